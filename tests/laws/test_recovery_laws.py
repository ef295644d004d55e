"""A pipeline that is saved, killed and started again knows what one knows that ran straight through.

told      0 1 2 3 4 5 6 7        one batch each, in the order of the source
saved           ^       ^        positions first, then state
killed            x   x     x    what came after the last save is delivered again, and some of what came before
"""

import asyncio
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.source import Batch, Source
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline import state
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.fuzz.bounds import examples
from tests.laws.histories import (
    END,
    T0,
    Delivery,
    Told,
    assert_same,
    batch_of,
    deliveries,
    essence,
    histories,
    topology,
)

Step = tuple[int, str, int, Random]
END_MS = 60_000  # after the last delivery


@pytest.fixture(autouse=True, scope="module")
def _silence_ends_no_job() -> Iterator[None]:
    """Silence counts while a process listens, so a job falls silent later for one that was started again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "SILENT_JOB_MS", 2 * (END - T0))
        yield


class ToldSource(Source):
    """Deliveries as a source: at least once, so a seek goes back `overlap` further than it must."""

    name = "told"

    def __init__(self, entities: Entities, arrived: Sequence[Delivery], clock: ManualClock, overlap: int) -> None:
        self.entities, self.arrived, self.clock, self.overlap = entities, arrived, clock, overlap
        self.at = 0

    async def next(self) -> Batch:
        if self.at >= len(self.arrived):
            raise StopAsyncIteration
        delivery = self.arrived[self.at]
        self.at += 1
        self.clock.advance(max(0, delivery.now_ms - self.clock.time_ms) / 1000)
        return batch_of(delivery.told, self.entities)

    def position(self) -> dict[str, Any]:
        return {"at": self.at}

    def seek(self, position: Mapping[str, Any]) -> None:
        self.at = max(0, position.get("at", 0) - self.overlap)

    async def close(self) -> None:
        pass


class Life:
    """One pipeline after another on one state folder."""

    def __init__(self, folder: Path, arrived: Sequence[Delivery]) -> None:
        self.config = Config(state=str(folder))
        self.arrived = arrived
        self.clock = ManualClock(arrived[0].now_ms)
        self.start(0)

    def start(self, overlap: int) -> None:
        """As after a SIGKILL: nothing but the disk is left."""
        sources = lambda entities: [ToldSource(entities, self.arrived, self.clock, overlap)]  # noqa: E731
        self.pipeline = Pipeline(self.config, self.clock, topology(), sources)
        (self.source,) = self.pipeline.sources

    def damage(self, random: Random) -> None:
        """One file of the snapshots is changed in a byte, cut short, or deleted."""
        files = sorted(path for path in (self.config.folder / "snapshot").rglob("*") if path.is_file())
        if not files:
            return
        path = random.choice(files)
        data = bytearray(path.read_bytes())
        path.unlink()  # files of two snapshots may be one by a link: the other one keeps its own
        how = random.choice(("change", "change", "cut", "delete"))
        offset = random.randrange(len(data) + 1)
        if how == "change" and offset < len(data):
            data[offset] ^= 1 << random.randrange(8)
        if how != "delete":
            path.write_bytes(data[:offset] if how == "cut" else data)

    async def take(self, batches: int) -> None:
        for _ in range(batches):
            try:
                self.pipeline.apply_batch(await self.source.next())
            except StopAsyncIteration:
                return

    async def end(self, now_ms: int) -> dict[str, Any]:
        """What it knows once everything was delivered, and what its board says of the jobs."""
        await self.take(len(self.arrived))
        self.clock.advance((now_ms - self.clock.time_ms) / 1000)
        await self.pipeline.tick()
        board = BoardReader(self.config.board).latest()
        assert board is not None
        shown = {name: _by_job(board.json(name)) for name in ("doc.jobs", "jobs.running")}
        return essence(self.pipeline.state, now_ms) | shown


def _by_job(rows: Any) -> list[Any]:
    return sorted(rows["rows"] if isinstance(rows, dict) else rows, key=lambda row: (row["job"], row["attempt"]))


what_happens = st.sampled_from(("save", "damage", "kill", "tick", "save", "damage"))
seeds = st.integers(0, 2**32).map(Random)
lives = st.lists(st.tuples(st.integers(0, 5), what_happens, st.integers(0, 3), seeds), max_size=8)


@examples(15)
@given(histories(contradict=True), st.randoms(use_true_random=False), lives)
def test_saves_kills_and_damage_at_any_moment_change_nothing(
    history: list[Told], random: Random, steps: list[Step]
) -> None:
    arrived = deliveries(history, random)
    asyncio.run(compare(arrived, steps))


async def compare(arrived: Sequence[Delivery], steps: Sequence[Step]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        straight, broken = (Life(Path(folder) / name, arrived) for name in ("straight", "broken"))
        for batches, what, overlap, random in steps:
            await broken.take(batches)
            if what == "save":
                await broken.pipeline.save()
            elif what == "tick":
                await broken.pipeline.tick()
            else:
                if what == "damage":
                    broken.damage(random)
                broken.start(overlap)
        now_ms = max(row.now_ms for row in arrived) + END_MS
        assert_same(await broken.end(now_ms), await straight.end(now_ms))
