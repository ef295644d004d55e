"""Whatever is added late or twice, flushed, lost with a process, told again or compacted: each row is there once.

Of samples each (series, time), of events each identity.
"""

import contextlib
import errno
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import NodeEvent, Step
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.archive.compact import compact, find_compaction_runs
from fleetcast.ingest.archive.files import HOUR_MS, ArchiveFiles, FileName
from tests.fuzz.bounds import examples

T0 = 1_795_276_800_000
POWER = find_metric_row(EntityKind.GPU, "power_w")
NODES = ("n1", "n2")

Reading = tuple[int, int]  # GPU, and seconds after T0
READINGS = st.tuples(st.integers(0, 1), st.integers(0, 30) | st.integers(3590, 3620))
STEPS = st.lists(
    st.lists(READINGS, min_size=1, max_size=8) | st.sampled_from(("flush", "flush", "die", "move", "compact")),
    min_size=3,
    max_size=25,
)


def topology(block: str) -> Topology:
    return Topology.build([NodeSpec(name, 1, domains={Level.BLOCK: block}) for name in NODES])


@dataclass
class Life:
    """An archive, and a model of it. newest: of each GPU in the store, which a death sets back to the last flush."""

    folder: Path
    topology: Topology
    told: list[tuple[Reading, float]] = field(default_factory=list)
    there: dict[Reading, float] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)
    saved: dict[int, int] = field(default_factory=dict)
    number: float = 0.0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.entities = Entities()
        self.gpus = [self.entities.add_to_node(EntityKind.GPU, name, 0) for name in NODES]
        self.archive = Archive(ArchiveFiles(str(self.folder)), self.entities)

    def add(self, readings: Sequence[Reading]) -> None:
        rows, sure = [], []
        for gpu, second in readings:
            self.number += 1
            rows.append((POWER, self.gpus[gpu], T0 + second * 1000, self.number))
            sure.append(second > self.newest.get(gpu, -1))
            self.newest[gpu] = max(second, self.newest.get(gpu, -1))
            self.told.append(((gpu, second), self.number))
        self.archive.add(SampleBatch.from_rows(EntityKind.GPU, rows), np.array(sure))

    def flush(self) -> None:
        self.archive.prepare_flush(self.topology, T0)()
        for key, value in self.told:
            self.there.setdefault(key, value)
        self.told, self.saved = [], dict(self.newest)

    def die(self) -> None:
        self.archive.close()
        self.told, self.newest = [], dict(self.saved)
        self.saved = {}  # the next one that dies finds the snapshot damaged
        self.open()

    def move(self) -> None:
        """The next process finds the nodes in another block."""
        self.topology = topology("b2")
        self.die()

    def compact(self) -> None:
        self.flush()
        for run in find_compaction_runs(self.archive.files, "0", T0 + 2 * HOUR_MS, most_rows=30):
            compact(self.archive.files, run)

    def rows(self) -> dict[Reading, float]:
        found = duckdb.sql(f"SELECT entity, time_ms, value FROM '{self.folder}/samples/**/*.parquet'").fetchall()
        rows = {(NODES.index(name.partition("/")[0]), (ms - T0) // 1000): value for name, ms, value in found}
        assert len(rows) == len(found)
        return rows


@examples(50)
@given(STEPS)
def test_each_series_and_time_is_there_once_and_the_first_value_stays(steps: list[list[Reading] | str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        life = Life(Path(name), topology("b1"))
        life.add([(0, 0)])
        for step in steps:
            if isinstance(step, str):
                getattr(life, step)()
            else:
                life.add(step)
        life.flush()
        life.archive.close()
        if life.there:
            assert life.rows() == life.there


STREAM = (0, 40, 3590, 20, 3610, 3590, 3605, 3599, 10, 3600, 7190, 3601, 7300, 7199, 50, 7301)  # seconds of events
EVENT_STEPS = st.lists(
    st.integers(1, 4) | st.sampled_from(("flush", "save", "save", "die", "die", "older", "compact", "fail")),
    min_size=4,
    max_size=30,
)


def event(number: int) -> Step | NodeEvent:
    time_ms = T0 + STREAM[number] * 1000
    if number % 2:
        return NodeEvent(node="n1", source="s", sequence=number, time_ms=time_ms, type="health", message="fine")
    return Step(job="j", sequence=number, time_ms=time_ms, step=number, duration_s=1.0)


@dataclass
class Stream:
    """A source that tells its events from a position on, and the snapshots that keep it: the last two."""

    folder: Path
    position: int = 0
    snapshots: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # positions, and when it was taken
    written: int = 0  # the furthest that a flush has come

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.position, saved_ms = self.snapshots[-1]
        self.archive = Archive(ArchiveFiles(str(self.folder)), Entities(), saved_ms=saved_ms)

    def tell(self, number: int) -> None:
        for told in range(self.position, min(self.position + number, len(STREAM))):
            self.archive.add_event(event(told))
            self.position = told + 1

    def flush(self) -> None:
        self.archive.prepare_flush(topology("b1"), T0 + STREAM[-1] * 1000)()
        self.written = max(self.written, self.position)

    def save(self) -> None:
        self.flush()
        saved_ms = T0 + max(STREAM[: self.position + 1]) * 1000
        self.snapshots = [*self.snapshots[-1:], (self.position, saved_ms)]

    def die(self) -> None:
        self.archive.close()
        self.open()

    def older(self) -> None:
        """The newest snapshot is damaged."""
        self.snapshots = self.snapshots[:1]
        self.die()

    def fail(self) -> None:
        """The disk is full after a file."""
        put, puts = self.archive.files.write_file, []

        def full(name: FileName, data: Any) -> None:
            puts.append(name)
            if len(puts) > 1:
                raise OSError(errno.ENOSPC, "No space left on device")
            put(name, data)

        with patch.object(self.archive.files, "write_file", full), contextlib.suppress(OSError):
            self.flush()

    def compact(self) -> None:
        for run in find_compaction_runs(self.archive.files, "0", T0 + 3 * HOUR_MS, most_rows=12):
            compact(self.archive.files, run)

    def rows(self) -> list[int]:
        path = f"{self.folder}/events/**/*.parquet"
        return sorted(number for (number,) in duckdb.sql(f"SELECT sequence FROM '{path}'").fetchall())


@examples(100)
@example([3, "save", 9, "flush", "die", 2, "save", "compact", "die", 4, "flush"])
@given(EVENT_STEPS)
def test_each_event_is_there_once_whatever_lives_and_snapshots_came_between(steps: list[int | str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        stream = Stream(Path(name))
        for step in steps:
            if isinstance(step, str):
                getattr(stream, step)()
            else:
                stream.tell(step)
        stream.tell(1)
        stream.flush()
        stream.archive.close()
        rows = stream.rows()
        assert len(set(rows)) == len(rows)
        assert set(rows) >= set(range(stream.written))
