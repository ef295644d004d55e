"""Detection of change points in step times as they arrive: whether the job has slowed down.

The smaller or noisier a slowdown is, the more steps are needed to be certain. So windows of the last
steps, of several lengths (scales), are each compared with all steps before:

    3 steps        the fastest of the window (a lone spike does not count)    above the median before
    8 steps        the median of the window (half of it may be spikes)        above the median before
    16 and more    the mean of the window without its fifths at either end    above the same mean before
                   and its median above the median before, by half as much: a burst does not count

The window must lie above the earlier steps by more than three limits: the scale's ratio, a number of
sigmas of the job's own noise, and the highest earlier window of this length. All are logarithms. The noise
of a median of n values is 1.25 sigma / sqrt(n), with sigma from their median deviation. The noise of two
trimmed means is sqrt(1 / n + 1 / steps before) times their winsorised deviation (Tukey and McLaughlin,
1963). It suits jobs of two speeds.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.peers import compute_median

Array = NDArray[np.float64]

MAD_TO_SIGMA = 1.4826
MEDIAN_SPREAD = 1.2533  # standard deviation of a median over that of a mean, normal values
FEWEST_BEFORE, FEWEST_BEFORE_MEAN = 12, 24
PEAK_QUANTILE, PEAK_MARGIN = 0.95, 0.03
LONGEST_OF_FEW, LONGEST_OF_MEDIAN = 4, 8
TRIMMED = 0.2  # of the steps at either end
BEST, CREPT = 64, 32  # steps
CREPT_RATIO, CREPT_SIGMAS = 1.10, 4.0
OTHER_WORK = 3.0  # times as long, and longer
EVEN_RATIO = 2.0  # of the longest steps to the shortest, without a twentieth at either end
ROUNDING = 1e-6  # of a limit


@dataclass(frozen=True, slots=True)
class Scale:
    """One scale of the comparison: a window of the last `steps` steps.

    A window shows a slowdown if it lies above the earlier steps by more than `ratio`, and by more than
    `sigmas` of noise.
    """

    steps: int
    ratio: float
    sigmas: float

    def compute_statistic(self, windows: Array) -> Array:
        """Return (...,) the statistic of windows of logarithms (..., steps).

        It is the minimum, the median or the trimmed mean, depending on the number of steps.
        """
        if self.steps <= LONGEST_OF_FEW:
            return np.asarray(windows.min(axis=-1))
        return _compute_medians(windows) if self.steps <= LONGEST_OF_MEDIAN else _compute_trimmed_mean(windows)

    def compute_past_statistics(self, log: Array) -> Array:
        """Return (window,) the statistic of every window in the logarithms (step,)."""
        if self.steps <= LONGEST_OF_FEW:  # few steps: a row a shift takes a tenth of the time
            windows = len(log) - self.steps + 1
            return np.asarray(np.minimum.reduce([log[shift : shift + windows] for shift in range(self.steps)]))
        return self.compute_statistic(np.lib.stride_tricks.sliding_window_view(log, self.steps))

    def estimate_usual_level(self, before: Array) -> tuple[float, float]:
        """Return the usual statistic of the earlier steps, and the standard deviation of a window's statistic.

        before: (step,) logarithms of step times.
        """
        if self.steps > LONGEST_OF_MEDIAN:
            cut = int(TRIMMED * len(before))
            ordered = np.sort(before)
            deviation = float(ordered.clip(ordered[cut], ordered[-1 - cut]).std())
            usual = float(ordered[cut : len(ordered) - cut].mean())
            return usual, deviation / (1 - 2 * TRIMMED) * math.sqrt(1 / self.steps + 1 / len(before))
        median = compute_median(before)
        sigma = MAD_TO_SIGMA * compute_median(np.abs(before - median))
        return median, sigma if self.steps <= LONGEST_OF_FEW else sigma * _compute_median_spread(self.steps)

    def may_show_slowdown(self, before: Array, last: Array) -> bool:
        """Return whether the last window is above the lowest limit that is possible.

        Few windows are, so this check saves the computation of the exact limit.
        """
        if self.steps > LONGEST_OF_MEDIAN:
            return compute_median(last) > compute_median(before) + math.log(self.ratio) / 2 - ROUNDING
        return float(self.compute_statistic(last)) > compute_median(before) + math.log(self.ratio) - ROUNDING


SCALES = (
    Scale(3, 1.12, 4.0),
    Scale(8, 1.08, 4.5),
    Scale(16, 1.07, 4.5),
    Scale(32, 1.06, 3.5),
    Scale(64, 1.06, 3.5),
)


@dataclass(frozen=True, slots=True)
class StepReference:
    """The reference with which the last steps of a job are compared.

    limit_s: the last steps are slow if they take longer. steps: the number of last steps that are
    compared.
    """

    usual_s: float
    limit_s: float
    steps: int


def make_step_reference(duration: Array, scale: Scale) -> StepReference | None:
    """Return the reference for the last steps of `duration` (seconds) at one scale.

    Returns None if there are too few steps.

    >>> make_step_reference(np.array([2.0] * 20), SCALES[0])
    StepReference(usual_s=2.0, limit_s=2.24, steps=3)
    """
    log = np.log(np.maximum(duration, 1e-9))
    before = log[: -scale.steps]
    if len(before) < max(scale.steps, FEWEST_BEFORE if scale.steps <= LONGEST_OF_MEDIAN else FEWEST_BEFORE_MEAN):
        return None
    usual, noise = scale.estimate_usual_level(before)
    limit = usual + max(math.log(scale.ratio), scale.sigmas * noise)
    if len(before) >= max(16, 2 * scale.steps):
        limit = max(limit, _compute_peak_quantile(scale.compute_past_statistics(before)) + PEAK_MARGIN)
    return StepReference(round(float(np.exp(usual)), 9), round(float(np.exp(limit)), 9), scale.steps)


def find_slowdown(duration: Array) -> StepReference | None:
    """Return the reference at the shortest scale at which the last steps are slow, or None if they are not slow.

    duration: (step,) seconds.

    >>> find_slowdown(np.array([2.0] * 30 + [2.4] * 3)).steps
    3
    >>> find_slowdown(np.array([2.0] * 30 + [2.2] * 8)).steps
    8
    >>> find_slowdown(np.array([2.0] * 30 + [9.0] * 2)) is None
    True
    """
    log = np.log(np.maximum(duration, 1e-9))
    for scale in SCALES:
        if len(duration) < scale.steps + FEWEST_BEFORE:
            break
        before, last = log[: -scale.steps], log[-scale.steps :]
        if not scale.may_show_slowdown(before, last):
            continue
        measure = make_step_reference(duration, scale)
        if measure is not None and math.exp(float(scale.compute_statistic(last))) > measure.limit_s:
            return measure
    return None


def find_best_pace(duration: Array, before_s: float | None = None) -> float | None:
    """Return the median seconds of the job's fastest BEST steps in a row, or `before_s` if that is less.

    A gradual slowdown does not change this result. A time below a third of the median of all steps is other
    work, such as the steps that a loader skips after a resume. Returns None without enough steps.

    >>> find_best_pace(np.array([0.01] * 100 + [2.0] * 156))
    2.0
    """
    if len(duration) < BEST:
        return before_s
    windows = np.array([duration[at : at + BEST] for at in range(0, len(duration) - BEST + 1, BEST // 4)])
    upper_s = np.partition(windows, BEST // 2, axis=-1)[:, BEST // 2]  # of a window of two kinds of work never a mix
    found_s = [*upper_s.tolist(), *([] if before_s is None else [before_s])]
    least_s = compute_median(duration) / OTHER_WORK
    return min((best_s for best_s in found_s if best_s >= least_s), default=None)


def find_slow_creep(duration: Array, best_s: float | None) -> StepReference | None:
    """Return the reference if the last steps are slow compared with the job's best pace, else None.

    This finds slowdowns that are too gradual for the comparison of windows. best_s: seconds of a step at the
    best pace.

    >>> after = np.full(100, 1.2)  # all that is kept of a job that took 1.0 s at its best
    >>> find_slowdown(after) is None, find_slow_creep(after, 1.0) is None
    (True, False)
    """
    if best_s is None or best_s <= 0 or len(duration) < BEST + CREPT:
        return None
    log = np.log(np.maximum(duration, 1e-9))
    recent = compute_median(log[-CREPT:])
    if recent <= math.log(best_s) + math.log(CREPT_RATIO) - ROUNDING:
        return None  # below the least limit that there is, as in most ticks
    moves = np.abs(np.diff(log))  # noise without the drift: of differences, sqrt(2) sigma
    sigma = MAD_TO_SIGMA * compute_median(moves) / np.sqrt(2)
    limit = float(np.log(best_s)) + float(np.log(CREPT_RATIO)) + CREPT_SIGMAS * sigma * _compute_median_spread(CREPT)
    if recent <= limit:
        return None
    return StepReference(round(best_s, 9), round(float(np.exp(limit)), 9), CREPT)


def is_still_slow(duration: Array, measure: StepReference) -> bool:
    """Return whether the slowdown continues: the last steps are nearer to the limit than to the usual time.

    For a short window, the longer of the last two steps decides. For a longer window, the median of the
    last eight steps decides.
    """
    ends_s = (measure.usual_s * measure.limit_s) ** 0.5
    if measure.steps <= LONGEST_OF_FEW:
        return bool(duration[-2:].max() > ends_s)
    return bool(compute_median(duration[-8:]) > ends_s)


def is_other_work(duration: Array, usual_s: float) -> bool:
    """Return whether `usual_s` was the time of other work.

    This is so if all stored steps take an even time far above `usual_s`.

    >>> is_other_work(np.full(256, 2.0), 0.01), is_other_work(np.full(256, 2.0), 1.0)
    (True, False)
    """
    if len(duration) < BEST:
        return False
    shortest_s, longest_s = np.quantile(duration, (0.05, 0.95)).tolist()
    return bool(shortest_s > OTHER_WORK * usual_s and longest_s < EVEN_RATIO * shortest_s)


def _compute_medians(windows: Array) -> Array:
    half = windows.shape[-1] // 2
    parts = np.partition(windows, (half - 1, half), axis=-1)
    return np.asarray((parts[..., half - 1] + parts[..., half]) / 2)


def _compute_peak_quantile(values: Array) -> float:
    """Return the quantile PEAK_QUANTILE, interpolated linearly as numpy does.

    >>> _compute_peak_quantile(np.arange(11.0))
    9.5
    """
    place = PEAK_QUANTILE * (len(values) - 1)
    at = min(int(place), len(values) - 2)
    parts = np.partition(values, (at, at + 1))
    return float(parts[at] + (parts[at + 1] - parts[at]) * (place - at))


def _compute_trimmed_mean(windows: Array) -> Array:
    cut = int(TRIMMED * windows.shape[-1])
    ordered = np.sort(windows, axis=-1)
    return np.asarray(ordered[..., cut : windows.shape[-1] - cut].mean(axis=-1))


@lru_cache
def _compute_median_spread(steps: int) -> float:
    return float(MEDIAN_SPREAD / np.sqrt(steps))
