"""What co-runs teach where a GPU falls silent, and where the clock is set back."""

import asyncio
from pathlib import Path

import pytest

from fleetcast.features.co_runs import CoRuns
from fleetcast.service.pipeline.jobs import interference
from tests.service.api.routes.test_interference import Fleet


def test_a_gpu_that_falls_silent_stays_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(tmp_path)
    fleet.read()
    fleet.tick()
    fleet.start("a-1", 0)
    fleet.slices(9.5, 9.5)
    fleet.steps(70, **{"a-1": 1.0})
    monkeypatch.setattr(fleet, "read", lambda: None)
    fleet.pass_s(700)
    fleet.restart()
    fleet.start("b-1", 0)
    fleet.steps(20, **{"a-1": 1.2, "b-1": 1.2})
    assert [row.share for row in fleet.pipeline.saved.parts[CoRuns].newest_co_runs.values()] == ["mig"]
    monkeypatch.undo()
    fleet.pass_s(15)  # it is heard again, and nothing is said of slices
    assert fleet.pipeline.saved.parts[CoRuns].divided == frozenset()
    asyncio.run(fleet.pipeline.close())


def test_a_clock_that_was_set_back_stops_no_learning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interference, "FEW", 0)
    fleet = Fleet(tmp_path)
    fleet.read()
    for gpu, (a, b) in enumerate((("a-1", "b-1"), ("c-1", "d-1"))):
        fleet.start(a, gpu)
        fleet.steps(70, **{a: 1.0})
        fleet.start(b, gpu)
        if gpu:
            fleet.now_ms -= 3_600_000
            fleet.pipeline.clock.time_ms -= 3_600_000  # type: ignore[attr-defined]
            fleet.pass_s(1)
        fleet.steps(20, **{a: 2.5, b: 2.5})
        assert fleet.ask(a, b)["observed"] == 1
    asyncio.run(fleet.pipeline.close())
