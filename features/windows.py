"""Pure statistics over the slots of a window."""

import numpy as np
from numpy.typing import NDArray


def mean(count: NDArray[np.int32], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the known values; NaN where there is none.

    >>> mean(np.array([2, 0]), np.array([3.0, 0.0]))
    array([1.5, nan])
    """
    average: NDArray[np.float64] = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return average


def spread(count: NDArray[np.int32], total: NDArray[np.float64], square: NDArray[np.float64]) -> NDArray[np.float64]:
    """Population standard deviation of the known values; NaN where there is none.

    `square`: sum of squares. What the subtraction cannot tell from rounding (1e-9 of the mean square) is zero.

    >>> spread(np.array([2]), np.array([4.0]), np.array([10.0]))
    array([1.])
    """
    average = mean(count, total)
    mean_square = mean(count, square)
    variance = mean_square - average * average
    return np.sqrt(np.where(variance > 1e-9 * mean_square, variance, 0.0 * average))


def largest(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """(entity,) largest known value over the slot axis of (slot, entity); NaN where there is none."""
    highest: NDArray[np.float32] = np.fmax.reduce(values, axis=0, initial=np.nan)
    return highest
