"""One pass over what waits: who starts now, and for whom room is kept. EASY backfill over rows, on any machine.

Entries are taken by rank: priority, then who has waited too long (by arrival), then the least key. The first that does
not fit is the *head*: the machine keeps room for it, and others start only beside that room, or where they should have
ended by then (Lifka, "The ANL/IBM SP Scheduling System", 1995). Once an entry did not start, nobody behind it in its
row is tried in this pass: room only shrinks.

What the head leaves goes by priority and key alone, whoever has waited: only the head has a promise, and a bound that
also ordered what passes it would make a long queue first come, first served. So nobody who has waited too long is
passed for ever: in time it is the head, and the head's place never moves back as long as nobody runs longer than
planned.
"""

import heapq
from collections.abc import Hashable
from typing import Protocol, TypeVar

from placement.rows import NEVER, A, Item, Rank, Rows, WaitingRow

B_contra = TypeVar("B_contra", bound=Hashable, contravariant=True)


class Machine(Protocol[B_contra]):
    """The machine that a pass places on. It holds the head's claim."""

    def fits(self, ask: B_contra) -> bool:
        """Return whether there is room now, claimed or not. False is final within a pass."""

    def start(self, ask: B_contra, item: Item) -> bool:
        """Start an entry now if that does not delay the head's reservation. Returns False otherwise."""

    def claim(self, ask: B_contra, item: Item) -> bool:
        """Reserve room for an entry, the head, from the earliest time at which there should be room.

        Returns False if there will never be room.
        """


Ranked = tuple[Rank, Item, WaitingRow[A]]
UNBOUND_S = -NEVER  # a moment at which nobody has waited too long


def backfill(rows: Rows[A], machine: Machine[A], now_s: float) -> None:
    """Start what may start now; it leaves its row."""
    if _head(rows, machine, now_s):
        _beside(rows, machine)


def _head(rows: Rows[A], machine: Machine[A], now_s: float) -> bool:
    """Start by rank until somebody does not fit, and keep room for it; False where nobody is kept waiting."""
    ranked: list[Ranked[A]] = [(*row.first(now_s), row) for row in rows]
    heapq.heapify(ranked)
    while ranked:
        _, item, row = heapq.heappop(ranked)
        if _starts(row, item, machine):
            _push_next(ranked, row, now_s)
        elif machine.claim(row.ask, item):
            return True
    return False


def _beside(rows: Rows[A], machine: Machine[A]) -> None:
    """Start by key what may start beside the head."""
    ranked: list[Ranked[A]] = [(*row.first(UNBOUND_S), row) for row in rows if machine.fits(row.ask)]
    heapq.heapify(ranked)
    while ranked:
        _, item, row = heapq.heappop(ranked)
        if _starts(row, item, machine):
            _push_next(ranked, row, UNBOUND_S)


def _starts(row: WaitingRow[A], item: Item, machine: Machine[A]) -> bool:
    started = machine.start(row.ask, item)
    if started:
        row.remove(item)
    return started


def _push_next(ranked: list[Ranked[A]], row: WaitingRow[A], now_s: float) -> None:
    """Rank the next entry of a row."""
    if row.size:
        heapq.heappush(ranked, (*row.first(now_s), row))
