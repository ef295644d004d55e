"""A job that slows down, seen as early as its noise allows, and nothing else."""

import numpy as np
import pytest

from fleetcast.fleet.events import Step
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.stragglers.change_point import (
    SCALES,
    find_best_pace,
    find_slow_creep,
    find_slowdown,
    is_still_slow,
    make_step_reference,
)
from fleetcast.models.stragglers.steps import measure_pace


def noisy(steps: int, sigma: float, seed: int = 0) -> np.ndarray:
    return np.exp(np.random.default_rng(seed).normal(0, sigma, steps))


def first_seen(seconds: np.ndarray, start: int) -> int | None:
    return next((at - start for at in range(start + 1, len(seconds) + 1) if find_slowdown(seconds[:at])), None)


@pytest.mark.parametrize(("factor", "steps"), [(1.5, 3), (1.2, 3), (1.1, 5)])
def test_the_larger_a_slowdown_the_sooner_it_is_seen(factor, steps):
    seconds = np.concatenate((noisy(60, 0.01), factor * noisy(20, 0.01, 1)))
    assert first_seen(seconds, 60) == steps


def test_noise_alone_is_no_change():
    for seed in range(5):
        seconds = noisy(200, 0.2, seed)
        assert not any(find_slowdown(seconds[:at]) for at in range(16, 200))


def test_what_a_job_does_every_now_and_then_is_usual():
    bursts = np.tile(np.concatenate((np.ones(12), np.full(4, 1.5))), 8)
    assert find_slowdown(np.concatenate((bursts, np.ones(12), np.full(3, 1.5)))) is None
    assert find_slowdown(np.concatenate((bursts, np.ones(12), np.full(3, 2.5)))) is not None


def test_a_slow_spell_ends_nearer_to_the_usual_than_to_its_limit():
    measure = make_step_reference(np.ones(40), SCALES[0])
    assert measure.limit_s == pytest.approx(1.12)
    assert is_still_slow(np.array([1.3, 1.07]), measure)
    assert is_still_slow(np.array([1.07, 1.07]), measure)
    assert not is_still_slow(np.array([1.3, 1.04, 1.04]), measure)


def test_a_slow_drift_is_seen_though_every_step_is_like_the_one_before():
    seconds = np.exp(np.random.default_rng(0).normal(0, 0.01, 3000)) * np.linspace(1.0, 1.3, 3000)
    attempt, pace, seen = JobAttempt("j", 1), None, 0
    for number, duration_s in enumerate(seconds.tolist()):
        attempt.fold(Step(job="j", sequence=number, time_ms=number * 1000, step=number, duration_s=duration_s))
        if number % 10 == 9:
            pace = measure_pace(attempt, pace)
            seen = seen or (number if pace.slow else 0)
    assert 1000 < seen < 1500  # 10 % and the noise: at step 1,000 it is 10 % slower
    assert pace.slow
    assert pace.usual_s == pytest.approx(1.0, abs=0.02)
    steady = seconds / np.linspace(1.0, 1.3, 3000)
    assert find_slow_creep(steady[-256:], find_best_pace(steady[-256:])) is None


def pace_with_lengths(lengths: np.ndarray, seconds: np.ndarray):
    attempt, pace = JobAttempt("j", 1), None
    for number, (length, duration_s) in enumerate(zip(lengths.tolist(), seconds.tolist(), strict=True)):
        attempt.fold(
            Step(
                job="j", sequence=number, time_ms=number * 10_000, step=number, duration_s=duration_s, tokens=100_000,
                sequence_length=length,
            )
        )  # fmt: skip
        pace = measure_pace(attempt, pace)
    return pace


def test_steps_that_are_long_because_of_their_sequences_are_nobodys_fault():
    lengths = np.random.default_rng(0).uniform(500, 1500, 40)
    lengths[-4:] = 6000
    pace = pace_with_lengths(lengths, 1.0 + lengths / 2000)
    assert pace.slow
    assert pace.cause == "sequence_length"
    assert pace.expected_s == pytest.approx(4.0)  # for its lengths; by its past it were 1.5
    assert pace.ratio == pytest.approx(4.0 / 1.5, rel=0.1)
    slowed_too = (1.0 + lengths / 2000) * np.where(np.arange(40) < 36, 1.0, 1.5)
    assert pace_with_lengths(lengths, slowed_too).cause == "unknown"
