"""The run times of jobs that actions stopped: they count what earlier attempts ran."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fleetcast.fleet.events import Preempted, Started
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.running_jobs import RUN_LEVELS
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.service.placer.resumed_runs import ResumedRuns, read_resumed_runs
from tests.service.placer.test_running_jobs import HOUR_MS, RANKS, ToldWorld
from tests.service.placer_world import NOW_MS

RUN_TIMES = RunTimeQuantiles({8: (600.0, 7200.0)})


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ToldWorld]:
    world = ToldWorld(tmp_path)
    yield world
    world.close()


def start(job: str, attempt: int, ago_h: float) -> Started:
    return Started(job=job, attempt=attempt, sequence=3, time_ms=NOW_MS - round(ago_h * HOUR_MS), ranks=RANKS)


def test_a_resumed_job_counts_the_time_of_its_stopped_attempts(world: ToldWorld) -> None:
    stopped = Preempted(job="train", attempt=1, sequence=9, time_ms=NOW_MS - HOUR_MS, by="placer", reason="an action")
    jobs = world.tell(start("train", 1, 3.0), stopped, start("train", 2, 0.5))
    assert world.service.view.board is not None
    resumed = read_resumed_runs(world.service.view.board)
    assert resumed.ran_s == {"train": 7200.0}
    forecast = replace(jobs, remaining_s=np.full_like(jobs.remaining_s, 60.0))  # by a model that knows one attempt
    run = resumed.add_earlier_runs(forecast).find_run("train", NOW_MS)
    assert run.compute_age_s(NOW_MS) == pytest.approx(2.5 * 3600)
    assert run.left_s is None
    assert forecast.find_run("train", NOW_MS).left_s is not None


def test_a_stopped_job_needs_what_jobs_of_its_age_still_need() -> None:
    find = ResumedRuns({"old": 7200.0}).wrap_finder(lambda request: (60.0,) * len(RUN_LEVELS), RUN_TIMES)
    left_s = find(PlacementRequest(request_id="old.2", job="old", attempt=2, gpus_per_node=8))
    assert left_s is not None
    expected_s = RUN_TIMES.compute_run_times(8, np.array(RUN_LEVELS), 7200.0, None) - 7200.0
    np.testing.assert_allclose(left_s, expected_s)
    assert left_s[3] > 3600  # the median: a new job of this size needs ten minutes
    assert find(PlacementRequest(request_id="new", gpus_per_node=8)) == (60.0,) * len(RUN_LEVELS)
