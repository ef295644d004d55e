"""Expanding windows: what a window is fitted on ends before it, and Dask changes no number."""

from collections.abc import Iterator

import numpy as np
import pytest

from fleetcast.fleet.errors import FleetcastError
from fleetcast.models.demand.trees import Settings
from fleetcast.models.forecast import Panel
from fleetcast.training.fits.backtest import (
    backtest,
    judge_demand,
    make_demand_windows,
    make_duration_windows,
    make_verdict,
    merge_results,
)
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets.demand_sets import DemandSet
from fleetcast.training.sets.job_sets import HistoryJobs

DAY = 144


def made_set(days: int = 12, seed: int = 0, square: bool = False) -> DemandSet:
    """Running GPUs of two pools: a daily square wave, or random walks."""
    rng = np.random.default_rng(seed)
    bins = np.arange(days * DAY)
    walk = np.abs(np.cumsum(rng.normal(0, 2, (2, len(bins))), axis=1)) + 50
    wave = 40.0 + 30 * ((bins // 72) % 2) + rng.normal(0, 1, (2, len(bins)))
    values = np.round(wave if square else walk)
    return DemandSet("demand/made", Panel("running", ("a", "b"), 600, 0, values, np.full(2, 500.0)), len(bins))


def made_jobs(rows: int = 200) -> HistoryJobs:
    rng = np.random.default_rng(0)
    submit_s = np.sort(rng.uniform(0, 86_400 * 10, rows))
    words = np.array([f"w{row % 4}" for row in range(rows)], object)
    numbers = np.full(rows, np.nan)
    return HistoryJobs(
        job=np.array([str(row) for row in range(rows)], object),
        submit_s=submit_s,
        start_s=submit_s + 5.0,
        run_s=rng.lognormal(6, 1, rows),
        gpus=np.full(rows, 4.0),
        user=words,
        group=words,
        name=words,
        queue=words,
        cpus=numbers,
        limit_s=numbers,
        failed=np.zeros(rows),
    )


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few trees on few rows, in one thread."""
    fast = Settings(trees=5, rows=1000, leaf_rows=20, threads=1)
    monkeypatch.setattr("fleetcast.training.judges.demand.DemandTrees", lambda seed, settings: _trees(seed, fast))


def _trees(seed: int, settings: Settings) -> object:
    from fleetcast.models.demand.trees import DemandTrees

    return DemandTrees(seed, settings)


def test_windows_grow_and_never_overlap() -> None:
    windows = make_demand_windows([made_set()], 3, seed=7, share=0.25)
    cuts = [(window.demand[0].train_bins, window.demand[0].panel.bins) for window in windows]
    assert cuts == [(1296, 1440), (1440, 1584), (1584, 1728)]
    assert {window.seed for window in windows} == {7}
    table = made_jobs()
    (first, last) = make_duration_windows([("jobs/made", table)], 2, share=0.5)
    for window, rows in ((first, 150), (last, 200)):
        (one,) = window.jobs
        assert len(one.table) == rows
        assert one.is_judged.sum() == 50
        assert one.train_end_s == table.submit_s[rows - 51]


def test_what_comes_after_a_window_is_not_in_it() -> None:
    before, after = made_set(seed=1), made_set(seed=1)
    after.panel.values[:, 1600:] = 9e9
    (window, *_), (other, *_) = (make_demand_windows([one], 3, share=0.25) for one in (before, after))
    assert judge_demand(window).rows == judge_demand(other).rows


def test_too_little_history_is_an_error() -> None:
    with pytest.raises(FleetcastError, match="too little history"):
        backtest("demand", make_demand_windows([], 3))


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    from distributed import LocalCluster  # takes long, and only the worker that runs these tests needs it

    with LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", host="127.0.0.1", dashboard_address=":0"
    ) as cluster:
        yield cluster.scheduler_address


def test_dask_changes_no_number(scheduler: str) -> None:
    windows = make_demand_windows([made_set(days=8)], 2, seed=3)
    here, there = backtest("demand", windows), backtest("demand", windows, address=scheduler)
    assert here.rows == there.rows
    assert {row.method for row in here.rows} == {"ours", "persistence", "rolling_median", "seasonal_naive", "theta"}
    assert {row.dataset for row in here.rows} == {"demand/made"}


def row(method: str, value: float | None, n: int, low: float | None = None, high: float | None = None) -> ResultRow:
    return ResultRow("d", "running", "all", 3600, method, "trees", "wql", value, low, high, n)


def test_windows_are_put_together_by_outcomes() -> None:
    parts = [
        Results("demand", [row("ours", 1.0, 100, 0.8, 1.2)], ["a"]),
        Results("demand", [row("ours", 2.0, 300, 1.6, 2.4), row("theta", None, 0)], ["a", "b"]),
    ]
    whole = merge_results("demand", parts)
    (ours, theta) = whole.rows
    assert (ours.value, ours.n) == (1.75, 400)
    assert ours.low == pytest.approx(1.75 - np.hypot(0.05, 0.3))
    assert ours.high == pytest.approx(1.75 + np.hypot(0.05, 0.3))
    assert theta.value is None
    assert whole.skipped == ["a", "b"]


def number(target: str, hours: int, ours: float, low: float | None = None) -> list[ResultRow]:
    """Ours and persistence, which has 1, at one horizon of a target."""
    rows = (("ours", ours, low), ("persistence", 1.0, None))
    at = "d", target, "all", 3600 * hours
    return [ResultRow(*at, method, "trees", "wql", value, bound, bound and 9.0, 50) for method, value, bound in rows]


def test_one_target_that_is_far_worse_takes_no_other_along() -> None:
    rows = [*number("running", 1, 0.8), *number("wanted", 1, 0.9), *number("queued", 1, 2.78, 2.5)]
    gate = make_verdict("demand", Results("demand", rows))
    assert gate is not None
    assert gate.won
    assert gate.withheld_targets == {"queued"}
    assert (round(gate.ours / gate.baseline_value, 3), gate.origins) == (0.849, 100), "of the targets that it serves"
    assert gate.sentence.endswith("serves running, wanted, not queued (WQL at 1 h 178.0% above persistence)")


def test_a_target_that_wins_in_the_mean_and_is_worse_beyond_its_interval_somewhere_is_lost() -> None:
    rows = [*number("running", 1, 0.4), *number("running", 6, 1.3, 1.1), *number("wanted", 1, 0.9)]
    gate = make_verdict("demand", Results("demand", rows))
    assert gate is not None
    assert gate.withheld_targets == {"running"}
    within = [*number("running", 1, 0.4), *number("running", 6, 1.3, 0.9), *number("wanted", 1, 0.9)]
    again = make_verdict("demand", Results("demand", within))
    assert again is not None
    assert again.withheld_targets == frozenset(), "an interval that reaches the baseline says nothing"


def test_a_model_that_wins_no_target_does_not_serve_and_withholds_nothing_by_force() -> None:
    gate = make_verdict("demand", Results("demand", [*number("running", 1, 1.0), *number("queued", 1, 1.2)]))
    assert gate is not None
    assert not gate.won
    assert gate.withheld_targets == frozenset()
    assert "serves nothing, not running (WQL 0.0% above the best baselines)" in gate.sentence


def test_the_verdict_is_against_the_best_baseline_of_each_number() -> None:
    wins = Results("demand", [row("ours", 0.9, 50), row("persistence", 1.0, 50), row("theta", 1.2, 50)])
    loses = Results("demand", [row("ours", 1.0, 50), row("persistence", 1.0, 50), row("theta", 1.2, 50)])
    won, lost = make_verdict("demand", wins), make_verdict("demand", loses)
    assert won is not None
    assert lost is not None
    assert (won.won, won.baseline, won.origins) == (True, "persistence", 50)
    assert won.sentence.startswith("WQL 10.0% below the best baseline (persistence")
    assert not lost.won  # as good as a baseline is not worth a change
    assert make_verdict("demand", Results("demand")) is None
