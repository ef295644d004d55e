"""Peaks against those of scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.peaks import find_peaks
from tests.fuzz.bounds import examples


def oracle(curve: np.ndarray, height: float, prominence: float) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    from scipy.signal import find_peaks  # half a second, which each worker would pay

    return find_peaks(curve, height=height, prominence=prominence)


@examples(400)
@given(
    st.lists(st.integers(-3, 6), max_size=60),
    st.floats(-3.0, 6.0, allow_nan=False),
    st.floats(0.0, 6.0, allow_nan=False),
)
def test_the_peaks_are_those_of_scipy(levels: list[int], height: float, prominence: float) -> None:
    curve = np.array(levels, np.float64)
    expected, _ = oracle(curve, height=height, prominence=prominence)
    np.testing.assert_array_equal(find_peaks(curve, height, prominence), expected)


@pytest.mark.parametrize("seed", range(4))
def test_the_peaks_of_a_noisy_wave_are_those_of_scipy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    curve = np.cos(np.arange(6000) / 37) + 0.2 * rng.standard_normal(6000)
    for height in (0.0, 0.1, 0.9):
        expected, _ = oracle(curve, height=height, prominence=height / 2)
        assert len(expected)
        np.testing.assert_array_equal(find_peaks(curve, height, height / 2), expected)


def test_an_unknown_value_is_no_peak() -> None:
    curve = np.array([0.0, np.nan, 0.0, 2.0, 1.0])
    assert find_peaks(curve, 0.0, 0.0).tolist() == oracle(curve, height=0.0, prominence=0.0)[0].tolist() == [3]
