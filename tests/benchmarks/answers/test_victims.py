"""The exact solver, Kueue's order and our search agree where they must."""

import sys

import numpy as np
import pytest

from fleetcast.benchmarks.answers.victims import solve_victims, stop_youngest_first
from fleetcast.benchmarks.kit.victim_scenes import VictimScene, fill_with_pieces, make_request, make_scene, make_view
from fleetcast.placement.machines.options import Options
from fleetcast.placement.reclaim.victims import ChosenVictims, find_victims


def scene(seed: int) -> VictimScene:
    rng = np.random.default_rng(seed)
    return make_scene(make_view(fill_with_pieces(12, rng), 4), rng)


@pytest.mark.parametrize("seed", range(6))
def test_no_set_is_cheaper_than_the_solver_s_and_ours_is_close(seed: int) -> None:
    pytest.importorskip("ortools", reason="the extra `optimum` is not installed")
    request = make_request(3, 4, "rack" if seed % 2 else None)
    found = find_victims(request, scene(seed).view, scene(seed).cost_gpu_s, Options())
    best, proven = solve_victims(scene(seed), request, ())
    assert proven
    if isinstance(found, ChosenVictims):
        assert best is not None
        assert best - 1 <= found.chosen.cost_gpu_s <= 1.05 * best + 1
        assert found.bound_gpu_s <= best + 1
    else:
        assert best is None


@pytest.mark.parametrize("seed", range(6))
def test_youngest_first_stops_no_cheaper_set_than_the_bound(seed: int) -> None:
    request = make_request(3, 4)
    found = find_victims(request, scene(seed).view, scene(seed).cost_gpu_s, Options())
    assert isinstance(found, ChosenVictims)
    assert stop_youngest_first(scene(seed), request) >= found.bound_gpu_s


def test_the_youngest_job_stops_first_and_runs_on_if_it_is_not_needed() -> None:
    view = make_view(np.array([[0] * 4 + [1] * 4, [2] * 8]), 2)
    young = VictimScene(view, np.array([1.0, 2.0, 9.0]), np.array([5.0, 1.0, 2.0]))
    assert stop_youngest_first(young, make_request(1, 8)) == 9.0, "job 0 is the youngest, and job 2 alone is enough"


def test_without_ortools_the_solver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ortools.sat.python", None)
    with pytest.raises(AssertionError, match=r"fleetcast\[optimum\]"):
        solve_victims(scene(0), make_request(1, 8), ())
