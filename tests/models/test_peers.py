"""Medians within groups, with numpy and a sort of all values as the oracles."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.models.peers import Groups, compute_robust_z, encode_values, number_groups
from tests.fuzz.bounds import examples

NUMBERS = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, 1980.0, np.nan, np.inf, -np.inf])
SHAPES = st.sampled_from(["any", "in order", "equal sizes", "one large"])


def sorted_medians(values, group, groups):
    """The medians by a sort of all values: the plain form of what the table does."""
    use = np.isfinite(values) & (group >= 0)
    kept, of = values[use].astype(np.float64), group[use]
    count = np.bincount(of, minlength=groups)
    ordered = kept[np.lexsort((kept, of))]
    start = np.cumsum(count) - count
    median = np.full(groups, np.nan)
    some = count > 0
    median[some] = (ordered[start[some] + (count[some] - 1) // 2] + ordered[start[some] + count[some] // 2]) / 2
    return median, count


@st.composite
def grouped_values(draw):
    """Values with groups as fleets have them: by node, by gang in any order, or one gang that is half the fleet."""
    values = np.array(draw(st.lists(NUMBERS, max_size=60)), np.float64)
    n, shape = len(values), draw(SHAPES)
    groups = draw(st.integers(1, 12))
    if shape == "equal sizes":
        group = np.arange(n) // draw(st.integers(1, 8))
        groups = int(group.max(initial=-1)) + 1 + draw(st.integers(0, 2))
    else:
        group = np.array(draw(st.lists(st.integers(-1, groups - 1), min_size=n, max_size=n)), np.int64)
        if shape == "in order":
            group.sort()
        if shape == "one large":
            group[: n // 2] = 0
    return values, group.astype(draw(st.sampled_from([np.int32, np.int64]))), groups


def test_group_medians_equal_numpys():
    rng = np.random.default_rng(0)
    values = rng.normal(size=300)
    values[rng.random(300) < 0.2] = np.nan
    group = rng.integers(-1, 9, 300)
    median, count = Groups(group, 10).compute_medians(values)
    for row in range(9):
        members = values[(group == row) & np.isfinite(values)]
        assert count[row] == len(members)
        assert np.isclose(median[row], np.median(members))
    assert np.isnan(median[9])


@given(grouped_values())
@examples(500)
def test_medians_by_a_table_are_those_by_a_sort(case):
    values, group, groups = case
    with np.errstate(over="ignore"):
        median, count = Groups(group, groups).compute_medians(values)
        expected, expected_count = sorted_medians(values, group, groups)
    assert np.array_equal(median, expected, equal_nan=True)
    assert count.tolist() == expected_count.tolist()


@given(grouped_values())
@examples(200)
def test_a_figure_of_a_group_comes_to_each_of_its_members(case):
    _, group, groups = case
    figure = np.arange(groups, dtype=np.float64)
    expected = [figure[of] if of >= 0 else np.nan for of in group.tolist()]
    assert np.array_equal(Groups(group, groups).copy_to_members(figure), np.array(expected, float), equal_nan=True)


def test_one_group_far_larger_than_the_others_has_the_same_medians():
    rng = np.random.default_rng(3)
    group = np.concatenate([np.zeros(900, int), np.arange(1, 200)])
    values = rng.normal(size=len(group))
    assert np.array_equal(Groups(group, 200).compute_medians(values)[0], sorted_medians(values, group, 200)[0])


def test_groups_of_nothing_have_no_median():
    median, count = Groups(np.zeros(0, np.int32), 2).compute_medians(np.zeros(0))
    assert np.isnan(median).all()
    assert count.tolist() == [0, 0]
    assert len(Groups(np.zeros(0, np.int32), 0).compute_member_medians(np.zeros(0))) == 0


@given(st.lists(st.integers(-1, 2**40) | st.integers(-1, 30), max_size=40), st.booleans())
@examples(300)
def test_groups_are_numbered_by_their_keys(keys, ordered):
    keys = np.array(sorted(keys) if ordered else keys, np.int64)
    numbers, count = number_groups(keys)
    different = sorted(set(keys[keys >= 0].tolist()))
    assert numbers.tolist() == [different.index(key) if key >= 0 else -1 for key in keys.tolist()]
    assert count == len(different)


@given(st.lists(NUMBERS, max_size=40))
@examples(300)
def test_codes_are_those_of_a_sort(values):
    found, code = encode_values(np.array(values, float))
    expected, expected_code = np.unique(np.array(values, float), return_inverse=True)
    assert np.array_equal(found, expected, equal_nan=True)
    assert code.tolist() == expected_code.tolist()


def test_a_gang_of_equals_has_no_outliers_but_a_slow_one_is_far_out():
    gang = Groups(np.zeros(8, int), 1)
    z, median = compute_robust_z(np.array([1980, 1980, 1965, 1980, 1980, 1965, 1980, 1980.0]), gang)
    assert np.abs(z).max() < 1
    assert median[0] == 1980
    z, _ = compute_robust_z(np.array([1980, 1980, 1980, 990, 1980, 1980, 1980, 1980.0]), gang)
    assert z[3] < -20
    assert np.abs(np.delete(z, 3)).max() == 0


@pytest.mark.parametrize("unknown", [np.nan, np.inf])
def test_a_value_that_is_no_number_has_no_place_in_a_median(unknown):
    median, count = Groups(np.array([0, 0, 0]), 1).compute_medians(np.array([1.0, unknown, 3.0]))
    assert (median[0], count[0]) == (2.0, 2)
