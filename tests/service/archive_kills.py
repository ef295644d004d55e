"""A pipeline that is killed again and again while it archives: `archive_kills FOLDER KILLS SEED T0`.

One process imports everything and forks the pipelines, so that a life is short. However fast the machine, a life that
is to be killed is told at most its share of the source; the last one is told the rest, and ends by itself.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import NodeEvent, Step
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.source import Batch, Source
from fleetcast.service.config import ArchiveConfig, Config, PipelineConfig
from fleetcast.service.pipeline.pipeline import Pipeline

BATCHES = 900
STEP_MS = 15_000
NODES = ("n1", "n2")
METRICS = tuple(find_metric_row(EntityKind.GPU, name) for name in ("xid", "clock_event_reasons", "energy_j"))
Sample = tuple[int, int, int, float]  # metric, GPU, time, value


def samples_of(number: int, t0: int) -> list[Sample]:
    """A batch: the scrape of its moment, now and then an earlier one again, and late ones between two scrapes."""
    rows = [(metric, gpu, t0 + number * STEP_MS, float(number)) for metric in METRICS for gpu in range(4)]
    if number % 7 == 3:
        rows += [(metric, 0, t0 + (number - 3) * STEP_MS, float(number - 3)) for metric in METRICS]
    if number % 5 == 4:
        rows += [(metric, 1, t0 + (number - 200) * STEP_MS + 7, -1.0) for metric in METRICS]
    return rows


def events_of(number: int, t0: int) -> tuple[Step, NodeEvent]:
    time_ms = t0 + number * STEP_MS
    return (
        Step(job=f"j{number % 3}", sequence=number, time_ms=time_ms, step=number, duration_s=1.0),
        NodeEvent(node="n1", source="test", sequence=number, time_ms=time_ms, type="health", message="fine"),
    )


class Numbered(Source):
    """Batches by number: told again from wherever the snapshot says."""

    name = "numbered"

    def __init__(self, entities: Entities, t0: int, most: int) -> None:
        self._gpus = [entities.add_to_node(EntityKind.GPU, node, index) for node in NODES for index in range(2)]
        self._t0 = t0
        self._next = 0
        self._left = most
        self.ended = asyncio.Event()

    async def next(self) -> Batch:
        await asyncio.sleep(0.003)
        if self._left == 0:
            await asyncio.Event().wait()  # for the kill
        self._left -= 1
        if self._next >= BATCHES:
            self.ended.set()
            raise StopAsyncIteration
        number, self._next = self._next, self._next + 1
        rows = [(metric, self._gpus[gpu], ms, value) for metric, gpu, ms, value in samples_of(number, self._t0)]
        step, told = events_of(number, self._t0)
        return Batch(samples=(SampleBatch.from_rows(EntityKind.GPU, rows),), events=(step,), node_events=(told,))

    def position(self) -> dict[str, Any]:
        return {"next": self._next}

    def seek(self, position: dict[str, Any]) -> None:
        self._next = int(position.get("next", 0))

    async def close(self) -> None:
        pass


async def live(folder: Path, t0: int, most: int) -> None:
    """One life: until the source is at its end, which is told at most so many batches."""
    config = Config(
        state=str(folder),
        pipeline=PipelineConfig(snapshot_s=0.04),
        archive=ArchiveConfig(buffer_bytes=2**20, keep_days=0),
    )
    config.board.mkdir(parents=True, exist_ok=True)
    specs = [NodeSpec(name, 2, domains={Level.BLOCK: f"b-{name}"}) for name in NODES]
    sources: list[Numbered] = []

    def open_sources(entities: Entities) -> list[Numbered]:
        sources.append(Numbered(entities, t0, most))
        return sources

    pipeline = Pipeline(config, SystemClock(), Topology.build(specs), open_sources)
    work = asyncio.create_task(pipeline.run())
    tidy = asyncio.create_task(_tidy(pipeline))
    ended = asyncio.create_task(sources[0].ended.wait())
    await asyncio.wait({work, tidy, ended}, return_when=asyncio.FIRST_COMPLETED)
    assert ended.done(), (work, tidy)
    for task in (work, tidy):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    await pipeline.save()
    assert pipeline.archive_writer.archive is not None
    await pipeline.archive_writer.compact_and_prune(pipeline.archive_writer.archive)
    await pipeline.close()


async def _tidy(pipeline: Pipeline) -> None:
    assert pipeline.archive_writer.archive is not None
    while True:
        await asyncio.sleep(0.03)
        await pipeline.archive_writer.compact_and_prune(pipeline.archive_writer.archive)


def child(folder: Path, t0: int, most: int) -> int:
    """The process id of a new life."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            asyncio.run(live(folder, t0, most))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def main(folder: Path, kills: int, seed: int, t0: int) -> None:
    rng = random.Random(seed)
    for _ in range(kills):
        pid = child(folder, t0, (BATCHES - 1) // kills)
        time.sleep(rng.uniform(0.15, 0.4))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), status
    _, status = os.waitpid(child(folder, t0, BATCHES + 1), 0)
    assert status == 0, status


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
