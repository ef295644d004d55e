"""Estimation of a job's iteration period from its telemetry.

The method follows AutoPeriod (Vlachos et al., SDM 2005).

1. Each channel (SM activity, tensor activity, power, traffic) is detrended, its stalls are clipped, and its
   autocorrelation is computed by FFT. The curves are averaged, since a repetition shows in all channels at one
   lag and noise does not.
2. Candidates are the hills of that curve. The first one that is nearly as high as the highest is the period.
   Later ones are its multiples, and lower ones before it are micro-batches.
3. The highest hill must be higher than the hills of shuffled copies of the same samples, which arise by chance.
4. The hill is refined at its multiples, because a hundredth of a sample matters where a period has four samples.
5. A repetition faster than every four samples shows as a faint slow beat, if at all. If the swing is too small, no
   period is returned.
6. A series that stays at one level most of the time swings too little for this method. For such series,
   `features/pulses.py` compares the times between short pauses or bursts.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.peaks import find_peaks
from fleetcast.features.pulses import find_rhythm
from fleetcast.features.sums import divide

Array = NDArray[np.float64]

SAMPLES_A_PERIOD = 4.0
FEWEST_SAMPLES = 24
LONGEST_PERIODS = 3  # the longest lag is a third of the series
COPIES, CHANCE = 100, 0.99  # shuffled copies, and the level of their highest autocorrelations that a hill must pass
SHUFFLED_VALUES = 300_000  # of all copies together: a part of a long series tells as much, scaled
HILL = 0.1  # of the averaged autocorrelation, at the least: drift is more alike than its shuffled copies
NEAR_HILL = 0.25  # within four samples, where noise alone leaves hills between the samples
NEARLY = 0.8  # of the highest hill up to WITHIN times its lag: a step has no more micro-batches
WITHIN = 12
MOST_MULTIPLES = 8
STILL = 0.5  # of the first hill: so high are the multiples that refine it
FAR = 50.0  # samples: there a hill stands to half a per cent, and further on lie the long steps, not the usual ones
LEAST_SWING = 0.5  # spread over mean, of the liveliest channel
CHANNEL_SWING = 0.2  # of every further one
LEAST_KNOWN = 0.8  # of the samples of a channel
REGULAR = 0.7  # of the autocorrelation: steps that are less alike are counted one by one
SAMPLES_AN_EDGE = 8.0  # a period: with fewer a rise is not seen well enough
LEAST_TRUE = 0.6  # of the times between rises, about a period long
LAGS = 4000
FINE = 4
TOO_FAST = f"fewer than {SAMPLES_A_PERIOD:.0f} samples a period: shorter than the samples can show"


@dataclass(frozen=True, slots=True)
class Period:
    """The iteration period of a job, or the reason why there is none.

    period_s: None if unknown. `reason` then says why. strength: the autocorrelation at the period,
    0 to 1.
    """

    period_s: float | None
    reason: str = ""
    strength: float = 0.0


def find_period(channels: Array, interval_s: float, averaged: NDArray[np.bool_] | None = None) -> Period:
    """Find the iteration period of a job in the samples of its metrics.

    channels: (channel, sample), regular in time, NaN for missing samples. averaged: (channel,) whether samples
    are means over their interval. Without it, they count as momentary readings.

    >>> beat = np.sin(np.arange(400) * 2 * np.pi / 12.5)
    >>> round(find_period(1 + beat[None, :], 0.5).period_s, 2)
    6.25
    """
    known = np.isfinite(channels)
    usable = known.mean(axis=1) >= LEAST_KNOWN if channels.shape[1] else np.zeros(len(channels), bool)
    if not usable.any() or channels.shape[1] < FEWEST_SAMPLES:
        return Period(None, f"fewer than {FEWEST_SAMPLES} samples in a row")
    rows = bridge_gaps(channels[usable])
    found = find_swing_period(rows, interval_s)
    if found.period_s is not None:
        return found
    means = np.zeros(len(rows), bool) if averaged is None else averaged[usable]
    rhythm = find_rhythm(rows, means, interval_s)
    if rhythm.period is None:
        return found if found.reason == TOO_FAST else Period(None, rhythm.reason or found.reason)
    if found.reason == TOO_FAST and rhythm.longest < SAMPLES_A_PERIOD + 1:
        every_s = rhythm.period * interval_s
        return Period(None, f"its swing every {every_s:.0f} s is so short that a faster rhythm may look the same")
    return Period(rhythm.period * interval_s)


def find_swing_period(rows: Array, interval_s: float) -> Period:
    """Find the period of series that swing most of the time. rows: (channel, sample) without NaN."""
    level, swings = _remove_drift(rows)
    if swings.max() < LEAST_SWING:
        span_min = rows.shape[1] * interval_s / 60
        unseen = "it does not repeat, or faster than the samples can show, or more seldom"
        return Period(None, f"nothing swings in {span_min:.0f} min: {unseen}")
    lively = level[swings > CHANNEL_SWING]
    curve = _compute_autocorrelation(lively)
    lag = _find_first_hill(curve, max(HILL, _bound_chance_correlation(lively, len(curve) // FINE)))
    if lag is None:
        return Period(None, "nothing repeats")
    fine = _refine_period(curve, lag) / FINE
    if fine < SAMPLES_A_PERIOD or _is_beat(lively, fine):
        return Period(None, TOO_FAST)
    strength = min(float(curve[lag]), 1.0)
    if strength < REGULAR and fine >= SAMPLES_AN_EDGE:
        fine = _find_usual_cycle(lively, fine)
    return Period(fine * interval_s, "", strength)


def bridge_gaps(rows: Array) -> Array:
    """Return (channel, sample) `rows` with missing samples interpolated linearly."""
    at, whole, known = np.arange(rows.shape[1]), rows.copy(), np.isfinite(rows)
    for channel in np.flatnonzero(~known.all(axis=1)).tolist():
        whole[channel] = np.interp(at, at[known[channel]], rows[channel, known[channel]])
    return whole


def _remove_drift(rows: Array) -> tuple[Array, Array]:
    """Return (channel, sample) the rows without stalls, drift and mean, and (channel,) the relative spread.

    The relative spread is the spread divided by the mean.
    """
    at = np.arange(rows.shape[1])
    ordered, odd = np.sort(rows, axis=1), round(0.01 * (len(at) - 1))  # a hundredth at either end
    whole = np.clip(rows, ordered[:, odd, None], ordered[:, -1 - odd, None])
    mean = whole.mean(axis=1)
    time = at - at.mean()
    slope = (whole - mean[:, None]) @ time / (time @ time)
    level = whole - mean[:, None] - slope[:, None] * time
    spread, scale = level.std(axis=1), np.abs(mean)
    return level, divide(spread, scale, 0.0)


def _correlate_at_lags(rows: Array, lags: int) -> Array:
    """Return (..., lag) the channels' mean autocorrelation at lags 0 to `lags`.

    rows: (..., channel, sample).
    """
    many = rows.shape[-1]
    length = 1 << (many + lags).bit_length()
    lines = np.fft.rfft(rows, length)
    energy = np.maximum((rows**2).sum(axis=-1), np.finfo(np.float64).tiny)
    power = ((lines.real**2 + lines.imag**2) / energy[..., None]).mean(axis=-2)
    left = 1 - np.arange(lags + 1) / many  # of the samples have a partner at that lag
    return np.asarray(np.fft.irfft(power, length)[..., : lags + 1] / left)


def _compute_autocorrelation(rows: Array) -> Array:
    """Return the mean of the channels' autocorrelations, at FINE lags per sample.

    Lags are finer than a sample, because hills also lie between samples.
    """
    lags = min(rows.shape[1] // LONGEST_PERIODS, LAGS)
    curve = _correlate_at_lags(rows, lags)
    even = np.concatenate((curve, curve[-2:0:-1]))
    return np.asarray(np.fft.irfft(np.fft.rfft(even), FINE * len(even))[: FINE * lags] * FINE)


def _bound_chance_correlation(rows: Array, lags: int) -> float:
    """Return the autocorrelation that shuffled samples exceed only by chance (quantile CHANCE).

    All channels are shuffled in the same way.
    """
    channels, many = rows.shape
    part = min(many, max(4 * FEWEST_SAMPLES, SHUFFLED_VALUES // (COPIES * channels)))
    rng = np.random.default_rng(0)
    order = rng.random((COPIES, many), np.float32).argsort(axis=1)[:, :part]
    copies = rows[:, order].swapaxes(0, 1)
    curves = _correlate_at_lags(copies, max(1, round(lags * part / many)))
    highest = float(np.quantile(curves[:, 1:].max(axis=-1), CHANCE))
    return highest * float(np.sqrt(part / many))  # its spread falls with the root of the samples


def _find_first_hill(curve: Array, height: float) -> int | None:
    hills = find_peaks(curve, height=height, prominence=height / 2)
    hills = hills[(hills >= SAMPLES_A_PERIOD * FINE) | (curve[hills] >= NEAR_HILL)]
    if not len(hills):
        return None
    for hill in hills.tolist():
        near = curve[hills[(hills >= hill) & (hills <= WITHIN * hill)]]
        if curve[hill] >= NEARLY * near.max():
            return int(hill)
    return None


def _is_beat(rows: Array, period: float) -> bool:
    """Return whether a period is only a multiple of the true period, which is shorter than four samples.

    This is the case if, in all channels, frequencies above a quarter per sample are stronger than the frequency
    of the period.
    """
    power = np.abs(np.fft.rfft(rows * np.hanning(rows.shape[1]))) ** 2
    frequency = np.arange(power.shape[1]) / rows.shape[1]
    own = np.abs(frequency * period - 1) < 0.1
    return bool((power[:, frequency > 1 / SAMPLES_A_PERIOD].max(axis=1) > power[:, own].max(axis=1, initial=0.0)).all())


def _find_usual_cycle(rows: Array, period: float) -> float:
    """Return the median time between rises in samples, or `period` if the rises do not support it.

    If steps vary in length, long steps increase the period of the autocorrelation, but not this median.
    """
    usual = []
    for row in rows:
        low, high = np.quantile(row, (0.1, 0.9))
        gaps = np.diff(_find_rises(row, low + 0.35 * (high - low), low + 0.65 * (high - low)))
        if len(gaps) and float((np.abs(gaps / period - 1) < 0.5).mean()) >= LEAST_TRUE:
            usual.append(float(np.median(gaps)))
    return float(np.median(usual)) if usual else period


def _find_rises(row: Array, low: float, high: float) -> Array:
    """Return (rise,) the times, in samples, at which a channel rises through the middle.

    A rise goes from below `low` to above `high`.
    """
    side = np.where(row > high, 1, np.where(row < low, -1, 0))
    at = np.flatnonzero(side)
    tops = at[1:][(side[at[1:]] > 0) & (side[at[:-1]] < 0)]
    middle = (low + high) / 2
    step = row[tops] - row[tops - 1]
    beyond: Array = divide(row[tops] - middle, step, 0.0).clip(0, 1)
    return tops - beyond


def _refine_period(curve: Array, lag: int) -> float:
    """Return the period in samples, refined from its multiples, up to the first multiple that is not a hill."""
    period = _find_vertex(curve, lag)
    for many in range(2, MOST_MULTIPLES + 1):
        if period * (many - 1) >= FAR * FINE:
            break
        at = round(period * many)
        reach = max(1, round(period / 4))
        if at + reach + 1 >= len(curve):
            break
        top = at - reach + int(np.argmax(curve[at - reach : at + reach + 1]))
        if curve[top] < STILL * curve[lag] or not at - reach < top < at + reach:
            break  # on the edge of what is looked at nothing is a hill: a parabola there leads anywhere
        period = _find_vertex(curve, top) / many
    return period


def _find_vertex(curve: Array, at: int) -> float:
    """Return the position of the vertex of the parabola through the point `at` and its two neighbours."""
    before, top, after = curve[at - 1 : at + 2]
    bend = before - 2 * top + after
    return at + (0.5 * float((before - after) / bend) if bend < 0 else 0.0)
