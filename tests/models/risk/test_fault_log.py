"""What is served of a node's past faults is what is judged, and what was told is compared with what came."""

import asyncio
import json
from collections.abc import Callable

import numpy as np
import pytest

from fleetcast.fleet.events import NodeEvent
from fleetcast.models.risk import fault_log
from fleetcast.models.risk.fault_log import DAY_MS, FaultLog
from fleetcast.models.risk.hazard import PUBLISHED, FaultHistory, fit_history, make_feature_columns, make_past_days
from fleetcast.models.risk.record import RiskRecord
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS
from fleetcast.models.risk.state import RiskState
from fleetcast.service.pipeline.risk_calibration import make_calibration_document, make_calibration_page, refit_if_due

T0 = 20_000 * DAY_MS
HOUR_MS = 3_600_000
NAMES = tuple(f"n{row:02}" for row in range(30))


def watched(history: FaultHistory, days: int, log: FaultLog | None = None) -> FaultLog:
    """A log that was told of a history hour by hour."""
    log = log or FaultLog()
    for now_ms in range(T0, T0 + days * DAY_MS + 1, HOUR_MS // 2):
        begun, over = (np.rint(times * DAY_MS) for times in (history.start_day, history.end_day))
        on = np.flatnonzero((begun <= now_ms) & (now_ms <= over))
        hard = {
            NAMES[history.node[at]]: (round(history.start_day[at] * DAY_MS), bool(history.hardware[at]))
            for at in on.tolist()
        }
        log.record_signals(hard, len(NAMES), now_ms)
    return log


def lemons(days: int, seed: int = 0) -> FaultHistory:
    """Every sixth node fails often; each fault lasts two hours, and begins on the hour."""
    rng = np.random.default_rng(seed)
    rows = []
    for node in range(len(NAMES)):
        hours = np.sort(rng.choice(days * 4, rng.poisson(8 if node % 6 == 0 else 1), replace=False)) * 6
        rows += [(node, T0 / DAY_MS + hour / 24, T0 / DAY_MS + (hour + 2) / 24, node % 2 == 0) for hour in hours]
    return FaultHistory(*(np.array(column) for column in zip(*rows, strict=True)))


def test_the_service_tells_what_is_judged_on_the_same_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_log, "OWN_FAULTS", 20)
    history, days = lemons(64), 64
    log = watched(history, days)
    now_ms = T0 + days * DAY_MS
    today = now_ms // DAY_MS
    judged = fit_history(history, T0 // DAY_MS + 1, today, len(NAMES))
    rows = make_past_days(history, range(today, today + 1), len(NAMES))
    before = log.compute_hazard(NAMES, RISK_HORIZONS_S, now_ms)
    np.testing.assert_allclose(before[:, rows.node], PUBLISHED.compute_hazard(rows.columns, RISK_HORIZONS_S), rtol=1e-9)
    memory = RiskState()
    memory.faults = log
    assert asyncio.run(refit_if_due(memory, asyncio.Lock(), NAMES, now_ms))
    found = log.fit
    assert found is not None
    assert found.notes == judged.notes
    for day, fit in judged.horizons.items():
        assert found.horizons[day].intercept == pytest.approx(fit.intercept, rel=1e-4)
        assert found.horizons[day].weights == pytest.approx(fit.weights, rel=1e-4, abs=1e-4)
    served = log.compute_hazard(NAMES, RISK_HORIZONS_S, now_ms)[:, rows.node]
    np.testing.assert_allclose(served, judged.compute_hazard(rows.columns, RISK_HORIZONS_S), rtol=1e-4)
    assert served[2].max() > 1.2 * served[2].min()
    assert (np.diff(served, axis=0) >= 0).all()
    assert not log.is_fit_due(now_ms + DAY_MS)
    assert log.is_fit_due(now_ms + 7 * DAY_MS)


def test_faults_are_told_apart_by_quiet_between_them_and_not_of_the_whole_fleet() -> None:
    log = FaultLog()
    log.record_signals({"n01": (0, True)}, 30, T0)
    log.record_signals({}, 30, T0 + HOUR_MS // 2)
    log.record_signals({"n01": (T0 + HOUR_MS // 2, False)}, 30, T0 + HOUR_MS)  # the same again
    log.record_signals({"n01": (T0 + 4 * HOUR_MS, False)}, 30, T0 + 4 * HOUR_MS)
    log.record_signals(dict.fromkeys(NAMES, (0, False)), 30, T0 + 8 * HOUR_MS)
    assert [(row.node, row.start_ms - T0, row.hardware) for row in log.faults] == [
        ("n01", 0, True),
        ("n01", 4 * HOUR_MS, False),
    ]
    assert log.find_new_faults(T0, T0 + 4 * HOUR_MS) == {"n01"}
    late = log.make_history({"n01": 0}).truncate((T0 + 9 * HOUR_MS) / DAY_MS)
    assert late.end_day[0] == (T0 + HOUR_MS) / DAY_MS


def test_what_was_told_is_compared_with_what_came() -> None:
    log, record = FaultLog(), RiskRecord()
    values = np.zeros((len(RISK_KINDS), len(RISK_HORIZONS_S), 30))
    values[0] = np.linspace(0.0, 0.3, 30)
    fails = {8: ("n29", "n28"), 13: ("n20",), 30: ("n01",)}  # by hour
    for hour in range(51):
        now_ms = T0 + hour * HOUR_MS
        for part in range(6):  # a tick each ten minutes
            log.record_signals(dict.fromkeys(fails.get(hour, ()), (0, True)), 30, now_ms + part * HOUR_MS // 6)
            record.record_tick(values, NAMES, log, now_ms + part * HOUR_MS // 6)
        if hour == 20:
            record, log = reborn(record, log)
    hours, five, day, week = record.list_calibrations()
    assert (week.matured, week.brier_skill, week.observed) == (0, None, None)
    assert day.matured > 30 * 4 > week.matured
    assert day.mean_p == pytest.approx(0.15, abs=0.01)
    assert 0 < day.observed < 0.15
    assert hours.matured > five.matured > day.matured
    assert hours.faults >= 4
    assert sum(row.n for row in five.bins) == five.matured
    assert sum(row.n * row.p for row in five.bins) == pytest.approx(five.matured * five.mean_p, rel=1e-3)
    assert day.bins[-1].observed > day.bins[0].observed
    assert len(record.waiting) <= 5 * len(RISK_HORIZONS_S)
    memory = RiskState()
    memory.record = record
    page = make_calibration_page(make_calibration_document(memory).rows).decode()
    assert f'fleetcast_node_risk_matured_forecasts{{horizon="1d"}} {day.matured}' in page
    before = record.list_calibrations()[0].matured
    record.record_tick(values, NAMES, log, now_ms + 40 * HOUR_MS)  # nobody watched
    assert record.list_calibrations()[0].matured == before


def reborn(record: RiskRecord, log: FaultLog) -> tuple[RiskRecord, FaultLog]:
    about, arrays = record.dump()
    again, other = RiskRecord(), FaultLog()
    again.load(json.loads(json.dumps(about)), arrays)
    other.load(*json.loads(json.dumps(log.dump())))
    assert again.list_calibrations() == record.list_calibrations()
    assert other.dump() == log.dump()
    return again, other


def test_nodes_that_are_gone_are_forgotten() -> None:
    log, record = FaultLog(), RiskRecord()
    for hour in range(60):
        names = tuple(f"h{hour}-{row}" for row in range(30))
        values = np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), 30), 0.1)
        record.record_tick(values, names, log, T0 + hour * HOUR_MS)
    assert len(record.names) < 200


def test_faults_of_the_rules_are_remembered_and_raise_the_node(small_fleet: Callable) -> None:
    fleet = small_fleet()
    fleet.gpu["xid"][fleet.row("n002", 3)] = 79.0
    fleet.gpu_since["xid"][fleet.row("n002", 3)] = fleet.now_ms
    fleet.gpu["age_s"][fleet.row("n002", 3)] = 600.0
    fleet.gpu["silent_s"] = fleet.gpu["age_s"].copy()
    fleet.tick(3)
    fleet.gpu["age_s"][:] = 1.0
    fleet.gpu["silent_s"][:] = 1.0
    answer = fleet.tick(30, 60.0)
    (fault,) = fleet.memory.faults.faults
    assert (fault.node, fault.hardware) == ("n002", True)
    assert (answer.risk.values[0, :, 1] > answer.risk.values[0, :, 0]).all()
    again = RiskState()
    about, arrays = fleet.memory.dump()
    again.load(json.loads(json.dumps(about)), arrays)
    assert again.faults.dump() == fleet.memory.faults.dump()
    days = (fleet.now_ms - fault.start_ms) / DAY_MS
    known = fleet.memory.faults.make_history({name: row for row, name in enumerate(fleet.names)})
    assert make_feature_columns(known, fleet.now_ms / DAY_MS, 4)[1, 0] == pytest.approx(np.exp(-days / 30))


@pytest.mark.parametrize(("told", "faults"), [(("drain", "lost"), []), (("drain",), []), ((), ["n002"])])
def test_a_node_that_is_drained_and_powered_off_has_no_fault(
    small_fleet: Callable, told: tuple[str, ...], faults: list[str]
) -> None:
    fleet = small_fleet()
    fleet.tick(2)
    for at, type in enumerate(told):
        fleet.node_events.apply(
            NodeEvent(node="n002", source="op", sequence=at, time_ms=fleet.now_ms + at, type=type)  # type: ignore[arg-type]
        )
    fleet.node["scrape_up"][1] = 0.0
    for at in range(20):  # five minutes
        for columns in (fleet.gpu, fleet.port):
            columns["age_s"][8:16] = 15.0 * at
        answer = fleet.tick()
    assert any("node has not answered" in text or "lost" in text for text in fleet.sentences(answer, "n002"))
    assert [fault.node for fault in fleet.memory.faults.faults] == faults


def test_an_outage_that_spreads_tick_by_tick_is_no_fault_of_its_nodes_and_neither_is_its_end() -> None:
    log, names = FaultLog(), [f"n{row:03}" for row in range(100)]
    log.record_signals({"n099": (0, True)}, 100, T0 - DAY_MS)
    log.record_signals({}, 100, T0 - HOUR_MS)
    for tick in range(1, 5):
        log.record_signals(dict.fromkeys(names[: 10 * tick], (T0, False)), 100, T0 + tick * 15_000)
    _, log = reborn(RiskRecord(), log)
    for left in (9, 3):
        log.record_signals(dict.fromkeys(names[:left], (T0, False)), 100, T0 + HOUR_MS // 2)
    assert [fault.node for fault in log.faults] == ["n099"]
    log.record_signals({}, 100, T0 + HOUR_MS)
    log.record_signals({"n001": (0, True)}, 100, T0 + 2 * HOUR_MS)  # it was well again
    assert log.find_last_fault_times() == {"n099": T0 - DAY_MS, "n001": T0 + 2 * HOUR_MS}


def test_a_fit_begins_where_faults_are_still_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    log = FaultLog()
    log.record_signals({}, 30, T0)
    now_ms = T0 + 500 * DAY_MS
    for day in (450, 460, 470):
        log.record_signals({"n01": (0, True)}, 30, T0 + day * DAY_MS)
    assert log.make_fit_inputs(NAMES, now_ms)[1] == (T0 + 100 * DAY_MS) // DAY_MS + 1
    monkeypatch.setattr(fault_log, "MOST", 3)
    assert log.make_fit_inputs(NAMES, now_ms)[1] == (T0 + 450 * DAY_MS) // DAY_MS + 1
