"""Nodes on which jobs fail oftener than elsewhere, by what is told of how they ended."""

import json

import numpy as np
import pytest

from fleetcast.fleet.events import Failed
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.risk import job_outcomes
from fleetcast.models.risk.fault_log import DAY_MS
from fleetcast.models.risk.job_outcomes import MOST_TIMES, JobOutcomes
from fleetcast.models.risk.node_risk import score_nodes
from fleetcast.models.risk.rules import ROW
from fleetcast.models.risk.signals import Signals

T0 = 20_000 * DAY_MS
ROWS = {f"n{row}": row for row in range(10)}


def ended(number, nodes, category="", named=""):
    """An attempt that finished, or failed with a category."""
    failure = Failed(job=f"j{number}", sequence=9, time_ms=T0, category=category, node=named) if category else None
    return JobAttempt(
        f"j{number}", 1, nodes=nodes, ended_ms=T0, outcome="failed" if category else "finished", failure=failure
    )


def told(jobs, now_ms=T0):
    outcomes = JobOutcomes()
    outcomes.count_ended(jobs, now_ms)
    outcomes.count_ended(jobs, now_ms)  # each once
    return {signal.entity: signal for signal in outcomes.make_signals(ROWS)}, outcomes


def jobs_on_all(lemon_category, named=""):
    """Twenty jobs a node, one in twenty fails; on n3 every second."""
    rows = [(node, at) for node in ROWS for at in range(20)]
    return [
        ended(number, (node,), lemon_category if node == "n3" and at % 2 else "unknown" if at == 0 else "", named)
        for number, (node, at) in enumerate(rows)
    ]


def test_a_lemon_is_named_with_its_share_and_raises_its_own_risk() -> None:
    found, outcomes = told(jobs_on_all("hardware"))
    assert list(found) == ["n3"]
    assert found["n3"].value == 11 / 20
    assert found["n3"].usual == (9 + 11) / 200
    scores = score_nodes(Signals.from_signals(list(found.values())), np.ones(10, bool), T0, None)
    times = np.log1p(-scores.values[0, :, 3]) / np.log1p(-scores.values[0, :, 0])
    assert np.allclose(times, 1 + (MOST_TIMES - 1) * found["n3"].strength)
    assert 2 < times[0] <= MOST_TIMES
    (reason,) = scores.reasons[3]
    assert reason.sentence == "55 % of the jobs on it failed, of all 10 %"
    assert reason.share > 0.5
    again = JobOutcomes()
    again.load(*json.loads(json.dumps(outcomes.dump())))
    assert again.dump() == outcomes.dump()
    later, _ = told([], T0)
    assert later == {}
    again.count_ended([], T0 + 120 * DAY_MS)
    assert again.make_signals(ROWS) == []


def test_what_users_do_and_what_one_large_job_does_speaks_against_no_node() -> None:
    assert told(jobs_on_all("user"))[0] == {}
    assert told(jobs_on_all("timeout"))[0] == {}
    large = [ended(number, tuple(ROWS), "unknown" if number % 2 else "") for number in range(12)]
    assert told(large)[0] == {}


def test_the_node_that_a_failure_names_is_the_one() -> None:
    gangs = [ended(number, tuple(ROWS), "hardware" if number < 6 else "", "n7" * (number < 6)) for number in range(60)]
    found, _ = told(gangs)
    assert list(found) == ["n7"]
    assert ROW["failed_jobs"]


def crash(job, attempt, at_ms, nodes=("n3",), named=""):
    failure = Failed(job=job, attempt=attempt, sequence=9, time_ms=at_ms, category="unknown", node=named)
    return JobAttempt(job, attempt, nodes=nodes, ended_ms=at_ms, outcome="failed", failure=failure)


def test_a_job_that_fails_again_and_again_speaks_once_against_its_node():
    outcomes = told([ended(number, (node,)) for number, node in enumerate(list(ROWS) * 20)])[1]
    hour_ms = DAY_MS // 24
    for attempt in range(40):
        at_ms = T0 + attempt * hour_ms
        outcomes.count_ended([crash("loop", attempt, at_ms)], at_ms)
        again = JobOutcomes()
        again.load(*json.loads(json.dumps(outcomes.dump())))
        outcomes = again
    assert outcomes.make_signals(ROWS) == []
    jobs, failed = outcomes.dump()[0]["sums"]["n3"]
    assert 0.8 < failed <= 1.0
    assert jobs <= 21.0
    late_ms = T0 + 40 * hour_ms + DAY_MS
    outcomes.count_ended([], late_ms)
    outcomes.count_ended([crash("loop", 50, late_ms)], late_ms)
    assert outcomes.dump()[0]["sums"]["n3"][1] > failed  # it was quiet for a day
    outcomes.count_ended([crash(f"other{number}", 1, late_ms) for number in range(8)], late_ms)
    assert [signal.entity for signal in outcomes.make_signals(ROWS)] == ["n3"]


def test_what_is_remembered_of_failures_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_outcomes, "FAILED_AT_MOST", 5)
    _, outcomes = told([crash(f"j{number}", 1, T0) for number in range(20)])
    assert [row[0] for row in outcomes.dump()[0]["failed"]] == [f"j{number}" for number in range(15, 20)]
