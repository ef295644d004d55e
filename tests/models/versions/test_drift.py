"""Drift: three plain conditions ask for a new fit, distributions are told beside them."""

import numpy as np
import pytest

from models.versions.card import Card, Coverage
from models.versions.drift import DriftLimits, Recent, card_coverage, judge, ks, moved, psi, recent_of

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
        (Recent(0.775, 0.9, 1000), 10, set()),
        (Recent(0.60, 0.9, 1000), 10, {"coverage"}),
        (Recent(0.95, 0.9, 1000), 10, {"coverage"}),
        (Recent(0.775, 1.10, 1000), 10, {"loss"}),
        (Recent(0.60, 1.10, 199), 10, set()),  # too few to say
        (Recent(), 31, {"age"}),
        (Recent(0.5, 2.0, 200), 31, {"coverage", "loss", "age"}),
    ],
)
def test_each_condition_by_itself(recent: Recent, days: int, reasons: set[str]) -> None:
    drift = judge(CARD, recent, (100 + days) * DAY_MS)
    assert set(drift.reasons) == reasons
    assert (drift.kind, drift.version, drift.age_days) == ("demand", "0003", days)


def test_the_card_says_what_is_right_and_limits_may_be_set() -> None:
    assert card_coverage(CARD) == pytest.approx(0.775)
    assert "the card says 78%" in judge(CARD, Recent(0.6, None, 500), 0).reasons["coverage"]
    lax = DriftLimits(coverage_off=0.3, loss_ratio=2.0, after_days=0)
    assert not judge(CARD, Recent(0.5, 1.5, 10_000), 10_000 * DAY_MS, lax).reasons


def test_records_of_series_are_one_by_weight() -> None:
    rows = [
        {"coverage_80": 0.5, "wql_vs_best_naive": 1.0, "origins": 100},
        {"coverage_80": 0.9, "wql_vs_best_naive": None, "origins": 300},
        {"coverage_80": None, "wql_vs_best_naive": None, "origins": 0},
        None,
    ]
    assert recent_of(rows) == Recent(0.8, 1.0, 400)
    assert recent_of([]) == Recent(None, None, 0)


def test_what_moved_comes_first_and_what_stayed_stays_near_nothing() -> None:
    rng = np.random.default_rng(0)
    before, now = rng.normal(size=(4000, 3)), rng.normal(size=(1000, 3))
    now[:, 1] += 2.0
    now[:, 2] = np.nan
    rows = moved(("a", "b", "c"), before, now)
    assert [row.feature for row in rows] == ["b", "a"]
    assert rows[0].psi > 1.0
    assert rows[0].ks == pytest.approx(0.68, abs=0.05)
    assert rows[1].psi < 0.05
    assert rows[1].ks < 0.06
    assert rows[0].n == 1000


def test_a_feature_with_one_value_is_no_trouble() -> None:
    same = np.full(50, 3.0)
    assert psi(same, same) == ks(same, same) == 0.0
    assert psi(same, np.full(10, 2.0)) > 0.25
    assert ks(same, np.full(10, 2.0)) == 1.0
