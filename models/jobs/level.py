"""Detection of the present level of a job's readings: the level since the last lasting change.

Readings that rise or fall steadily have no level. A line describes such readings better than steps do. The
line is extended by two minutes only, because slow waves turn and ramps end.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

CLEAR_T = 3.0  # standard errors between the readings before a change and those after it
NOISE_SHARE = 0.005  # of the level: readings that differ by less are the same
LATEST = 4  # readings that make a level: a minute of scrapes
BACK_SHARE, AWAY_SHARE = 0.2, 0.5  # of the last change: nearer is the same level, farther is another
LEAD = 8  # readings by which the line is extended
FITS_ENOUGH = 1.5  # times the variance around steps: they are placed where they fit best, and so fit noise, too
MOST_CHANGES = 8  # of level within one window


def shift_to_present_level(readings: Array) -> Array:
    """Return the readings moved to the present level.

    Each result is the last level plus the reading's distance from its own level. readings: (reading,) oldest
    first, without NaN. Readings without a change of level and without a trend are returned unchanged.

    >>> shift_to_present_level(np.array([10.0, 10.0, 10.0, 10.0, 110.0, 110.0, 110.0, 110.0])).tolist()
    [110.0, 110.0, 110.0, 110.0, 110.0, 110.0, 110.0, 110.0]
    """
    begins = find_level_changes(readings)
    slope = _fit_trend(readings, begins)
    if slope:
        ahead = float(readings.mean()) + slope * ((len(readings) - 1) / 2 + LEAD)
        return np.asarray(np.maximum(ahead + _subtract_trend(readings), 0.0))
    if len(begins) == 1 or _is_rhythmic(readings, begins):
        return readings
    level = float(np.mean(readings[-LATEST:]))
    scatter = np.concatenate([_subtract_trend(part) for part in np.split(readings, begins[1:])])
    return np.asarray(np.maximum(level + scatter, 0.0))


def _is_rhythmic(readings: Array, begins: list[int]) -> bool:
    """Return whether the readings swing between levels, so that no level lasts.

    They swing if they had the last level before and left it, or if the newest readings are far from it. begins:
    the index at which each level begins.
    """
    before, last = readings[begins[-2] : begins[-1]].mean(), readings[begins[-1] :].mean()
    near = np.abs(readings[: begins[-1]] - last) < BACK_SHARE * abs(before - last)
    swings = abs(readings[-LATEST:].mean() - last) > AWAY_SHARE * abs(before - last)
    return bool(swings or near.sum() >= LATEST)


def _fit_trend(readings: Array, begins: list[int]) -> float:
    """Return the slope per reading of the least-squares line.

    Returns 0 if the slope is not clear, or if constant levels fit as well. begins: the index at which each
    level begins.
    """
    if len(readings) <= 2 * LATEST:
        return 0.0
    line = float(np.sum(_subtract_trend(readings) ** 2)) / (len(readings) - 2)
    steps = sum(float(np.sum((part - part.mean()) ** 2)) for part in np.split(readings, begins[1:]))
    steps /= max(len(readings) - 2 * len(begins) + 1, 1)  # each level has a time and a mean, the first only a mean
    slope, spread = _fit_slope(readings)
    noise = line + (NOISE_SHARE * float(np.abs(readings).mean())) ** 2
    is_clear = abs(slope) > CLEAR_T * np.sqrt(max(noise, 1e-12) / spread)
    return slope if is_clear and line < FITS_ENOUGH * steps else 0.0


def _fit_slope(part: Array) -> tuple[float, float]:
    """Return the slope per reading of the least-squares line, and the sum of squares of the centred times."""
    at = np.arange(len(part)) - (len(part) - 1) / 2
    spread = max(float(at @ at), 1.0)
    return float(at @ part) / spread, spread


def _subtract_trend(part: Array) -> Array:
    """Return (reading,) the readings less their least-squares line."""
    at = np.arange(len(part)) - (len(part) - 1) / 2
    return np.asarray(part - np.mean(part) - _fit_slope(part)[0] * at)


def find_level_changes(readings: Array) -> list[int]:
    """Return the indices at which each level begins, 0 first.

    The function finds the clearest change first. It continues with the clearest one among the later readings.
    """
    begins = [0]
    while len(begins) <= MOST_CHANGES:
        at = _find_clearest_change(readings[begins[-1] :])
        if at is None:
            break
        begins.append(begins[-1] + at)
    return begins


def _find_clearest_change(readings: Array) -> int | None:
    """Return the index of the first reading after the clearest change of level, or None if there is none.

    The clearest change separates the means before and after it most, compared with their noise.
    """
    n = len(readings)
    if n <= LATEST:
        return None
    before = np.arange(1, n)
    sums, squares = readings.cumsum(), (readings**2).cumsum()
    gap = sums[:-1] / before - (sums[-1] - sums[:-1]) / (n - before)
    within = squares[-1] - sums[:-1] ** 2 / before - (sums[-1] - sums[:-1]) ** 2 / (n - before)
    noise = (NOISE_SHARE * np.abs(readings).mean()) ** 2
    variance = np.maximum(within / (n - 1), 0.0) + noise
    t = np.abs(gap) * np.sqrt(before * (n - before) / n) / np.sqrt(np.maximum(variance, 1e-12))
    at = int(t[: n - LATEST].argmax())
    middle = (readings[: at + 1].mean() + readings[at + 1 :].mean()) / 2
    stays = bool(((readings[-LATEST:] > middle) == (gap[at] < 0)).sum() >= LATEST - 1)
    return at + 1 if t[at] > CLEAR_T and stays else None
