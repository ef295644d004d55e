"""Prediction of a job's next checkpoint or evaluation from the times of its earlier ones.

The prediction is the last beginning plus a quantile of the intervals. Intervals that are already exceeded
do not count. Jobs that count steps are regular in seconds too, as long as their pace stays the same. With
fewer than ENOUGH intervals, the spread is that of regular jobs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SPREAD = 0.05  # of an interval, where fewer than ENOUGH are known
ENOUGH = 4
MAX_SPELLS = 16
LEVELS = (0.1, 0.5, 0.9)
SOON_S = 5.0


@dataclass(frozen=True, slots=True)
class NextBeginning:
    """Quantiles of when a job's next checkpoint or evaluation begins, in Unix ms.

    intervals: the number of intervals that the prediction is based on.
    """

    p10_ms: int
    p50_ms: int
    p90_ms: int
    intervals: int


def predict_next_beginning(begins_ms: NDArray[np.int64], now_ms: int) -> NextBeginning | None:
    """Predict when the next checkpoint or evaluation of a job begins.

    begins_ms: (n,) when the earlier ones began, in Unix ms. Returns None if there are fewer than two of them, or if
    the next one is far overdue.

    >>> predict_next_beginning(np.array([0, 600_000, 1_200_000]), 1_300_000).p50_ms
    1800000
    """
    begins = np.unique(begins_ms[begins_ms <= now_ms])[-MAX_SPELLS - 1 :]
    if len(begins) < 2:
        return None
    intervals = np.diff(begins).astype(np.float64)
    if len(intervals) < ENOUGH:
        middle = float(np.median(intervals))
        intervals = np.concatenate([intervals, middle * np.array([1 - SPREAD, 1, 1 + SPREAD])])
    elapsed = float(now_ms - begins[-1])
    left = intervals[intervals > elapsed]
    if not len(left):
        late = float(elapsed / np.median(intervals))
        if late > 2:
            return None
        left = np.array([elapsed + SOON_S * 1000.0])
    low, middle, high = np.quantile(left, LEVELS)
    last = int(begins[-1])
    return NextBeginning(last + round(low), last + round(middle), last + round(high), len(begins) - 1)
