"""What the rules remember survives a restart, and a clock that steps."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from fleet.events import Step
from models.memory import RiskMemory
from models.score import Fleet


def troubled(fleet) -> None:
    """A throttling GPU, a gang member whose clocks fall behind, and steps that become slow."""
    fleet.start("j", fleet.names)
    fleet.throttle(fleet.names[0], 3)
    slow = slice(fleet.row(fleet.names[1], 0), fleet.row(fleet.names[1], 0) + 8)
    fleet.gpu["sm_clock_mhz"][slow] = fleet.gpu["sm_clock_mhz_mean_2m"][slow] = 1500.0
    for number, duration_s in enumerate([2.0] * 12 + [3.5] * 6):
        time_ms = fleet.now_ms + number * 2000
        fleet.jobs.apply(Step(job="j", sequence=10 + number, time_ms=time_ms, step=number, duration_s=duration_s))


def reborn(memory: RiskMemory) -> RiskMemory:
    about, arrays = memory.dump()
    again = RiskMemory()
    again.load(json.loads(json.dumps(about)), arrays)
    return again


def assert_same(one: Fleet, other: Fleet) -> None:
    np.testing.assert_array_equal(one.risk.values, other.risk.values)
    assert one.risk.actions == other.risk.actions
    assert one.risk.reasons == other.risk.reasons
    assert one.stragglers == other.stragglers


@pytest.mark.parametrize("ticks", [2, 30])
def test_a_memory_that_was_saved_goes_on_as_if_it_had_not_been(small_fleet: Callable, ticks: int) -> None:
    fleet, saved = small_fleet(), small_fleet()
    for one in (fleet, saved):
        troubled(one)
        one.tick(ticks)
    saved.memory = reborn(saved.memory)
    for _ in range(3):
        assert_same(saved.tick(), fleet.tick())
    for one in (fleet, saved):
        one.gpu["clock_event_reasons"][:] = 0
        one.gpu["sm_clock_mhz"][:] = one.gpu["sm_clock_mhz_mean_2m"][:] = 1980.0
    assert fleet.flagged(fleet.tick()) != []  # not yet pardoned
    saved.tick()
    for _ in range(60):
        assert_same(saved.tick(), fleet.tick())


def test_only_where_something_was_seen_is_evidence_kept(small_fleet: Callable) -> None:
    fleet = small_fleet()
    fleet.throttle(fleet.names[0], 3)
    fleet.tick(3)
    _, arrays = fleet.memory.dump()
    assert len(arrays["gpu/rule"]) == len(arrays["gpu/streak"]) < 5


def test_a_rule_that_is_gone_is_forgotten(small_fleet: Callable) -> None:
    fleet = small_fleet()
    fleet.throttle(fleet.names[0], 3)
    fleet.tick(3)
    about, arrays = fleet.memory.dump()
    about["rules"]["gpu"] = [f"{name} of old" for name in about["rules"]["gpu"]]
    again = RiskMemory()
    again.load(about, arrays)
    assert not any(memory.firm.any() for memory in again.kinds.values())


def test_times_move_with_the_clock(small_fleet: Callable) -> None:
    fleet, moved = small_fleet(), small_fleet()
    hour_ms = 3_600_000
    for one in (fleet, moved):
        troubled(one)
        one.tick(3)
    moved.memory.move(-hour_ms)
    moved.now_ms -= hour_ms
    for name in moved.gpu_since:
        moved.gpu_since[name][moved.gpu_since[name] > 0] -= hour_ms
    for _ in range(5):
        one, other = fleet.tick(), moved.tick()
        np.testing.assert_array_equal(one.risk.values, other.risk.values)
        assert one.risk.actions.keys() == other.risk.actions.keys()
