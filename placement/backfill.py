"""One pass over what waits: who starts now, and for whom room is kept. EASY backfill over rows, on any machine.

Entries are taken by rank: priority, then who has waited too long (by arrival), then the least key. The first that does
not fit is the *head*: the machine keeps room for it, and later entries start only beside that room, or where they
should have ended by then (Lifka, "The ANL/IBM SP Scheduling System", 1995). Once an entry did not start, nobody behind
it in its row is tried in this pass: room only shrinks. So nobody who has waited too long is passed for ever: in time it
is the head, and the head's place never moves back as long as nobody runs longer than planned.
"""

import heapq
from collections.abc import Hashable
from typing import Protocol, TypeVar

from placement.rows import A, Item, Rank, Rows, WaitingRow

B_contra = TypeVar("B_contra", bound=Hashable, contravariant=True)


class Machine(Protocol[B_contra]):
    """What a pass places on. It keeps the head's claim."""

    def fits(self, ask: B_contra) -> bool:
        """Whether there is room now, kept for somebody or not. False is final within a pass."""

    def start(self, ask: B_contra, item: Item) -> bool:
        """Start an entry now beside what is kept for the head; False where that cannot be."""

    def claim(self, ask: B_contra, item: Item) -> bool:
        """Keep room for an entry, the head, as soon as it should be there; False where there never will be any."""


Ranked = tuple[Rank, Item, WaitingRow[A]]


def backfill(rows: Rows[A], machine: Machine[A], now_s: float) -> None:
    """Start what may start now; it leaves its row."""
    ready: list[Ranked[A]] = []
    blocked: list[Ranked[A]] = []
    for row in rows:
        (ready if machine.fits(row.ask) else blocked).append((*row.first(now_s), row))
    heapq.heapify(ready)
    heapq.heapify(blocked)
    headless = True
    while ready or (blocked and headless):
        if headless and blocked and not (ready and ready[0][0] < blocked[0][0]):
            _, item, row = heapq.heappop(blocked)
            headless = not machine.claim(row.ask, item)
            continue
        _, item, row = heapq.heappop(ready)
        if machine.start(row.ask, item):
            row.remove(item)
            if row.size:
                heapq.heappush(ready, (*row.first(now_s), row))
        elif headless:
            headless = not machine.claim(row.ask, item)
