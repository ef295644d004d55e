import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS
from fleetcast.placement.plan.timeline import (
    Hold,
    RunTimeQuantiles,
    Timeline,
    add_placements,
    estimate_releases,
)
from tests.placement.runs import Run, table_of

HOUR_MS = 3_600_000


def test_the_estimate_is_the_p90_of_finished_jobs_of_the_same_size() -> None:
    times = RunTimeQuantiles.from_durations(
        {
            "by_gpus": {"8": {"p50": 100, "p90": 1000, "n": 50}, "16": {"p50": 1, "p90": 2, "n": 2}},
            "all": {"p50": 10, "p90": 60, "n": 500},
        }
    )
    assert times.estimate_run_s(8, 0.9) == pytest.approx(1000)
    assert times.estimate_run_s(8, 0.5) == pytest.approx(100)
    assert times.estimate_run_s(16, 0.9) == pytest.approx(60)  # too few of 16: all
    assert times.estimate_run_s(8, 0.9, limit_s=300) == 300


def test_without_finished_jobs_the_limit_serves_then_a_day() -> None:
    assert RunTimeQuantiles.from_durations({}).estimate_run_s(4, 0.9, limit_s=600) == pytest.approx(600)
    assert RunTimeQuantiles.from_durations({"by_gpus": {}, "all": {"p50": None, "p90": None, "n": 0}}).estimate_run_s(
        4, 0.9
    ) == pytest.approx(86_400)


def test_an_estimate_that_passed_grows_with_the_age() -> None:
    times = RunTimeQuantiles({8: (100.0, 1000.0)})
    ages = (0.0, 500.0, 1000.0, 5000.0, 1e9)
    runs = [times.estimate_run_s(8, 0.9, age_s=age) for age in ages]
    assert runs == sorted(runs)
    assert all(run > age for run, age in zip(runs, ages, strict=True))
    assert times.estimate_run_s(8, 0.9, age_s=700.0, limit_s=600.0) > 700


def test_releases_come_soonest_first_and_free_their_gpus(make_view) -> None:
    view = make_view({"r01": [0, 4]})
    holders = view.holders.copy()
    holders[1, :4] = 1
    view = make_view({"r01": [0, 4]}, holders=holders, jobs=("long", "short"))
    running = table_of({"long": Run(0, 8), "short": Run(0, 4, limit_s=60.0)})
    ahead = estimate_releases(view, running, RunTimeQuantiles.from_durations({}), now_ms=30_000)
    assert (ahead[0].job, ahead[0].end_ms) == ("short", 60_000)
    timeline = Timeline(view, ahead)
    assert [int(timeline.make_view_after(step).free.sum()) for step in range(3)] == [4, 8, 16]


def test_bisection_finds_the_first_release_that_makes_room(make_view) -> None:
    view = make_view({"r01": [0, 0, 0]}, holders=np.repeat(np.arange(3, dtype=np.int32), 8).reshape(3, 8))
    view = make_view({"r01": [0, 0, 0]}, holders=view.holders, jobs=("a", "b", "c"))
    running = table_of({name: Run(0, 8, limit_s=60.0 * (index + 1)) for index, name in enumerate("abc")})
    timeline = Timeline(view, estimate_releases(view, running, RunTimeQuantiles.from_durations({}), 1))
    assert timeline.find_first_fit(PlacementRequest(request_id="x", gang=2, gpus_per_node=8), Options()) == 2
    assert timeline.find_first_fit(PlacementRequest(request_id="x", gang=4, gpus_per_node=8), Options()) is None


def test_gpus_that_do_not_answer_are_not_released(make_view) -> None:
    view = make_view({"r01": [0]}, usable=np.zeros((1, 8), bool))
    timeline = Timeline(view, estimate_releases(view, NO_RUNNING_JOBS, RunTimeQuantiles.from_durations({}), 1))
    assert not timeline.make_view_after(1).free.any()


def test_host_memory_comes_back_with_the_gpus(make_view) -> None:
    view = make_view({"r01": [0]}, free_cpus=np.array([28.0]), free_host_memory_gib=np.array([np.nan]))
    timeline = Timeline(view, estimate_releases(view, NO_RUNNING_JOBS, RunTimeQuantiles.from_durations({}), 1))
    assert timeline.make_view_after(1).free_cpus.tolist() == [128.0]
    assert np.isnan(timeline.make_view_after(1).free_host_memory_gib).all()


def test_occupying_leaves_the_given_view_alone(make_view) -> None:
    view = make_view({"r01": [8]})
    after = add_placements(
        view, [Hold("x", [RankPlacement(0, "n001", (0, 1)), RankPlacement(1, "gone", (0,))], cpus=8)]
    )
    assert int(view.free.sum()) == 8
    assert int(after.free.sum()) == 6
    assert after.holders[0, :3].tolist() == [1, 1, -1]
    assert after.jobs == ("running", "x")
    assert after.free_cpus.tolist() == [120.0]
