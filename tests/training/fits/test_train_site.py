"""Risk of a site: fitted on what had matured, judged on windows after it, served only where it beats what serves."""

from types import SimpleNamespace

import numpy as np
import pytest

from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.models.risk.site_risk import SiteFit
from fleetcast.models.versions.registry import Registry
from fleetcast.training.fits.retrain import TrainingPlan
from fleetcast.training.fits.site_risk import fit_site
from fleetcast.training.fits.train_site import make_verdict, train_risk
from fleetcast.training.judges.site_risk import (
    compare_geometric_means,
    compute_metrics,
    judge_windows,
    make_risk_results,
    make_windows,
)
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets.simulated_year import draw_plan, simulate_year

PLAN = TrainingPlan("risk", "a test", windows=2)
NOW_MS = 1_900_000_000_000


@pytest.fixture(scope="module")
def year():
    return simulate_year(draw_plan(nodes=60, days=200, seed=3, faults=4.0))


@pytest.fixture(scope="module")
def quiet():
    """A young site: its faults are few."""
    return simulate_year(draw_plan(nodes=40, days=60, seed=3, faults=1.0))


def test_a_years_fit_beats_the_shipped_one_out_of_sample(year):
    results = make_risk_results(judge_windows(year, 2), "year")
    for metric in ("log_loss", "brier", "calibration_error"):
        ours, shipped, _ = compare_geometric_means(results, RISK_KINDS, "shipped", metric=metric)
        assert ours < shipped
    value = {(row.target, row.horizon_s, row.method, row.metric): row.value for row in results.select(series="all")}
    for metric in ("auroc", "precision_top5pct"):
        assert value["fail", 86_400, "ours", metric] > value["fail", 86_400, "shipped", metric]


def test_what_comes_later_changes_neither_fit_nor_what_it_says(year):
    """Cut off the second window: the first one's fit and probabilities stay to the last digit."""
    first, second = make_windows(year, 2)
    whole = judge_windows(year, 2)
    known = year.select_rows(year.time_ms < first.begin_ms)
    assert fit_site(known, first.begin_ms) == whole.fits[0]
    later = {kind: told.count_until(first.begin_ms) for kind, told in year.begun.items()}
    assert later != {kind: len(told.node) for kind, told in year.begun.items()}  # something came after it
    rows = year.select_rows((year.time_ms >= first.begin_ms) & (year.time_ms < first.end_ms))
    inside = whole.window == 0
    assert (rows.compute_probabilities(whole.fits[0]) == whole.p["ours"][:, :, inside]).all()
    assert second.begin_ms >= first.end_ms


def test_rows_are_labelled_by_what_begins_after_them(year):
    labels = year.compute_labels("fail", 1)
    row = int(np.flatnonzero(labels)[0])
    starts = year.begun["fail"].time_ms[year.begun["fail"].node == year.node[row]]
    after = starts[starts > year.time_ms[row]].min()
    assert 0 < after - year.time_ms[row] <= 86_400_000
    assert labels.sum() <= year.compute_labels("fail", 7).sum()


def test_a_version_that_wins_serves_and_its_card_says_why(year, tmp_path):
    registry = Registry(tmp_path)
    trained = train_risk(year, PLAN, registry, NOW_MS, say=lambda line: None)
    assert trained.objection == ""
    assert registry.find_current_version("risk") == "0001"
    assert "below the shipped fit" in trained.card.gate.sentence
    assert set(SiteFit.load(registry.find_folder("risk", "0001")).kinds) == set(RISK_KINDS)
    assert {"log_loss", "auroc", "precision_top1pct"} <= {row.metric for row in trained.card.metrics}
    again = train_risk(year, PLAN, registry, NOW_MS, say=lambda line: None)
    assert "0 events since the data of the serving version 0001 ended" in again.objection
    assert registry.find_current_version("risk") == "0001"


def test_a_site_with_few_failures_is_kept_and_does_not_serve(quiet, tmp_path):
    count = len(quiet.begun["fail"].node)
    assert 0 < count < 50
    registry = Registry(tmp_path)
    trained = train_risk(quiet, PLAN, registry, NOW_MS, say=lambda line: None)
    assert f"{count} failures, 50 needed" in trained.objection
    assert registry.find_current_version("risk") is None
    assert trained.card.gate.origins == 0
    with_force = registry.promote("risk", trained.version, force=True)
    assert with_force is None
    assert registry.list_promotions("risk")[0].forced


@pytest.mark.parametrize(("serving", "wins"), [(0.8, False), (1.2, True)])
def test_a_challenger_must_beat_the_version_that_serves_on_what_came_after_its_data(serving, wins):
    counts, fits = dict.fromkeys(RISK_KINDS, 90), (SiteFit({"fail": {}}),)
    results = Results("risk")
    said = {"ours": 0.9, "shipped": 1.1, "ours_beside_serving": 0.95, "serving": serving}
    for method, value in said.items():
        given = ("site", "fail", "all", 86_400, method, "", "log_loss", value, None, None, 40)
        results.rows.append(ResultRow(*given))
    gate = make_verdict(counts, SimpleNamespace(fits=fits), results, "0001")
    assert gate.won is wins
    assert ("the serving version 0001" in gate.sentence) is not wins
    few = Results("risk", [row for row in results.rows if row.method in ("ours", "shipped")])
    assert (
        "0 events since the data of the serving version 0001 ended"
        in make_verdict(counts, SimpleNamespace(fits=fits), few, "0001").sentence
    )


def test_metrics_of_a_perfect_and_of_a_constant_forecast():
    labels = np.zeros(200, bool)
    labels[:2] = True
    time_ms = np.arange(200) // 20
    perfect = compute_metrics(time_ms, np.where(labels, 0.99, 0.01), labels)
    constant = compute_metrics(time_ms, np.full(200, 0.01), labels)
    assert (perfect["auroc"], perfect["precision_top1pct"]) == (1.0, 1.0)
    assert (constant["auroc"], constant["told_over_came"]) == (0.5, pytest.approx(1.0))
    assert constant["precision_top1pct"] == pytest.approx(0.01)
    assert perfect["log_loss"] < constant["log_loss"]
