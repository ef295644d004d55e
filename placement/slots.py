"""Slots: what is free of each GPU, in thousandths of it, so that several requests can share one."""

import numpy as np
from numpy.typing import NDArray

WHOLE = 1000  # thousandths of a GPU; int16 holds them

Milli = NDArray[np.int16]


def milli_of(free: NDArray[np.bool_]) -> Milli:
    """Slots of GPUs that are free as a whole or not at all.

    >>> milli_of(np.array([True, False])).tolist()
    [1000, 0]
    """
    return np.multiply(free, WHOLE, dtype=np.int16)
