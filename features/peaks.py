"""Peaks of a curve, as `scipy.signal.find_peaks` defines them.

This module does not use scipy, because importing it would cost 56 MiB and a second.
"""

import numpy as np
from numpy.typing import NDArray


def find_peaks(curve: NDArray[np.float64], height: float, prominence: float) -> NDArray[np.intp]:
    """Return (peak,) the positions of local maxima with at least this height and prominence, in order.

    The position of a plateau is its middle, rounded down. On each side of a peak, its low is the lowest value
    before the next higher value or the end of the curve. The peak's prominence is its height above the higher of
    the two lows.
    """
    tops = _find_tops(curve)
    tops = tops[curve[tops] >= height]
    return np.array([top for top in tops.tolist() if _compute_prominence(curve, top) >= prominence], np.intp)


def _find_tops(curve: NDArray[np.float64]) -> NDArray[np.intp]:
    """Return the middle index of each run of equal values whose two neighbours are lower."""
    if len(curve) < 3:
        return np.empty(0, np.intp)
    first = np.concatenate(([0], np.flatnonzero(curve[1:] != curve[:-1]) + 1))  # of each stretch
    last = np.concatenate((first[1:], [len(curve)])) - 1
    values = curve[first]
    inner = np.flatnonzero((values[1:-1] > values[:-2]) & (values[1:-1] > values[2:])) + 1
    return np.asarray((first[inner] + last[inner]) // 2, np.intp)


def _compute_prominence(curve: NDArray[np.float64], top: int) -> float:
    """Return the prominence of the peak at position `top`, as `find_peaks` defines it."""
    higher = np.flatnonzero(~(curve <= curve[top]))  # an unknown value ends the stretch, too
    at = int(np.searchsorted(higher, top))
    begin = int(higher[at - 1]) + 1 if at else 0
    end = int(higher[at]) if at < len(higher) else len(curve)
    return float(curve[top] - max(curve[begin : top + 1].min(), curve[top:end].min()))
