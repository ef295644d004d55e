"""Whatever is added late or twice, flushed, lost with a process, told again or compacted: each (series, time) once."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.entities import Entities
from fleet.metrics import metric_row
from fleet.samples import EntityKind, SampleBatch
from fleet.topology import Level, NodeSpec, Topology
from ingest.archive import Archive
from ingest.archive_compact import compact, runs
from ingest.archive_files import HOUR_MS, ArchiveFiles

T0 = 1_795_276_800_000
POWER = metric_row(EntityKind.GPU, "power_w")
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
        self.gpus = [self.entities.of_node(EntityKind.GPU, name, 0) for name in NODES]
        self.archive = Archive(ArchiveFiles(str(self.folder)), self.entities)

    def add(self, readings: Sequence[Reading]) -> None:
        rows, sure = [], []
        for gpu, second in readings:
            self.number += 1
            rows.append((POWER, self.gpus[gpu], T0 + second * 1000, self.number))
            sure.append(second > self.newest.get(gpu, -1))
            self.newest[gpu] = max(second, self.newest.get(gpu, -1))
            self.told.append(((gpu, second), self.number))
        self.archive.add(SampleBatch.of(EntityKind.GPU, rows), np.array(sure))

    def flush(self) -> None:
        self.archive.hand_over(self.topology, T0)()
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
        for run in runs(self.archive.files, "0", T0 + 2 * HOUR_MS, most_rows=30):
            compact(self.archive.files, run)

    def rows(self) -> dict[Reading, float]:
        found = duckdb.sql(f"SELECT entity, time_ms, value FROM '{self.folder}/samples/**/*.parquet'").fetchall()
        rows = {(NODES.index(name.partition("/")[0]), (ms - T0) // 1000): value for name, ms, value in found}
        assert len(rows) == len(found)
        return rows


@settings(max_examples=20, deadline=None)
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
