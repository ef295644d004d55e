"""Make the medians of a pool's classes, or of its groups, sum to the pool's own median.

The whole is forecast better, so the parts give way. Where they fall short, each rises in proportion to the width of its
80 % band: the least sure gives way most. Where they exceed it, all quantiles scale down alike. Quantiles stay in order.
Counts are whole numbers afterwards, too.
"""

import numpy as np
from numpy.typing import NDArray

from models.forecast import QUANTILES

Array = NDArray[np.float64]

MEDIAN = QUANTILES.index(0.5)
LOW_80, HIGH_80 = QUANTILES.index(0.1), QUANTILES.index(0.9)


def reconciled(parts: Array, whole: Array) -> Array:
    """(quantile, horizon, part) whose medians sum to `whole`, (horizon,) the median of the sum.

    >>> reconciled(np.full((7, 1, 2), 2.0), np.array([6.0]))[3].tolist()
    [[3.0, 3.0]]
    """
    total = parts[MEDIAN].sum(axis=1)
    missing = np.maximum(whole - total, 0.0)
    width = parts[HIGH_80] - parts[LOW_80]
    width = np.where(width.sum(axis=1, keepdims=True) > 0, width, 1.0)
    lift = missing[:, None] * (width / width.sum(axis=1, keepdims=True))
    bound = np.maximum(whole, 0.0)
    is_over = total > bound
    scale = np.where(is_over, bound, 1.0) / np.where(is_over, total, 1.0)
    return np.asarray(parts * scale[:, None] + lift)


def in_whole_numbers(parts: Array) -> Array:
    """(quantile, horizon, part) rounded, quantiles in order. Medians that sum to a whole number still do (largest
    remainders are rounded up).

    >>> in_whole_numbers(np.full((7, 1, 3), 10 / 3))[3].tolist()
    [[4.0, 3.0, 3.0]]
    """
    median = np.floor(parts[MEDIAN])
    missing = np.rint(parts[MEDIAN].sum(axis=1) - median.sum(axis=1))
    rank = np.argsort(np.argsort(median - parts[MEDIAN], axis=1, kind="stable"), axis=1)
    median += rank < missing[:, None]
    rounded = np.rint(parts)
    below, above = np.minimum(rounded[:MEDIAN], median), np.maximum(rounded[MEDIAN + 1 :], median)
    return np.concatenate([below, median[None], above])
