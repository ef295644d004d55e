"""Running sums over windows of closed slots: a slot is added when it closes and taken off when the window leaves it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


class ValueSums:
    """Count and sum of known values over two windows, and the sum of squares over the longer.

    rows: value rows that are summed, s of them; lengths: (short, long) in closed slots.
    count, total: (window, s, entity); square: (s, entity).
    """

    def __init__(self, rows: Sequence[int], lengths: tuple[int, int]) -> None:
        self.rows = list(rows)
        self.lengths = lengths
        self.longest = max(lengths)
        self.count = np.zeros((2, len(rows), 0), np.int32)
        self.total = np.zeros((2, len(rows), 0), np.float64)
        self.square = np.zeros((len(rows), 0), np.float64)

    @property
    def nbytes(self) -> int:
        return self.count.nbytes + self.total.nbytes + self.square.nbytes

    def widen(self, capacity: int) -> None:
        self.count, self.total = _widened(self.count, capacity), _widened(self.total, capacity)
        self.square = _widened(self.square, capacity)

    def close(self, fine: NDArray[np.float32], slot: int, size: int) -> None:
        """Move both windows on by the slot that closes."""
        for window, length in enumerate(self.lengths):
            if length:
                self._move(fine[self.rows, slot % fine.shape[1], :size], window, 1)
                self._move(fine[self.rows, (slot - length) % fine.shape[1], :size], window, -1)

    def _move(self, values: NDArray[np.float32], window: int, sign: int) -> None:
        size = values.shape[1]
        known = ~np.isnan(values)
        clean = np.where(known, values, 0).astype(np.float64)
        self.count[window, :, :size] += sign * known
        self.total[window, :, :size] += sign * clean
        if window == 1:
            self.square[:, :size] += sign * clean * clean

    def recompute(self, fine: NDArray[np.float32], closed: int, columns: NDArray[np.intp]) -> None:
        """Sum the chosen entities anew from the ring."""
        for window, length in enumerate(self.lengths):
            slots = np.arange(closed - length + 1, closed + 1) % fine.shape[1]
            for index, row in enumerate(self.rows):
                values = fine[row][np.ix_(slots, columns)]
                known = ~np.isnan(values)
                clean = np.where(known, values, 0).astype(np.float64)
                self.count[window, index, columns] = known.sum(axis=0)
                self.total[window, index, columns] = clean.sum(axis=0)
                if window == 1:
                    self.square[index, columns] = (clean * clean).sum(axis=0)

    def window(
        self, fine: NDArray[np.float32], window: int, open_slots: NDArray[np.intp], size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
        """(count, total, square), each (s, entity), of a window with its open slots; square of window 1 only."""
        count, total = self.count[window, :, :size].copy(), self.total[window, :, :size].copy()
        square = self.square[:, :size].copy()
        for slot in open_slots:
            values = fine[self.rows, slot, :size]
            known = ~np.isnan(values)
            clean = np.where(known, values, 0).astype(np.float64)
            count += known
            total += clean
            square += clean * clean
        return count, total, square


class EventSums:
    """Exact sums of increments over two windows. total: (window, event, entity)."""

    def __init__(self, rows: int, lengths: tuple[int, int]) -> None:
        self.lengths = lengths
        self.longest = max(lengths)
        self.total = np.zeros((2, rows, 0), np.int64)

    @property
    def nbytes(self) -> int:
        return self.total.nbytes

    def widen(self, capacity: int) -> None:
        self.total = _widened(self.total, capacity)

    def close(self, events: NDArray[np.uint32], slot: int, size: int) -> None:
        """Move both windows on by the slot that closes."""
        for window, length in enumerate(self.lengths):
            if length:
                self.total[window, :, :size] += events[:, slot % events.shape[1], :size]
                self.total[window, :, :size] -= events[:, (slot - length) % events.shape[1], :size]

    def recompute(self, events: NDArray[np.uint32], closed: int, columns: NDArray[np.intp]) -> None:
        """Sum the chosen entities anew from the ring."""
        for window, length in enumerate(self.lengths):
            slots = np.arange(closed - length + 1, closed + 1) % events.shape[1]
            for row in range(len(events)):
                self.total[window, row, columns] = events[row][np.ix_(slots, columns)].sum(axis=0, dtype=np.int64)

    def window(
        self, events: NDArray[np.uint32], window: int, open_slots: NDArray[np.intp], size: int
    ) -> NDArray[np.int64]:
        """(event, entity) increments in a window with its open slots."""
        total = self.total[window, :, :size].copy()
        for slot in open_slots:
            total += events[:, slot, :size]
        return total


def _widened(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    wide = np.zeros((*array.shape[:-1], capacity), array.dtype)
    wide[..., : array.shape[-1]] = array
    return wide
