import numpy as np
import pytest

from fleetcast.models.jobs.template import lock_phase, predict_ahead

LEVELS = (0.1, 0.5, 0.9)


def beat(period: float, samples: int = 120, wobble: float = 0.0) -> np.ndarray:
    """Computing for three fifths of a period, waiting for the rest; wobble: of each period's length."""
    rng = np.random.default_rng(1)
    ends = np.cumsum(period * (1 + wobble * rng.standard_normal(samples)))
    at = np.arange(samples)
    cycle = np.searchsorted(ends, at, side="right")
    begins = np.concatenate(([0.0], ends))[cycle]
    return np.where(at - begins < 0.6 * (ends[cycle] - begins), 600.0, 100.0)


def test_a_regular_job_is_read_ahead_to_the_phase_that_it_will_be_in() -> None:
    values = beat(12.0, 140)
    lock = lock_phase(values[:120], 12.0)
    assert lock is not None
    for samples in range(1, 20):
        middle = predict_ahead(values[:120], lock, samples, 15.0, LEVELS)[1]
        if 1 <= (119 + samples) % 12 <= 5 or 8 <= (119 + samples) % 12 <= 10:  # not at an edge
            assert middle == values[119 + samples]


def test_a_period_that_is_a_little_off_is_pulled_in() -> None:
    lock = lock_phase(beat(12.0), 12.2)
    assert lock is not None
    assert lock.period == pytest.approx(12.0, rel=0.012)


def test_a_phase_that_strays_leaves_the_level() -> None:
    values = beat(12.0, wobble=0.15)
    lock = lock_phase(values, 12.0)
    assert lock is not None
    soon, late = (predict_ahead(values, lock, samples, 15.0, LEVELS) for samples in (1, 600))
    assert late[0] == 100.0
    assert late[2] == 600.0
    assert soon != late


def test_two_cycles_are_no_template_and_silence_tells_nothing() -> None:
    assert lock_phase(beat(50.0), 50.0) is None
    values = np.full(120, np.nan)
    lock = lock_phase(values, 12.0)
    assert lock is not None
    assert predict_ahead(values, lock, 3, 15.0, LEVELS) == []


def test_gaps_are_no_phase() -> None:
    values = beat(12.0)
    gaps = np.where(np.arange(120) % 7 == 3, np.nan, values)
    lock = lock_phase(gaps, 12.0)
    assert lock is not None
    assert predict_ahead(gaps, lock, 15, 15.0, LEVELS)[1] == 600.0  # the third sample of a cycle
