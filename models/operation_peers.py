"""Who is slow, from single operations: every operation beside the same one of the other replicas.

The same operation is that of the same step, stage, type and micro-batch. Its time over the median of the replicas'
needs no history, knows no waiting, and is the same whatever the workers are called. A worker's ratio is the median of
its operations', so a long sequence here and there does not count, and a slow machine does.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SLOW_RATIO = 1.10
FEWEST_REPLICAS = 3  # with two, nobody knows which of them is slow


def worker_ratios(seconds: Array) -> Array:
    """(step, replica, stage) median ratio of `seconds` (step, replica, stage, type, micro-batch) to the replicas'.

    >>> seconds = np.ones((1, 4, 1, 2, 3)); seconds[0, 2] = 2.0
    >>> worker_ratios(seconds)[0, :, 0].tolist()
    [1.0, 1.0, 2.0, 1.0]
    """
    typical = np.nanmedian(seconds, axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.where(typical > 0, seconds / typical, np.nan)
    return np.asarray(np.nanmedian(ratios.reshape(*ratios.shape[:3], -1), axis=-1))


def slow_workers(seconds: Array, ratio: float = SLOW_RATIO) -> NDArray[np.bool_]:
    """(step, replica, stage) who is slow, by `worker_ratios`; nobody where there are too few replicas to compare."""
    if seconds.shape[1] < FEWEST_REPLICAS:
        return np.zeros(seconds.shape[:3], bool)
    return np.asarray(worker_ratios(seconds) >= ratio)
