"""One pass of EASY backfill over rows of waiting entries, on any machine.

The pass decides which entries start now, and which one gets a reservation.

Entries are tried by rank: by priority, then starved entries (by arrival), then the smallest key.
The first that does not fit is the *head*, and the machine reserves room for it. Other entries start
only outside that room, or if they should have ended by then (Lifka, "The ANL/IBM SP Scheduling
System", 1995). Room only shrinks in a pass. So once an entry did not start, no entry behind it in
its row is tried.

Entries behind the head are ordered by priority and key alone, however long they have waited. Only
the head has a promise. If starved entries also came first behind the head, a long queue would
become first come, first served. Still no starved entry is passed for ever. In time it becomes the
head, whose start is delayed only by a job that runs longer than planned.
"""

import heapq
from collections.abc import Hashable
from typing import Protocol, TypeVar

from fleetcast.placement.play.rows import NEVER, A, Rank, RowEntry, Rows, WaitingRow

B_contra = TypeVar("B_contra", bound=Hashable, contravariant=True)


class Machine(Protocol[B_contra]):
    """A machine that a pass places entries on. It stores the claim of the head."""

    def fits(self, ask: B_contra) -> bool:
        """Return whether there is room for an ask now, including room that the head has claimed.

        Once it is False, it stays False for the rest of the pass.
        """

    def start(self, ask: B_contra, item: RowEntry) -> bool:
        """Start an entry now if it fits and does not delay the head. Returns whether it was started."""

    def claim(self, ask: B_contra, item: RowEntry) -> bool:
        """Reserve room for the head from the earliest time at which there should be room.

        Returns False if there will never be room.
        """


Ranked = tuple[Rank, RowEntry, WaitingRow[A]]
UNBOUND_S = -NEVER  # a moment at which nobody has waited too long


def run_backfill_pass(rows: Rows[A], machine: Machine[A], now_s: float) -> None:
    """Start the entries that may start now, and remove them from their rows."""
    if _start_until_head(rows, machine, now_s):
        _start_behind_head(rows, machine)


def _start_until_head(rows: Rows[A], machine: Machine[A], now_s: float) -> bool:
    """Start entries by rank until one does not fit. Reserve room for that entry, the head.

    Returns False if there is no head.
    """
    ranked: list[Ranked[A]] = [(*row.find_next_entry(now_s), row) for row in rows]
    heapq.heapify(ranked)
    while ranked:
        _, item, row = heapq.heappop(ranked)
        if _try_to_start(row, item, machine):
            _push_next_entry(ranked, row, now_s)
        elif machine.claim(row.ask, item):
            return True
    return False


def _start_behind_head(rows: Rows[A], machine: Machine[A]) -> None:
    """Start those entries that do not delay the head, in order of priority and key."""
    ranked: list[Ranked[A]] = [(*row.find_next_entry(UNBOUND_S), row) for row in rows if machine.fits(row.ask)]
    heapq.heapify(ranked)
    while ranked:
        _, item, row = heapq.heappop(ranked)
        if _try_to_start(row, item, machine):
            _push_next_entry(ranked, row, UNBOUND_S)


def _try_to_start(row: WaitingRow[A], item: RowEntry, machine: Machine[A]) -> bool:
    started = machine.start(row.ask, item)
    if started:
        row.remove(item)
    return started


def _push_next_entry(ranked: list[Ranked[A]], row: WaitingRow[A], now_s: float) -> None:
    """Add the next entry of a row to the ranked entries."""
    if row.size:
        heapq.heappush(ranked, (*row.find_next_entry(now_s), row))
