"""The CPU time of each part of a tick, on a fleet at work, measured in the thread that runs the part.

    python -m fleetcast.benchmarks.ticks.working_tick                      10,000 GPUs, a table
    python -m fleetcast.benchmarks.ticks.working_tick --json -             the same as one JSON object
    python -m fleetcast.benchmarks.ticks.working_tick --gpus 2000 --ranks 8 --step-s 2

Before each tick, every node is scraped (GPUs, ports, the node itself), and every job reports its
steps. Some jobs also report checkpoints and evaluations. A tenth of the nodes had a fault in the
last week. Some jobs share GPUs with another job, and others share only nodes. All nodes lie in
racks, power domains and rail groups. Then the service runs its usual tick: extract, score, publish.
Outside the tick, the benchmark also measures a pass of fingerprints, and a snapshot each minute.
"""

import argparse
import asyncio
import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import numpy as np

from fleetcast.benchmarks.kit.case import fits_memory, make_record
from fleetcast.benchmarks.kit.collector import configure_garbage_collector
from fleetcast.benchmarks.ticks.tick import BYTES_PER_GPU, GPUS_PER_NODE, T0, add_entities, make_no_sources, make_scrape
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Checkpoint, JobEvent, NodeEvent, Phase, Started, Step, StepParts, Submitted
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.models.risk import local, score
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.models.stragglers.gang import GangMemberCache
from fleetcast.service.board.board import BoardReader, BoardWriter
from fleetcast.service.config import Config
from fleetcast.service.pipeline import pipeline, tick_inputs
from fleetcast.service.pipeline.capabilities import Capabilities
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.fleet_scores import FleetScores
from fleetcast.service.pipeline.jobs.fingerprints import Fingerprints
from fleetcast.service.pipeline.jobs.interference import InterferenceLearner
from fleetcast.service.pipeline.run_times import forecasts as run_forecasts
from fleetcast.service.pipeline.state import FleetState

GANGS = (1, 1, 2, 2, 4, 8, 16)  # nodes
STEPS_BEFORE = 256  # what a job keeps
SHARED = 0.05  # of the nodes: two jobs on the same four GPUs, and two that meet on its ports
FAULTY = 0.1  # of the nodes: a fault in the last week
NOISE = (0.005, 0.01, 0.02, 0.05, 0.15)  # of a job's step times
UNEVEN = 4  # of so many jobs one has steps that are as long as what is in them
CHECKPOINT_S, EVALUATION_S, PAUSE_S = 600, 1800, 30
TICKS, SCRAPES = 6, 24
SCRAPE_S = 15
SAID: tuple[Literal["fatal", "ok"], ...] = ("fatal", "ok")
NODE_USUAL = {"scrape_up": 1.0, "scrape_duration_s": 0.05, "gpus_reported": 8.0, "ports_reported": 8.0}

# Part -> where it is called from; those below `score` are parts of it, the others of the tick.
PARTS: dict[str, tuple[ModuleType | type, tuple[str, ...]]] = {
    "extract": (FleetWatch, ("extract_frames",)),
    "instances": (tick_inputs, ("list_served_instances", "find_mig_instances")),
    "score": (FleetWatch, ("score_local", "score")),
    "  signals": (local, ("_make_gpu_view", "_make_gpu_signals", "_make_node_signals")),
    "  ports": (local, ("_make_port_signals",)),
    "  members": (GangMemberCache, ("find_members",)),
    "  gangs": (score, ("_join_locals", "make_gang_signals")),
    "  node events": (score, ("make_event_signals",)),
    "  node risk": (score, ("score_nodes",)),
    "  steps": (score, ("find_stragglers",)),
    "publish": (FleetScores, ("make_sections",)),
    "peaks": (run_forecasts, ("make_peak_sections",)),
    "co-runs": (InterferenceLearner, ("make_sections",)),
    "metrics": (Capabilities, ("make_page",)),
    "demand": (DemandForecasts, ("make_sections",)),
    "copies": (FleetState, ("copy_events",)),
    "board": (BoardWriter, ("publish",)),
}
BESIDE = ("samples", "events", "fingerprints", "snapshot")  # not of the tick


class Stopwatch:
    """A stopwatch that adds up a thread's CPU seconds for each part of its work."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def time_part(self, part: str) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.seconds[part] += time.thread_time() - began

    def wrap_with_timer(self, part: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def run_timed(*arguments: Any, **more: Any) -> Any:
            with self.time_part(part):
                return work(*arguments, **more)

        return run_timed

    @contextlib.contextmanager
    def time_all_parts(self) -> Iterator[None]:
        """Time every part of PARTS while the context is open."""
        with contextlib.ExitStack() as stack:
            for part, (owner, names) in PARTS.items():
                for name in names:
                    stack.enter_context(
                        mock.patch.object(owner, name, self.wrap_with_timer(part, getattr(owner, name)))
                    )
            yield


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the simulated fleet.

    ranks: the number of ranks on each node that report steps. step_s: mean seconds of a step. scrapes:
    the number of scrapes before the first tick.
    """

    gpus: int
    ranks: int = 1
    step_s: float = 5.0
    scrapes: int = SCRAPES


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure a fleet of each size in GPUs. Sizes that do not fit the memory are left out."""
    for gpus in sizes:
        if fits_memory(gpus, BYTES_PER_GPU):
            yield measure_fleet(Size(gpus))


def measure_fleet(size: Size, ticks: int = TICKS) -> dict[str, Any]:
    """Measure the ticks of a fleet, and return a record.

    `value`: CPU milliseconds of the median tick. `parts`: the median CPU milliseconds of each part.
    """
    with tempfile.TemporaryDirectory() as folder:
        fleet = WorkingFleet(size, Path(folder))
        with configure_garbage_collector():
            rows = [fleet.measure_tick() for _ in range(ticks + 1)][1:]
    parts = {name: statistics.median(row[name] for row in rows) for name in (*PARTS, *BESIDE)}
    totals = [row["tick"] for row in rows]
    models = parts["score"] + parts["co-runs"] + parts["fingerprints"]
    middle = statistics.median(totals)
    about = {"gpus": size.gpus, "jobs": fleet.jobs, "ranks": size.ranks}
    return make_record("working_tick", "tick, CPU", about, totals, "ms", cpu_s=middle / 1000) | {
        "value": middle,
        "parts": {name.strip(): round(ms, 2) for name, ms in parts.items()},
        "risk_models_ms": round(models, 2),
        "events_per_s": round(fleet.compute_event_rate()),
    }


class WorkingFleet:
    """A pipeline of a fleet whose jobs report steps, checkpoints and evaluations."""

    def __init__(self, size: Size, folder: Path) -> None:
        self.nodes = max(4, size.gpus // GPUS_PER_NODE)
        self.clock = ManualClock(T0)
        self.pipeline = pipeline.Pipeline(
            Config(state=str(folder)), self.clock, make_domain_topology(self.nodes), make_no_sources
        )
        self.reader = BoardReader(folder / "board")
        self.watch = Stopwatch()
        self.sent, self.folding_s = 0, 0.0
        self._size, self._rng = size, np.random.default_rng(1)
        entities = self.pipeline.state.entities
        self._rows = {kind: add_entities(entities, kind, self.nodes) for kind in (EntityKind.GPU, EntityKind.PORT)}
        self._jobs = [WorkingJob(*at, self._size) for at in enumerate(make_placements(self.nodes))]
        self.jobs = len(self._jobs)
        self.pipeline.apply_batch(Batch(events=tuple(event for job in self._jobs for event in job.make_first_events())))
        self.pipeline.apply_batch(Batch(node_events=tuple(make_faults(self.nodes))))
        for _ in range(size.scrapes):
            self.ingest_scrape()

    def ingest_scrape(self) -> None:
        """Ingest one scrape of all GPUs, ports and nodes, and advance the clock by SCRAPE_S."""
        now_ms = self.clock.now_ms()
        samples = [make_scrape(kind, rows, now_ms, self._rng) for kind, rows in self._rows.items()]
        self.pipeline.apply_batch(Batch(samples=(*samples, make_node_samples(self.nodes, now_ms))))
        self.clock.advance(SCRAPE_S)

    def run_tick(self) -> None:
        """Run one tick. Asserts that it flags no node."""
        asyncio.run(self.pipeline.tick())
        board = self.reader.latest()
        assert board is not None
        assert board.as_of_ms == self.clock.now_ms()
        assert not board.array("node.flagged").any(), "a healthy fleet was flagged"

    def measure_tick(self) -> dict[str, float]:
        """Return part → CPU milliseconds of a tick, of its parts, and of the work outside it."""
        self.watch.seconds.clear()
        with self.watch.time_part("samples"):
            self.ingest_scrape()
        self._send_steps(self.clock.now_ms())
        began = time.process_time()
        with self.watch.time_all_parts():
            self.run_tick()
        tick_s = time.process_time() - began
        asyncio.run(self._renew_fingerprints())
        began = time.process_time()
        asyncio.run(self.pipeline.save())
        self.watch.seconds["snapshot"] = time.process_time() - began
        return {name: 1000 * self.watch.seconds.get(name, 0.0) for name in (*PARTS, *BESIDE)} | {"tick": 1000 * tick_s}

    def compute_event_rate(self) -> float:
        """Return how many events are applied to the tables per second of CPU time."""
        return self.sent / self.folding_s

    def _send_steps(self, now_ms: int) -> None:
        """Ingest the events of all jobs since the last tick."""
        events = tuple(event for job in self._jobs for event in job.make_events_until(now_ms))
        before = self.watch.seconds["events"]
        with self.watch.time_part("events"):
            self.pipeline.apply_batch(Batch(events=events))
        self.sent, self.folding_s = self.sent + len(events), self.folding_s + self.watch.seconds["events"] - before

    async def _renew_fingerprints(self) -> None:
        began = time.process_time()
        await self.pipeline.capabilities[Fingerprints].run_pass(self.pipeline.state)
        self.watch.seconds["fingerprints"] += time.process_time() - began


class WorkingJob:
    """A job with its steps, checkpoints and evaluations, as its ranks report them."""

    def __init__(self, number: int, place: Sequence[RankPlacement], size: Size) -> None:
        self.name = f"train-{number % 40}-{number}"
        self.place, self.size = tuple(place), size
        self._sequence, self._step = 2, 0
        self._rng = np.random.default_rng(number)
        self._step_s = size.step_s * float(self._rng.uniform(0.6, 1.4))
        self._noise = float(self._rng.choice(NOISE))
        self._is_uneven = number % UNEVEN == 0
        self._time_ms = T0 - round(STEPS_BEFORE * self._step_s * 1000)
        self._ranks = len(place) * size.ranks

    def make_first_events(self) -> Iterator[JobEvent]:
        """Yield the job's start, and its steps until T0."""
        start_ms, gpus = self._time_ms, len(self.place[0].gpus)
        yield Submitted(
            job=self.name,
            sequence=0,
            time_ms=start_ms,
            gang=len(self.place),
            gpus_per_node=gpus,
            user="user",
            name=self.name,
        )
        yield Started(job=self.name, sequence=1, time_ms=start_ms, ranks=self.place)
        yield from self.make_events_until(T0)

    def make_events_until(self, now_ms: int) -> Iterator[JobEvent]:
        """Yield the job's events from the last one until `now_ms`."""
        while self._time_ms + self._step_s * 1000 <= now_ms:
            before_ms = self._time_ms
            seconds = self._step_s * float(np.exp(self._noise * self._rng.standard_normal()))
            self._time_ms += round(seconds * 1000)
            yield from self._make_steps(seconds)
            yield from self._make_due_pause(before_ms)

    def _make_steps(self, seconds: float) -> Iterator[Step]:
        self._step += 1
        compute = seconds * (0.7 + 0.005 * self._rng.standard_normal(self._ranks))
        for rank in range(self._ranks):
            parts = StepParts(compute=float(compute[rank]), communication=float(seconds - compute[rank]))
            yield Step(
                job=self.name,
                sequence=self._draw_sequence(),
                time_ms=self._time_ms,
                step=self._step,
                duration_s=seconds,
                rank=rank if self._ranks > 1 else None,
                parts=parts,
                tokens=round(1e6 * (seconds / self._step_s if self._is_uneven else 1.0)),
                sequence_length=4096.0,
            )

    def _make_due_pause(self, before_ms: int) -> Iterator[JobEvent]:
        """Yield the events of a checkpoint or an evaluation, if one is due since `before_ms`."""
        began_ms = self._time_ms
        if began_ms // (CHECKPOINT_S * 1000) > before_ms // (CHECKPOINT_S * 1000):
            yield Checkpoint(
                job=self.name, sequence=self._draw_sequence(), time_ms=began_ms, edge="begin", bytes=10**11
            )
            self._time_ms += PAUSE_S * 1000
            yield Checkpoint(job=self.name, sequence=self._draw_sequence(), time_ms=self._time_ms, edge="end")
        elif began_ms // (EVALUATION_S * 1000) > before_ms // (EVALUATION_S * 1000):
            yield Phase(job=self.name, sequence=self._draw_sequence(), time_ms=began_ms, name="evaluation")
            self._time_ms += PAUSE_S * 1000
            yield Phase(job=self.name, sequence=self._draw_sequence(), time_ms=self._time_ms, name="steady")

    def _draw_sequence(self) -> int:
        self._sequence += 1
        return self._sequence


def make_placements(nodes: int) -> Iterator[tuple[RankPlacement, ...]]:
    """Yield the placement of each job: gangs on whole nodes, then pairs of jobs on the last nodes.

    The jobs of a pair share GPUs of one node, or each job has half of the GPUs of the same two nodes.
    """
    rng = np.random.default_rng(2)
    alone = nodes - max(2, round(SHARED * nodes)) // 2 * 2
    node, all_gpus = 0, tuple(range(GPUS_PER_NODE))
    low, high = all_gpus[: GPUS_PER_NODE // 2], all_gpus[GPUS_PER_NODE // 2 :]
    while node < alone:
        width = min(int(rng.choice(GANGS)), alone - node)
        yield tuple(RankPlacement(rank, f"n{node + rank:05d}", all_gpus) for rank in range(width))
        node += width
    for first in range(alone, nodes, 2):
        one, other = f"n{first:05d}", f"n{first + 1:05d}"
        if first % 4:
            for gpus in (low, high):
                yield (RankPlacement(0, one, gpus), RankPlacement(1, other, gpus))
        else:
            for name in (one, one, other, other):
                yield (RankPlacement(0, name, low),)


def make_faults(nodes: int) -> Iterator[NodeEvent]:
    """Yield the health events of every tenth node: a fault that has ended.

    Such a fault still raises the node's hazard.
    """
    for node in range(0, nodes, round(1 / FAULTY)):
        began_ms = T0 - 86_400_000 - node * 60_000 % (5 * 86_400_000)
        for sequence, severity in enumerate(SAID):
            yield NodeEvent(
                node=f"n{node:05d}",
                source="kernel_log",
                sequence=sequence,
                time_ms=began_ms + sequence * 3_600_000,
                type="health",
                check="board",
                severity=severity,
            )


def make_domain_topology(nodes: int) -> Topology:
    """Make a topology: racks of 16 nodes, power domains of four racks, and rail groups of 32 nodes."""
    return Topology.build(
        [
            NodeSpec(
                f"n{node:05d}",
                gpus=GPUS_PER_NODE,
                gpu_model="NVIDIA H100 80GB HBM3",
                domains={Level.RACK: f"r{node // 16}", Level.RAIL_GROUP: f"rg{node // 32}"},
                power_domain=f"p{node // 64}",
            )
            for node in range(nodes)
        ]
    )


def make_node_samples(nodes: int, now_ms: int) -> SampleBatch:
    """Make typical samples of `nodes` nodes, as scrapers report them.

    The nodes are the first rows of the scrapers' node table.
    """
    names = [metric.name for metric in METRICS[EntityKind.NODE]]
    sent = np.array([names.index(name) for name in NODE_USUAL], np.int16)
    return SampleBatch(
        EntityKind.NODE,
        np.tile(sent, nodes),
        np.repeat(np.arange(nodes, dtype=np.int32), len(sent)),
        np.full(nodes * len(sent), now_ms, np.int64),
        np.tile(list(NODE_USUAL.values()), nodes),
    )


def main() -> None:
    """Run `python -m fleetcast.benchmarks.ticks.working_tick`."""
    parser = argparse.ArgumentParser(
        prog="python -m fleetcast.benchmarks.ticks.working_tick",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Numbers are CPU milliseconds of the median tick, so a busy machine changes them little.",
    )
    parser.add_argument("--gpus", type=int, default=10_000, help="size of the fleet [%(default)s]")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that report on each node [%(default)s]")
    parser.add_argument("--step-s", type=float, default=5.0, help="mean seconds of a step [%(default)s]")
    parser.add_argument("--scrapes", type=int, default=SCRAPES, help="scrapes before the first tick [%(default)s]")
    parser.add_argument("--ticks", type=int, default=TICKS, help="ticks that are measured [%(default)s]")
    parser.add_argument("--json", metavar="FILE", help="write the whole record here; - is stdout")
    asked = parser.parse_args()
    line = measure_fleet(Size(asked.gpus, asked.ranks, asked.step_s, asked.scrapes), asked.ticks)
    if asked.json == "-":
        json.dump(line, sys.stdout, indent=1)
        return
    if asked.json:
        Path(asked.json).write_text(json.dumps(line, indent=1), encoding="utf-8")
    print(format_table(line))


def format_table(line: dict[str, Any]) -> str:
    """Format the record as a table for people."""
    names = {name.strip(): name for name in (*PARTS, *BESIDE)}
    rows = [f"{names[name]:<16}{ms:>9.1f} ms" for name, ms in line["parts"].items()]
    head = f"{'whole tick':<16}{line['value']:>9.1f} ms   ({line['min']:.1f} to {line['max']:.1f})"
    foot = f"{line['events_per_s']:,} events/s folded; all risk models {line['risk_models_ms']:.1f} ms"
    return "\n".join([str(line["size"]), head, *rows, foot])


if __name__ == "__main__":
    main()
