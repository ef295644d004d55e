"""Helpers for arrays whose last axis is the entity: growing them, and finding slots in a ring."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def widen_array(array: NDArray[Any], capacity: int, fill: Any = 0) -> NDArray[Any]:
    """Return a copy of an array with room for `capacity` entities. New cells are `fill`."""
    wide = np.full((*array.shape[:-1], capacity), fill, array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide


def widen_open_slots(array: NDArray[Any], capacity: int, fill: Any, opened: Sequence[slice]) -> NDArray[Any]:
    """Return a copy of a ring (row, slot, entity) with room for `capacity` entities.

    Only the open slots are written, so that the others need no memory yet.
    """
    wide, size = np.zeros((*array.shape[:-1], capacity), array.dtype), array.shape[-1]
    for run in opened:
        wide[:, run, :size] = array[:, run]
        wide[:, run, size:] = fill
    return wide


def find_ring_slices(first: int, end: int, length: int) -> list[slice]:
    """Return the slices of a ring that hold the newest `length` of the slots `first … end - 1`.

    The ring has `length` slots.

    >>> find_ring_slices(7, 12, 10)
    [slice(7, 10, None), slice(0, 2, None)]
    """
    first = max(first, end - length)
    at, count = first % length, max(0, end - first)
    pieces = slice(at, min(at + count, length)), slice(0, at + count - length)
    return [piece for piece in pieces if piece.stop > piece.start]
