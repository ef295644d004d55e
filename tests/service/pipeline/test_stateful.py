"""The list of what a pipeline remembers: a new part is one line in it, whatever befalls its neighbours."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleetcast.features.co_runs import CoRuns
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.service.config import Config
from fleetcast.service.pipeline.node_past import NodePasts
from fleetcast.service.pipeline.pipeline_clock import PipelineClock
from fleetcast.service.pipeline.snapshot import SavedState, Snapshot
from fleetcast.service.pipeline.stateful import STATEFUL, PartKind

NOW_MS = 1_789_000_000_000
TOPOLOGY = Topology.build([NodeSpec("n1", 8)])


class Sightings(Stateful):
    """A made-up part: when something was seen, and how much of it."""

    def __init__(self) -> None:
        self.seen_ms: dict[int, int] = {}
        self.amounts = np.zeros(0)

    def dump(self) -> Dump:
        return {"seen_ms": dict(self.seen_ms), "most": self.amounts.max()}, {"amounts": self.amounts.copy()}

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.seen_ms, self.amounts = about["seen_ms"], arrays["amounts"].copy()

    def shift_times(self, by_ms: int) -> None:
        self.seen_ms = {key: time_ms + by_ms for key, time_ms in self.seen_ms.items()}


def kinds(*, starts_empty: bool) -> list[PartKind]:
    """The list with one line more, in the middle."""
    own = PartKind("sightings", lambda config, state: Sightings(), starts_empty)
    return [*STATEFUL[:-1], own, STATEFUL[-1]]


def restored(folder: Path, *, starts_empty: bool = True) -> SavedState:
    return Snapshot(folder, kinds(starts_empty=starts_empty)).restore(Config(), TOPOLOGY, NOW_MS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two snapshots; the made-up part saw one thing before the first and another one before the second."""
    snapshot = Snapshot(tmp_path, kinds(starts_empty=True))
    kept = snapshot.restore(Config(), TOPOLOGY, NOW_MS)
    part = kept.parts[Sightings]
    for number in (1, 2):
        part.seen_ms[number] = NOW_MS
        part.amounts = np.append(part.amounts, np.float64(number))
        kept.saved_ms = NOW_MS
        asyncio.run(snapshot.save(kept))
    return tmp_path


def tear(folder: Path, part: str) -> None:
    path = folder / "2" / f"{part}.arrays"
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[: len(data) // 2])


def test_a_part_that_was_added_to_the_list_outlives_the_process(folder: Path) -> None:
    part = restored(folder).parts[Sightings]
    assert part.seen_ms == {1: NOW_MS, 2: NOW_MS}
    assert part.amounts.tolist() == [1.0, 2.0]


def test_a_part_that_was_added_to_the_list_moves_with_a_clock_that_is_set_back(folder: Path) -> None:
    clock, kept = ManualClock(NOW_MS), restored(folder)
    rows = [(find_metric_row(EntityKind.NODE, "scrape_up"), 0, NOW_MS, 1.0)]
    kept.state.apply(Batch(samples=(SampleBatch.from_rows(EntityKind.NODE, rows),)), NOW_MS)
    time = PipelineClock(clock, kept, 15_000, asyncio.Event())
    clock.time_ms -= 3_600_000
    time.check_clock_ms()
    time.shift_part_times()
    assert kept.parts[Sightings].seen_ms == {1: NOW_MS - 3_600_000, 2: NOW_MS - 3_600_000}


@pytest.mark.parametrize("neighbour", [kind.name for kind in STATEFUL if kind.starts_empty])
def test_a_part_survives_a_torn_neighbour(folder: Path, neighbour: str, caplog: pytest.LogCaptureFixture) -> None:
    tear(folder, neighbour)
    kept = restored(folder)
    assert kept.number == 2
    assert kept.parts[Sightings].seen_ms == {1: NOW_MS, 2: NOW_MS}
    assert f"{neighbour} of snapshot 2 cannot be used" in caplog.text


def test_a_torn_part_begins_anew_where_its_line_says_so_and_all_else_stays(folder: Path) -> None:
    tear(folder, "sightings")
    kept = restored(folder, starts_empty=True)
    assert (kept.number, kept.parts[Sightings].seen_ms) == (2, {})
    assert kept.parts[Sightings] in list(kept.parts)
    older = restored(folder, starts_empty=False)
    assert (older.number, older.parts[Sightings].seen_ms) == (1, {1: NOW_MS})


def test_every_part_of_ours_is_found_by_its_class(tmp_path: Path) -> None:
    parts = restored(tmp_path).parts
    assert all(parts[type(part)] is part for part in parts)
    assert {CoRuns, NodePasts} < {type(part) for part in parts}
    assert len({kind.name for kind in STATEFUL}) == len(STATEFUL)
