"""Medians within groups, with numpy as the oracle."""

import numpy as np

from models.peers import group_median, robust_z


def test_group_medians_equal_numpys():
    rng = np.random.default_rng(0)
    values = rng.normal(size=300)
    values[rng.random(300) < 0.2] = np.nan
    group = rng.integers(-1, 9, 300)
    median, count = group_median(values, group, 10)
    for row in range(9):
        members = values[(group == row) & np.isfinite(values)]
        assert count[row] == len(members)
        assert np.isclose(median[row], np.median(members))
    assert np.isnan(median[9])


def test_a_gang_of_equals_has_no_outliers_but_a_slow_one_is_far_out():
    group = np.zeros(8, int)
    z, median = robust_z(np.array([1980, 1980, 1965, 1980, 1980, 1965, 1980, 1980.0]), group, 1)
    assert np.abs(z).max() < 1
    assert median[0] == 1980
    z, _ = robust_z(np.array([1980, 1980, 1980, 990, 1980, 1980, 1980, 1980.0]), group, 1)
    assert z[3] < -20
    assert np.abs(np.delete(z, 3)).max() == 0
