from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.play.capacity import CountAsk
from fleetcast.placement.play.replay import Trace
from fleetcast.placement.play.seen_runs import SeenRuns
from fleetcast.training.judges.queue import METHODS, ON_LIMITS, compute_jain_index, evaluate
from fleetcast.training.judges.queue_policies import list_job_kinds
from fleetcast.training.reports.results import Results

DAY_S = 86_400


def history(limits: bool = True) -> pd.DataFrame:
    """Eight GPUs and bursts of users whose jobs run for a quarter of their limit."""
    rng = np.random.default_rng(1)
    submit_s = np.sort(rng.integers(0, 30 * DAY_S, 560))
    user = rng.integers(1, 6, len(submit_s))
    run_s = 600 * user**2
    return pd.DataFrame(
        {
            "job": np.arange(len(user)),
            "submit_s": submit_s,
            "run_s": run_s,
            "gpus": rng.choice([1, 2, 4, 8], len(user)),
            "user": user,
            "queue": "",
            "limit_s": run_s * 4 if limits else "",
        }
    )


def split(folder: Path, table: pd.DataFrame) -> tuple[Path, Path]:
    folders = folder / "train", folder / "test"
    for part, late in zip(folders, (False, True), strict=True):
        (part / "jobs/own").mkdir(parents=True)
        table[(table.submit_s > 20 * DAY_S) == late].to_csv(part / "jobs/own/jobs.csv", index=False)
    return folders


def judged(folder: Path, table: pd.DataFrame, max_wait_h: float = 24.0) -> Results:
    return evaluate(*split(folder, table), 0, lambda line: None, capacity=8, max_wait_h=max_wait_h)


def means(results: Results) -> dict[str, float]:
    rows = results.select(series="all", metric="wait_mean_s")
    return {row.method: row.value for row in rows if row.value is not None}


def test_every_method_plays_the_same_jobs_and_all_pass_the_head(tmp_path: Path) -> None:
    results = judged(tmp_path, history())
    found = means(results)
    assert set(found) == set(METHODS)
    assert len({row.n for row in results.select(series="all")}) == 1
    assert max(found["ours"], found["easy_limits"]) < found["fifo"]
    assert found["area_oracle"] <= found["ours"] * 1.05
    assert {row.metric for row in results.rows} == {"wait_mean_s", "wait_p99_s", "wait_max_s", "jain"}


def test_ours_is_the_area_by_limits_and_a_forecast_beats_limits_that_say_nothing(tmp_path: Path) -> None:
    found = means(judged(tmp_path, history().assign(limit_s=DAY_S), 1e6))
    assert found["ours"] == found["limit_x_cores"] == found["gpus_only"]
    assert max(found["area_oracle"], found["forecast_x_cores"]) < 0.95 * found["ours"]


def test_without_limits_the_peers_on_limits_are_left_out_and_ours_is_gpus_alone(tmp_path: Path) -> None:
    found = means(judged(tmp_path, history(limits=False)))
    assert set(found) == set(METHODS) - ON_LIMITS
    assert found["ours"] == found["gpus_only"]


def test_a_job_larger_than_the_fleet_is_left_out_and_a_bad_row_is_counted(tmp_path: Path) -> None:
    table = history()
    table.loc[559, "gpus"], table.loc[558, "gpus"] = 16, 0
    results = judged(tmp_path, table)
    assert "jobs/own: 1 rows: no GPUs" in results.skipped
    assert {row.n for row in results.select(series="all")} == {int((table.submit_s > 20 * DAY_S).sum()) - 2}


def test_the_future_changes_nothing_before_it(tmp_path: Path) -> None:
    """Another run time of the last job moves no other wait."""
    table = history()
    before = means(judged(tmp_path / "a", table))
    table.loc[559, "run_s"] = 1  # the limit, which is known, stays
    assert means(judged(tmp_path / "b", table))["ours"] == before["ours"]


def test_jain_is_one_where_all_are_served_alike() -> None:
    trace = Trace([], [0.0] * 40, [10.0] * 40, [1] * 40, [None] * 40, ["a", "b"] * 20)
    rows = np.ones(40, bool)
    assert compute_jain_index(trace, np.zeros(40), rows) == pytest.approx(1.0)
    assert compute_jain_index(trace, np.array([0.0, 990.0] * 20), rows) == pytest.approx(1.01**2 / (2 * (1 + 0.01**2)))
    assert compute_jain_index(Trace([], [0.0], [1.0], [1], [None], [""]), np.zeros(1), rows[:1]) is None


def test_plans_without_limits_follow_what_ended() -> None:
    seen = SeenRuns()
    for _ in range(10):
        seen.record_end(8, 100.0)
    trace = Trace([], [0.0], [1.0], [8], [None], ["u"])
    assert len(list_job_kinds(trace)[0]) == 6
    assert seen.plan_run_s(CountAsk(8, None), 0.0) == pytest.approx(100.0, rel=0.1)
    assert seen.plan_run_s(CountAsk(8, 60.0), 0.0) == 60.0


def test_the_capacity_is_of_queues_alone(tmp_path: Path) -> None:
    words = ["evaluate", "start", "--train", str(tmp_path), "--test", str(tmp_path), "--capacity", "8"]
    with pytest.raises(ConfigError, match="--capacity: start plays no queue"):
        raise CliRunner().invoke(app, words).exception or AssertionError
