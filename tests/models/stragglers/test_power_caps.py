"""A capped node is named as capped, with its cost, and never as faulty: with and without the bit, and the limit."""

from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.fleet.clock_reasons import POWER_CAP
from fleetcast.fleet.events import Step, StepParts
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]
CAPPED = "at 450 W, 11 % slower; the gang of 4 nodes waits for it"


def running(small_fleet: Small, bits: bool = True, limit: bool = True) -> SmallFleet:
    """Four nodes at work for one job."""
    fleet = small_fleet()
    fleet.gpu["power_w_mean_2m"] = np.full(32, 650.0)
    fleet.gpu["power_limit_w"] = np.full(32, 700.0 if limit else np.nan)
    if not bits:
        fleet.gpu["clock_event_reasons"][:] = np.nan
    fleet.start("train-1", fleet.names)
    fleet.tick(2)
    return fleet


def cap(fleet: SmallFleet, clock: float = 1785.0, power_w: float = 448.0, gpus: slice = slice(8, 16)) -> None:
    """An operator limits GPUs of n002; the others wait for them."""
    fleet.gpu["power_w"][:] = fleet.gpu["power_w_mean_2m"][:] = 590.0
    fleet.gpu["power_w"][gpus] = fleet.gpu["power_w_mean_2m"][gpus] = power_w
    fleet.gpu["sm_clock_mhz"][gpus] = fleet.gpu["sm_clock_mhz_mean_2m"][gpus] = clock
    if np.isfinite(fleet.gpu["power_limit_w"][0]):
        fleet.gpu["power_limit_w"][gpus] = 450.0


def slow_steps(fleet: SmallFleet, compute_s: float = 1.6, slow: float = 1.12) -> None:
    """Ranks 0 to 3, one a node, of whom n002's computes longer than the others."""
    for number in range(6):
        for rank in range(4):
            own = compute_s * (slow if rank == 1 else 1.0)
            parts = StepParts(compute=own, communication=2.0 - own)
            row = Step(
                job="train-1",
                sequence=2 + 4 * number + rank,
                time_ms=fleet.now_ms + 2000 * (number + 1),
                step=number,
                duration_s=2.0,
                rank=rank,
                parts=parts,
            )
            fleet.jobs.apply(row)
    fleet.now_ms += 12_000


@pytest.mark.parametrize(("bits", "limit"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_capped_node_is_watched_and_named_with_what_it_costs(small_fleet: Small, bits: bool, limit: bool) -> None:
    fleet = running(small_fleet, bits, limit)
    cap(fleet)
    answer = fleet.tick(1)
    assert answer.risk.actions[1].code == "watch"
    assert fleet.flagged(fleet.tick(8)) == []
    (said,) = fleet.sentences(answer, "n002")
    words = CAPPED if limit else CAPPED.replace("450", "448")
    words = words if bits or limit else words.replace("slower", "slower; neither its limit nor the reason is exported")
    assert said == f"power capped since 15:07 UTC: {words}"
    assert set(answer.risk.reasons) == {1}


def test_it_may_hold_its_gang_back_but_with_that_reason(small_fleet: Small) -> None:
    fleet = running(small_fleet)
    cap(fleet)
    slow_steps(fleet)
    body = fleet.tick(1).stragglers["train-1"]
    assert (body["slow"], body["cause"], body["culprit"]["name"]) == (True, "power_cap", "n002")
    assert "n002 holds the gang back: power capped since" in body["sentence"]
    assert body["sentence"].endswith(CAPPED)


@pytest.mark.parametrize("clock", [1742.0, 1700.0, 1200.0])
def test_no_depth_of_a_cap_makes_it_a_fault(small_fleet: Small, clock: float) -> None:
    for bits in (True, False):
        fleet = running(small_fleet, bits=bits, limit=False)
        cap(fleet, clock, power_w=118 + 470 * (clock / 1980) ** 2.3)
        assert fleet.flagged(fleet.tick(8)) == []


def test_a_stall_of_the_gang_makes_no_fault_of_a_cap(small_fleet: Small) -> None:
    fleet = running(small_fleet)
    cap(fleet, 1455.0, 448.0)
    fleet.tick(8)
    for _ in range(4):  # links flap: for one scrape nobody draws more than an idle context does
        drawn = fleet.gpu["power_w"].copy()
        fleet.gpu["power_w"][:] = 125.0
        assert fleet.flagged(fleet.tick(1)) == []
        fleet.gpu["power_w"][:] = drawn
        assert fleet.flagged(fleet.tick(1)) == []


def test_clocks_divided_by_two_and_heat_are_no_untold_cap(small_fleet: Small) -> None:
    braked, hot, warm = (running(small_fleet, bits=False, limit=False) for _ in range(3))
    cap(braked, 900.0, 200.0)
    cap(hot, 1500.0, 350.0)
    hot.gpu["gpu_temp_c"][9] = 90.0
    cap(warm, 1500.0, 350.0, slice(9, 10))
    warm.gpu["gpu_temp_c"][9] += 10.0
    for fleet in (braked, hot, warm):
        assert fleet.flagged(fleet.tick(8)) == ["n002"]


@pytest.mark.parametrize("clock", [1700.0, 1500.0, 1250.0])
def test_a_single_capped_gpu_is_known_by_its_power_where_nothing_else_tells(small_fleet: Small, clock: float) -> None:
    fleet = running(small_fleet, bits=False, limit=False)
    cap(fleet, clock, 118 + 470 * (clock / 1980) ** 1.5, slice(9, 10))
    slow_steps(fleet, slow=1980 / clock)
    answer = fleet.tick(8)
    assert fleet.flagged(answer) == []
    assert "power capped" in fleet.sentences(answer, "n002")[0]
    assert answer.stragglers["train-1"]["cause"] == "power_cap"


@pytest.mark.parametrize(
    ("power_w", "mean_w"),
    [(585.0, 585.0), (400.0, 340.0)],
    ids=["draws as much as its peers", "draws more than lately, as its peers do not"],
)
def test_a_single_slow_gpu_whose_power_lies_on_no_plateau_is_faulty(
    small_fleet: Small, power_w: float, mean_w: float
) -> None:
    fleet = running(small_fleet, bits=False, limit=False)
    cap(fleet, 1500.0, power_w, slice(9, 10))
    fleet.gpu["power_w_mean_2m"][9] = mean_w
    assert fleet.flagged(fleet.tick(8)) == ["n002"]


def test_who_draws_as_much_as_the_gang_or_far_below_the_limit_is_not_capped(small_fleet: Small) -> None:
    strong, sick = running(small_fleet), running(small_fleet)
    cap(strong, 1500.0, 590.0)
    cap(sick, 1200.0, 200.0)
    for fleet in (strong, sick):
        assert fleet.flagged(fleet.tick(8)) == ["n002"]


def test_a_lowered_limit_explains_a_clock_while_the_gang_waits_and_draws_little(small_fleet: Small) -> None:
    fleet = running(small_fleet)
    cap(fleet, 1350.0, 210.0, slice(8, 9))
    fleet.gpu["power_w"][:] = fleet.gpu["power_w_mean_2m"][:] = 270.0
    fleet.gpu["power_w"][8] = fleet.gpu["power_w_mean_2m"][8] = 210.0
    fleet.gpu["power_limit_w"][8] = 333.0
    fleet.gpu["clock_event_reasons"][8] = POWER_CAP
    answer = fleet.tick(8)
    assert fleet.flagged(answer) == []
    assert "power capped" in fleet.sentences(answer, "n002")[0]
    fleet.gpu["power_limit_w"][8] = 700.0  # what all have
    assert fleet.flagged(fleet.tick(30)) == ["n002"]


def test_a_gpu_that_falls_below_the_cap_of_its_node_is_an_outlier(small_fleet: Small) -> None:
    fleet = running(small_fleet)
    cap(fleet)
    fleet.tick(4)
    cap(fleet, 1000.0, 150.0, slice(9, 10))
    fleet.gpu["clock_event_reasons"][9] = 0.0
    assert fleet.flagged(fleet.tick(8)) == ["n002"]


def test_a_fleet_at_its_power_limit_says_nothing_and_hides_nobody(small_fleet: Small) -> None:
    fleet = running(small_fleet)
    fleet.gpu["sm_clock_mhz"][:] = fleet.gpu["sm_clock_mhz_mean_2m"][:] = 1500.0
    assert fleet.tick(8).risk.reasons == {}
    fleet.throttle("n003", 5)
    body = fleet.tick(4).stragglers["train-1"]
    assert body["culprit"]["name"] == "n003/5"


def test_most_of_a_gang_capped_blames_the_next_one_with_a_reason(small_fleet: Small) -> None:
    fleet = small_fleet(8)
    fleet.gpu["power_limit_w"] = np.full(64, 700.0)
    fleet.start("train-1", fleet.names[:4])
    fleet.start("other", fleet.names[4:])
    fleet.tick(2)
    gpus = slice(0, 24)
    fleet.gpu["sm_clock_mhz"][gpus] = fleet.gpu["sm_clock_mhz_mean_2m"][gpus] = 1300.0
    fleet.gpu["power_w"][gpus], fleet.gpu["power_limit_w"][gpus] = 300.0, 300.0
    answer = fleet.tick(3)
    assert {fleet.names[row] for row in answer.risk.reasons} == {"n001", "n002", "n003"}
    fleet.throttle("n004", 5, 1600.0)
    body = fleet.tick(3).stragglers["train-1"]
    assert body["culprit"]["name"] == "n004/5"
