"""What nobody can read raises no signal and clears none."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.fleet.samples import EntityKind
from fleetcast.models.risk.rules import ACTIONS
from fleetcast.models.risk.state import RiskState
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]


def narrow_link(fleet: SmallFleet) -> None:
    fleet.gpu["pcie_link_width"][fleet.row("n002", 3)] = 8.0


def hot_and_throttled(fleet: SmallFleet) -> None:
    fleet.throttle("n002", 3)


def uncorrectable(fleet: SmallFleet) -> None:
    fleet.gpu["ecc_dbe_volatile_count_30m"][fleet.row("n002", 3)] = 1.0


def dead_link(fleet: SmallFleet) -> None:
    row = fleet.entities[EntityKind.PORT].find_row("n002/mlx5_3/1")
    fleet.port["state"][row] = 1.0


def late(fleet: SmallFleet) -> None:
    """No page of n002 arrives: its values turn old, and windows run empty."""
    for columns in (fleet.gpu, fleet.port):
        for name, column in columns.items():
            rows = slice(8, 16)
            if name == "age_s":
                column[rows] += 15.0
            elif "_count_" in name:
                column[rows] = 0.0
            else:
                column[rows] = np.nan


@pytest.mark.parametrize("fault", [narrow_link, hot_and_throttled, uncorrectable, dead_link])
@pytest.mark.parametrize("late_s", [60, 3600])
def test_no_action_falls_because_pages_are_late(
    small_fleet: Small, fault: Callable[[SmallFleet], None], late_s: int
) -> None:
    fleet = small_fleet(4)
    fleet.tick(2)
    fault(fleet)
    before = fleet.tick(8).risk.actions[1].code
    assert ACTIONS.index(before) >= ACTIONS.index("avoid")
    for _ in range(late_s // 15):
        late(fleet)
        assert fleet.tick().risk.actions[1].code == before


def test_a_host_with_a_second_silent_host_stays_flagged(small_fleet: Small) -> None:
    fleet = small_fleet(2)
    fleet.tick(3)
    silence(fleet, 0, 3600.0)
    assert fleet.flagged(fleet.tick(2)) == ["n001"]
    silence(fleet, 1, 60.0)
    assert fleet.flagged(fleet.tick(6)) == ["n001"]


def silence(fleet: SmallFleet, node: int, age_s: float) -> None:
    rows = slice(8 * node, 8 * node + 8)
    fleet.gpu["age_s"][rows] = fleet.port["age_s"][rows] = age_s
    fleet.node["scrape_up"][node] = 0.0


def test_what_was_held_is_in_the_snapshot(small_fleet: Small) -> None:
    fleet = small_fleet(4)
    fleet.tick(2)
    dead_link(fleet)
    fleet.tick(4)
    late(fleet)
    before = fleet.tick().risk.actions[1]
    about, arrays = fleet.memory.dump()
    fleet.memory = RiskState()
    fleet.memory.load(json.loads(json.dumps(about)), arrays)
    late(fleet)
    assert fleet.tick().risk.actions[1] == before
