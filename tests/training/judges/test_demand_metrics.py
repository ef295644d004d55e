"""What a band covers where outcomes lie at its ends."""

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from fleetcast.models.forecast import QUANTILES, Panel
from fleetcast.training.judges.demand_metrics import JudgedForecasts, judge_set
from fleetcast.training.reports.results import Results


def shares(outcomes: list[float], low: float, high: float) -> tuple[float, float]:
    """coverage_80 and inside_80 of one band at every origin."""
    values = np.array([[np.nan, *outcomes]])
    panel = Panel("running", ("a",), 600, 0, values, np.full(1, np.nan))
    origins = np.arange(len(outcomes))
    band = np.linspace(low, high, 5)
    quantiles = np.array([low, *band, high]).reshape(-1, 1, 1, 1) * np.ones((1, 1, len(outcomes), 1))
    assert len(quantiles) == len(QUANTILES)
    model = np.full((1, len(outcomes), 1), "persistence")
    methods = {"ours": quantiles, "persistence": quantiles}
    results = Results("demand")
    judge_set(results, JudgedForecasts("demand/a", panel, origins, (1,), methods, model, np.ones(1)), 0)
    closed, strict = (
        next(
            row.value or 0.0 for row in results.rows if (row.metric, row.method, row.series) == (metric, "ours", "all")
        )
        for metric in ("coverage_80", "inside_80")
    )
    return closed, strict


def test_a_band_of_no_width_covers_a_series_that_stays_and_holds_nothing_strictly_inside() -> None:
    np.testing.assert_allclose(shares([5.0] * 9 + [6.0], 5.0, 5.0), (0.9, 0.0))


def test_outcomes_at_an_end_are_covered_and_not_inside() -> None:
    np.testing.assert_allclose(shares([1.0, 2.0, 3.0, 4.0], 1.0, 3.0), (0.75, 0.25))


@example([5e-324, 9.0], 0.0, 4.0)
@example([5e-324], 1.0, 5.0)
@given(st.lists(st.floats(0.0, 9.0), min_size=1, max_size=20), st.floats(0.0, 4.0), st.floats(4.0, 9.0))
def test_what_is_inside_is_covered_and_without_ties_both_shares_are_one(
    outcomes: list[float], low: float, high: float
) -> None:
    closed, strict = shares(outcomes, low, high)
    assert strict <= closed
    if not {low, high} & set(outcomes):
        assert strict == closed
