"""Running sums over windows of closed slots, and their statistics.

A slot is added when it closes, and removed when it leaves the window.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleetcast.features.ring_arrays import widen_array


class ValueSums:
    """The count and sum of the known values of each row over two windows.

    The longer window also has the sum of squares.
    """

    def __init__(self, rows: Sequence[int], lengths: tuple[int, int]) -> None:
        self.rows = list(rows)
        self.lengths = lengths  # (short, long), in closed slots
        self.longest = max(lengths)
        self.count = np.zeros((2, len(rows), 0), np.int32)  # (window, row, entity)
        self.total = np.zeros((2, len(rows), 0), np.float64)
        self.square = np.zeros((len(rows), 0), np.float64)

    @property
    def nbytes(self) -> int:
        return self.count.nbytes + self.total.nbytes + self.square.nbytes

    def widen_arrays(self, capacity: int) -> None:
        self.count, self.total = widen_array(self.count, capacity), widen_array(self.total, capacity)
        self.square = widen_array(self.square, capacity)

    def close_slot(self, fine: NDArray[np.float32], slot: int, size: int, first: int) -> None:
        """Advance both windows by the slot that closes. first: the oldest slot with values."""
        for window, length in enumerate(self.lengths):
            moves = [(number, sign) for number, sign in ((slot, 1), (slot - length, -1)) if number >= first]
            for number, sign in moves if length else ():
                for index, row in enumerate(self.rows):
                    self._add_slot(fine[row, number % fine.shape[1], :size], window, index, sign)

    def _add_slot(self, values: NDArray[np.float32], window: int, index: int, sign: int) -> None:
        size = len(values)
        known, clean = _split_known_values(values)
        self.count[window, index, :size] += sign * known
        self.total[window, index, :size] += sign * clean
        if window == 1:
            self.square[index, :size] += sign * clean * clean

    def recompute_entities(
        self, fine: NDArray[np.float32], closed: int, columns: slice | NDArray[np.intp], first: int
    ) -> None:
        """Recompute the sums of the entities `columns` from the ring. first: the oldest slot with values."""
        for window, length in enumerate(self.lengths):
            slots = np.arange(max(first, closed - length + 1), closed + 1) % fine.shape[1]
            for index, row in enumerate(self.rows):
                known, clean = _split_known_values(copy_slots(fine[row], slots, columns))
                self.count[window, index, columns] = known.sum(axis=0)
                self.total[window, index, columns] = clean.sum(axis=0)
                if window == 1:
                    self.square[index, columns] = (clean * clean).sum(axis=0)

    def read_windows(
        self, fine: NDArray[np.float32], index: int, open_slots: NDArray[np.intp], size: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.float64]]:
        """Return one row's count (window, entity), sum (window, entity) and sum of squares (entity,).

        All three include the open slots. The sum of squares covers the longer window.
        """
        count, total = self.count[:, index, :size].copy(), self.total[:, index, :size].copy()
        square = self.square[index, :size].copy()
        for slot in open_slots:
            known, clean = _split_known_values(fine[self.rows[index], slot, :size])
            count += known
            total += clean
            square += clean * clean
        return count, total, square


class EventSums:
    """Exact sums of event counts over two windows. total: (window, event, entity)."""

    def __init__(self, rows: int, lengths: tuple[int, int]) -> None:
        self.lengths = lengths
        self.longest = max(lengths)
        self.total = np.zeros((2, rows, 0), np.int64)

    @property
    def nbytes(self) -> int:
        return self.total.nbytes

    def widen_arrays(self, capacity: int) -> None:
        self.total = widen_array(self.total, capacity)

    def close_slot(self, events: NDArray[np.uint32], slot: int, size: int, first: int) -> None:
        """Advance both windows by the slot that closes. first: the oldest slot with values."""
        for window, length in enumerate(self.lengths):
            if length and slot >= first:
                self.total[window, :, :size] += events[:, slot % events.shape[1], :size]
            if length and slot - length >= first:
                self.total[window, :, :size] -= events[:, (slot - length) % events.shape[1], :size]

    def recompute_entities(
        self, events: NDArray[np.uint32], closed: int, columns: slice | NDArray[np.intp], first: int
    ) -> None:
        """Recompute the sums of the entities `columns` from the ring. first: the oldest slot with values."""
        for window, length in enumerate(self.lengths):
            slots = np.arange(max(first, closed - length + 1), closed + 1) % events.shape[1]
            for row in range(len(events)):
                self.total[window, row, columns] = copy_slots(events[row], slots, columns).sum(axis=0, dtype=np.int64)

    def read_windows(
        self, events: NDArray[np.uint32], row: int, open_slots: NDArray[np.intp], size: int
    ) -> NDArray[np.int64]:
        """Return (window, entity) the increments of one row, including its open slots."""
        total = self.total[:, row, :size].copy()
        for slot in open_slots:
            total += events[row, slot, :size]
        return total


def copy_slots(ring: NDArray[Any], slots: NDArray[np.intp], columns: slice | NDArray[np.intp]) -> NDArray[Any]:
    """Copy some slots and columns of a ring (slot, entity). Returns (slot, column)."""
    return ring[slots, columns] if isinstance(columns, slice) else ring[np.ix_(slots, columns)]


def _split_known_values(values: NDArray[np.float32]) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return a bool array of the known values, and the values as float64 with 0 in place of unknown ones."""
    known = ~np.isnan(values)
    return known, np.where(known, values, 0).astype(np.float64)


@np.errstate(over="ignore", invalid="ignore")  # half as dear as a block on small arrays
def divide(top: ArrayLike, below: ArrayLike, otherwise: ArrayLike = np.nan) -> NDArray[np.float64]:
    """Divide element by element where `below` is above zero. The result elsewhere is `otherwise`.

    A quotient beyond the largest float is infinite. There are no warnings.

    >>> divide([1.0, 2.0, 3.0], [2.0, 0.0, np.nan], 0.0)
    array([0.5, 0. , 0. ])
    """
    quotient = np.empty(np.broadcast(top, below, otherwise).shape)
    quotient[...] = otherwise
    np.divide(top, below, out=quotient, where=np.greater(below, 0))
    return quotient


def compute_mean(count: NDArray[np.int32], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of the known values, element by element, NaN where there are none.

    count: the number of known values. total: their sum.

    >>> compute_mean(np.array([2, 0]), np.array([3.0, 0.0]))
    array([1.5, nan])
    """
    average: NDArray[np.float64] = np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
    return average


def compute_std(
    count: NDArray[np.int32], total: NDArray[np.float64], square: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the population standard deviation of the known values, NaN where there are none.

    count, total, square: the number, sum and sum of squares of these values. The result is 0 where the variance is
    below 1e-9 of the mean square, because rounding errors can be as large.

    >>> compute_std(np.array([2]), np.array([4.0]), np.array([10.0]))
    array([1.])
    """
    average = compute_mean(count, total)
    mean_square = compute_mean(count, square)
    variance = mean_square - average * average
    return np.sqrt(np.where(variance > 1e-9 * mean_square, variance, 0.0 * average))


def find_largest(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return (entity,) the largest known value in `values` (slot, entity), NaN if no value is known."""
    highest: NDArray[np.float32] = np.fmax.reduce(values, axis=0, initial=np.nan)
    return highest
