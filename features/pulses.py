"""Rhythms of short pauses or bursts: how regularly a job leaves its usual level.

Training jobs pause for their checkpoints, for example. An autocorrelation needs a series that swings most of
the time. Here each excursion counts as one pulse, and the times between pulses are compared. If the series
ends within a pulse, one edge of it is known: beginnings are compared with beginnings and ends with ends.
A rhythm is reported only if pulses at random times would rarely be so evenly spaced.
"""

from dataclasses import dataclass
from math import comb

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FEWEST_PULSES = 3
MOST_PULSES = 60  # of the newest ones: enough to tell, and the chain below takes time with their square
SHORTEST_SAMPLES = 4.0  # of a period
CLEAR_SIGMAS, CLEAR_SHARE = 5.0, 0.06  # so far from the usual level is outside, in spreads and as a share of the range
RARE = 0.4  # with a larger share outside, the median is no usual level
GAP_SIGMAS = 4.0  # between the two levels of a series that has two
LEAST_RANGE = 0.08  # of the level: a smaller excursion is the wobble of steady work
BLURRED, JITTER = 0.75, 0.04  # tolerance of an interval: samples, and share of the period
PRECISE = 0.3  # samples: a mean over a sample shows which part of it lies outside, a momentary reading does not
MOST_SKIPPED = 3  # periods between two neighbours: a scrape may miss pulses
MOST_MISSING, MOST_EXTRA = 0.25, 0.34  # share of expected pulses that are absent, and of pulses that do not fit
CHANCE = 0.02
CANDIDATES = 8


@dataclass(frozen=True, slots=True)
class Pulses:
    """The pulses of one series: its excursions from the usual level. Times are in samples.

    centers: (pulse,) the middles of pulses with both edges. begins, ends: (pulse,) edges within the series.
    longest: the length of the longest pulse. blurred: the error of an interval between two pulses, in samples.
    """

    centers: Array
    begins: Array
    ends: Array
    longest: int
    blurred: float
    pauses: bool  # below the usual level; otherwise bursts above it


@dataclass(frozen=True, slots=True)
class Rhythm:
    """The rhythm of pulses. Times are in samples. If there is no rhythm, `period` is None and `reason` says why."""

    period: float | None
    reason: str = ""
    centers: tuple[float, ...] = ()  # of the pulses that fit, or one edge of each
    longest: int = 0  # samples of the longest pulse
    pauses: bool = True


def find_rhythm(channels: Array, averaged: NDArray[np.bool_], interval_s: float) -> Rhythm:
    """Find the clearest rhythm of pulses in channels (channel, sample), regular in time, without NaN.

    averaged: (channel,) whether samples are means over their interval. A channel of momentary readings
    can miss pulses that are shorter than a sample, so its rhythm counts only if a pulse covers two
    samples.

    >>> pauses = np.ones((1, 120))
    >>> pauses[0, 7::16] = pauses[0, 8::16] = 0.03
    >>> round(find_rhythm(pauses, np.array([False]), 15.0).period, 9)
    16.0
    """
    found, best, least, most, short = Rhythm(None), CHANCE, 1.0, -1, False
    for row, is_mean in zip(channels, averaged.tolist(), strict=True):
        pulses = find_pulses(row, is_mean)
        if pulses is None:
            continue
        most = max(most, len(pulses.centers), len(pulses.begins), len(pulses.ends))
        if not is_mean and pulses.longest == 1:
            short = True
            continue
        fit, chance = _fit_rhythm(pulses)
        least = min(least, chance)
        if fit is not None and chance < best:
            found, best = fit, chance
    if found.period is not None:
        return found
    return Rhythm(None, _explain_missing_rhythm(most, short, least < 1.0, channels.shape[1] * interval_s, interval_s))


def find_pulses(row: Array, is_mean: bool) -> Pulses | None:
    """Return the excursions of row (sample,) from its usual level, or None if there are none."""
    split = _find_usual_level(row)
    if split is None:
        return None
    usual, edge, sign = split
    away = np.maximum(sign * (row - usual), 0.0)
    outside = np.concatenate([[False], away > edge, [False]])
    begins = np.flatnonzero(~outside[:-1] & outside[1:])
    ends = np.flatnonzero(outside[:-1] & ~outside[1:])
    short = ends - begins <= len(row) / 2
    begins, ends = begins[short][-MOST_PULSES:], ends[short][-MOST_PULSES:]
    begun, ended = begins > 0, ends < len(row)
    whole = begun & ended
    centers = []
    for begin, end in zip(begins[whole].tolist(), ends[whole].tolist(), strict=True):
        at = np.arange(begin - 1, end + 1)
        centers.append(float(np.average(at, weights=np.maximum(away[at], 1e-12))))
    seen = slice(None) if is_mean else whole
    longest = int((ends - begins)[seen].max(initial=0))
    from_, to = _find_pulse_edges(away, begins, ends) if is_mean else (begins, ends)
    blurred = PRECISE if is_mean else BLURRED
    return Pulses(np.array(centers), from_[begun].astype(float), to[ended].astype(float), longest, blurred, sign < 0)


def _find_pulse_edges(away: Array, begins: NDArray[np.intp], ends: NDArray[np.intp]) -> tuple[Array, Array]:
    """Return (pulse,) when each pulse begins and ends, in fractions of a sample.

    The samples are means over their interval. away: (sample,) distance from the usual level.
    """
    padded = np.concatenate([[0.0], away, [0.0]])
    full = np.array([np.median(away[begin:end]) for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)])
    first, last = padded[begins] + padded[begins + 1], padded[ends] + padded[ends + 1]
    return begins + 1 - np.minimum(first / full, 2.0), ends - 1 + np.minimum(last / full, 2.0)


def _find_usual_level(row: Array) -> tuple[float, float, int] | None:
    """Return the usual level, the distance from it at which a pulse begins, and the side of the pulses.

    The side is 1 for bursts above the level and -1 for pauses below it. Returns None for a series that
    stays at its usual level.
    """
    usual = float(np.median(row))
    lowest, highest = float(row.min()), float(row.max())
    sign = -1 if usual - lowest > highest - usual else 1
    reach = max(usual - lowest, highest - usual)
    if reach <= LEAST_RANGE * max(abs(usual), reach):
        return None
    edge = max(CLEAR_SIGMAS * 1.4826 * float(np.median(np.abs(row - usual))), CLEAR_SHARE * reach)
    share = float((sign * (row - usual) > edge).mean())
    if 0 < share < RARE:
        return usual, edge, sign
    middle = (lowest + highest) / 2
    low, high = row[row < middle], row[row >= middle]
    apart = float(high.mean() - low.mean())
    if apart < GAP_SIGMAS * max(float(low.std()), float(high.std())):
        return None
    if len(high) >= len(low):
        return float(high.mean()), apart / 2, -1
    return float(low.mean()), apart / 2, 1


def _fit_rhythm(pulses: Pulses) -> tuple[Rhythm | None, float]:
    """Return the rhythm that fits most pulses, and the probability that it arises by chance."""
    best, best_chance = None, 1.0
    edges = [edge for edge in (pulses.begins, pulses.ends) if len(edge) > len(pulses.centers)]
    for times in (pulses.centers, *edges):
        period, on, chance = _find_even_times(times, pulses.blurred)
        if chance < best_chance:
            best, best_chance = Rhythm(period, "", on, pulses.longest, pulses.pauses), chance
    return best, best_chance


def _find_even_times(times: Array, blurred: float) -> tuple[float | None, tuple[float, ...], float]:
    """Return the period of pulses, the times that fit it, and the probability of such a fit by chance.

    times: (pulse,) in samples. blurred: the error of an interval in samples.
    """
    found: tuple[float | None, tuple[float, ...], float] = None, (), 1.0
    if len(times) < FEWEST_PULSES:
        return found
    gaps = np.diff(times)
    tried = np.concatenate([np.quantile(gaps, (0.5, 0.25, 0.75)), gaps / 2, gaps, times[2:] - times[:-2]])
    seen: list[float] = []
    for period in tried.tolist():
        if period < SHORTEST_SAMPLES or any(abs(period / other - 1) < JITTER / 2 for other in seen):
            continue
        seen.append(period)
        on, turns = _find_longest_chain(times, period)
        chance = _compute_chance(len(times), times[on], turns, blurred)
        if chance < found[2]:
            found = float(np.polyfit(turns, times[on], 1)[0]), tuple(times[on].tolist()), chance
        if len(seen) == CANDIDATES:
            break
    return found if found[0] is not None and found[0] >= SHORTEST_SAMPLES else (None, (), 1.0)


def _find_longest_chain(centers: Array, period: float) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Return the longest chain of pulses that are whole periods apart, and the period number of each pulse."""
    apart = centers[:, None] - centers[None, :]
    turns = np.rint(apart / period).astype(np.int64)
    fits = (turns >= 1) & (turns <= MOST_SKIPPED) & (np.abs(apart - turns * period) <= BLURRED + JITTER * period)
    length = np.ones(len(centers), np.int64)
    before = np.full(len(centers), -1)
    for at in range(1, len(centers)):
        reached = np.where(fits[at, :at], length[:at], 0)
        if reached.max() > 0:
            before[at] = int(reached.argmax())
            length[at] = reached.max() + 1
    chain = [int(length.argmax())]
    while before[chain[-1]] >= 0:
        chain.append(int(before[chain[-1]]))
    on = np.array(chain[::-1], np.intp)
    steps = turns[on[1:], on[:-1]]
    return on, np.concatenate([[0], np.cumsum(steps)])


def _compute_chance(pulses: int, on: Array, turns: NDArray[np.int64], blurred: float) -> float:
    """Return the probability that pulses at random times fit a period as well as these. It is 1 if too few fit.

    pulses: the number of all pulses. on: (fitting,) times of the pulses that fit. turns: (fitting,) the
    number of each one's period. blurred: the error of these times in samples.
    """
    extra = pulses - len(on)
    missing = int(turns[-1]) + 1 - len(on)
    if len(on) < FEWEST_PULSES or extra > MOST_EXTRA * pulses or missing > MOST_MISSING * (turns[-1] + 1):
        return 1.0
    period = (on[-1] - on[0]) / turns[-1]
    off = float(np.abs(np.diff(on) - np.diff(turns) * period).max())
    hit = min(1.0, 2 * max(off, blurred) / period)
    return min(1.0, float(comb(pulses, extra) * hit ** (len(on) - 2)))


def _explain_missing_rhythm(most: int, short: bool, is_even: bool, span_s: float, interval_s: float) -> str:
    """Return a sentence that says why there is no rhythm.

    most: the most pulses of any channel, -1 if no channel has any. short: whether a channel was left out
    because its pulses are shorter than two samples. is_even: whether the pulses of a channel are evenly
    spaced, but too few to exclude chance.
    """
    if short:
        return f"its pauses may be shorter than the {interval_s:g} s between samples, which then miss some of them"
    if most < 0:
        return ""
    times = f"it left its usual level {most} times in {span_s / 60:.0f} min"
    if most < FEWEST_PULSES:
        return f"{times}: {FEWEST_PULSES} times are needed"
    if is_even:
        return f"{times}, evenly, but so few may be even by chance"
    return f"{times}, at no regular distance: nothing repeats, or faster than the samples can show"
