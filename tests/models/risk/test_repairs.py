"""A node that was repaired is judged by what came after, not by what its exporter still remembers."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.fleet.events import NodeEvent
from fleetcast.models.risk.state import RiskState
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]


def tell(fleet: SmallFleet, type: str, sequence: int, ago_s: float = 0.0) -> None:
    time_ms = fleet.now_ms - int(ago_s * 1000)
    event = NodeEvent(node="n002", source="op", sequence=sequence, time_ms=time_ms, type=type)  # type: ignore[arg-type]
    fleet.node_events.apply(event)


def xid(fleet: SmallFleet, code: float) -> None:
    fleet.gpu["xid"][fleet.row("n002", 3)] = code
    fleet.gpu_since.setdefault("xid", np.zeros(32, np.int64))[fleet.row("n002", 3)] = fleet.now_ms


def broken(small_fleet: Small) -> SmallFleet:
    """GPU 3 of n002 with an XID 79, a remapped row and an uncorrectable error; drained for it."""
    fleet = small_fleet(4)
    fleet.tick()
    xid(fleet, 79.0)
    row = fleet.row("n002", 3)
    fleet.gpu["remapped_rows_uncorrectable"][row] = 1.0
    fleet.gpu_since["remapped_rows_uncorrectable"][row] = fleet.now_ms
    fleet.gpu["ecc_dbe_volatile_count_30m"][row] = 1.0
    assert fleet.flagged(fleet.tick(3)) == ["n002"]
    tell(fleet, "drain", 1)
    assert fleet.flagged(fleet.tick()) == ["n002"]
    return fleet


def test_what_an_exporter_remembers_is_set_aside_when_the_node_is_given_back(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2)
    answer = fleet.tick()
    assert fleet.flagged(answer) == []
    assert [text[:9] for text in fleet.sentences(answer, "n002")] == ["had a fau"], "its history stays"
    fleet.tick(100)
    fleet.gpu["ecc_dbe_volatile_count_30m"][:] = 0.0  # the window is past it
    assert fleet.flagged(fleet.tick(100)) == []


def test_a_new_code_after_the_repair_counts_at_once(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2)
    fleet.tick()
    fleet.now_ms += 5000
    xid(fleet, 48.0)
    assert fleet.flagged(fleet.tick()) == ["n002"]


def test_a_count_that_grows_after_the_repair_counts(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2)
    assert fleet.flagged(fleet.tick()) == []
    fleet.gpu["ecc_dbe_volatile_count_30m"][fleet.row("n002", 3)] = 2.0
    assert fleet.flagged(fleet.tick(2)) == ["n002"]


def test_what_was_not_repaired_is_said_again(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.tick()
    fleet.gpu["pcie_link_width"][fleet.row("n002", 3)] = 8.0
    fleet.tick(3)
    tell(fleet, "undrain", 1)
    assert fleet.flagged(fleet.tick()) == []
    assert fleet.flagged(fleet.tick(45)) == ["n002"]


@pytest.mark.parametrize(("lost_s", "flagged"), [(30.0, ["n002"]), (300.0, [])])
def test_a_node_that_was_lost_for_a_moment_was_not_repaired(
    small_fleet: Small, lost_s: float, flagged: list[str]
) -> None:
    fleet = small_fleet(4)
    fleet.tick()
    xid(fleet, 79.0)
    fleet.tick(3)
    tell(fleet, "lost", 1, ago_s=lost_s)
    tell(fleet, "returned", 2)
    assert fleet.flagged(fleet.tick()) == flagged


def test_a_drain_alone_pardons_nothing_and_neither_does_one_that_goes_on(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2, ago_s=5.0)
    tell(fleet, "drain", 3)
    assert fleet.flagged(fleet.tick()) == ["n002"]


def test_a_restart_keeps_what_was_pardoned(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2)
    fleet.tick()
    about, arrays = fleet.memory.dump()
    fleet.memory = RiskState()
    fleet.memory.load(json.loads(json.dumps(about)), arrays)
    assert fleet.flagged(fleet.tick(3)) == []


def test_a_return_that_is_told_late_counts(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    fleet.tick(2)
    event = NodeEvent(
        node="n002", source="checker", sequence=9, time_ms=fleet.now_ms, type="health", severity="ok", check="fan"
    )
    fleet.node_events.apply(event)
    assert fleet.flagged(fleet.tick()) == ["n002"]
    tell(fleet, "undrain", 2, ago_s=20.0)
    assert fleet.flagged(fleet.tick()) == []


def test_codes_of_a_node_that_was_silent_when_it_was_given_back_are_set_aside_when_they_show(
    small_fleet: Small,
) -> None:
    fleet = broken(small_fleet)
    row = fleet.row("n002", 3)
    code, rows = fleet.gpu["xid"].copy(), fleet.gpu["remapped_rows_uncorrectable"].copy()
    fleet.gpu["xid"][row] = fleet.gpu["remapped_rows_uncorrectable"][row] = 0.0
    fleet.gpu["ecc_dbe_volatile_count_30m"][row] = 0.0
    fleet.tick(60)  # all is forgotten
    tell(fleet, "undrain", 2)
    assert fleet.flagged(fleet.tick(2)) == []
    about, arrays = fleet.memory.dump()
    fleet.memory = RiskState()
    fleet.memory.load(json.loads(json.dumps(about)), arrays)
    fleet.gpu["xid"], fleet.gpu["remapped_rows_uncorrectable"] = code, rows
    assert fleet.flagged(fleet.tick(3)) == []
    xid(fleet, 48.0)
    assert fleet.flagged(fleet.tick()) == ["n002"]


def test_a_count_that_grew_after_the_repair_is_not_pardoned_again(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2)
    fleet.tick()
    fleet.gpu["ecc_dbe_volatile_count_30m"][fleet.row("n002", 3)] = 2.0
    for _ in range(5):
        assert fleet.flagged(fleet.tick()) == ["n002"]


def test_a_clock_that_is_set_back_does_not_honour_a_return_again(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2)
    assert fleet.flagged(fleet.tick()) == []
    hour_ms = 3_600_000
    fleet.memory.shift_times(-hour_ms)
    fleet.now_ms -= hour_ms
    for since in fleet.gpu_since.values():
        since[since > 0] -= hour_ms
    fleet.tick()
    tell(fleet, "drain", 3)  # dated before the return
    fleet.now_ms += 1000
    xid(fleet, 48.0)
    assert fleet.flagged(fleet.tick()) == ["n002"]


def test_a_second_repair_sets_aside_what_came_after_the_first(small_fleet: Small) -> None:
    fleet = broken(small_fleet)
    tell(fleet, "undrain", 2)
    fleet.tick()
    fleet.now_ms += 5000
    xid(fleet, 48.0)
    assert fleet.flagged(fleet.tick(2)) == ["n002"]
    tell(fleet, "undrain", 3)
    assert fleet.flagged(fleet.tick(3)) == []
