"""Nodes on which jobs fail oftener than elsewhere, by what is told of how they ended."""

import json

import numpy as np

from fleet.events import Failed
from fleet.jobs import JobAttempt
from models.fault_log import DAY_MS
from models.job_outcomes import MOST_TIMES, JobOutcomes
from models.node_risk import score_nodes
from models.rules import ROW
from models.signals import Signals

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
    outcomes.note(jobs, now_ms)
    outcomes.note(jobs, now_ms)  # each once
    return {signal.entity: signal for signal in outcomes.signals(ROWS)}, outcomes


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
    scores = score_nodes(Signals.of(list(found.values())), np.ones(10, bool), T0, None)
    times = np.log1p(-scores.values[0, :, 3]) / np.log1p(-scores.values[0, :, 0])
    assert np.allclose(times, 1 + (MOST_TIMES - 1) * found["n3"].strength)
    assert 2 < times[0] <= MOST_TIMES
    (reason,) = scores.reasons[3]
    assert reason.sentence == "55 % of the jobs on it failed, of all 10 %"
    assert reason.share > 0.5
    again = JobOutcomes()
    again.load(json.loads(json.dumps(outcomes.dump())))
    assert again.dump() == outcomes.dump()
    later, _ = told([], T0)
    assert later == {}
    again.note([], T0 + 120 * DAY_MS)
    assert again.signals(ROWS) == []


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
