"""One sampled future of the queue, played forward by the queue's own rules.

Jobs end at their drawn times, and further jobs arrive. After each change a pass goes over the
waiting jobs: higher priority first, then first come. The first job that does not fit reserves the
nodes that should be free for it soonest. Later jobs start on other nodes. They may also use the
reserved nodes if they should end before that job starts (EASY backfill, as in
`fleetcast.placement.plan.queue`). Each node is stored only as its number of free thousandths of GPUs,
so thousands of events take a second. Parts of GPUs count as if they were packed well.

Queues keep within their limits, borrow GPUs from each other, and avoid nodes that are closed to
them. Jobs that stop for a waiting job end early, and their next attempts join the queue.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.machines.gang_room import Fleet, GangAsk, Ints
from fleetcast.placement.queues.queues_ahead import QueuesAhead

MOST_EVENTS = 1000  # of a path, and two for each that waits


class Arrival(NamedTuple):
    """A job that arrives at `at_s`.

    order: a sort key, the smallest first. number: the caller's number of the job, -1 for none.
    """

    at_s: float
    order: tuple[float, float]
    ask: GangAsk
    run_s: float
    number: int = -1


class StoppedJob(NamedTuple):
    """A running job that stops. number, nodes, gpus: as in the heap of ends. following: its next attempt, if any."""

    number: int
    nodes: Ints
    gpus: Ints
    following: Arrival | None


class PayerStop(NamedTuple):
    """The stop of some jobs for a waiting job, the payer. What they free is promised to the payer alone."""

    payer: Arrival
    jobs: Sequence[StoppedJob]


FRONT = -np.inf, 0.0  # the order of a job for which others have stopped

Row = tuple[tuple[float, float], int, GangAsk]  # of a line: the order of its first job, its number, its ask
FullGroup = tuple[Row, int, list[Row]]  # the next row, its index, the group


@dataclass(slots=True)
class AskLine:
    """A line of waiting jobs that ask for the same slots, in order.

    group: the sorted rows of all lines that fit if and only if this one fits.
    """

    number: int
    ask: GangAsk
    group: list[Row]
    jobs: deque[Arrival] = field(default_factory=deque)

    def insert_row(self) -> Row:
        """Insert a row for the line's first job into the group, and return the row."""
        row = self.jobs[0].order, self.number, self.ask
        insort(self.group, row)
        return row

    def remove_row(self) -> None:
        """Remove the line's row from the group. The caller does this before the line's first job changes."""
        if self.jobs:
            del self.group[bisect_left(self.group, (self.jobs[0].order, self.number))]


@dataclass(slots=True)
class Future:
    """One sampled future of the queue. `play` may be called only once.

    ends: a heap of (end_s, number of the job, nodes, thousandths of GPUs). is_settled: no waiting job
    can start before another event happens. stops: number → stop. Its time is an end with this number, which
    releases nothing by itself.
    """

    fleet: Fleet
    ends: list[tuple[float, int, Ints, Ints]]
    arrivals: Iterator[Arrival]
    queues: QueuesAhead | None = None
    is_settled: bool = False
    stops: Mapping[int, PayerStop] = field(default_factory=dict)
    now_s: float = 0.0
    _gone: set[int] = field(default_factory=set)  # the jobs that have ended, if any jobs stop
    _lines: dict[GangAsk, AskLine] = field(default_factory=dict)
    _groups: dict[tuple[int, int], list[Row]] = field(default_factory=dict)  # by slot and members: all fit, or none
    _started: dict[int, float] = field(default_factory=dict)
    _count: int = 0

    def play(self, waiting: Sequence[Arrival]) -> dict[int, float]:
        """Play the future, and return number → start_s of the waiting jobs that started.

        waiting: the waiting jobs, in order. The play ends after at most MOST_EVENTS + 2 × len(waiting) events.
        """
        most = MOST_EVENTS + 2 * len(waiting)
        for one in waiting:
            self._find_or_add_line(one.ask).jobs.append(one)
        for line in self._lines.values():
            line.insert_row()
        heapq.heapify(self.ends)
        following, events = next(self.arrivals, None), 0
        if not self.is_settled:
            self._run_pass()
        while len(self._started) < len(waiting) and events < most:
            events += 1
            end_s = self.ends[0][0] if self.ends else np.inf
            if following is not None and following.at_s < end_s:
                self.now_s = following.at_s
                self._add_arrival(following)
                if self.fleet.fits(following.ask):  # else nobody starts who could not before
                    self._run_pass()
                following = next(self.arrivals, None)
            elif self.ends:
                self.now_s = end_s
                self._end_jobs()
                self._run_pass()
            else:
                break
        return self._started

    def _find_or_add_line(self, ask: GangAsk) -> AskLine:
        """Return the line of the jobs with this ask. Adds the line if it is missing."""
        if ask not in self._lines:
            group = self._groups.setdefault((ask.slot, ask.members), [])
            self._lines[ask] = AskLine(len(self._lines), ask, group)
        return self._lines[ask]

    def _add_arrival(self, one: Arrival) -> None:
        line = self._find_or_add_line(one.ask)
        line.remove_row()
        if line.jobs and line.jobs[-1].order > one.order:
            line.jobs = deque(sorted([*line.jobs, one], key=lambda other: other.order))
        else:
            line.jobs.append(one)
        line.insert_row()

    def _end_jobs(self) -> None:
        """End all jobs whose end time has come."""
        while self.ends and self.ends[0][0] <= self.now_s:
            _, number, nodes, gpus = heapq.heappop(self.ends)
            if number in self.stops:
                self._stop_jobs(self.stops[number])
            elif number not in self._gone:
                self._end_job(number, nodes, gpus)

    def _end_job(self, number: int, nodes: Ints, gpus: Ints) -> None:
        self.fleet.change_free_gpus(nodes, gpus)
        if self.queues is not None:
            self.queues.end_job(number)
        if self.stops:
            self._gone.add(number)

    def _stop_jobs(self, stop: PayerStop) -> None:
        """Stop the jobs of a payer that still waits, and start the payer.

        If others have taken what it also needs, it moves to the front.
        """
        if stop.payer.number in self._started:
            return
        for job in stop.jobs:
            if job.number not in self._gone:
                self._end_job(job.number, job.nodes, job.gpus)
                if job.following is not None:
                    self._add_arrival(job.following)
        ask = stop.payer.ask
        line = self._lines[ask]
        line.remove_row()
        line.jobs.remove(stop.payer)
        closed = _merge_excluded_nodes(None, ask.mask_closed_nodes(self.now_s))
        place = self.fleet.choose_gang_nodes(ask, closed) if self.fleet.fits(ask) else None
        if place is not None:
            self._start_job(stop.payer, place)
        else:
            line.jobs.appendleft(stop.payer._replace(order=FRONT))
        if line.jobs:
            line.insert_row()

    def _run_pass(self) -> None:
        """Start all jobs that may start now."""
        ready, full = self._find_ready_and_full()
        if not ready:
            return
        heapq.heapify(ready)
        heapq.heapify(full)
        head: GangAsk | None = None
        reserved, shadow_s = None, np.inf
        while ready:
            order, _, ask = heapq.heappop(ready)
            head = head or self._find_first_full_ask(full, order)
            if not self._is_allowed_by_queue(ask):
                continue
            if not self.fleet.fits(ask):
                head = head or ask
                ready = [row for row in ready if self.fleet.fits(row[2])]  # room only shrinks within a pass
                heapq.heapify(ready)
                continue
            if head is not None and reserved is None:
                reserved, shadow_s = self.fleet.find_soonest_nodes(head, self.now_s)
            in_time = self.now_s + ask.planned_s <= shadow_s
            place = self.fleet.choose_gang_nodes(
                ask, _merge_excluded_nodes(None if in_time else reserved, ask.mask_closed_nodes(self.now_s))
            )
            if place is None:
                head = head or ask
                continue
            line = self._lines[ask]
            line.remove_row()
            self._start_job(line.jobs.popleft(), place)
            if line.jobs:
                heapq.heappush(ready, line.insert_row())

    def _find_ready_and_full(self) -> tuple[list[Row], list[FullGroup]]:
        """Return the rows whose first job may start now, and the groups for which the fleet has no room."""
        ready: list[Row] = []
        full: list[FullGroup] = []
        for (slot, members), group in self._groups.items():
            if not group:
                continue
            if self.fleet.has_room(slot, members):
                ready += [row for row in group if self._is_allowed_by_queue(row[2])]
            else:
                full.append((group[0], 0, group))
        return ready, full

    def _find_first_full_ask(self, full: list[FullGroup], before: tuple[float, float]) -> GangAsk | None:
        """Return the first ask that its queue allows to start, but that the fleet has no room for.

        before: the search ends at this place in the order. full: a heap of the groups without room, which this
        call advances. Returns None if there is no such ask.
        """
        while full and full[0][0][0] < before:
            (_, _, ask), at, group = full[0]
            if at + 1 < len(group):
                heapq.heapreplace(full, (group[at + 1], at + 1, group))
            else:
                heapq.heappop(full)
            if self._is_allowed_by_queue(ask):
                return ask
        return None

    def _is_allowed_by_queue(self, ask: GangAsk) -> bool:
        """Return whether the quota of the gang's queue allows the gang to start now."""
        return self.queues is None or ask.hold is None or self.queues.allows(ask.hold)

    def _start_job(self, one: Arrival, place: tuple[Ints, Ints]) -> None:
        nodes, gpus = place
        self.fleet.change_free_gpus(nodes, -gpus)
        self.fleet.ready_s[nodes] = np.maximum(self.fleet.ready_s[nodes], self.now_s + one.ask.planned_s)
        self._count += 1
        if one.run_s < np.inf:
            heapq.heappush(self.ends, (self.now_s + one.run_s, self._count, nodes, gpus))
        if self.queues is not None and one.ask.hold is not None:
            self.queues.start_job(self._count, one.ask.hold, one.number >= 0)
        if one.number >= 0:
            self._started[one.number] = self.now_s


def _merge_excluded_nodes(reserved: Ints | None, closed: NDArray[np.bool_] | None) -> Ints | None:
    """Return the rows of all nodes that are reserved for the head or closed.

    Returns None if there are none.
    """
    if closed is None:
        return reserved
    return np.union1d(np.zeros(0, np.int64) if reserved is None else reserved, np.flatnonzero(closed))
