"""Prediction of a periodic job's power and traffic minutes ahead, from a template of its cycle.

The template is built cycle by cycle:
    1. fold: average the last cycles into a template, the reading at each phase
    2. lock: shift each cycle to where it fits the template best, and move anchor and period by a part of
       the shift, as a phase-locked loop does. The shifts show how far the phase strays per cycle
    3. predict: compute the phase at the later time, which is less certain the more cycles lie between.
       Return the quantiles of the readings around that phase

If the phase strays too far to be of use, every sample has the same weight. The result is then the level of the
last cycles.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BINS = 24
CYCLES = 5  # that the template is made of, at least; more, while they lie within LEVEL_S
LEVEL_S = 600.0
FEWEST_CYCLES = 3
SHIFTS = np.arange(-3, 4)  # bins, a cycle, at most
ANCHOR_GAIN, PERIOD_GAIN = 0.5, 0.1  # of the shift, a cycle
LEAST_SPREAD = 1.0 / BINS  # of phase: no template is finer than its bins


@dataclass(frozen=True, slots=True)
class PhaseLock:
    """The phase of each sample of the window, (sample,) from 0 to 1.

    period: in samples. strays: the standard deviation of the shifts of all cycles, as a part of a cycle.
    """

    phase: Array
    period: float
    strays: float


def lock_phase(values: Array, period: float) -> PhaseLock | None:
    """Find the phase of each sample, or return None if there are fewer than FEWEST_CYCLES cycles.

    values: (sample,), regular in time, NaN if unknown. period: in samples.
    """
    cycles = int(len(values) / period)
    if cycles < FEWEST_CYCLES or period < 2:
        return None
    time = np.arange(len(values), dtype=np.float64)
    began, length = len(values) - cycles * period, period
    template = _fold_cycles(values, (time - began) / period % 1)
    phase, shifts = (time - began) / length % 1, []
    for _ in range(cycles):
        inside = (time >= began) & (time < began + length)
        shift = _find_best_shift(values[inside], (time[inside] - began) / length, template)
        shifts.append(shift)
        began += ANCHOR_GAIN * shift * length
        length *= 1 + PERIOD_GAIN * shift
        rest = time >= began
        phase[rest] = (time[rest] - began) / length % 1
        began += length
    return PhaseLock(phase, length, float(np.std(shifts)))


def predict_ahead(
    values: Array, lock: PhaseLock, samples: float, interval_s: float, levels: tuple[float, ...]
) -> list[float]:
    """Predict the reading that follows `samples` samples after the last one, as quantiles at `levels`.

    Returns an empty list if no reading is known.
    """
    since = np.arange(len(values))[::-1]
    lately = max(CYCLES * lock.period, LEVEL_S / interval_s)
    known = np.isfinite(values) & (since < lately)
    if not known.any():
        return []
    then = (lock.phase[-1] + samples / lock.period) % 1
    apart = np.abs(lock.phase[known] - then)
    apart = np.minimum(apart, 1 - apart)
    spread = max(LEAST_SPREAD, lock.strays * float(np.sqrt(max(samples / lock.period, 1.0))))
    return compute_weighted_quantiles(values[known], np.exp(-0.5 * (apart / spread) ** 2), levels)


def compute_weighted_quantiles(values: Array, weights: Array, levels: tuple[float, ...]) -> list[float]:
    """Return the quantiles of weighted values at `levels`.

    >>> compute_weighted_quantiles(np.array([3.0, 1.0, 2.0]), np.array([0.0, 1.0, 1.0]), (0.5, 0.9))
    [1.5, 2.0]
    """
    counts = weights > 1e-9 * weights.max()
    values, weights = values[counts], weights[counts]
    order = np.argsort(values)
    shares = np.cumsum(weights[order])
    middles = (shares - weights[order] / 2) / shares[-1]
    return [float(np.interp(level, middles, values[order])) for level in levels]


def _fold_cycles(values: Array, phase: Array) -> Array:
    """Return (bin,) the mean of the readings at each phase. A phase without readings has the mean of all readings."""
    known = np.isfinite(values)
    at = (phase[known] * BINS).astype(int) % BINS
    many = np.bincount(at, minlength=BINS)
    total = np.bincount(at, values[known], minlength=BINS)
    mean = float(values[known].mean()) if known.any() else 0.0
    folded: Array = np.divide(total, many, out=np.full(BINS, mean), where=many > 0)
    return folded


def _find_best_shift(values: Array, phase: Array, template: Array) -> float:
    """Return the shift of the template, as a part of a cycle, at which it fits this cycle best."""
    known = np.isfinite(values)
    if not known.any():
        return 0.0
    at = (phase[known] * BINS).astype(int)
    errors = [float(((values[known] - template[(at - shift) % BINS]) ** 2).mean()) for shift in SHIFTS]
    return float(SHIFTS[int(np.argmin(errors))]) / BINS
