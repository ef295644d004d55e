"""The iteration period of a job from its telemetry, or why nobody can tell.

Plan:
    1. every channel (SM activity, tensor activity, power, traffic): detrend, clip stalls, autocorrelation by FFT;
       the curves are averaged: what repeats shows in all channels at one lag, noise does not
    2. candidates are the hills of that curve; the first one that is nearly as high as the highest is the period
       (later ones are its multiples, lower ones before it are micro-batches)
    3. the hill must hold a line of the spectrum, too, and be refined at its multiples: a hundredth of a sample
       matters where a period has four
    4. aliasing: what repeats more often than every four samples is not seen, or seen as a slow beat. A beat is faint,
       since a sample is a mean over its interval: below a swing that steps leave, nothing is said

After AutoPeriod (Vlachos et al., SDM 2005): a spectrum proposes, the autocorrelation disposes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SAMPLES_A_PERIOD = 4.0
FEWEST_SAMPLES = 24
LONGEST_PERIODS = 3  # the longest lag is a third of the series
HILL = 0.25  # of the averaged autocorrelation
NEARLY = 0.8  # of the highest hill up to WITHIN times its lag: a step has no more micro-batches
WITHIN = 12
MOST_MULTIPLES = 8
LEAST_SWING = 0.5  # spread over mean, of the liveliest channel
CHANNEL_SWING = 0.2  # of every further one
LEAST_KNOWN = 0.8  # of the samples of a channel
LAGS = 4000
FINE = 4


@dataclass(frozen=True, slots=True)
class Period:
    """`period_s` None: `reason` says why. strength: the autocorrelation at it, 0..1."""

    period_s: float | None
    reason: str = ""
    strength: float = 0.0


def find_period(channels: Array, interval_s: float) -> Period:
    """The period of what repeats in `channels` (channel, sample), regular in time; NaN where nothing was reported.

    >>> beat = np.sin(np.arange(400) * 2 * np.pi / 12.5)
    >>> round(find_period(1 + beat[None, :], 0.5).period_s, 2)
    6.25
    """
    usable = [_filled(row) for row in channels if np.isfinite(row).mean() >= LEAST_KNOWN]
    if not usable or channels.shape[1] < FEWEST_SAMPLES:
        return Period(None, f"fewer than {FEWEST_SAMPLES} samples in a row")
    swings = [_swing(row) for row in usable]
    lively = [row for row, swing in zip(usable, swings, strict=True) if swing > CHANNEL_SWING]
    if max(swings) < LEAST_SWING:
        return Period(None, "nothing swings: either it does not repeat, or faster than the samples can show")
    curve = _autocorrelation(lively)
    lag = _first_hill(curve)
    if lag is None:
        return Period(None, "nothing repeats")
    fine = _refined(curve, lag) / FINE
    if fine < SAMPLES_A_PERIOD or _is_beat(lively, fine):
        return Period(None, f"fewer than {SAMPLES_A_PERIOD:.0f} samples a period: shorter than the samples can show")
    return Period(fine * interval_s, "", float(curve[lag]))


def _filled(row: Array) -> Array:
    """Gaps bridged, stalls clipped, slow drift taken off; the mean stays."""
    from scipy import signal

    known = np.isfinite(row)
    whole = np.interp(np.arange(len(row)), np.flatnonzero(known), row[known])
    low, high = np.quantile(whole, (0.01, 0.99))
    whole = np.clip(whole, low, high)
    return np.asarray(signal.detrend(whole) + whole.mean())


def _swing(row: Array) -> float:
    mean = float(np.abs(row).mean())
    return float(row.std()) / mean if mean > 0 else 0.0


def _autocorrelation(rows: list[Array]) -> Array:
    """The mean of the rows' autocorrelations, at FINE lags a sample: hills lie between samples, too."""
    from scipy import signal  # slow to import, both: only who looks for a period waits
    from statsmodels.tsa.stattools import acf

    lags = min(len(rows[0]) // LONGEST_PERIODS, LAGS)
    curve = np.mean([acf(row, nlags=lags, fft=True, adjusted=True) for row in rows], axis=0)
    even = np.concatenate((curve, curve[-2:0:-1]))
    return np.asarray(signal.resample(even, FINE * len(even))[: FINE * lags])


def _first_hill(curve: Array) -> int | None:
    from scipy import signal

    hills, _ = signal.find_peaks(curve, height=HILL, prominence=HILL / 2)
    if not len(hills):
        return None
    for hill in hills.tolist():
        near = curve[hills[(hills >= hill) & (hills <= WITHIN * hill)]]
        if curve[hill] >= NEARLY * near.max():
            return int(hill)
    return None


def _is_beat(rows: list[Array], period: float) -> bool:
    """Whether lines faster than four samples outshine those of the period: then it is a multiple of one of them."""
    power = np.mean([_spectrum(row) for row in rows], axis=0)
    frequency = np.arange(len(power)) / (2 * (len(power) - 1))
    own = np.abs(frequency * period - 1) < 0.1
    return bool(power[frequency > 1 / SAMPLES_A_PERIOD].max() > power[own].max(initial=0.0))


def _spectrum(row: Array) -> Array:
    from scipy import signal

    _, power = signal.periodogram(row / row.std(), window="hann", detrend="constant")
    return np.asarray(power)


def _refined(curve: Array, lag: int) -> float:
    """The period in samples from its multiples, while they are hills."""
    period = _vertex(curve, lag)
    for many in range(2, MOST_MULTIPLES + 1):
        at = round(period * many)
        reach = max(1, round(period / 4))
        if at + reach + 1 >= len(curve):
            break
        top = at - reach + int(np.argmax(curve[at - reach : at + reach + 1]))
        if curve[top] < curve[lag] / 2 or not at - reach < top < at + reach:
            break  # on the edge of what is looked at nothing is a hill: a parabola there leads anywhere
        period = _vertex(curve, top) / many
    return period


def _vertex(curve: Array, at: int) -> float:
    """Where the parabola through a hill's top and its neighbours is highest."""
    before, top, after = curve[at - 1 : at + 2]
    bend = before - 2 * top + after
    return at + (0.5 * float((before - after) / bend) if bend < 0 else 0.0)
