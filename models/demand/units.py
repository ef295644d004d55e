"""Losses and distances of forecasts, in the units of a series.

The gate measures everything in units of persistence's own error in the same series.
"""

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.forecast import QUANTILES

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

LEVELS = np.array(QUANTILES)
MEDIAN = QUANTILES.index(0.5)
MOST_REGRET = 3.0  # one outcome counts as at most so many of persistence's usual errors


def compute_pinball_loss(quantiles: Array, outcome: Array) -> Array:
    """Return (..., series) twice the pinball loss, as the mean over the quantile levels.

    quantiles: (quantile, ..., series). outcome: (series,).

    >>> compute_pinball_loss(np.full((7, 1), 3.0), np.array([5.0])).tolist()
    [2.0]
    """
    gap = outcome - quantiles
    levels = LEVELS.reshape(-1, *[1] * (quantiles.ndim - 1))
    return np.asarray(2 * (np.add.reduce(np.maximum(levels * gap, (levels - 1) * gap)) / len(LEVELS)))


def are_whole_numbers(values: Array) -> NDArray[np.bool_]:
    """Return which values are whole numbers. Unknown values count as whole.

    >>> are_whole_numbers(np.array([2.0, 0.2, np.nan])).tolist()
    [True, False, True]
    """
    return np.asarray((values == np.rint(values)) | np.isnan(values))


def measure_distance(raw: Array, level: Array) -> Array:
    """Return (candidate, ...) the distance of each candidate's median from a level. raw: (candidate, quantile, ...)."""
    return np.asarray(np.abs(raw[:, MEDIAN] - level))


def scale_to_units(values: Array, size: Array, least: float = -MOST_REGRET) -> Array:
    """Return (..., series) values in units of `size`, limited to the range from `least` to MOST_REGRET.

    Where the size is 0, any value other than 0 counts as MOST_REGRET units.
    """
    units = np.divide(values, size, out=np.sign(values) * MOST_REGRET, where=size > 0)
    units[np.isnan(units)] = 0.0
    return units.clip(least, MOST_REGRET, out=units)
