import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fleetcast.models.demand.hierarchy import MEDIAN, reconcile_parts, round_parts
from fleetcast.models.forecast import QUANTILES

sizes = st.floats(0, 1e4)
TINY = 1e-308


@given(arrays(np.float64, (len(QUANTILES), 3, 4), elements=sizes), arrays(np.float64, 3, elements=sizes))
@example(np.full((len(QUANTILES), 3, 4), TINY), np.full(3, 5.0))
@example(np.full((len(QUANTILES), 3, 4), TINY) * (np.arange(len(QUANTILES)) > MEDIAN)[:, None, None], np.full(3, 5.0))
@example(np.full((len(QUANTILES), 3, 4), 5e-324) * (np.arange(len(QUANTILES)) > MEDIAN)[:, None, None], np.full(3, 0.3))
def test_medians_sum_to_the_whole_and_quantiles_stay_in_order(values, whole) -> None:
    parts = np.sort(values, axis=0)
    given_way = reconcile_parts(parts, whole)
    np.testing.assert_allclose(given_way[MEDIAN].sum(axis=1), whole, rtol=1e-6, atol=1e-6)
    assert (given_way >= 0).all()
    assert (np.diff(given_way, axis=0) >= -1e-6).all()


def test_parts_that_add_up_stay_as_they_are() -> None:
    parts = np.sort(np.random.default_rng(0).uniform(0, 9, (len(QUANTILES), 2, 3)), axis=0)
    np.testing.assert_allclose(reconcile_parts(parts, parts[MEDIAN].sum(axis=1)), parts)


def test_who_is_least_sure_gives_way_most() -> None:
    spread = np.linspace(-1, 1, len(QUANTILES))[:, None, None] * np.array([1.0, 3.0])
    lifted = reconcile_parts(10 + spread, np.array([24.0]))
    np.testing.assert_allclose(lifted[MEDIAN], [[11.0, 13.0]])


@given(
    arrays(np.float64, (len(QUANTILES), 3, 4), elements=sizes), arrays(np.float64, 3, elements=st.integers(0, 10_000))
)
def test_counts_stay_whole_and_still_sum_to_the_whole(values, whole) -> None:
    counts = round_parts(reconcile_parts(np.sort(values, axis=0), whole))
    assert (counts == np.rint(counts)).all()
    assert (counts >= 0).all()
    np.testing.assert_array_equal(counts[MEDIAN].sum(axis=1), whole)
    assert (np.diff(counts, axis=0) >= 0).all()
