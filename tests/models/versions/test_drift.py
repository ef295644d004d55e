"""Drift: three plain conditions ask for a new fit, distributions are told beside them."""

import numpy as np
import pytest

from fleetcast.models.versions.card import Card, Coverage
from fleetcast.models.versions.drift import (
    PSI_MOVED,
    DriftLimits,
    RecentAccuracy,
    compare_features,
    compute_chance_psi,
    compute_ks,
    compute_psi,
    count_independent_rows,
    judge_drift,
    merge_records,
    read_card_coverage,
)

DAY_MS = 86_400_000
CARD = Card(
    kind="demand",
    version="0003",
    created_ms=0,
    made_by="a test",
    seed=0,
    fitted_until_ms=100 * DAY_MS,
    calibration=(
        Coverage("running", 3600, 0.8, 0.70, 100),
        Coverage("running", 7200, 0.8, 0.80, 300),
        Coverage("running", 3600, 0.5, 0.10, 100),
    ),
)


@pytest.mark.parametrize(
    ("recent", "days", "reasons"),
    [
        (RecentAccuracy(0.775, 0.9, 1000), 10, set()),
        (RecentAccuracy(0.60, 0.9, 1000), 10, {"coverage"}),
        (RecentAccuracy(0.95, 0.9, 1000), 10, {"coverage"}),
        (RecentAccuracy(0.775, 1.10, 1000), 10, {"loss"}),
        (RecentAccuracy(0.60, 1.10, 199), 10, set()),  # too few to say
        (RecentAccuracy(), 31, {"age"}),
        (RecentAccuracy(0.5, 2.0, 200), 31, {"coverage", "loss", "age"}),
    ],
)
def test_each_condition_by_itself(recent: RecentAccuracy, days: int, reasons: set[str]) -> None:
    drift = judge_drift(CARD, recent, (100 + days) * DAY_MS)
    assert set(drift.reasons) == reasons
    assert (drift.kind, drift.version, drift.age_days) == ("demand", "0003", days)


def test_the_card_says_what_is_right_and_limits_may_be_set() -> None:
    assert read_card_coverage(CARD) == pytest.approx(0.775)
    assert "the card says 78%" in judge_drift(CARD, RecentAccuracy(0.6, None, 500), 0).reasons["coverage"]
    lax = DriftLimits(coverage_off=0.3, loss_ratio=2.0, after_days=0)
    assert not judge_drift(CARD, RecentAccuracy(0.5, 1.5, 10_000), 10_000 * DAY_MS, lax).reasons


def test_records_of_series_are_one_by_weight() -> None:
    rows = [
        {"coverage_80": 0.5, "wql_vs_best_naive": 1.0, "origins": 100},
        {"coverage_80": 0.9, "wql_vs_best_naive": None, "origins": 300},
        {"coverage_80": None, "wql_vs_best_naive": None, "origins": 0},
        None,
    ]
    assert merge_records(rows) == RecentAccuracy(0.8, 1.0, 400)
    assert merge_records([]) == RecentAccuracy(None, None, 0)


def test_what_moved_comes_first_and_what_stayed_stays_near_nothing() -> None:
    rng = np.random.default_rng(0)
    before, now = rng.normal(size=(4000, 3)), rng.normal(size=(1000, 3))
    now[:, 1] += 2.0
    now[:, 2] = np.nan
    rows = compare_features(("a", "b", "c"), before, now)
    assert [row.feature for row in rows] == ["b", "a"]
    assert rows[0].psi > 1.0
    assert rows[0].ks == pytest.approx(0.68, abs=0.05)
    assert rows[1].psi < 0.05
    assert rows[1].ks < 0.06
    assert rows[0].n == 1000
    assert [row.verdict for row in rows] == ["drifted", "same"]


def test_a_feature_with_one_value_is_no_trouble() -> None:
    same = np.full(50, 3.0)
    assert compute_psi(same, same) == compute_ks(same, same) == 0.0
    assert compute_psi(same, np.full(10, 2.0)) > 0.25
    assert compute_ks(same, np.full(10, 2.0)) == 1.0


def walk(rows: int, seed: int, r: float = 0.995) -> np.ndarray:
    """A series whose neighbouring values are nearly the same, and whose mean never changes."""
    rng = np.random.default_rng(seed)
    values = np.empty(rows)
    values[0] = rng.normal()
    for at in range(1, rows):
        values[at] = r * values[at - 1] + np.sqrt(1 - r * r) * rng.normal()
    return values


def test_a_small_sample_lies_apart_by_chance_and_says_so() -> None:
    rng = np.random.default_rng(1)
    before = rng.normal(size=(4000, 50))
    few = compare_features([f"f{n}" for n in range(50)], before, rng.normal(size=(12, 50)))
    assert max(row.psi for row in few) > PSI_MOVED
    assert {row.verdict for row in few} <= {"same", "too_few"}
    far = compare_features(["far"], before[:, :1], rng.normal(size=(12, 1)) + 3)
    assert (far[0].verdict, far[0].independent) == ("too_few", 12)
    many = compare_features(["far"], before[:, :1], rng.normal(size=(400, 1)) + 3)
    assert many[0].verdict == "drifted"


def test_a_day_of_a_slow_series_is_few_rows_however_often_it_was_read() -> None:
    verdicts = []
    for seed in range(8):
        series = walk(5000, seed)
        (row,) = compare_features(["x"], series[:4500, None], series[4500:, None])
        assert row.independent < 30 < row.n
        verdicts.append(row.verdict)
    assert "too_few" in verdicts
    assert "drifted" not in verdicts


def test_rows_of_several_series_are_worth_the_sum_of_each() -> None:
    rng = np.random.default_rng(2)
    free = rng.normal(size=(300, 4))
    assert count_independent_rows(free) == pytest.approx(1200, rel=0.15)
    levels = free * 0.001 + np.arange(4.0)  # a level of its own for each is no memory
    assert count_independent_rows(levels) == pytest.approx(1200, rel=0.15)
    free[:, 3] = np.nan
    assert count_independent_rows(free) == pytest.approx(900, rel=0.15)
    assert count_independent_rows(np.full((5, 1), np.nan)) == 0.0


def test_what_chance_passes_is_what_samples_of_one_population_show() -> None:
    rng = np.random.default_rng(3)
    found = [compute_psi(rng.normal(size=2000), rng.normal(size=100)) for _ in range(400)]
    assert np.mean(found) == pytest.approx(9 * (1 / 2000 + 1 / 100), rel=0.3)
    assert np.mean(np.array(found) > compute_chance_psi(2000, 100)) <= 0.02
