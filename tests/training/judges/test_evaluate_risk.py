"""Node risk judged on a made-up trace: a few lemons that fail again and again, and many nodes that never do."""

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError
from fleetcast.models.risk.hazard import (
    PUBLISHED,
    FaultHistory,
    HorizonFit,
    compute_features,
    fit_history,
    fit_logistic,
    is_in_repair,
    load_history,
)
from fleetcast.training.judges import risk as evaluate_risk
from fleetcast.training.judges.risk import CENSORED_DAYS, evaluate
from fleetcast.training.judges.risk_metrics import NodeDays, RankedScores, compute_top_precision, measure_reliability
from fleetcast.training.reports.report import render_report

NAME = "faults/infinitehbd"
DAY_S = 86_400


def trace(days=120, nodes=40, seed=0):
    """Every tenth node fails each fortnight or so in pairs a day apart, the others once in a long while."""
    rng = np.random.default_rng(seed)
    rows = []
    for node in range(nodes):
        for start in np.sort(rng.uniform(0, days, rng.poisson(10 if node % 10 == 0 else 0.4))):
            rows += [(f"n{node:02d}", start, start + 0.2), (f"n{node:02d}", start + 1.0, start + 1.3)]
    return pd.DataFrame(rows, columns=["node", "start_day", "end_day"]).query("start_day < @days")


def split(table, folder, at=80):
    folders = folder / "train", folder / "test"
    for path, part in zip(folders, (table[table.start_day < at], table[table.start_day >= at]), strict=True):
        (path / NAME).mkdir(parents=True)
        part.to_parquet(path / NAME / "fault_intervals.parquet", index=False)
    return folders


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(evaluate_risk, "STATED_NODES", {NAME: 60})
    monkeypatch.setattr("fleetcast.training.judges.risk_metrics.DRAWS", 10)


def test_repeats_are_found_beside_the_baselines_with_intervals(tmp_path):
    said = []
    results = evaluate(*split(trace(), tmp_path), 0, said.append)
    value = {(row.horizon_s, row.method, row.metric): row for row in results.rows}
    ours = value[DAY_S, "ours", "auroc"]
    assert ours.value > 0.7
    assert ours.low <= ours.value <= ours.high
    assert value[DAY_S, "ours", "brier_skill"].value > 0.02
    assert value[DAY_S, "ours", "ap"].value > value[DAY_S, "count", "ap"].value
    assert value[DAY_S, "base_rate", "auroc"].value == 0.5
    assert value[DAY_S, "base_rate", "brier_skill"].value == 0
    assert (7 * DAY_S, "recency", "brier_skill") not in value  # an order is no probability
    above = value[DAY_S, "ours", "auroc_above_count"]
    assert above.value == pytest.approx(ours.value - value[DAY_S, "count", "auroc"].value)
    assert above.low <= above.value <= above.high
    assert any("never had one" in line for line in said)
    assert evaluate(tmp_path / "train", tmp_path / "test", 0, said.append).rows == results.rows


def test_what_comes_later_changes_no_forecast(tmp_path):
    table = trace()
    late = table[table.start_day < 104]
    parts = (("a", table), ("b", late))
    whole, cut = (forecasts(evaluate(*split(part, tmp_path / name), 0, print)) for name, part in parts)
    both = whole.keys() & cut.keys()
    assert len(both) > 300
    assert {key: whole[key] for key in both} == {key: cut[key] for key in both}


def forecasts(results):
    block = results.predictions[0]
    return dict(zip(zip(block["issued_ms"], block["series"], strict=True), block["value"], strict=True))


def test_a_test_folder_without_outcomes_is_skipped_with_the_reason(tmp_path):
    results = evaluate(*split(trace(), tmp_path, at=120 - CENSORED_DAYS + 1), 0, print)
    assert not results.rows
    assert "no day has an outcome" in results.skipped[0]


def test_odd_files_are_skipped_with_the_reason_and_odd_rows_left_out(tmp_path):
    def skipped(change, name):
        train, test = split(trace(), tmp_path / name)
        path = test / NAME / "fault_intervals.parquet"
        change(pd.read_parquet(path)).to_parquet(path, index=False)
        return evaluate(train, test, 0, print).skipped

    assert "no column end_day" in skipped(lambda table: table.drop(columns="end_day"), "a")[0]
    assert "they are no days" in skipped(lambda table: table.assign(start_day=table.start_day * 86_400_000), "b")[0]
    assert "0 others" in skipped(lambda table: table.assign(start_day="soon"), "c")[0]
    train, test = split(trace(), tmp_path / "d")
    path = test / NAME / "fault_intervals.parquet"
    before = evaluate(train, test, 0, print)
    whole = trace().assign(level="unknown")  # with the train rows, another column, and a row without a start
    pd.concat([whole, pd.DataFrame({"node": ["x"], "start_day": [np.nan]})]).to_parquet(path, index=False)
    assert evaluate(train, test, 0, print).rows == before.rows
    path.write_bytes(b"PAR1 not a table")
    assert "no table" in evaluate(train, test, 0, print).skipped[0]


def test_nodes_in_repair_are_away_until_they_return_or_fail_again():
    history = FaultHistory(
        np.array([0, 1, 2, 2]), np.array([5.0, 5.0, 3.0, 8.0]), np.array([9.0, np.nan, np.nan, 8.5]), np.zeros(4, bool)
    )
    assert is_in_repair(history.truncate(7.0), 4).tolist() == [True, True, True, False]
    assert is_in_repair(history.truncate(10.0), 4).tolist() == [False, True, False, False]


def test_a_later_fault_and_a_later_return_never_lower_the_probability():
    days = np.linspace(0, 60, 40)
    part = np.zeros(40, bool)
    fit = HorizonFit(-5.0, {"fault_30d": 2.0, "return_2d": 2.0, "hardware_60d": 1.0})
    never = fit.predict_probability(compute_features(np.array([np.inf]), np.array([np.inf]), np.array([False])))
    p = fit.predict_probability(compute_features(days, np.full(40, np.inf), part))
    assert (np.diff(p) <= 0).all()
    assert (p >= never).all()
    assert (fit.predict_probability(compute_features(days, np.minimum(days, 1.0), part)) >= p).all()
    assert (fit.predict_probability(compute_features(days, np.full(40, np.inf), ~part)) > p).all()


def test_weights_have_the_sign_of_the_data():
    rng = np.random.default_rng(0)
    columns = np.column_stack((rng.random((4000, 2)), np.ones(4000)))
    labels = rng.random(4000) < 0.3 * columns[:, 0] * (1 - columns[:, 1])
    _, weights = fit_logistic(columns, labels, penalty=10)
    assert weights[0] > 0.3
    assert weights[1] < -0.3
    assert weights[2] == 0  # constant


def test_a_replaced_part_lowers_the_probability_of_its_node():
    """Nodes wear out: one that came back from repair has no fault for long, the others go on failing."""
    rng = np.random.default_rng(3)
    nodes, days = 200, 400
    first = rng.uniform(0, 300, nodes)
    faults = FaultHistory(np.arange(nodes), first, first + 1, np.ones(nodes, bool))
    fit = fit_history(faults, 0, days, nodes)
    back = compute_features(np.array([2.0]), np.array([1.0]), np.array([True]))
    never = compute_features(np.array([np.inf]), np.array([np.inf]), np.array([False]))
    assert fit.horizons[1].predict_probability(back) < fit.horizons[1].predict_probability(never)


def test_equal_scores_are_no_order():
    rows = NodeDays(np.zeros(100, np.int64), np.arange(100) < 10, 1)
    assert compute_top_precision(rows, np.zeros(100)) == pytest.approx([0.1])
    level = RankedScores(rows, np.zeros(100)).compute_metrics(np.ones(1))
    assert level["auroc"] == 0.5
    assert (level["ap"], level["recall_top5pct"]) == pytest.approx((0.1, 0.05))
    perfect = RankedScores(rows, rows.labels.astype(float)).compute_metrics(np.ones(1))
    assert perfect["auroc"] == perfect["ap"] == 1
    assert perfect["recall_top5pct"] == 0.5
    assert perfect["precision_top20"] == 0.5


def test_metrics_are_those_of_sklearn():
    from sklearn.metrics import average_precision_score, roc_auc_score

    rng = np.random.default_rng(1)
    score, labels = rng.integers(0, 9, 300).astype(float), rng.random(300) < 0.2
    found = RankedScores(NodeDays(np.sort(rng.integers(0, 3, 300)), labels, 3), score).compute_metrics(np.ones(3))
    assert found["auroc"] == pytest.approx(roc_auc_score(labels, score))
    assert found["ap"] == pytest.approx(average_precision_score(labels, score))


def test_the_page_has_a_reliability_plot_whose_dots_lie_in_their_intervals(tmp_path):
    results = evaluate(*split(trace(), tmp_path), 0, print)
    dots = measure_reliability(results.predictions, NAME, DAY_S)
    assert len(dots) > 1
    assert all(low <= observed <= high for _, observed, low, high in dots)
    assert sum(p for p, *_ in dots) > 0
    page = render_report(results)
    assert "Is the probability within 24 h true?" in page
    assert f"{NAME}: reliability within 24 h" in page
    assert "no history predicts those" in page


def test_a_history_fitted_from_a_file_is_what_a_service_takes_up(tmp_path):
    table, path = trace(), tmp_path / "faults.csv"
    table.to_csv(path, index=False)
    given = [
        "train",
        "history",
        "--faults",
        str(path),
        "--nodes",
        "60",
        "--out",
        str(tmp_path / "m/fault_history.json"),
    ]
    assert CliRunner().invoke(app, given).exit_code == 0
    assert load_history(tmp_path / "m") == evaluate_risk.fit_history_file(path, None, 60) != PUBLISHED
    assert load_history(tmp_path) is PUBLISHED
    (tmp_path / "fault_history.json").write_text('{"horizons": {"1": {"intercept": 1, "weights": {}}}}')
    with pytest.raises(ConfigError, match="horizons of"):
        load_history(tmp_path)
    path.write_text("node,start_day\na,1\n")
    failed = CliRunner().invoke(app, given)
    assert failed.exit_code == 1
    assert "no column end_day" in str(failed.exception or failed.output)
