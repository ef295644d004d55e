"""Arrays whose last axis is the entity: how they grow, and where numbered slots are in a ring."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def widen_array(array: NDArray[Any], capacity: int, fill: Any = 0) -> NDArray[Any]:
    """Return a copy with room for more entities."""
    wide = np.full((*array.shape[:-1], capacity), fill, array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide


def widen_open_slots(array: NDArray[Any], capacity: int, fill: Any, opened: Sequence[slice]) -> NDArray[Any]:
    """Return a copy of a ring (row, slot, entity) with room for more entities. Only the open slots are written."""
    wide, size = np.zeros((*array.shape[:-1], capacity), array.dtype), array.shape[-1]
    for run in opened:
        wide[:, run, :size] = array[:, run]
        wide[:, run, size:] = fill
    return wide


def runs(first: int, end: int, length: int) -> list[slice]:
    """Return where the newest `length` of the numbers `first … end - 1` are in a ring of this length.

    >>> runs(7, 12, 10)
    [slice(7, 10, None), slice(0, 2, None)]
    """
    first = max(first, end - length)
    at, count = first % length, max(0, end - first)
    pieces = slice(at, min(at + count, length)), slice(0, at + count - length)
    return [piece for piece in pieces if piece.stop > piece.start]
