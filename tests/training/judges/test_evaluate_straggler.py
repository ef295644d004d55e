"""The judge of stragglers, on worlds of our own making."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import pytest

from fleetcast.training.judges.straggler import evaluate
from fleetcast.training.judges.straggler_metrics import compute_rate_bounds, compute_share_bounds
from fleetcast.training.reports.results import Results
from fleetcast.training.sets.operation_traces import read_traces
from fleetcast.training.sets.straggler_steps import (
    FILE,
    draw_slowdowns,
    extend_run,
    find_natural_spells,
    is_judged,
    judge_steps,
    read_series,
)

SLOW = (2, 1)  # replica, stage


def write_trace(folder: Path, factor: float = 1.6) -> None:
    """Two stages, four replicas, four micro-batches, six steps; forward all, then backward all."""
    rng = np.random.default_rng(0)
    rows = []
    for step in range(6):
        for replica in range(4):
            for stage in range(2):
                clock = 0.0
                for kind in ("forward-compute", "backward-compute"):
                    for micro in range(4):
                        seconds = float(rng.normal(1.0, 0.01)) * (factor if (replica, stage) == SLOW else 1.0)
                        rows.append((replica, stage, step, kind, clock, seconds, micro))
                        clock += seconds
    names = ["dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id"]
    path = folder / "faults/straggler_bytedance"
    path.mkdir(parents=True)
    pd.DataFrame(rows, columns=names).astype({"optype": "category"}).to_parquet(path / "trace-X.parquet")
    answers = {
        "blocking_slowdown": factor,
        "blocking_decompose_by_dp_rank": {"0": 1.0, "1": 1.0, "2": factor, "3": 1.0},
        "blocking_decompose_by_stage": {"0": 1.0, "1": factor},
    }
    (path / "result-X.json").write_text(json.dumps(answers))


def test_the_right_worker_in_every_step_and_no_other(tmp_path):
    write_trace(tmp_path)
    results = evaluate(tmp_path, tmp_path, 0, lambda line: None)
    for series in ("as recorded", "relabelled"):
        values = [results.select(series=series, method="ours", metric=name)[0].value for name in ("f1", "top1")]
        assert values == [1.0, 1.0]
    for series in ("scaled back", "all slowed"):
        assert results.select(series=series, method="ours", metric="false_culprits")[0].value == 0.0
    assert results.select(series="culprit", metric="share")[0].value > 0.9
    assert msgspec.json.encode(results.rows)  # no number of a library's own kind
    assert len(results.skipped) == 2  # no step times, no simulated fleets


def test_a_job_whose_authors_blame_nobody_has_no_culprit(tmp_path):
    write_trace(tmp_path, factor=1.05)
    results = evaluate(tmp_path, tmp_path, 0, lambda line: None)
    row = results.select(series="as recorded", method="ours", metric="false_culprits")[0]
    assert row.value == 0.0
    assert not results.select(series="as recorded", method="ours", metric="recall")


def test_slowdowns_are_seen_and_natural_ones_counted_apart(monkeypatch):
    monkeypatch.setattr("fleetcast.training.sets.straggler_steps.CONTINUED", 90)
    monkeypatch.setattr("fleetcast.training.sets.straggler_steps.LONGEST", 40)
    rng = np.random.default_rng(1)
    series = {f"run-{number}": np.exp(rng.normal(0, 0.01, 70)) for number in range(6)}
    for seconds in series.values():
        seconds[15:22] *= 1.4  # a natural one in each
    judged = sum(map(is_judged, series))
    results = Results("straggler")
    judge_steps(series, results, 0, lambda line: None)
    ours = {(row.metric, row.series): row for row in results.select(method="ours")}
    assert ours["recall", "all"].value == 1.0
    assert ours["delay_steps", "all"].value <= 10  # 7 slow steps of 30 made this size look usual
    for runs in ("all", "continued"):
        assert ours["false_alarms_per_10000_steps", runs].n == 0
        assert ours["natural_spells_per_10000_steps", runs].n == judged
    assert 0.5 < ours["seen_in_time", "20-60 %"].value <= 1.0
    assert msgspec.json.encode(results.rows)
    assert results.select(method="static 1.1x", metric="recall", series="all")[0].value > 0.9


def test_slowdowns_keep_clear_of_natural_ones_and_are_as_long_as_drawn():
    seconds = np.exp(np.random.default_rng(0).normal(0, 0.01, 200))
    seconds[100:110] *= 2.0
    spells = find_natural_spells(seconds)
    assert spells[100:110].all()
    drawn = draw_slowdowns(seconds, spells, np.random.default_rng(0), 50)
    for one in drawn:
        assert one.last <= 100 or one.first >= 110
        assert 1.1 <= one.factor <= 1.6
        assert 20 <= one.last - one.first <= 600
        made = one.apply_to(extend_run(seconds, spells, one.last, np.random.default_rng(1)))
        assert len(made) == one.last
        assert made[one.first] == pytest.approx(one.factor * seconds[one.first])
    assert any(one.last > 300 for one in drawn)
    more = extend_run(seconds, spells, 900, np.random.default_rng(1))
    assert (more[:200] == seconds).all()
    assert np.isin(more[200:], seconds[~spells]).all()


def test_odd_files_are_skipped_with_a_reason(tmp_path):
    write_trace(tmp_path)
    path = tmp_path / "faults/straggler_bytedance/trace-X.parquet"
    table = pd.read_parquet(path)
    table.drop(columns="mb_id").to_parquet(path.with_name("trace-column.parquet"))
    table.assign(stage=-1).to_parquet(path.with_name("trace-stage.parquet"))
    path.with_name("trace-none.parquet").write_bytes(b"PAR1")
    first = (table.optype == "forward-compute") & (table.stage == 0)
    backwards = table.assign(start_ts=np.where(first, 99.0, table.start_ts))  # the stages wait for each other
    backwards.to_parquet(path.with_name("trace-Y.parquet"))
    path.with_name("result-Y.json").write_bytes(path.with_name("result-X.json").read_bytes())
    steps = tmp_path / FILE
    steps.parent.mkdir(parents=True)
    pd.DataFrame({"suite": ["a"], "step": [1]}).to_parquet(steps)
    results = evaluate(tmp_path, tmp_path, 0, lambda line: None)
    skipped = "\n".join(results.skipped)
    for word in ("no column mb_id", "below 0", "trace-none.parquet", "/Y: the schedule waits", "no table of suite"):
        assert word in skipped
    assert [trace.name for trace in read_traces(tmp_path, [])] == ["X", "Y"]
    rows = pd.DataFrame({"suite": "a", "test_case": "b", "platform": "c", "step": range(60), "iteration_time_s": 1.0})
    rows.loc[3, "iteration_time_s"] = np.nan
    rows.to_parquet(steps)
    reasons: list[str] = []
    assert read_series(tmp_path, reasons) == {}
    assert "such as a/b/c" in reasons[0]


def test_bounds_are_the_published_ones():
    assert compute_rate_bounds(0, 10_000 / 10_000)[1] == pytest.approx(3.689, abs=1e-3)  # the rule of three, two-sided
    assert compute_share_bounds(99, 100) == pytest.approx((0.9455, 0.99975), abs=1e-4)
