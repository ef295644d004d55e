"""The multiple of the published fault rate that a fleet's own faults explain, and the nodes that leave the record."""

import json
from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.models.risk.fault_log import DAY_MS, FaultLog
from fleetcast.models.risk.fault_rate import FaultRate, compute_posterior_ratio, has_warning
from fleetcast.models.risk.record import RiskRecord
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS

T0 = 20_000 * DAY_MS
HOUR_MS = 3_600_000
TICK_MS = 60_000
NAMES = tuple(f"n{row:03}" for row in range(133))
DAILY = 0.0034  # faults that the published history expects of a node that never failed
NONE = np.zeros(len(NAMES), bool)


def watched(times: float, hours: int, seed: int, tick_ms: int = TICK_MS) -> FaultRate:
    """Return the rate after so many hours of a fleet whose faults come `times` as often as expected."""
    rng, rate, log = np.random.default_rng(seed), FaultRate(), FaultLog()
    until_ms = np.zeros(len(NAMES))
    for now_ms in range(T0, T0 + hours * HOUR_MS + 1, tick_ms):
        falls = (rng.random(len(NAMES)) < times * DAILY * tick_ms / DAY_MS) & (until_ms < now_ms)
        until_ms[falls] = now_ms + 40 * 60_000
        log.record_signals({NAMES[row]: (0, True) for row in np.flatnonzero(until_ms >= now_ms)}, len(NAMES), now_ms)
        rate.record_tick(np.full(len(NAMES), DAILY), NONE, NAMES, log, now_ms)
    return rate


@pytest.mark.parametrize("seed", range(3))
def test_faults_400_times_as_often_move_the_rate_within_hours(seed: int) -> None:
    assert 200 < watched(400.0, 3, seed).times < 800


@pytest.mark.parametrize("seed", range(3))
def test_an_ordinary_fleet_stays_near_the_published_rate(seed: int) -> None:
    assert 0.4 < watched(1.0, 24 * 14, seed, 10 * TICK_MS).times < 2.5


def test_one_fault_on_the_first_day_of_a_small_fleet_moves_little() -> None:
    assert 1 < compute_posterior_ratio(1, 4 * DAILY) < 3
    assert compute_posterior_ratio(0, 0.0) == 1.0


def test_the_multiple_grows_with_faults_and_falls_with_time_without_any() -> None:
    found = np.array(
        [[compute_posterior_ratio(seen, expected) for seen in range(30)] for expected in (0.01, 0.1, 1.0, 10.0)]
    )
    assert (np.diff(found, axis=1) >= 0).all()
    assert (np.diff(found, axis=0) <= 0).all()


def test_nodes_that_fall_within_a_minute_are_one_fault() -> None:
    rate, log = FaultRate(), FaultLog()
    for minute in range(40):
        fallen = NAMES[:4] if minute >= 10 else ()
        log.record_signals(dict.fromkeys(fallen, (0, False)), len(NAMES), T0 + minute * TICK_MS)
        rate.record_tick(np.full(len(NAMES), DAILY), NONE, NAMES, log, T0 + minute * TICK_MS)
    assert round(rate.seen, 2) == 1


def test_faults_that_were_there_when_watching_began_say_nothing_about_the_rate() -> None:
    rate, log = FaultRate(), FaultLog()
    for minute in range(40):
        now_ms = T0 + minute * TICK_MS
        hard = {NAMES[0]: (0, True), NAMES[1]: (T0 - 8 * TICK_MS, True), NAMES[2]: (T0 - 4 * TICK_MS, True)}
        log.record_signals(hard, len(NAMES), now_ms)
        rate.record_tick(np.full(len(NAMES), DAILY), np.arange(len(NAMES)) < 3, NAMES, log, now_ms)
    assert rate.seen == 0
    assert rate.times <= 1


@pytest.mark.parametrize("certain_after", [0, 3])
@pytest.mark.parametrize("is_backdated", [False, True])
def test_a_node_that_joins_while_it_is_broken_says_nothing_about_the_rate(
    certain_after: int, is_backdated: bool
) -> None:
    """Nobody watched its fault begin, however long a rule is in finding it."""
    rate, log = FaultRate(), FaultLog()
    for minute in range(80):
        now_ms, joins = T0 + minute * TICK_MS, T0 + 30 * TICK_MS
        names = NAMES if now_ms >= joins else NAMES[1:]
        hard = {NAMES[0]: (joins if is_backdated else 0, True)} if now_ms >= joins + certain_after * TICK_MS else {}
        log.record_signals(hard, len(names), now_ms)
        rate.record_tick(np.full(len(names), DAILY), NONE[: len(names)], names, log, now_ms)
    assert rate.seen == 0


def test_a_node_that_was_listed_and_never_heard_joins_with_its_first_telemetry() -> None:
    rate, log = FaultRate(), FaultLog()
    for minute in range(80):
        now_ms = T0 + minute * TICK_MS
        known = np.arange(len(NAMES)) > 0 if minute < 30 else ~NONE
        log.record_signals({NAMES[0]: (0, True)} if minute >= 31 else {}, len(NAMES), now_ms)
        rate.record_tick(np.full(len(NAMES), DAILY), NONE, NAMES, log, now_ms, known)
    assert rate.seen == 0


def test_a_node_that_comes_back_broken_after_a_long_silence_is_no_new_fault_and_one_that_falls_later_is() -> None:
    rate, log = FaultRate(), FaultLog()
    for minute in range(160):
        now_ms = T0 + minute * TICK_MS
        known = np.arange(len(NAMES)) > 0 if 10 <= minute < 60 else ~NONE
        hard = {NAMES[0]: (0, True)} if minute >= 61 else {}
        hard |= {NAMES[1]: (0, True)} if minute >= 100 else {}
        log.record_signals(hard, len(NAMES), now_ms)
        rate.record_tick(np.full(len(NAMES), DAILY), NONE, NAMES, log, now_ms, known)
    assert round(rate.seen, 2) == 1


def test_a_node_that_joined_well_and_falls_later_counts_also_after_a_restart() -> None:
    rate, log = FaultRate(), FaultLog()
    for minute in range(120):
        now_ms = T0 + minute * TICK_MS
        names = NAMES if minute >= 30 else NAMES[1:]
        log.record_signals({NAMES[0]: (0, True)} if minute >= 60 else {}, len(names), now_ms)
        rate.record_tick(np.full(len(names), DAILY), NONE[: len(names)], names, log, now_ms)
        if minute == 62:
            about, arrays = rate.dump()
            rate = FaultRate()
            rate.load(json.loads(json.dumps(about)), arrays)
    assert round(rate.seen, 2) == 1


def test_faults_of_a_time_without_ticks_say_nothing_about_the_rate() -> None:
    rate, log = FaultRate(), FaultLog()
    for minute in (*range(20), *range(200, 240)):
        now_ms = T0 + minute * TICK_MS
        hard = {NAMES[row]: (T0 + at * TICK_MS, True) for row, at in enumerate((100, 120, 195, 200)) if minute >= 200}
        log.record_signals(hard, len(NAMES), now_ms)
        rate.record_tick(np.full(len(NAMES), DAILY), NONE, NAMES, log, now_ms)
    assert rate.seen == 0


def test_a_fault_after_a_warning_does_not_count() -> None:
    rate, log = FaultRate(), FaultLog()
    warned = NONE.copy()
    warned[0] = True
    for minute in range(60):
        fallen = {NAMES[0]: (0, True), NAMES[1]: (0, True)} if minute >= 20 else {}
        log.record_signals(
            {NAMES[0]: fallen[NAMES[0]]} if fallen and minute < 25 else fallen, len(NAMES), T0 + minute * TICK_MS
        )
        rate.record_tick(np.full(len(NAMES), DAILY), warned if minute >= 5 else NONE, NAMES, log, T0 + minute * TICK_MS)
    assert round(rate.seen, 2) == 1  # of n001, which nothing announced


def test_a_fault_counts_as_warned_after_its_warning_has_ended() -> None:
    rate, log = FaultRate(), FaultLog()
    warned = NONE.copy()
    warned[0] = True
    for minute in range(90):
        now_ms = T0 + minute * TICK_MS
        log.record_signals({NAMES[0]: (0, True)} if minute >= 30 else {}, len(NAMES), now_ms)
        rate.record_tick(np.full(len(NAMES), DAILY), warned if minute < 40 else NONE, NAMES, log, now_ms)
    assert rate.seen == 0


def test_a_warning_is_what_the_history_does_not_expect() -> None:
    p, history = np.array([np.nan, 0.001, 0.07, 0.07]), np.array([0.0, 0.0, 0.0, 0.06])
    assert has_warning(p, history).tolist() == [False, False, True, False]


def test_the_rate_survives_a_restart_and_follows_the_clock() -> None:
    rate, again = watched(400.0, 1, 0), FaultRate()
    again.load(json.loads(json.dumps(rate.dump()[0])), {})
    assert (again.times, again.dump()) == (rate.times, rate.dump())
    again.shift_times(DAY_MS)
    assert again.dump()[0]["now_ms"] == rate.dump()[0]["now_ms"] + DAY_MS


def test_the_multiple_scales_the_hazard_of_each_node(small_fleet: Callable) -> None:
    fleet = small_fleet()
    before = fleet.tick(2).risk.values[0]
    fleet.memory.rate.seen, fleet.memory.rate.expected = 9.0, 0.025
    fleet.tick()
    after = fleet.tick().risk.values[0]
    assert fleet.memory.rate.times == 320
    np.testing.assert_allclose(np.log1p(-after), 320 * np.log1p(-before), rtol=1e-6)


def scored(hard_since_ms: int, known_ms: int, names: tuple[str, ...] = ("n000",)) -> RiskRecord:
    """Return the record of two hours in which nodes stand at 90 %, and whose faults become known at `known_ms`."""
    log, record = FaultLog(), RiskRecord()
    values = np.zeros((len(RISK_KINDS), len(RISK_HORIZONS_S), len(NAMES)))
    values[0, :, : len(names)] = 0.9
    for now_ms in range(T0, T0 + 2 * HOUR_MS + 1, TICK_MS):
        hard = dict.fromkeys(names, (hard_since_ms, True)) if now_ms >= known_ms else {}
        log.record_signals(hard, len(NAMES), now_ms)
        record.record_tick(values, NAMES, log, now_ms)
    return record


def test_a_node_that_had_failed_before_its_forecast_leaves_the_record() -> None:
    hour = scored(T0 - TICK_MS, T0 + 5 * TICK_MS).list_calibrations()[0]
    assert hour.mean_p == 0.0
    assert hour.faults == 0


def test_a_node_that_fails_after_its_forecast_stays_in_the_record() -> None:
    hour = scored(0, T0 + 5 * TICK_MS).list_calibrations()[0]
    assert hour.faults == 1
    assert hour.bins[-1].n == 1


def test_nodes_that_fell_together_leave_the_record() -> None:
    hour = scored(0, T0, NAMES[:100]).list_calibrations()[0]
    assert hour.mean_p == 0.0
