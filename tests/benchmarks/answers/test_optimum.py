import sys

import numpy as np
import pytest

from fleetcast.benchmarks.answers.optimum import EACH, compare_mean_waits, make_scene, solve_optimum
from fleetcast.placement.play.replay import Trace
from fleetcast.training.judges.played import PlayScene


def scene(submit_s: list[float], run_s: list[float], nodes: list[int]) -> PlayScene:
    gpus = [EACH * count for count in nodes]
    return PlayScene(Trace([], submit_s, run_s, gpus, run_s, [""] * len(gpus), [""] * len(gpus)), 2, EACH)


def test_the_clairvoyant_plan_waits_for_a_short_job_that_is_still_to_come() -> None:
    pytest.importorskip("ortools", reason="the extra `optimum` is not installed")
    known = scene([0, 10, 12], [100, 10, 5], [2, 1, 1])
    assert solve_optimum(known, np.array([0.0, 100.0, 100.0])) == (20.0, True)


def test_no_play_is_better_than_the_clairvoyant_plan() -> None:
    pytest.importorskip("ortools", reason="the extra `optimum` is not installed")
    ours, easy, best, proven = compare_mean_waits(scene([0, 1, 2, 3], [60, 30, 90, 10], [1, 2, 2, 1]))
    assert best <= min(ours, easy)
    assert proven


def test_a_scene_is_the_same_for_its_seed_and_limits_are_kept() -> None:
    one, two, other = make_scene(3).trace, make_scene(3).trace, make_scene(4).trace
    assert one == two != other
    assert all(run_s <= (limit_s or 0) for run_s, limit_s in zip(one.run_s, one.limit_s, strict=True))


def test_without_ortools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(AssertionError, match=r"fleetcast\[optimum\]"):
        solve_optimum(scene([0], [1], [1]), np.array([0.0]))
