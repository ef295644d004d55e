"""What is left of a job that goes on: given that it has run so far, and what jobs of that age did."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.run_past import LEVELS
from fleetcast.models.run_times.remaining import blend_with_all_jobs, condition_on_survival

P05, P50 = LEVELS.index(0.05), LEVELS.index(0.5)
seconds = st.floats(1.0, 1e6)
quantiles = st.lists(seconds, min_size=len(LEVELS), max_size=len(LEVELS)).map(sorted)


def rows(*values: float) -> np.ndarray:
    return np.array(values, np.float64)


@given(quantiles, st.floats(0.0, 2e6), seconds)
def test_what_is_left_lies_ahead_and_its_levels_are_in_order(left_s: list[float], since_s: float, age_s: float) -> None:
    (found,) = condition_on_survival(np.array([left_s]), rows(since_s), rows(age_s + since_s))
    assert (found > 0).all()
    assert (np.diff(found) >= -1e-6 * found[1:]).all()


@given(quantiles)
def test_nothing_has_changed_at_once(left_s: list[float]) -> None:
    (found,) = condition_on_survival(np.array([left_s]), rows(0.0), rows(1.0))
    np.testing.assert_allclose(found, left_s, rtol=1e-6)


def test_a_job_that_outlived_its_lowest_level_is_not_about_to_end() -> None:
    left_s = np.array([[10.0, 60.0, 600.0, 3600.0, 7200.0, 14_400.0, 20_000.0, 40_000.0]])
    (found,) = condition_on_survival(left_s, rows(50.0), rows(5000.0))
    assert found[P05] > 10
    assert 3400 < found[P50] < 4200


def test_past_every_level_it_may_run_as_long_again() -> None:
    (found,) = condition_on_survival(np.full((1, len(LEVELS)), 30.0), rows(60.0), rows(4000.0))
    assert found[P50] == 4000.0


def test_similar_jobs_and_all_of_that_age_meet_half_way_until_a_day() -> None:
    left_s, everybody_s = np.full((3, len(LEVELS)), 100.0), np.full((3, len(LEVELS)), 10_000.0)
    left_s[2] = np.nan
    found = blend_with_all_jobs(left_s, everybody_s, rows(3600.0, 90_000.0, 3600.0))
    np.testing.assert_allclose(found[:, P50], [1000.0, 10_000.0, 10_000.0])
