"""The table of running jobs: columns stay aligned with the names when rows are added and removed."""

import numpy as np
import pytest

from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS, RUN_LEVELS, JobRun, make_running_jobs


def test_columns_left_out_state_the_unknown() -> None:
    jobs = make_running_jobs(["a"])
    assert (jobs.attempt[0], jobs.preemptible[0], jobs.checkpoint_ms[0], jobs.restart_s[0]) == (1, -1, -1, 300.0)
    assert np.isnan(jobs.cpus[0])
    assert np.isnan(jobs.limit_s[0])
    assert np.isnan(jobs.remaining_s).all()
    assert jobs.remaining_s.shape == (1, len(RUN_LEVELS))


def test_rows_stay_aligned_when_rows_are_added_and_removed() -> None:
    first = make_running_jobs(["a", "b", "c"], gpus=[1, 2, 3], leaf=["x", "y", "z"], preemptible=[-1, 0, 1])
    both = first.append_rows(make_running_jobs(["d"], gpus=4, leaf=["w"]))
    left = both.select_rows(np.array([True, False, True, True]))
    assert (left.names, left.leaf) == (("a", "c", "d"), ("x", "z", "w"))
    assert (left.gpus.tolist(), left.preemptible.tolist()) == ([1, 3, 4], [-1, 1, -1])
    assert left.row == {"a": 0, "c": 1, "d": 2}
    assert len(NO_RUNNING_JOBS.append_rows(left)) == 3


def test_a_column_of_another_name_or_length_is_refused() -> None:
    with pytest.raises(TypeError, match="no column gpu"):
        make_running_jobs(["a"], gpu=1)
    with pytest.raises(ValueError, match="broadcast"):
        make_running_jobs(["a", "b"], gpus=[1, 2, 3])


def test_runs_survive_an_append_and_unknown_jobs_count_as_begun_now() -> None:
    levels = tuple(float(level) for level in range(1, 9))
    first = make_running_jobs(["a", "b", "c"], started_ms=[5, 6, -1], gpus=[8, 4, 2], limit_s=[60.0, np.nan, np.nan])
    both = first.append_rows(make_running_jobs(["a"], started_ms=7, gpus=1, remaining_s=levels))
    assert both.find_run("a", 100) == JobRun(7, 1, None, levels)  # the later attempt
    assert both.find_run("b", 100) == JobRun(6, 4, None, None)
    assert both.find_run("c", 100, 3) == both.find_run("d", 100, 3) == JobRun(100, 3, None, None)
    assert first.find_run("a", 100) == JobRun(5, 8, 60.0, None)
    assert both.runs == both.select_rows(np.arange(4)).runs
