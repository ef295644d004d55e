"""DeltaBins: the changes of quantities in bins of event time. The running sums of changes are levels."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import WHOLE_GPU

ARRIVING, ARRIVING_JOBS, RUNNING, QUEUED, MARKS = range(5)
ROWS = 5
MOST = 2**30 * WHOLE_GPU  # of anything in a bin: no fleet comes near it, one made-up event must not wrap around
MOST_NARROW = 2**30  # bins with more than this take 8 bytes a number instead of 4


class DeltaBins:
    """The changes of one scope's demand in the newest `size` bins. `before` sums all earlier ones.

    Changes wait in a list until a reader needs them. Only the reader's clock moves the window, so an
    event with a wrong time deletes nothing. If changes are in too many bins, the bins before `floor` are
    summed. The row MARKS counts the changes in a bin, 0 in an unused one. GPUs are in thousandths.
    """

    def __init__(self, bin_ms: int, size: int) -> None:
        self.bin_ms = bin_ms
        self.size = size
        self.head: int | None = None
        self.floor: int | None = None
        self.before = np.zeros(ROWS)
        self.bins: NDArray[np.int32] | NDArray[np.int64] = np.zeros((ROWS, size), np.int32)
        self._waiting: list[tuple[int, ...]] = []  # bin, then ROWS amounts
        self._patience = 2 * size + 4096

    def dump(self) -> tuple[dict[str, Any], NDArray[np.int32] | NDArray[np.int64]]:
        """Return a copy for a snapshot: JSON-able parts, and the bins (row, bin)."""
        self._fold_waiting_changes()
        about = {"head": self.head, "floor": self.floor, "before": self.before.tolist(), "waiting": [*self._waiting]}
        return about, self.bins.copy()

    def load(self, about: Mapping[str, Any], bins: NDArray[Any]) -> None:
        """Restore the result of `dump` into new bins. Raises ValueError if the dump has another size."""
        if bins.shape != self.bins.shape:
            raise ValueError(f"bins of shape {bins.shape}, expected {self.bins.shape}")
        self.head, self.floor = about["head"], about["floor"]
        self.before, self.bins = np.array(about["before"], np.float64), copy_to_smallest_type(bins)
        self._waiting = [tuple(row) for row in about["waiting"]]

    def is_idle(self) -> bool:
        """Return whether nothing happened in any bin and all levels are zero."""
        levels = self.before[[RUNNING, QUEUED]]
        return not self._waiting and not self.bins.any() and not levels.any()

    def add(self, time_ms: int, amounts: tuple[int, ...]) -> None:
        """Add (ROWS,) amounts to the bin of a time. Negative amounts undo earlier ones."""
        self._waiting.append((time_ms // self.bin_ms, *amounts))
        if len(self._waiting) > self._patience:
            self._fold_waiting_changes()

    def _fold_waiting_changes(self) -> None:
        """Sum waiting changes by bin, and add them to their bins."""
        if not self._waiting:
            return
        rows = np.array(self._waiting, np.int64)
        at, group = np.unique(rows[:, 0], return_inverse=True)
        sums = np.stack([np.bincount(group, rows[:, row + 1], len(at)) for row in range(ROWS)], axis=1)
        oldest = self._find_oldest_bin(at)
        self.before += sums[at < oldest].sum(axis=0)
        head = -1 if self.head is None else self.head
        inside = (at >= oldest) & (at <= head)
        columns = at[inside] % self.size
        sums_there = self.bins[:, columns] + np.clip(sums[inside].T, -MOST, MOST).astype(np.int64)
        if copy_to_smallest_type(sums_there).dtype == np.int64:
            self.bins = self.bins.astype(np.int64, copy=False)
        self.bins[:, columns] = sums_there
        ahead = at > max(head, oldest - 1)
        waiting = np.column_stack([at[ahead], sums[ahead]]).astype(np.int64)
        self._waiting = [tuple(row) for row in waiting.tolist()]
        self._patience = 2 * (self.size + len(self._waiting)) + 4096

    def _find_oldest_bin(self, waiting: NDArray[np.int64]) -> int:
        """Return the number of the oldest bin that is stored separately.

        waiting: (n,) bins of the waiting changes. If they are too many, `floor` is raised first.
        """
        if self.head is None and len(waiting) > 2 * self.size:
            self.floor = int(waiting[-2 * self.size - 1])
        newest_gone = -1 if self.head is None else self.head - self.size
        return max(newest_gone, -1 if self.floor is None else self.floor) + 1

    def advance(self, head: int) -> None:
        """Move the window's last bin forward to `head`, and apply waiting changes. It never moves back."""
        if self.head is not None and head > self.head:
            leaving = np.arange(max(self.head + 1, head - self.size + 1), head + 1) % self.size
            self.before += self.bins[:, leaving].sum(axis=1)
            self.bins[:, leaving] = 0
        self.head = head if self.head is None else max(self.head, head)
        self._fold_waiting_changes()

    def _order_bins(self, row: int) -> NDArray[Any]:
        assert self.head is not None, "advance first"
        return np.roll(self.bins[row], -((self.head + 1) % self.size))

    def read_sums(self, row: int, last: int, bins: int) -> NDArray[np.float64]:
        """Return (bin,) the amounts of the bins up to `last`, NaN outside the window."""
        return self._cut_window(self._order_bins(row), last, bins)

    def compute_levels(self, row: int, last: int, bins: int) -> NDArray[np.float64]:
        """Return (bin,) the running sums at the ends of the bins up to `last`, NaN outside the window."""
        return self._cut_window(self.before[row] + np.cumsum(self._order_bins(row), dtype=np.int64), last, bins)

    def _cut_window(self, values: NDArray[Any], last: int, bins: int) -> NDArray[np.float64]:
        assert self.head is not None
        cut = np.full(bins, np.nan)
        stop = self.size - (self.head - last)
        start = max(0, stop - bins)
        if stop > start:
            cut[bins - (stop - start) :] = values[start:stop]
        return cut

    def compute_first_stored_bin(self) -> int:
        """Return the number of the oldest bin that is stored separately."""
        assert self.head is not None
        return max(self.head - self.size, -1 if self.floor is None else self.floor) + 1

    def find_first_changed_bin(self) -> int:
        """Return the number of the first bin with a change.

        If there are changes before the window, returns the oldest stored bin. Without any change, returns the bin
        after the last one.
        """
        assert self.head is not None
        if self.before[MARKS] > 0:
            return self.compute_first_stored_bin()
        marked = np.flatnonzero(self._order_bins(MARKS) > 0)
        return self.head - self.size + 1 + int(marked[0]) if len(marked) else self.head + 1


def copy_to_smallest_type(values: NDArray[Any]) -> NDArray[np.int32] | NDArray[np.int64]:
    """Return a copy of `values` as int32 if they fit, else as int64."""
    is_narrow = np.abs(values).max(initial=0) <= MOST_NARROW
    return values.astype(np.int32) if is_narrow else values.astype(np.int64)
