"""Waiting entries, grouped into rows of entries that have the same needs.

The cost of a pass depends on the number of rows, not of entries. A row has one ask, one priority
and one waiting bound. Its entries have two orders: by key, and by arrival for those that have
waited as long as the bound (they are *starved*). An entry that is removed stays in each order until
it would be the next one there.
"""

import heapq
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

A = TypeVar("A", bound=Hashable)

Rank = tuple[int, int, float, float, str]  # -priority, 0 for the starved, key, arrival, name
NEVER = float("inf")


@dataclass(slots=True, eq=False)
class RowEntry:
    """One waiting entry of a row.

    key: the entry with the smallest key is next. queued_s: its arrival. name: unique. number: the
    caller's number.
    """

    name: str
    key: float
    queued_s: float
    number: int = -1
    waits: bool = False


@dataclass(slots=True, eq=False)
class WaitingRow(Generic[A]):
    """Waiting entries with the same ask. bound_s: the seconds of waiting after which an entry is starved."""

    ask: A
    priority: int = 0
    bound_s: float = NEVER
    size: int = 0
    _by_key: list[tuple[float, float, str, RowEntry]] = field(default_factory=list)
    _by_arrival: list[tuple[float, str, RowEntry]] = field(default_factory=list)

    def find_next_entry(self, now_s: float) -> tuple[Rank, RowEntry]:
        """Return the rank and the next entry of a row that is not empty.

        The rank orders the next entries of all rows.
        """
        if self.bound_s < NEVER:
            while not self._by_arrival[0][2].waits:
                heapq.heappop(self._by_arrival)
            queued_s, name, item = self._by_arrival[0]
            if now_s - queued_s >= self.bound_s:
                return (-self.priority, 0, 0.0, queued_s, name), item
        while not self._by_key[0][3].waits:
            heapq.heappop(self._by_key)
        key, queued_s, name, item = self._by_key[0]
        return (-self.priority, 1, key, queued_s, name), item

    def list_ranked_entries(self, now_s: float) -> Iterator[tuple[Rank, RowEntry]]:
        """Yield all waiting entries with their ranks, in no particular order."""
        for key, queued_s, name, item in self._by_key:
            if item.waits:
                starved = now_s - queued_s >= self.bound_s
                yield (-self.priority, 0 if starved else 1, 0.0 if starved else key, queued_s, name), item

    def add(self, item: RowEntry) -> None:
        item.waits = True
        self.size += 1
        heapq.heappush(self._by_key, (item.key, item.queued_s, item.name, item))
        if self.bound_s < NEVER:
            heapq.heappush(self._by_arrival, (item.queued_s, item.name, item))

    def remove(self, item: RowEntry) -> None:
        item.waits = False
        self.size -= 1


class Rows(Generic[A]):
    """All rows of waiting entries of a queue."""

    def __init__(self) -> None:
        self._rows: dict[tuple[A, int, float], WaitingRow[A]] = {}

    def __iter__(self) -> Iterator[WaitingRow[A]]:
        """Yield the rows that are not empty."""
        return (row for row in self._rows.values() if row.size)

    def add(self, ask: A, item: RowEntry, priority: int = 0, bound_s: float = NEVER) -> None:
        """Add an entry to its row."""
        key = (ask, priority, bound_s)
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = WaitingRow(*key)
        row.add(item)
