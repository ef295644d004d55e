"""Early signs: said of who shows them, silent on what looks like them, and never a flag."""

from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind
from fleetcast.models.risk.heat import LEAST_ROUNDS
from fleetcast.models.risk.rules import RULES
from tests.models.conftest import SmallFleet
from tests.models.risk.test_state import reborn

Small = Callable[..., SmallFleet]
BASE_1H = 2e-4


def telling(small_fleet: Small, nodes: int = 6) -> SmallFleet:
    """A fleet at work whose usual temperatures and scrape times are known."""
    fleet = small_fleet(nodes)
    rng = np.random.default_rng(1)
    warm = np.tile(np.where(np.isin(np.arange(8), (0, 3, 4, 6)), 67.0, 56.0), nodes)
    fleet.gpu["gpu_temp_c_mean_2m"] = warm + rng.normal(0, 1, 8 * nodes)
    fleet.gpu["power_w_mean_2m"] = np.full(8 * nodes, 650.0)
    fleet.gpu["ecc_sbe_volatile_count_30m"] = np.zeros(8 * nodes)
    fleet.port["symbol_errors_count_30m"] = np.zeros(8 * nodes)
    fleet.node["scrape_duration_s_mean_2m"] = rng.normal(0.02, 0.001, nodes)
    fleet.node["gaps_10m"], fleet.node["gaps_30m"] = np.zeros(nodes), np.zeros(nodes)
    assert not fleet.tick(LEAST_ROUNDS + 5).risk.reasons
    return fleet


def early(fleet: SmallFleet, ticks: int = 24) -> set[str]:
    """Nodes with an early sign now; none is flagged, and the risk of each is well above the base and below hard."""
    answer = fleet.tick(ticks)
    assert fleet.flagged(answer) == []
    assert all(action.code == "watch" for action in answer.risk.actions.values())
    for row in answer.risk.reasons:
        hour = answer.risk.values[:, 0, row].max()
        assert 20 * BASE_1H < hour < 0.1
    return {fleet.names[row] for row in answer.risk.reasons}


def test_a_gpu_that_is_warmer_than_its_slot_at_that_power_is_watched(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    fleet.gpu["gpu_temp_c_mean_2m"][fleet.row("n002", 1)] = (
        65.0  # no more than its neighbours of the other cooling group
    )
    assert early(fleet, 6) == set()  # not for a minute
    assert early(fleet) == {"n002"}
    assert "GPU 1: 65 °C, its slot at this power usually 56" in " ".join(fleet.sentences(fleet.tick(), "n002"))


def test_a_warm_room_other_work_and_idle_gpus_are_no_heat(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    warm, power = fleet.gpu["gpu_temp_c_mean_2m"], fleet.gpu["power_w_mean_2m"]
    room = slice(fleet.row("n001", 0), fleet.row("n001", 0) + 8)
    warm[room] += 9.0
    power[fleet.row("n003", 1)], warm[fleet.row("n003", 1)] = 450.0, 66.0  # a power that nobody has shown yet
    idle = fleet.row("n004", 1)
    fleet.gpu["gpu_util"][idle], fleet.gpu["sm_active"][idle], warm[idle] = 0.0, 0.0, 80.0
    assert early(fleet) == set()


def test_corrected_errors_count_where_the_fleet_has_none(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    errors = fleet.gpu["ecc_sbe_volatile_count_30m"]
    errors[fleet.row("n005", 2)] = 9.0
    errors[fleet.row("n002", 2)] = 1.0
    assert early(fleet) == {"n005"}
    errors[:] = 9.0
    assert early(fleet, 60) == set()


def test_symbol_errors_count_but_not_those_of_a_link_that_was_trained_anew(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    late, more = fleet.port["symbol_errors_count_10m"], fleet.port["symbol_errors_count_30m"]
    late[17], more[17] = 30.0, 60.0
    assert early(fleet) == {"n003"}
    fleet.port["link_recoveries_count_30m"][17] = 1.0
    assert "symbol errors" not in " ".join(fleet.sentences(fleet.tick(60), "n003"))


def test_late_scrapes_speak_for_minutes_and_not_when_all_are_late(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    took = fleet.node["scrape_duration_s_mean_2m"]
    took[3] = 1.2
    assert early(fleet, 8) == set()  # one page of ten seconds stays in the mean for so long
    took[3] = 0.15
    assert early(fleet) == {"n004"}
    took[:] = 0.15
    assert early(fleet, 40) == set()


@pytest.mark.parametrize(
    ("late", "whole", "nodes", "said"),
    [
        (4, 12, 1, True),  # now and then
        (0, 3, 1, False),  # an exporter that restarted a while ago
        (3, 3, 1, False),  # or just now
        (1, 3, 1, False),  # or twice
        (30, 90, 1, False),  # an outage
        (4, 12, 6, False),  # of all: it is us
    ],
)
def test_lost_scrapes_speak_when_they_come_again(
    small_fleet: Small, late: float, whole: float, nodes: int, said: bool
) -> None:
    fleet = telling(small_fleet)
    fleet.node["gaps_10m"][:nodes], fleet.node["gaps_30m"][:nodes] = late, whole
    assert early(fleet) == ({"n001"} if said else set())


@pytest.mark.parametrize("back_s", [450, 15])
def test_one_outage_that_began_before_the_last_ten_minutes_is_no_sign(small_fleet: Small, back_s: int) -> None:
    fleet = telling(small_fleet)
    fleet.node["gaps_10m"][0], fleet.node["gaps_30m"][0] = 10.0, 20.0  # five minutes, half of them in the window
    for _ in range(24):
        fleet.node_since["scrape_up"][0] = fleet.now_ms + 15_000 - back_s * 1000
        answer = fleet.tick()
    assert bool(answer.risk.reasons) == (back_s == 15)  # now and then, or all of them before it came back


def test_where_too_few_gpus_work_to_tell_of_the_room_nothing_is_said(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    fleet.gpu["gpu_temp_c_mean_2m"][:8] += 9.0
    fleet.gpu["gpu_util"][2:8] = fleet.gpu["sm_active"][2:8] = 0.0
    assert early(fleet) == set()


def test_a_gpu_whose_load_has_just_changed_is_not_compared(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    hot = fleet.row("n002", 1)
    fleet.gpu["power_w_mean_30m"] = fleet.gpu["power_w_mean_2m"].copy()
    fleet.gpu["gpu_temp_c_mean_2m"][hot] = 65.0
    fleet.gpu["power_w_mean_30m"][hot] = 720.0
    assert early(fleet) == set()
    fleet.gpu["power_w_mean_30m"][hot] = 660.0
    assert early(fleet) == {"n002"}


def test_minutes_are_more_samples_where_they_come_oftener(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    fleet.memory.interval_s = 5.0
    fleet.gpu["gpu_temp_c_mean_2m"][fleet.row("n002", 1)] = 65.0
    assert not fleet.tick(30, every_s=5.0).risk.reasons
    assert fleet.tick(40, every_s=5.0).risk.reasons


def test_a_usual_time_never_passes_what_is_seen(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    fleet.memory.interval_s = 60.0
    fleet.node["scrape_duration_s_mean_2m"][:] = 0.01
    fleet.tick(1, every_s=3600.0)
    assert (fleet.memory.scrapes.usual_s >= 0.0099).all()


def test_what_is_usual_survives_a_restart(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    fleet.memory = reborn(fleet.memory)
    fleet.gpu["gpu_temp_c_mean_2m"][fleet.row("n002", 1)] = 65.0
    fleet.node["scrape_duration_s_mean_2m"][3] = 0.15
    assert early(fleet) == {"n002", "n004"}


def test_early_signs_only_watch() -> None:
    assert {rule.action for rule in RULES if rule.early} == {"watch"}
    assert all(max(rule.prior) <= 0.03 and not rule.hard for rule in RULES if rule.early)


def test_slots_are_of_one_model_and_those_of_unknown_nodes_have_no_usual(small_fleet: Small) -> None:
    fleet = telling(small_fleet)
    slots, entities = fleet.memory.slots, Entities()
    for node in ("n001", "nobody"):
        entities.add_to_node(EntityKind.GPU, node, 5)
    assert slots.find_slots(entities[EntityKind.GPU].names, np.array([0, -1], np.int32), fleet.topology).tolist() == [
        5,
        -1,
    ]
    assert slots.names == [f"H100/{index}" for index in range(8)]
