"""Change points of step times as they come: has the job slowed down, and by which scale does it show?

A slowdown that is small or noisy needs more steps to be sure of. So the last steps are looked at in windows of
several lengths, each beside all steps before it:

    few steps    the fastest of the window (a lone spike says nothing)         above the median before
    many steps   the median of the window (half of it may be spikes)           above the median before

by more than the scale's ratio, by more than its sigmas of the job's own noise (of a median of n values: 1.25 sigma /
sqrt(n)), and by more than what windows of this length reached before in this very job. All on logarithms.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from models.peers import middle

Array = NDArray[np.float64]

MAD_TO_SIGMA = 1.4826
MEDIAN_SPREAD = 1.2533  # standard deviation of a median over that of a mean, normal values
FEWEST_BEFORE = 12
PEAK_QUANTILE, PEAK_MARGIN = 0.95, 0.03
LONGEST_OF_FEW = 4
BEST, CREPT = 64, 32  # steps
CREPT_RATIO, CREPT_SIGMAS = 1.10, 4.0
ROUNDING = 1e-6  # of a limit


@dataclass(frozen=True, slots=True)
class Scale:
    """A window of `steps`; a slowdown shows by it above `ratio` and `sigmas` of noise. by_least: the fastest counts."""

    steps: int
    ratio: float
    sigmas: float
    by_least: bool = False

    def of(self, windows: Array) -> Array:
        """(...,) what counts of logarithms (..., steps)."""
        return np.asarray(windows.min(axis=-1) if self.by_least else _median(windows))

    def past(self, log: Array) -> Array:
        """(window,) what counts of every window of logarithms (step,)."""
        if self.by_least:  # few steps: a row a shift takes a tenth of the time
            windows = len(log) - self.steps + 1
            return np.asarray(np.minimum.reduce([log[shift : shift + windows] for shift in range(self.steps)]))
        return self.of(np.lib.stride_tricks.sliding_window_view(log, self.steps))


SCALES = (Scale(3, 1.12, 4.0, True), Scale(8, 1.08, 4.5), Scale(16, 1.07, 4.0), Scale(32, 1.06, 4.0))


@dataclass(frozen=True, slots=True)
class Measure:
    """What a job's steps are held to. usual_s: their median before; limit_s: slow above it; steps: of the window."""

    usual_s: float
    limit_s: float
    steps: int


def measure_of(duration: Array, scale: Scale) -> Measure | None:
    """The measure for the last steps of `duration` (seconds) at one scale; None before there is enough to compare.

    >>> measure_of(np.array([2.0] * 20), SCALES[0])
    Measure(usual_s=2.0, limit_s=2.24, steps=3)
    """
    log = np.log(np.maximum(duration, 1e-9))
    before = log[: -scale.steps]
    if len(before) < max(FEWEST_BEFORE, scale.steps):
        return None
    usual = middle(before)
    sigma = MAD_TO_SIGMA * middle(np.abs(before - usual))
    noise = sigma if scale.by_least else sigma * _spread(scale.steps)
    limit = usual + max(math.log(scale.ratio), scale.sigmas * noise)
    if len(before) >= max(16, 2 * scale.steps):
        limit = max(limit, _peak(scale.past(before)) + PEAK_MARGIN)
    return Measure(round(float(np.exp(usual)), 9), round(float(np.exp(limit)), 9), scale.steps)


def slowed(duration: Array) -> Measure | None:
    """The measure by which the last steps of `duration` are slow, at the shortest scale that shows it; None: at none.

    >>> slowed(np.array([2.0] * 30 + [2.4] * 3)).steps
    3
    >>> slowed(np.array([2.0] * 30 + [2.2] * 8)).steps
    8
    >>> slowed(np.array([2.0] * 30 + [9.0] * 2)) is None
    True
    """
    log = np.log(np.maximum(duration, 1e-9))
    for scale in SCALES:
        if len(duration) < scale.steps + FEWEST_BEFORE:
            break
        last = float(scale.of(log[-scale.steps :]))
        if last <= middle(log[: -scale.steps]) + math.log(scale.ratio) - ROUNDING:
            continue  # below the least limit that there is, as in most ticks
        measure = measure_of(duration, scale)
        if measure is not None and math.exp(last) > measure.limit_s:
            return measure
    return None


def best_pace(duration: Array, before_s: float | None = None) -> float | None:
    """Seconds of a step in the job's best BEST steps in a row (their median), and as it was known `before`.

    Unlike the median of all steps it does not follow a job that becomes slower little by little.
    """
    if len(duration) < BEST:
        return before_s
    windows = np.lib.stride_tricks.sliding_window_view(duration, BEST)[:: BEST // 4]
    best_s = float(_median(windows).min())
    return best_s if before_s is None else min(best_s, before_s)


def crept(duration: Array, best_s: float | None) -> Measure | None:
    """The measure by which the last steps are slow beside the job's best ones, however slowly it came; None: not.

    >>> creeping = np.linspace(1.0, 1.18, 250)
    >>> slowed(creeping) is None, crept(creeping, best_pace(creeping)) is None
    (True, False)
    """
    if best_s is None or best_s <= 0 or len(duration) < BEST + CREPT:
        return None
    log = np.log(np.maximum(duration, 1e-9))
    moves = np.abs(np.diff(log))  # noise without the drift: of differences, sqrt(2) sigma
    sigma = MAD_TO_SIGMA * middle(moves) / np.sqrt(2)
    limit = float(np.log(best_s)) + float(np.log(CREPT_RATIO)) + CREPT_SIGMAS * sigma * _spread(CREPT)
    recent = middle(log[-CREPT:])
    if recent <= limit:
        return None
    return Measure(round(best_s, 9), round(float(np.exp(limit)), 9), CREPT)


def still_slow(duration: Array, measure: Measure) -> bool:
    """Whether what `measure` showed goes on: the last steps are nearer to its limit than to what was usual.

    Of a window of few steps any of the last two, of a longer one the median of the last eight.
    """
    ends_s = (measure.usual_s * measure.limit_s) ** 0.5
    if measure.steps <= LONGEST_OF_FEW:
        return bool(duration[-2:].max() > ends_s)
    return bool(middle(duration[-8:]) > ends_s)


def _median(windows: Array) -> Array:
    half = windows.shape[-1] // 2
    parts = np.partition(windows, (half - 1, half), axis=-1)
    return np.asarray((parts[..., half - 1] + parts[..., half]) / 2)


def _peak(values: Array) -> float:
    """The PEAK_QUANTILE, between the two nearest as numpy has it.

    >>> _peak(np.arange(11.0))
    9.5
    """
    place = PEAK_QUANTILE * (len(values) - 1)
    at = min(int(place), len(values) - 2)
    parts = np.partition(values, (at, at + 1))
    return float(parts[at] + (parts[at + 1] - parts[at]) * (place - at))


@lru_cache
def _spread(steps: int) -> float:
    return float(MEDIAN_SPREAD / np.sqrt(steps))
