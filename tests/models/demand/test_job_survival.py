"""How long started GPUs stay, from sums of what started and ended."""

import numpy as np
import pytest

from fleetcast.models.demand.job_survival import AGES_S, JobSurvival


def fleet(bins, lengths, rng):
    """(1, bin) started, ended, running of a fleet whose jobs of one GPU run for `lengths` bins, drawn at random."""
    started = rng.poisson(20.0, bins)
    ended = np.zeros(bins)
    for bin, count in enumerate(started):
        last = bin + rng.choice(lengths, count)
        np.add.at(ended, last[last < bins], 1)
    running = np.cumsum(started - ended)
    return started[None].astype(float), ended[None], running[None]


def test_jobs_of_half_an_hour_leave_sooner_than_jobs_of_a_day():
    rng = np.random.default_rng(1)
    short = JobSurvival.fit(*fleet(600, [3], rng), 600)
    long = JobSurvival.fit(*fleet(600, [144], rng), 600)
    assert short.compute_ending_share(6)[0] > 2 * long.compute_ending_share(6)[0]
    assert short.mix @ short.compute_ending_share(6) > 2 * long.mix @ long.compute_ending_share(6)


def test_the_young_are_told_from_the_old():
    rng = np.random.default_rng(2)
    fit = JobSurvival.fit(*fleet(1500, [1, 1, 1, 200], rng), 600)
    leaving = fit.compute_ending_share(3)
    assert leaving[0] > 0.5 > leaving[6]


def test_ages_add_up_to_what_runs_and_are_those_of_earlier_bins_alone():
    rng = np.random.default_rng(3)
    started, ended, running = fleet(400, [2, 30], rng)
    fit = JobSurvival.fit(started, ended, running, 600)
    ages = fit.compute_ages(started, ended, running, np.arange(400))
    assert ages.shape == (1, 400, len(AGES_S))
    np.testing.assert_allclose(ages.sum(axis=-1), running, atol=1e-3)
    early = fit.compute_ages(started[:, :99], ended[:, :99], running[:, :99], np.array([98, 40]))
    np.testing.assert_array_equal(early, ages[:, [98, 40]])


def test_more_leave_the_longer_one_waits_and_never_more_than_there_are():
    fit = JobSurvival.fit(*fleet(300, [5, 50], np.random.default_rng(4)), 600)
    leaving = np.array([fit.compute_ending_share(step) for step in (0, 1, 6, 36, 144, 5000)])
    assert leaving[0] == pytest.approx(0.0)
    assert (np.diff(leaving, axis=0) >= 0).all()
    assert (leaving <= 1).all()


def test_more_that_end_than_ran_leave_nothing_below_zero():
    started, ended, running = np.array([[1.0, 0.0]]), np.array([[0.0, 9.0]]), np.array([[1.0, np.nan]])
    fit = JobSurvival.fit(started, ended, running, 600)
    assert fit.compute_ages(started, ended, running, np.array([1])).sum() == pytest.approx(0.0)
    assert np.isfinite(fit.hazard).all()
