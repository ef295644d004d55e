"""Rhythms of jobs that rest at one level for most of the time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.period import find_period
from fleetcast.features.pulses import find_rhythm
from tests.fuzz.bounds import examples

INTERVAL_S = 15.0
HOURS_3 = 720  # samples


def work(
    period_s: float, pause_s: float, samples: int, seed: int = 0, jitter: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return channels (activity, momentary watts, mean watts) of a job that pauses, and which of them are means."""
    rng = np.random.default_rng(seed)
    gaps = period_s * (1 + jitter * rng.standard_normal(int(samples * INTERVAL_S / period_s) + 3))
    begins = np.cumsum(gaps) - period_s * rng.uniform(1, 2)

    def works(time_s: np.ndarray) -> np.ndarray:
        last = begins[np.maximum(np.searchsorted(begins, time_s, side="right") - 1, 0)]
        return ~((time_s >= last) & (time_s - last < pause_s))

    at_s = np.arange(1, samples + 1) * INTERVAL_S
    now = works(at_s).astype(float)
    fine = at_s[:, None] - (np.arange(60) + 0.5) / 60 * INTERVAL_S
    mean = works(fine).mean(axis=1)
    noise = 1 + 0.02 * rng.standard_normal((3, samples))
    return np.stack([0.02 + 0.55 * now, 120 + 480 * now, 120 + 480 * mean]) * noise, np.array([False, False, True])


@pytest.mark.parametrize(("period_s", "pause_s"), [(240, 16), (240, 30), (600, 20), (90, 15), (300, 291), (600, 560)])
def test_a_job_that_leaves_its_level_for_a_moment_has_a_rhythm(period_s: float, pause_s: float) -> None:
    channels, means = work(period_s, pause_s, HOURS_3)
    assert find_period(channels, INTERVAL_S, means).period_s == pytest.approx(period_s, rel=0.02)


@pytest.mark.parametrize(("period_s", "pause_s"), [(240, 30), (611, 25), (137, 35), (300, 265)])
def test_momentary_readings_show_pauses_that_cover_two_of_them(period_s: float, pause_s: float) -> None:
    channels, means = work(period_s, pause_s, HOURS_3)
    assert find_period(channels[:2], INTERVAL_S, means[:2]).period_s == pytest.approx(period_s, rel=0.02)


def test_a_fall_from_97_to_3_per_cent_every_240_s_is_seen_in_half_an_hour() -> None:
    busy = np.full(120, 0.97)
    busy[5::16] = busy[6::16] = 0.03
    assert find_period(busy[None, :], INTERVAL_S).period_s == pytest.approx(240)


def test_means_show_pauses_that_are_shorter_than_a_scrape() -> None:
    channels, means = work(1320, 8, HOURS_3)
    assert find_period(channels, INTERVAL_S, means).period_s == pytest.approx(1320, rel=0.02)
    momentary = find_period(channels[:2], INTERVAL_S)
    assert momentary.period_s is None
    assert "shorter than the 15 s between samples" in momentary.reason


@pytest.mark.parametrize("pause_share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("period_s", [610, 690, 780])
def test_half_an_hour_shows_a_rhythm_of_which_one_edge_is_seen_three_times(period_s: float, pause_share: float) -> None:
    found, seen = 0, 0
    for seed in range(12):
        channels, means = work(period_s, pause_share * period_s, 120, seed)
        sides = (channels[2] > 360).astype(int)
        edges = np.diff(sides)
        seen += max((edges > 0).sum(), (edges < 0).sum()) >= 3
        period = find_period(channels, INTERVAL_S, means).period_s
        found += period is not None
        assert period is None or period == pytest.approx(period_s, rel=0.03)
    assert found >= seen - 1
    assert found >= 3


def test_three_pauses_of_momentary_readings_are_too_few_and_the_reason_says_so() -> None:
    channels, means = work(600, 60, 120)
    assert "so few may be even by chance" in find_period(channels[:2], INTERVAL_S, means[:2]).reason


def test_the_reason_for_no_rhythm_is_the_true_one() -> None:
    channels, means = work(2400, 60, 120)
    assert "3 times are needed" in find_period(channels, INTERVAL_S, means).reason
    steady = 1 + 0.01 * np.random.default_rng(1).standard_normal((2, 120))
    assert "or more seldom" in find_period(steady, INTERVAL_S).reason
    irregular = np.ones((1, 400))
    for at in (11, 30, 90, 104, 171, 260, 277, 360):
        irregular[0, at : at + 2] = 0.1
    assert "at no regular distance" in find_period(irregular, INTERVAL_S).reason


def test_a_missed_pause_and_an_evaluation_do_not_hide_the_rhythm() -> None:
    channels, _ = work(600, 20, HOURS_3)
    row = channels[2].copy()
    gone = np.flatnonzero(row < 500)[:2]
    row[gone[0] - 1 : gone[-1] + 2] = 600
    row[333:338] = 450
    assert find_rhythm(row[None, :], np.array([True]), INTERVAL_S).period == pytest.approx(40, rel=0.02)


@examples(40)
@given(st.integers(0, 2**31), st.floats(120, 2400), st.floats(0.03, 0.97), st.floats(0, 0.03))
def test_a_rhythm_is_right_or_unknown(seed: int, period_s: float, works: float, jitter: float) -> None:
    channels, means = work(period_s, (1 - works) * period_s, HOURS_3, seed, jitter)
    found = find_period(channels, INTERVAL_S, means)
    if found.period_s is None:
        assert found.reason
    else:
        assert found.period_s == pytest.approx(period_s, rel=0.06) or jitter > 0


@examples(40)
@given(st.integers(0, 2**31), st.floats(0.01, 0.15))
def test_pauses_at_random_times_seldom_look_like_a_rhythm(seed: int, rate: float) -> None:
    rng = np.random.default_rng(seed)
    answers = 0
    for _ in range(10):
        busy = np.ones(HOURS_3)
        at = np.cumsum(rng.exponential(1 / rate, 200) + 2).astype(int)
        at = at[at < HOURS_3 - 1]
        busy[at] = busy[at + 1] = 0.0
        answers += (
            find_period(busy[None, :] + 0.01 * rng.standard_normal((1, HOURS_3)), INTERVAL_S).period_s is not None
        )
    assert answers <= 2
