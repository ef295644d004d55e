"""Load peaks follow a change of level within a minute, and rhythms are no change of level."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.models.jobs.level import LATEST, LEAD, find_level_changes, shift_to_present_level
from tests.fuzz.bounds import examples
from tests.models.jobs.spike_windows import LOADS, ratios


@pytest.mark.parametrize("name", ["steady", "steps", "ramps", "plateaus", "swings", "dips", "gang"])
def test_peaks_are_no_worse_than_persistence(name: str) -> None:
    """In the mean no worse, and in no hour by more than a tenth."""
    found = np.stack([ratios(LOADS[name](np.random.default_rng(seed))) for seed in range(2)])
    assert found.mean() <= 1.0
    assert found.max() <= 1.1


def test_a_steady_rise_goes_on_for_two_minutes_and_keeps_its_scatter() -> None:
    readings = np.linspace(1000, 2000, 41) + np.random.default_rng(0).normal(0, 20, 41)
    found = shift_to_present_level(readings)
    assert abs(np.median(found) - (2000 + LEAD * 25)) < 40
    assert 10 < found.std() < 30


def test_a_step_in_noise_is_no_rise() -> None:
    readings = np.repeat([1000.0, 4000.0], 20) + np.random.default_rng(0).normal(0, 80, 40)
    assert abs(np.median(shift_to_present_level(readings)) - 4000) < 100


def test_a_new_level_counts_after_a_minute_and_keeps_the_scatter() -> None:
    rng = np.random.default_rng(0)
    readings = np.concatenate([1000 + rng.normal(0, 20, 36), 4000 + rng.normal(0, 20, LATEST)])
    found = shift_to_present_level(readings)
    assert len(found) == len(readings)
    assert abs(np.median(found) - 4000) < 40
    assert 10 < found.std() < 40


@pytest.mark.parametrize("dip", [1, 2])
def test_a_dip_that_has_just_begun_is_no_level(dip: int) -> None:
    readings = np.append(np.full(37, 5000.0), np.full(dip, 800.0))
    assert find_level_changes(readings) == [0]


def test_a_rhythm_that_comes_back_is_no_level() -> None:
    readings = np.tile(np.repeat([5000.0, 800.0], 8), 3)
    assert np.array_equal(shift_to_present_level(readings), readings)


@examples(50)
@given(st.lists(st.floats(0.0, 1e6, width=32), max_size=60), st.floats(0.1, 100.0))
def test_the_unit_does_not_matter(values: list[float], unit: float) -> None:
    readings = np.array(values)
    found, scaled = shift_to_present_level(readings), shift_to_present_level(readings * unit)
    assert found.shape == readings.shape
    assert (found >= 0).all()
    highest = float(readings.max(initial=1.0))
    assert np.allclose(scaled, found * unit, rtol=1e-6, atol=1e-3 * unit * highest)
