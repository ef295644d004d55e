"""A future as it is defined: every question is asked of all nodes again.

The answers of `fleetcast.placement.ahead.sampled_future` must be equal to these, to the bit.
"""

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.ahead.sampled_future import MOST_EVENTS, Arrival, PayerStop
from fleetcast.placement.ahead.searches import Searches
from fleetcast.placement.ahead.slot_times import SlotTimes
from fleetcast.placement.machines.gang_room import Floats, GangAsk, Ints, Slot
from fleetcast.placement.queues.queues_ahead import QueueHold, QueuesAhead
from tests.placement.ahead.slow_calendars import hold


@dataclass(slots=True)
class Fleet:
    """Free thousandths of GPUs by node, and for each slot how many members fit: by node, by domain, in the best domain.

    free: (n,); ready_s: (n,) when all that runs there should have ended.
    """

    free: Ints
    ready_s: Floats
    slots: Sequence[Slot]
    _each: Ints = field(init=False)  # (slot, 1)
    _most: Ints = field(init=False)  # (slot, n)
    _room: Ints = field(init=False)  # (slot, n)
    _total: list[Ints] = field(init=False)  # of each slot (domain,)
    _best: list[int] = field(init=False)  # of each slot

    def __post_init__(self) -> None:
        self._each = np.array([slot.each for slot in self.slots], np.int64)[:, None]
        self._most = np.array([slot.most for slot in self.slots], np.int64).reshape(len(self.slots), len(self.free))
        self._room = np.minimum(self._most, self.free // self._each)
        self._total = [_by_domain(slot, room) for slot, room in zip(self.slots, self._room, strict=True)]
        self._best = [int(total.max(initial=0)) for total in self._total]

    def copy(self) -> "Fleet":
        """Another that can be changed."""
        other = copy(self)
        other.free, other.ready_s, other._room = self.free.copy(), self.ready_s.copy(), self._room.copy()
        other._total, other._best = [total.copy() for total in self._total], self._best.copy()
        return other

    def change(self, nodes: Ints, gpus: Ints) -> None:
        """Give back (or, below zero, take) GPUs; each node once."""
        free = self.free[nodes] + gpus
        self.free[nodes] = free
        now = np.minimum(self._most[:, nodes], free // self._each)
        apart = now - self._room[:, nodes]
        self._room[:, nodes] = now
        for at, more in enumerate(apart.sum(axis=1).tolist()):
            domain, total = self.slots[at].domain, self._total[at]
            if domain is None:
                self._best[at] += more
            elif apart[at].any():
                known = domain[nodes] >= 0
                np.add.at(total, domain[nodes][known], apart[at][known])
                self._best[at] = int(total.max())

    def fits(self, ask: GangAsk) -> bool:
        return self._best[ask.slot] >= ask.members

    def choose(self, ask: GangAsk, kept: Ints | None) -> tuple[Ints, Ints] | None:
        """(nodes, GPUs of each), the fullest first, without the nodes `kept`; None: no room."""
        slot, room = self.slots[ask.slot], self._room[ask.slot]
        if kept is not None:
            room = room.copy()
            room[kept] = 0
        if slot.domain is not None:
            total = _by_domain(slot, room)
            holds = np.flatnonzero(total >= ask.members)
            if not len(holds):
                return None
            room = np.where(slot.domain == holds[np.argmin(total[holds])], room, 0)
        return _taken(room, self.free, ask.members, slot.each)

    def soonest(self, ask: GangAsk, now_s: float = 0.0) -> tuple[Ints, float]:
        """The nodes that should be free for a gang first, and when the last of them should be."""
        slot, closed = self.slots[ask.slot], ask.mask_closed_nodes(now_s)
        ready_s = np.where(slot.most > 0, np.where(self._room[ask.slot] >= slot.most, 0.0, self.ready_s), np.inf)
        if closed is not None:
            ready_s[closed] = np.inf
        order = np.argsort(ready_s, kind="stable")
        if slot.domain is not None:
            order = _first_domain(slot, order, ask.members)
        enough = int(np.searchsorted(np.cumsum(slot.most[order]), ask.members)) + 1
        nodes = order[:enough]
        return nodes, float(ready_s[nodes].max(initial=0.0))


def _by_domain(slot: Slot, room: Ints) -> Ints:
    if slot.domain is None:
        return np.array([room.sum()], np.int64)
    known = slot.domain >= 0
    size = int(slot.domain.max(initial=0)) + 1
    return np.bincount(slot.domain[known], room[known], size).astype(np.int64)


def _taken(room: Ints, free: Ints, members: int, each: int) -> tuple[Ints, Ints] | None:
    nodes = np.flatnonzero(room)
    if members == 1:
        return (nodes[[np.argmin(free[nodes])]], np.array([each])) if len(nodes) else None
    nodes = nodes[np.argsort(free[nodes], kind="stable")]
    before = np.cumsum(room[nodes]) - room[nodes]
    count = np.minimum(room[nodes], members - before)
    taken = count > 0
    if int(count[taken].sum()) < members:
        return None
    return nodes[taken], count[taken] * each


def _first_domain(slot: Slot, order: Ints, members: int) -> Ints:
    """The part of `order` in the domain that first has room for all members."""
    assert slot.domain is not None
    had = np.zeros(int(slot.domain.max(initial=0)) + 1, np.int64)
    for node in order.tolist():
        domain = int(slot.domain[node])
        if domain >= 0:
            had[domain] += slot.most[node]
            if had[domain] >= members:
                return np.asarray(order[slot.domain[order] == domain])
    return order


PLAIN_SEARCHES = Searches(Fleet, SlotTimes, hold)  # type: ignore[arg-type]


@dataclass(slots=True)
class Future:
    """One path. `ends` is a heap of (end_s, a number, nodes, thousandths of GPUs); call `play` once.

    is_settled: nobody who waits can start before something happens. stops: by the number of an end that frees nothing.
    """

    fleet: Fleet
    ends: list[tuple[float, int, Ints, Ints]]
    arrivals: Iterator[Arrival]
    queues: QueuesAhead | None = None
    is_settled: bool = False
    stops: Mapping[int, PayerStop] = field(default_factory=dict)
    now_s: float = 0.0
    _ended: list[int] = field(default_factory=list)
    _waiting: dict[GangAsk, deque[Arrival]] = field(default_factory=dict)
    _started: dict[int, float] = field(default_factory=dict)
    _count: int = 0

    def play(self, waiting: Sequence[Arrival]) -> dict[int, float]:
        """number → start_s of what waits, given in order; what has not started after MOST_EVENTS is left out."""
        most = MOST_EVENTS + 2 * len(waiting)
        for one in waiting:
            self._waiting.setdefault(one.ask, deque()).append(one)
        heapq.heapify(self.ends)
        following, events = next(self.arrivals, None), 0
        if not self.is_settled:
            self._pass()
        while len(self._started) < len(waiting) and events < most:
            events += 1
            end_s = self.ends[0][0] if self.ends else np.inf
            if following is not None and following.at_s < end_s:
                self.now_s = following.at_s
                self._arrive(following)
                if self.fleet.fits(following.ask):  # else nobody starts who could not before
                    self._pass()
                following = next(self.arrivals, None)
            elif self.ends:
                self.now_s = end_s
                self._end()
                self._pass()
            else:
                break
        return self._started

    def _arrive(self, one: Arrival) -> None:
        row = self._waiting.setdefault(one.ask, deque())
        if row and row[-1].order > one.order:
            row = self._waiting[one.ask] = deque(sorted([*row, one], key=lambda other: other.order))
        else:
            row.append(one)

    def _end(self) -> None:
        """All that ends at this moment."""
        while self.ends and self.ends[0][0] <= self.now_s:
            _, number, nodes, gpus = heapq.heappop(self.ends)
            stop = self.stops.get(number)
            rows = [(number, nodes, gpus, None)] if stop is None else stop.jobs
            if stop is not None and stop.payer.number in self._started:
                continue
            for job, held, amounts, following in rows:
                if job not in self._ended:
                    self._ended.append(job)
                    self.fleet.change(held, amounts)
                    if self.queues is not None:
                        self.queues.end_job(job)
                    if following is not None:
                        self._arrive(following)
            if stop is not None:
                row = self._waiting[stop.payer.ask]
                row.remove(stop.payer)
                ask = stop.payer.ask
                fits = self.fleet.fits(ask)
                place = self.fleet.choose(ask, _without(None, ask.mask_closed_nodes(self.now_s))) if fits else None
                if place is None:
                    row.appendleft(stop.payer._replace(order=(-np.inf, 0.0)))
                else:
                    self._start(stop.payer, place)

    def _pass(self) -> None:
        """Start what may start now."""
        rows = [(row[0].order, at, ask) for at, (ask, row) in enumerate(self._waiting.items()) if row]
        ready = [row for row in rows if self.fleet.fits(row[2]) and self._allows(row[2])]
        if not ready:
            return
        full = [row for row in rows if not self.fleet.fits(row[2])]
        heapq.heapify(ready)
        heapq.heapify(full)
        head: GangAsk | None = None
        kept, shadow_s = None, np.inf
        while ready:
            order, at, ask = heapq.heappop(ready)
            head = head or self._first(full, order)
            if not self._allows(ask):
                continue
            if not self.fleet.fits(ask):
                head = head or ask
                continue
            if head is not None and kept is None:
                kept, shadow_s = self.fleet.soonest(head, self.now_s)
            in_time = self.now_s + ask.planned_s <= shadow_s
            place = self.fleet.choose(ask, _without(None if in_time else kept, ask.mask_closed_nodes(self.now_s)))
            if place is None:
                head = head or ask
                continue
            row = self._waiting[ask]
            self._start(row.popleft(), place)
            if row:
                heapq.heappush(ready, (row[0].order, at, ask))

    def _first(self, full: list[tuple[Any, int, GangAsk]], before: tuple[float, float]) -> GangAsk | None:
        """The first whose turn comes before, and which its queue may have: the fleet has no room for it."""
        while full and full[0][0] < before:
            _, _, ask = heapq.heappop(full)
            if self._allows(ask):
                return ask
        return None

    def _allows(self, ask: GangAsk) -> bool:
        """Whether its queue may have it now."""
        return self.queues is None or ask.hold is None or self.queues.allows(ask.hold)

    def _start(self, one: Arrival, place: tuple[Ints, Ints]) -> None:
        nodes, gpus = place
        self.fleet.change(nodes, -gpus)
        self.fleet.ready_s[nodes] = np.maximum(self.fleet.ready_s[nodes], self.now_s + one.ask.planned_s)
        self._count += 1
        if one.run_s < np.inf:
            heapq.heappush(self.ends, (self.now_s + one.run_s, self._count, nodes, gpus))
        if self.queues is not None and one.ask.hold is not None:
            self.queues.start_job(self._count, one.ask.hold, one.number >= 0)
        if one.number >= 0:
            self._started[one.number] = self.now_s


def _without(kept: Ints | None, closed: NDArray[np.bool_] | None) -> Ints | None:
    """Nodes that are kept for others or closed."""
    if closed is None:
        return kept
    return np.union1d(np.zeros(0, np.int64) if kept is None else kept, np.flatnonzero(closed))


class PlainQueues(QueuesAhead):
    """Queues that are asked anew each time."""

    def copy(self) -> "PlainQueues":
        return PlainQueues(self._standing.copy(), self._holds)

    def allows(self, hold: QueueHold) -> bool:
        for stand in self._standing.stands.values():
            for name, below in stand.below.items():
                assert below == sum(child.reserve.get(name, 0.0) for child in stand.children)
        return self._standing.find_refusing_queue(hold.leaf, hold.amounts) is None
