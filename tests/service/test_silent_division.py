"""A GPU that falls silent stays divided as it was last seen to be, over a restart as well."""

import asyncio
from pathlib import Path

import pytest

from tests.service.test_interference import Fleet


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
    assert [row.share for row in fleet.pipeline.kept.co_runs.found.values()] == ["mig"]
    monkeypatch.undo()
    fleet.pass_s(15)  # it is heard again, and nothing is said of slices
    assert fleet.pipeline.kept.co_runs.divided == frozenset()
    asyncio.run(fleet.pipeline.close())
