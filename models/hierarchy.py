"""Parts that add up: the medians of a pool's classes, and of its groups, sum to the pool's own median.

The whole is forecast better than its parts, so the parts give way. Where they come to too little, each is lifted by a
share of what is missing, in proportion to the width of its 80 % band: who is least sure gives way most. Where they
come to too much, all quantiles of each are scaled down alike. Neither crosses quantiles or goes below zero.
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
    lift = missing[:, None] * width / width.sum(axis=1, keepdims=True)
    scale = np.where(total > whole, np.maximum(whole, 0.0) / np.where(total > 0, total, 1.0), 1.0)
    return np.asarray(parts * scale[:, None] + lift)
