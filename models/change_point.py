"""Change points of step times as they come: has the job slowed down, and by which scale does it show?

A slowdown that is small or noisy needs more steps to be sure of. So the last steps are looked at in windows of
several lengths, each beside all steps before it:

    few steps    the fastest of the window (a lone spike says nothing)         above the median before
    many steps   the median of the window (half of it may be spikes)           above the median before

by more than the scale's ratio, by more than its sigmas of the job's own noise (of a median of n values: 1.25 sigma /
sqrt(n)), and by more than what windows of this length reached before in this very job. All on logarithms.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MAD_TO_SIGMA = 1.4826
MEDIAN_SPREAD = 1.2533  # standard deviation of a median over that of a mean, normal values
FEWEST_BEFORE = 12
PEAK_QUANTILE, PEAK_MARGIN = 0.95, 0.03
LONGEST_OF_FEW = 4


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
    usual = float(np.median(before))
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(before - usual)))
    noise = sigma if scale.by_least else sigma * _spread(scale.steps)
    limit = usual + max(float(np.log(scale.ratio)), scale.sigmas * noise)
    if len(before) >= max(16, 2 * scale.steps):
        past = scale.of(np.lib.stride_tricks.sliding_window_view(before, scale.steps))
        limit = max(limit, float(np.quantile(past, PEAK_QUANTILE)) + PEAK_MARGIN)
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
    for scale in SCALES:
        if len(duration) < scale.steps + FEWEST_BEFORE:
            break
        measure = measure_of(duration, scale)
        last = np.log(np.maximum(duration[-scale.steps :], 1e-9))
        if measure is not None and float(np.exp(scale.of(last))) > measure.limit_s:
            return measure
    return None


def still_slow(duration: Array, measure: Measure) -> bool:
    """Whether what `measure` showed goes on: the last steps are nearer to its limit than to what was usual.

    Of a window of few steps any of the last two, of a longer one the median of the last eight.
    """
    ends_s = (measure.usual_s * measure.limit_s) ** 0.5
    if measure.steps <= LONGEST_OF_FEW:
        return bool(duration[-2:].max() > ends_s)
    return bool(np.median(duration[-8:]) > ends_s)


def _median(windows: Array) -> Array:
    half = windows.shape[-1] // 2
    parts = np.partition(windows, (half - 1, half), axis=-1)
    return np.asarray((parts[..., half - 1] + parts[..., half]) / 2)


@lru_cache
def _spread(steps: int) -> float:
    return float(MEDIAN_SPREAD / np.sqrt(steps))
