"""The judge of stragglers, on worlds of our own making."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from training.evaluate_straggler import evaluate
from training.fault_runs import FaultTruth
from training.results import Results
from training.straggler_fleets import Finding, Findings, score
from training.straggler_metrics import rate_bounds, share_bounds
from training.straggler_steps import draw_slowdowns, halves, judge_steps, natural_spells

SLOW = (2, 1)  # replica, stage


def write_trace(folder: Path, factor: float = 1.5) -> None:
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
    assert len(results.skipped) == 2  # no step times, no simulated fleets


def test_a_job_whose_authors_blame_nobody_has_no_culprit(tmp_path):
    write_trace(tmp_path, factor=1.05)
    results = evaluate(tmp_path, tmp_path, 0, lambda line: None)
    row = results.select(series="as recorded", method="ours", metric="false_culprits")[0]
    assert row.value == 0.0
    assert not results.select(series="as recorded", method="ours", metric="recall")


def test_slowdowns_are_seen_and_natural_ones_counted_apart():
    rng = np.random.default_rng(1)
    series = {f"run-{number}": np.exp(rng.normal(0, 0.01, 70)) for number in range(4)}
    for seconds in series.values():
        seconds[15:22] *= 1.4  # a natural one in each
    results = Results("straggler")
    judge_steps(series, results, 0, lambda line: None)
    ours = {row.metric: row for row in results.select(method="ours", series="all")}
    assert ours["recall"].value == 1.0
    assert ours["delay_steps"].value <= 10  # 7 slow steps of 30 made this size look usual
    assert ours["false_alarms_per_10000_steps"].n == 0
    assert ours["natural_spells_per_10000_steps"].n == 2  # of the half that is judged
    assert results.select(method="static 1.1x", metric="recall", series="all")[0].value > 0.9


def test_halves_share_nothing_and_slowdowns_keep_clear_of_natural_ones():
    tune, judged = halves([f"r{number}" for number in range(9)], 3)
    assert sorted(tune + judged) == [f"r{number}" for number in range(9)]
    seconds = np.ones(200)
    seconds[100:110] = 2.0
    spells = natural_spells(seconds)
    assert spells[100:110].all()
    for one in draw_slowdowns(seconds, spells, np.random.default_rng(0), 50):
        assert one.last <= 100 or one.first >= 110
        assert 1.1 <= one.factor <= 1.6


def fault(node: str, start_s: int, end_s: int, **more) -> FaultTruth:
    start_ms = start_s * 1000
    row = {"kind": "slow_nic", "visible_ms": start_ms, "visible": True, "port": 3, "job": "j", **more}
    return FaultTruth(node=node, start_ms=start_ms, end_ms=end_s * 1000, **row)


def test_findings_against_the_truth():
    found = Findings()
    for at_s in (1000, 1015, 1300, 4000, 9000):  # a hole of under 5 minutes is closed
        found.note("n1", at_s * 1000, "n1/mlx5_3/1" if at_s < 2000 else "n1/0")
    assert (found.rows[0].first_ms, found.rows[0].last_ms) == (1_000_000, 1_300_000)
    truth = [
        fault("n1", 970, 1200),
        fault("n1", 3990, 4100),  # found, and another unit was named
        fault("n2", 500, 600),  # missed
        fault("n2", 700, 800, visible_ms=None),  # nobody could see it
        fault("n1", 9000, 9100, benign=True),  # a look-alike
    ]
    one = score(found.rows, truth)
    assert (one.right, one.missed, one.wrong, one.first) == (2, 1, 1, 1)
    assert one.delays == [30.0, 10.0]


def test_a_finding_on_another_node_is_a_false_alarm():
    one = score([Finding("n9", 1_000_000, 1_010_000)], [fault("n1", 970, 1200)])
    assert (one.right, one.missed, one.wrong) == (0, 1, 1)


def test_bounds_are_the_published_ones():
    assert rate_bounds(0, 10_000 / 10_000)[1] == pytest.approx(3.689, abs=1e-3)  # the rule of three, two-sided
    assert share_bounds(99, 100) == pytest.approx((0.9455, 0.99975), abs=1e-4)
