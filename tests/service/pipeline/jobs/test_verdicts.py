"""The last verdict on a job stays when the job has ended, after a restart too."""

import json
from typing import Any

import numpy as np
import pytest

from fleetcast.features.ended_jobs import ENDED_RETENTION_MS
from fleetcast.fleet.events import Finished, Started
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, RiskScores
from fleetcast.service.pipeline.jobs import verdicts
from fleetcast.service.pipeline.jobs.verdicts import SLOW_RETENTION_MS, Verdicts
from fleetcast.service.pipeline.tick import Tick
from tests.service.ticks import tick_of

NOW_MS = 1_589_310_000_000
TOPOLOGY = Topology.build([NodeSpec("n1", 8)])
P = np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), 1), 0.01)


def job(name: str, number: int = 1, *, over: bool = False) -> JobAttempt:
    attempt = JobAttempt(name, number)
    attempt.fold(Started(job=name, attempt=number, sequence=1, time_ms=NOW_MS, nodes=("n1",)))
    if over:
        attempt.fold(Finished(job=name, attempt=number, sequence=2, time_ms=NOW_MS + 5000))
    return attempt


def verdict(slow: bool = True, **about: Any) -> dict[str, Any]:
    return {"slow": slow, "ratio": 1.8, "sentence": "n1 computes long", **about}


def tick(
    at_s: float, told: dict[str, dict[str, Any]], *running: JobAttempt, ended: tuple[JobAttempt, ...] = ()
) -> Tick:
    fleet = ScoredFleet(RiskScores(P, {}, {}, P[0, 0] > 2, "rules"), told)
    return tick_of(NOW_MS + round(at_s * 1000), TOPOLOGY, fleet, running, ended=ended)


def shown(made: Verdicts, at: Tick) -> dict[str, Any] | None:
    """What is published, None where nothing changed."""
    for section in made.make_sections(at):
        return json.loads(bytes(section.data))  # type: ignore[no-any-return]
    return None


def test_the_last_verdict_is_kept_when_the_job_ends() -> None:
    made = Verdicts()
    assert shown(made, tick(0, {"a": verdict(ratio=1.5)}, job("a"))) == {}
    assert shown(made, tick(10, {"a": verdict()}, job("a"))) is None
    told = shown(made, tick(20, {}, ended=(job("a", over=True),)))
    assert told == {"a": verdict(attempt=1, judged_ms=NOW_MS + 10_000)}
    assert shown(made, tick(30, {}, ended=(job("a", over=True),))) is None


def test_a_restart_between_verdict_and_end_loses_nothing() -> None:
    made = Verdicts()
    made.make_sections(tick(0, {"a": verdict(), "b": verdict()}, job("a"), job("b", 2)))
    made.make_sections(tick(10, {"b": verdict()}, job("b", 2)))
    again = Verdicts()
    again.load(None, made.dump()[1])
    told = shown(again, tick(99, {}))
    assert told is not None
    assert {name: (row["attempt"], row["judged_ms"] - NOW_MS) for name, row in told.items()} == {
        "a": (1, 0),
        "b": (2, 10_000),
    }


def test_verdicts_are_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Verdicts()
    made.make_sections(tick(0, {"slow": verdict(), "fine": verdict(slow=False)}, job("slow"), job("fine")))
    assert set(shown(made, tick(1, {})) or {}) == {"slow", "fine"}
    assert set(shown(made, tick(ENDED_RETENTION_MS / 1000 + 1, {})) or {}) == {"slow"}
    assert shown(made, tick(SLOW_RETENTION_MS / 1000 + 1, {})) == {}
    monkeypatch.setattr(verdicts, "MAX_REMEMBERED", 3)
    for number in range(6):
        name = f"j{number}"
        made.make_sections(tick(number, {name: verdict()}, job(name)))
    assert set(shown(made, tick(7, {})) or {}) == {"j3", "j4", "j5"}


def test_where_there_are_too_many_those_that_were_not_slow_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "MAX_REMEMBERED", 2)
    made = Verdicts()
    for at, slow in enumerate((True, False, True, False)):
        made.make_sections(tick(at, {f"j{at}": verdict(slow)}, job(f"j{at}")))
    assert set(shown(made, tick(5, {})) or {}) == {"j0", "j2"}


def test_a_job_that_no_step_tells_of_for_a_while_keeps_its_verdict() -> None:
    made = Verdicts()
    made.make_sections(tick(0, {"a": verdict()}, job("a")))
    made.make_sections(tick(10, {}, job("a")))
    assert shown(made, tick(20, {})) == {"a": verdict(attempt=1, judged_ms=NOW_MS)}
