"""Simulate the queue along sampled futures: when each GPU becomes free on each path.

1. Each path draws what every running job still has to go and how long every waiting one runs. Jobs of a path are partly
   long or short together, since they are misjudged together.
2. What waits is played by the rules of the queue, with jobs that may still come (`placement.futures`): its start times.
3. For a request that is not there yet, and for who waits for whom, the queue is played in order, without arrivals.
   A member of a gang takes a *slot*: as many GPUs of one node as it needs. A gang starts when the last of its slots is
   free, in the domain of its required level where that is soonest. GPUs reserved for it lie idle until then. A later
   job that plans to end before may use that first gap. A part of a GPU counts as a whole one.

Arrays are (path, node, gpu) float32 seconds from `now_ms`, ascending along a node, whose GPUs are alike. The filters
that decide placements also screen nodes here (model, drains, risk, CPUs).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleet.requests import PlacementRequest
from fleet.topology import Level, Topology
from placement.asks import MachineShape, shape_of
from placement.filters import screen
from placement.fit import widest_level
from placement.futures import ArrivalForecast, Drawn
from placement.options import Options
from placement.queue import ONE_LINE, Waiting
from placement.run_draws import PATHS, RunTimeSample
from placement.timeline import Release, RunningJob, RunTimeQuantiles, Timeline, releases
from placement.turns import QueueTurns
from placement.view import ClusterView

MIDDLE = PATHS // 2
BACKFILLED = 64  # entries of the queue, from the first, that may start in gaps
PLAYED = 2000  # entries that are played by the rules of the queue; later ones are told by the calendars
ROUNDS = 3
SHORTEST_GAP_S = 60.0
MOST_CALENDARS = 16  # and as many bytes as that, together
MOST_CALENDAR_BYTES = 2**28
MOST_SHAPES = 1024  # whose rooms are kept
NAMED = 5  # jobs that a request waits for

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Place:
    """One gang along every path. What fits along no path has no members."""

    start_s: Array  # (path,), inf where it never fits
    nodes: NDArray[np.int32]  # (path, member), -1 where it never fits
    gpus: NDArray[np.int64]  # (path, member, each) places along the calendar's last axis


@dataclass(frozen=True, slots=True)
class Hindrance:
    """A job (an index into `jobs`) that has a GPU until then, on a node (a row), along the path in the middle."""

    job: int
    node: int


@dataclass(slots=True)
class Calendar:
    """When GPUs are free: (path, node, gpu) each."""

    free_s: Array
    gap_s: Array  # begin of the first idle time before a reservation
    until_s: Array  # its end
    holder: NDArray[np.int32]  # index into `jobs` of the last to hold it, -1 nobody

    @property
    def nbytes(self) -> int:
        return self.free_s.nbytes + self.gap_s.nbytes + self.until_s.nbytes + self.holder.nbytes

    def copy(self) -> "Calendar":
        return Calendar(self.free_s.copy(), self.gap_s.copy(), self.until_s.copy(), self.holder.copy())


@dataclass(frozen=True, slots=True)
class Timelines:
    """The paths, refreshed now and then; estimates only read them."""

    view: ClusterView
    options: Options
    run_times: RunTimeQuantiles
    jobs: tuple[str, ...]  # names by `Calendar.holder`, the running ones first
    calendars: tuple[tuple[float, Calendar], ...]  # (priority, after all that waits with at least it), highest first
    starts_s: Mapping[str, Array]  # request_id → (path,)
    ends_s: Mapping[str, Array]  # job → (path,)
    waits: Mapping[str, str]  # job → request_id of what waits
    hindrances: Mapping[str, tuple[Hindrance, ...]]  # request_id → whom it waits for, the last to end first
    rooms: "Rooms"
    gpus: Mapping[str, int]  # request_id → how many it waits for
    entries: tuple[Waiting, ...] = ()  # in order
    turns: QueueTurns = ONE_LINE

    @property
    def now_ms(self) -> int:
        return self.options.now_ms

    def before(self, request: PlacementRequest) -> Calendar:
        """What a request finds when it comes now."""
        level: float = request.priority
        if self.turns is not ONE_LINE:
            mine = Waiting(request, self.now_ms)
            level = -self.turns.in_order([*self.entries, mine]).index(mine)
        return [calendar for highest, calendar in self.calendars if highest >= level][-1]

    def waiting(self, request: PlacementRequest) -> str | None:
        """The id under which it waits already, itself or as the job that it is for; None: it is hypothetical."""
        return request.request_id if request.request_id in self.starts_s else self.waits.get(request.job_name)


@dataclass(slots=True)
class Rooms:
    """Caches how many slots an empty node offers to a shape: many requests are alike."""

    empty: ClusterView
    options: Options
    known: dict[MachineShape, NDArray[np.int64]] = field(default_factory=dict)
    blocks: dict[Level, NDArray[np.int64]] = field(default_factory=dict)

    def of(self, request: PlacementRequest) -> NDArray[np.int64]:
        """(n,) members that a node could host if nothing ran."""
        shape = shape_of(request)
        room = self.known.get(shape)
        if room is None:
            room = screen(request, self.empty, self.options).room
            if len(self.known) >= MOST_SHAPES:
                self.known.clear()
            self.known[shape] = room
        return room

    def block(self, level: Level) -> NDArray[np.int64]:
        """(domain, most) rows of each domain's nodes, -1 where it has fewer."""
        if level not in self.blocks:
            self.blocks[level] = _rows_by_domain(self.empty.topology, level)
        return self.blocks[level]


def _rows_by_domain(topology: Topology, level: Level) -> NDArray[np.int64]:
    domain = topology.domain[level].astype(np.int64)
    known = np.flatnonzero(domain >= 0)
    order = known[np.argsort(domain[known], kind="stable")]
    counts = np.bincount(domain[known], minlength=max(1, len(topology.domain_names[level])))
    rows = np.full((len(counts), max(1, int(counts.max(initial=0)))), -1, np.int64)
    rows[np.arange(rows.shape[1])[None, :] < counts[:, None]] = order
    return rows


def timelines(
    queue: Sequence[Waiting],
    view: ClusterView,
    running: Mapping[str, RunningJob],
    run_times: RunTimeQuantiles,
    options: Options,
    run_quantiles: Callable[[PlacementRequest], Sequence[float] | None] = lambda request: None,
    arrivals: ArrivalForecast | None = None,
    turns: QueueTurns = ONE_LINE,
) -> Timelines:
    """Play the queue along `PATHS` paths. `run_quantiles`: of a request at `RUN_LEVELS`, where known."""
    draw = RunTimeSample(np.random.default_rng(0), run_times)
    ahead = Timeline(view, releases(view, running, run_times, options.now_ms))
    empty = ahead.at(len(ahead.ahead))
    calendar, left_s = _holding(view, running, draw, options.now_ms)
    ends_s = dict(left_s)
    jobs, calendars = list(view.jobs), [(float("inf"), calendar)]
    starts_s: dict[str, Array] = {}
    waits: dict[str, str] = {}
    runs_s: list[Array] = []
    hindrances: dict[str, tuple[Hindrance, ...]] = {}
    rooms = Rooms(empty, options)
    entries = [entry for entry in turns.in_order(queue) if entry.request.gpus_per_node]  # calendars are of GPUs
    places = turns.places(entries)
    kept = saved_before(places.levels, _most_calendars(calendar))
    for number, entry in enumerate(entries):
        request = entry.request
        if number in kept:
            calendar = calendar.copy()
            calendars.append((places.levels[number], calendar))
        backfills_s = planned(request, run_times) if number < BACKFILLED else None
        place = earliest_place(request, calendar, rooms, backfills_s)
        starts_s[request.request_id] = place.start_s
        waits[request.job_name] = request.request_id
        run_s = draw.runs(gpus_of(request), request.limit_s, run_quantiles(request))
        runs_s.append(run_s)
        if np.isfinite(place.start_s).any():
            hindrances[request.request_id] = hindrances_of(place, calendar)
            hold(calendar, place, run_s, len(jobs))
            ends_s[request.job_name] = place.start_s + run_s
            jobs.append(request.job_name)
    planned_s = planned_ends(ahead.ahead, options.now_ms)
    room = [rooms.of(entry.request) for entry in entries[:PLAYED]]
    drawn = Drawn(view, left_s, planned_s, entries[:PLAYED], room, runs_s, run_times, options.now_ms, places, arrivals)
    played_s, until_s = drawn.starts(PATHS)
    for entry, run_s, start_s in zip(entries, runs_s, played_s, strict=False):
        later_s = np.maximum(starts_s[entry.request.request_id], until_s)
        told_s = np.where(np.isfinite(start_s), start_s, later_s)
        starts_s[entry.request.request_id], ends_s[entry.request.job_name] = told_s, told_s + run_s
    gpus = {entry.request.request_id: gpus_of(entry.request) for entry in entries}
    held = tuple(jobs), tuple(calendars)
    line = tuple(entries), turns
    return Timelines(view, options, run_times, *held, starts_s, ends_s, waits, hindrances, rooms, gpus, *line)


def saved_before(priorities: Sequence[float], most: int) -> frozenset[int]:
    """Numbers of the entries before which to copy the calendar: where the priority changes, at most `most` of them.

    Of more changes keep those nearest to a geometric row: exact where few wait before.

    >>> sorted(saved_before([9, 9, 5, 0], 16)), sorted(saved_before(range(100, 0, -1), 4))
    ([0, 2, 3], [0, 4, 21, 99])
    """
    changes = np.array([at for at, one in enumerate(priorities) if at == 0 or one != priorities[at - 1]], np.int64)
    if len(changes) > most:
        row = np.rint(np.geomspace(1, changes[-1] + 1, most)).astype(np.int64) - 1
        changes = changes[np.searchsorted(changes, row)]
    return frozenset(changes.tolist())


def _most_calendars(one: Calendar) -> int:
    return min(MOST_CALENDARS, max(2, MOST_CALENDAR_BYTES // max(1, one.nbytes)))


def hindrances_of(place: Place, calendar: Calendar) -> tuple[Hindrance, ...]:
    """Who has the GPUs of the path in the middle until the gang starts: at most NAMED, the last to give them first."""
    path = int(np.argsort(place.start_s, kind="stable")[MIDDLE])
    nodes = np.repeat(place.nodes[path], place.gpus.shape[2])
    at = (path, nodes, place.gpus[path].ravel())
    holders, until_s = calendar.holder[at], calendar.free_s[at]
    found: dict[int, Hindrance] = {}
    for row in np.argsort(-until_s, kind="stable").tolist():
        job = int(holders[row])
        if job >= 0 and 0 < until_s[row] <= place.start_s[path]:
            found.setdefault(job, Hindrance(job, int(nodes[row])))
            if len(found) == NAMED:
                break
    return tuple(found.values())


def planned_ends(ahead: Sequence[Release], now_ms: int) -> dict[str, float]:
    """Running job → seconds until it should have ended, as the queue plans."""
    return {release.job: (release.end_ms - now_ms) / 1000 for release in ahead}


def gpus_of(request: PlacementRequest) -> int:
    return request.members.desired * request.gpus_per_node


def planned(request: PlacementRequest, run_times: RunTimeQuantiles) -> float:
    """For how long the queue plans with this job, in seconds."""
    return run_times.run_s(gpus_of(request), 0.9, limit_s=request.limit_s)


def _holding(
    view: ClusterView, running: Mapping[str, RunningJob], draw: RunTimeSample, now_ms: int
) -> tuple[Calendar, dict[str, Array]]:
    """The calendar of what runs: GPUs that are free now at 0, those that do not answer never."""
    n, g = view.free.shape
    left_s = {}
    table = np.zeros((len(view.jobs) + 1, PATHS), np.float32)  # the last row stands for nobody
    for index in np.unique(view.holders[view.holders >= 0]).tolist():
        name = view.jobs[index]
        table[index] = left_s[name] = draw.left(running.get(name) or RunningJob(now_ms, 1), now_ms)
    free_s = np.ascontiguousarray(np.moveaxis(table[view.holders], -1, 0))
    free_s[:, ~view.usable] = np.inf
    order = np.argsort(free_s, axis=-1, kind="stable")
    holder = np.broadcast_to(view.holders, (PATHS, n, g))
    calendar = Calendar(
        free_s=np.take_along_axis(free_s, order, -1),
        gap_s=np.full((PATHS, n, g), np.inf, np.float32),
        until_s=np.full((PATHS, n, g), -np.inf, np.float32),
        holder=np.ascontiguousarray(np.take_along_axis(holder, order, -1)),
    )
    return calendar, left_s


def earliest_place(request: PlacementRequest, calendar: Calendar, rooms: Rooms, planned_s: float | None) -> Place:
    """Where and when the gang starts; with `planned_s` also in gaps that last so long from its start on."""
    room = rooms.of(request)
    if planned_s is None:
        return _earliest(request, calendar.free_s, None, room, rooms)
    fits = (calendar.until_s - calendar.gap_s >= planned_s) & (room > 0)[:, None]
    if not fits.any():
        return _earliest(request, calendar.free_s, None, room, rooms)
    for _ in range(ROUNDS):
        ready = np.where(fits, calendar.gap_s, calendar.free_s)
        order = np.argsort(ready, axis=-1, kind="stable")
        place = _earliest(request, np.take_along_axis(ready, order, -1), order, room, rooms)
        start_s = np.where(np.isfinite(place.start_s), place.start_s, 0.0)[:, None, None]
        late = fits & (calendar.until_s < start_s + planned_s)
        if not late.any():
            break
        fits &= ~late
    else:
        return _earliest(request, calendar.free_s, None, room, rooms)
    return place


def _earliest(
    request: PlacementRequest,
    ready: Array,
    order: NDArray[np.int64] | None,
    room: NDArray[np.int64],
    rooms: Rooms,
) -> Place:
    """ready: (path, node, gpu), ascending along a node; order: the calendar's place of each, None: the same."""
    level, members, each = widest_level(request), request.members.min, request.gpus_per_node
    if level is Level.NODE:
        room, members, each = room // members, 1, each * members
    slots = _slots(ready, np.minimum(room, 1) if request.spread else room, each)
    paths, n, s = slots.shape
    if not n * s:
        return _nowhere(paths)
    if level is None or level is Level.NODE:
        among = slots.reshape(paths, 1, n * s)
        rows = np.arange(n)[None, :]
    else:
        rows = rooms.block(level)
        among = np.where(rows[None, :, :, None] >= 0, slots[:, rows], np.inf).reshape(paths, len(rows), -1)
    if among.shape[2] < members:
        return _nowhere(paths)
    last = among.min(axis=2) if members == 1 else np.partition(among, members - 1, axis=2)[:, :, members - 1]
    best = last.argmin(axis=1)
    start_s = last[np.arange(paths), best]
    mine = among[np.arange(paths), best]
    key = np.where(mine <= start_s[:, None], -mine, np.inf)  # of what is free by then, what is free last
    chosen = key.argmin(axis=1)[:, None] if members == 1 else np.argpartition(key, members - 1, axis=1)[:, :members]
    nodes = rows[best[:, None] if len(rows) > 1 else 0, chosen // s]
    gpus = (chosen % s)[:, :, None] * each + np.arange(each)
    if order is not None:
        gpus = order[np.arange(paths)[:, None, None], nodes[:, :, None], gpus]
    nodes = np.where(np.isfinite(start_s)[:, None], nodes, -1)
    return Place(start_s.astype(np.float32), nodes.astype(np.int32), gpus)


def _slots(ready: Array, room: NDArray[np.int64], each: int) -> Array:
    """(path, node, slot) when the GPUs of each slot are free; never those beyond a node's room."""
    slots = ready[:, :, each - 1 :: each]
    return np.where(np.arange(slots.shape[2]) < room[:, None], slots, np.float32(np.inf))


def _nowhere(paths: int) -> Place:
    """What never fits has no members: a gang of a million would else cost their memory."""
    never = np.full(paths, np.inf, np.float32)
    return Place(never, np.zeros((paths, 0), np.int32), np.zeros((paths, 0, 0), np.int64))


def hold(calendar: Calendar, place: Place, run_s: Array, job: int) -> None:
    """Write a gang into the calendar: it holds its GPUs for `run_s` (path,), as `job`."""
    fits = np.flatnonzero(np.isfinite(place.start_s))
    at = (fits[:, None, None], place.nodes[fits][:, :, None], place.gpus[fits])
    start_s = np.broadcast_to(place.start_s[fits][:, None, None], at[2].shape)
    end_s = start_s + run_s[fits][:, None, None]
    free_s, gap_s, until_s = calendar.free_s[at], calendar.gap_s[at], calendar.until_s[at]
    in_gap = start_s < free_s
    opens = ~in_gap & (start_s - free_s >= SHORTEST_GAP_S) & np.isinf(gap_s)
    calendar.gap_s[at] = np.where(in_gap, end_s, np.where(opens, free_s, gap_s))
    calendar.until_s[at] = np.where(opens, start_s, until_s)
    calendar.holder[at] = np.where(in_gap, calendar.holder[at], job)
    calendar.free_s[at] = np.where(in_gap, np.maximum(free_s, end_s), end_s)
    _sort(calendar, np.repeat(fits, place.nodes.shape[1]), place.nodes[fits].ravel())


def _sort(calendar: Calendar, paths: NDArray[np.int64], nodes: NDArray[np.int32]) -> None:
    """Bring the GPUs of some nodes back into ascending order."""
    order = np.argsort(calendar.free_s[paths, nodes], axis=-1, kind="stable")
    for column in (calendar.free_s, calendar.gap_s, calendar.until_s, calendar.holder):
        column[paths, nodes] = np.take_along_axis(column[paths, nodes], order, -1)
