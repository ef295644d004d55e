from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetcast.training.fits.run_pools import RunPools, compute_normal_quantiles
from fleetcast.training.judges import start as evaluate_start
from fleetcast.training.judges.start import DAY_S, StartScene, evaluate, replay_scene
from fleetcast.training.judges.wait_ratios import WaitRatios

SPLIT_S = 40 * DAY_S
CONTRACT = ("dataset", "target", "series", "horizon_s", "quantile", "value", "actual", "model")


def history(seed: int = 0) -> pd.DataFrame:
    """Sixteen cores, users whose jobs run for a tenth of their limit, and bursts that queue."""
    rng = np.random.default_rng(seed)
    bursts = np.sort(rng.integers(0, 45 * DAY_S, 90))
    submit_s = np.repeat(bursts, 10) + np.tile(np.arange(10) * 40, len(bursts))
    user = np.repeat(rng.integers(1, 6, len(bursts)), 10)
    run_s = np.array([600, 1200, 2400, 4800, 9600])[user - 1] * 1.3 * rng.uniform(0.8, 1.2, len(user))
    return pd.DataFrame(
        {
            "job_id": np.arange(len(user)),
            "submit_s": submit_s,
            "wait_s": -1,
            "run_s": run_s.round(),
            "procs_alloc": rng.choice([4, 8], len(user)),
            "time_req_s": 86_400,
            "user": user,
            "group": 1,
            "status": 1,
        }
    )


@pytest.fixture
def split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[pd.DataFrame], tuple[Path, Path]]:
    monkeypatch.setattr(evaluate_start, "JUDGED", 20)
    monkeypatch.setattr(evaluate_start, "TRIED", 12)
    monkeypatch.setattr(evaluate_start, "FEWEST", 5)
    monkeypatch.setattr(evaluate_start, "estimate_capacity", lambda train: 16)

    def write(table: pd.DataFrame) -> tuple[Path, Path]:
        folders = tmp_path / "train", tmp_path / "test"
        for folder, late in zip(folders, (False, True), strict=True):
            (folder / "jobs/own").mkdir(parents=True, exist_ok=True)
            part = table[(table["submit_s"] >= SPLIT_S) == late]
            part.to_csv(folder / "jobs/own/jobs.csv", index=False)
        return folders

    return write


def test_ours_is_nearer_than_the_limits_and_its_bound_holds(split) -> None:
    results = evaluate(*split(history()), 0, lambda line: None)
    value = {(row.method, row.metric): row.value for row in results.rows}
    assert value["ours", "within_10min"] > value["limit", "within_10min"]
    assert value["ours", "bound_90_correct"] > 0.7
    assert value["ours", "bound_90_width"] < value["limit", "bound_90_width"]
    correct = [row for row in results.windows if (row.method, row.metric) == ("ours", "bound_90_correct")]
    assert correct[0].begin_ms <= SPLIT_S * 1000
    assert all(one.end_ms == other.begin_ms for one, other in pairwise(correct))
    pooled = sum(row.value * row.n for row in correct) / sum(row.n for row in correct)
    assert pooled == pytest.approx(value["ours", "bound_90_correct"])
    (columns,) = results.predictions
    assert len({len(column) for column in columns.values()}) == 1
    assert set(columns) == {*CONTRACT, "job", "issued_ms"}
    assert min(columns["issued_ms"]) >= SPLIT_S * 1000
    ours = next(row for row in results.rows if row.method == "ours")
    assert set(columns["model"]) == {ours.model}


def test_the_same_seed_gives_the_same_numbers(split) -> None:
    folders = split(history())
    assert evaluate(*folders, 3, lambda line: None).rows == evaluate(*folders, 3, lambda line: None).rows


def test_what_comes_after_t_and_how_long_jobs_still_run_changes_no_forecast_before_t(
    split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate_start, "JUDGED", 40)  # neighbours, too
    one = evaluate_start.read_job_sets(*split(history().assign(procs_alloc=1)))[0]
    scene = evaluate_start.make_scene(one, 0, capacity=6)
    assert not isinstance(scene, str)
    moments, start_s = replay_scene(scene)
    until_s = int(scene.jobs.submit_s[moments[-2].job])  # jobs of its burst wait before it
    still = start_s + scene.run_s >= until_s
    cores = np.where(scene.jobs.submit_s >= until_s, 5, scene.jobs.cores)
    all_told = told_before(scene, 2 * until_s)
    told = {job: one for job, one in all_told.items() if scene.jobs.submit_s[job] < until_s}
    assert len(told) > 5
    for seed in range(3):
        factor = np.random.default_rng(seed).uniform(0.2, 5.0, len(still))
        run_s = np.where(still, np.maximum(until_s - start_s, scene.run_s * factor), scene.run_s).astype(np.int64)
        later = replace(scene, run_s=run_s, jobs=replace(scene.jobs, cores=cores))
        assert told_before(later, until_s) == told
    assert all_told != told_before(later, 2 * until_s)


def told_before(scene: StartScene, until_s: int) -> dict[int, tuple[float, tuple[float, float, float]]]:
    """Forecasts of the jobs that were submitted before a moment."""
    moments, start_s = replay_scene(scene)
    rows = evaluate_start.forecast_waits(scene, moments, start_s, 0)
    return {row.job: (row.planned_s, row.ours_s) for row in rows if scene.jobs.submit_s[row.job] < until_s}


def test_a_set_without_limits_and_waits_is_skipped_with_the_reason(split) -> None:
    results = evaluate(*split(history().drop(columns="time_req_s")), 0, lambda line: None)
    assert results.rows == []
    assert results.skipped == ["jobs/own: neither limits nor waits are known: there is no queue to replay"]


def test_a_set_in_which_nobody_waits_is_skipped(split, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate_start, "estimate_capacity", lambda train: 10_000)
    results = evaluate(*split(history()), 0, lambda line: None)
    assert results.skipped == ["jobs/own: hardly any job waits on 10,000 cores or GPUs"]


def test_ratios_of_jobs_that_still_wait_count_as_long() -> None:
    ratios = WaitRatios()
    for number in range(20):  # half of them start at their forecast, the others wait ten times as long
        ratios.record_forecast(number, 100, number + (100 if number % 2 else 1000))
    (now,) = ratios.compute_quantiles((0.9,), 300)
    assert now > 2.5  # known: they wait for more than twice the forecast already
    assert ratios.compute_quantiles((0.5, 0.9), 5000) == (1.0, 10.0)
    for number in range(60):  # forecasts of a day come true
        ratios.record_forecast(number, 86_400, number + 86_400)
    assert ratios.compute_quantiles((0.9,), 10**6, near_s=80_000) == (1.0,)
    assert ratios.compute_quantiles((0.9,), 10**6, near_s=100) == (10.0,)


def test_runs_are_drawn_from_what_outlived_the_age() -> None:
    pools = RunPools()
    for run_s in (10.0, 20.0, 4000.0, 5000.0, 6000.0):
        pools.record_end([(0,)], run_s)
    own = np.zeros((5, 2))
    drawn = pools.draw_run_times([(0,)], 1e9, np.array([0.0, 100.0]), own, compute_normal_quantiles(5))
    assert (np.diff(drawn, axis=0) >= 0).all()
    assert drawn[:, 1].min() > 1000
    past = pools.draw_run_times([(0,)], 20_000.0, np.array([9000.0]), own[:, :1], compute_normal_quantiles(5))
    assert np.median(past) == pytest.approx(18_000)
    assert past.max() <= 20_000
