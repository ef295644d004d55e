"""What the rules remember survives a restart, and a clock that steps."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.fleet.events import Step
from fleetcast.models.risk.local import score_own_nodes
from fleetcast.models.risk.score import FleetMoment, FoldedEvents, ScoredFleet, score_fleet
from fleetcast.models.risk.state import RiskState


def troubled(fleet) -> None:
    """A throttling GPU, a gang member whose clocks fall behind, and steps that become slow."""
    fleet.start("j", fleet.names)
    fleet.throttle(fleet.names[0], 3)
    slow = slice(fleet.row(fleet.names[1], 0), fleet.row(fleet.names[1], 0) + 8)
    fleet.gpu["sm_clock_mhz"][slow] = fleet.gpu["sm_clock_mhz_mean_2m"][slow] = 1500.0
    for number, duration_s in enumerate([2.0] * 12 + [3.5] * 6):
        time_ms = fleet.now_ms + number * 2000
        fleet.jobs.apply(Step(job="j", sequence=10 + number, time_ms=time_ms, step=number, duration_s=duration_s))


def reborn(memory: RiskState) -> RiskState:
    about, arrays = memory.dump()
    again = RiskState()
    again.load(json.loads(json.dumps(about)), arrays)
    return again


def assert_same(one: ScoredFleet, other: ScoredFleet) -> None:
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
    assert len(arrays["rules.gpu/rule"]) == len(arrays["rules.gpu/streak"]) < 5


def test_a_rule_that_is_gone_is_forgotten(small_fleet: Callable) -> None:
    fleet = small_fleet()
    fleet.throttle(fleet.names[0], 3)
    fleet.tick(3)
    about, arrays = fleet.memory.dump()
    about["rules.gpu"]["rules"] = [f"{name} of old" for name in about["rules.gpu"]["rules"]]
    again = RiskState()
    again.load(about, arrays)
    assert not any(memory.firm.any() for memory in again.rules.values())


def test_times_move_with_the_clock(small_fleet: Callable) -> None:
    fleet, moved = small_fleet(), small_fleet()
    hour_ms = 3_600_000
    for one in (fleet, moved):
        troubled(one)
        one.tick(3)
    moved.memory.shift_times(-hour_ms)
    moved.now_ms -= hour_ms
    for name in moved.gpu_since:
        moved.gpu_since[name][moved.gpu_since[name] > 0] -= hour_ms
    for _ in range(5):
        one, other = fleet.tick(), moved.tick()
        np.testing.assert_array_equal(one.risk.values, other.risk.values)
        assert one.risk.actions.keys() == other.risk.actions.keys()


def test_every_owner_is_saved_read_back_and_moved(small_fleet: Callable) -> None:
    fleet = small_fleet()
    troubled(fleet)
    fleet.tick(5)
    about, arrays = fleet.memory.dump()
    owners = {"clocks", "slots", "links", "scrapes", "faults", "record", "outcomes", "streaks", "paces", "repairs"}
    owners |= {"days", "shadow", "witnesses", "rate"}
    assert about.keys() == owners | {"rules.gpu", "rules.port", "rules.node"}
    assert vars(fleet.memory).keys() == owners | {"rules", "interval_s", "alike", "gangs"}
    back, same = reborn(fleet.memory).dump()
    assert json.dumps(back) == json.dumps(about)
    assert {name: array.tobytes() for name, array in same.items()} == {
        n: array.tobytes() for n, array in arrays.items()
    }
    moved = reborn(fleet.memory)
    moved.shift_times(1000)
    assert moved.scrapes.learned_ms == fleet.memory.scrapes.learned_ms + 1000
    assert moved.faults.since_ms == fleet.memory.faults.since_ms + 1000
    moved.shift_times(-1000)
    assert json.dumps(moved.dump()[0]) == json.dumps(about)


def test_a_state_that_lacks_an_owner_is_not_read(small_fleet: Callable) -> None:
    about, arrays = small_fleet().memory.dump()
    del about["repairs"]
    with pytest.raises(KeyError, match="repairs"):
        RiskState().load(about, arrays)


def test_a_fleet_is_scored_with_the_parts_of_its_own_alone(small_fleet: Callable) -> None:
    """What score_local writes stays as it is while the fleet is scored, and the other way round."""
    fleet = small_fleet()
    troubled(fleet)
    fleet.tick(3)
    local_parts = {"rules.gpu", "rules.port", "rules.node", "clocks", "slots", "links", "scrapes"}

    def written(write: Callable[[], object]) -> set[str]:
        before, after = fleet.memory.dump(), (write(), fleet.memory.dump())[1]
        texts = [{name: json.dumps(part) for name, part in about.items()} for about, _ in (before, after)]
        changed = {name for name in texts[0] if texts[0][name] != texts[1][name]}
        arrays = {name for name, array in before[1].items() if array.tobytes() != after[1][name].tobytes()}
        return changed | {name.partition("/")[0] for name in arrays}

    fleet.now_ms += 15_000
    frames, topology, memory, now_ms = fleet.frames(), fleet.topology, fleet.memory, fleet.now_ms
    local = []
    wrote = written(lambda: local.append(score_own_nodes(frames, fleet.entities, topology, memory, now_ms)))
    assert wrote
    assert wrote <= local_parts
    events = FoldedEvents(running=fleet.jobs.list_running(), ended=(), nodes={})
    wrote = written(lambda: score_fleet(FleetMoment(now_ms, topology, local, events), memory))
    assert {"faults", "streaks"} <= wrote
    assert not wrote & local_parts
