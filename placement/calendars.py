"""Calendars: along sampled futures, when each GPU is free, and where and when a gang starts on them.

Arrays are (path, node, gpu) float32 seconds from now, ascending along a node, whose GPUs are alike.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fleet.requests import PlacementRequest
from fleet.topology import Level, Topology
from placement.asks import FitKey, fit_key
from placement.filters import screen
from placement.fit import widest_level
from placement.options import Options
from placement.queues_ahead import Closure
from placement.view import ClusterView

ROUNDS = 3
SHORTEST_GAP_S = 60.0
MAX_CACHED_ROOMS = 1024

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Place:
    """One gang along every path. What fits along no path has no members."""

    start_s: Array  # (path,), inf where it never fits
    nodes: NDArray[np.int32]  # (path, member), -1 where it never fits
    gpus: NDArray[np.int64]  # (path, member, each) places along the calendar's last axis


@dataclass(slots=True)
class Calendar:
    """When GPUs are free: (path, node, gpu) each, C-contiguous."""

    free_s: Array
    gap_s: Array  # begin of the first idle time before a reservation
    until_s: Array  # its end
    holder: NDArray[np.int32]  # index into `jobs` of the last to hold it, -1 nobody

    @property
    def nbytes(self) -> int:
        return self.free_s.nbytes + self.gap_s.nbytes + self.until_s.nbytes + self.holder.nbytes

    def copy(self) -> "Calendar":
        return Calendar(self.free_s.copy(), self.gap_s.copy(), self.until_s.copy(), self.holder.copy())


@dataclass(slots=True)
class Rooms:
    """How many slots an empty node offers to a request, cached by fit key: many requests are alike."""

    empty: ClusterView
    options: Options
    known: dict[FitKey, NDArray[np.int64]] = field(default_factory=dict)
    blocks: dict[Level, NDArray[np.int64]] = field(default_factory=dict)

    def of(self, request: PlacementRequest) -> NDArray[np.int64]:
        """(n,) members that a node could host if nothing ran."""
        key = fit_key(request, has_plugins=bool(self.options.filters))
        room = self.known.get(key)
        if room is None:
            room = screen(request, self.empty, self.options).room
            if len(self.known) >= MAX_CACHED_ROOMS:
                self.known.clear()
            self.known[key] = room
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


@dataclass(frozen=True, slots=True)
class Bars:
    """What keeps a gang from GPUs that are free: from when on (path,) its queue may have it, and nodes closed to it."""

    run_s: float
    allowed_s: Array
    closures: tuple[Closure, ...] = ()

    def opened(self, ready: Array) -> Array:
        """When each GPU (path, node, gpu) may be used; as ascending along a node as before."""
        ready = np.maximum(ready, self.allowed_s[:, None, None])
        for one in self.closures:
            mine = ready[:, one.nodes]
            barred = (mine + self.run_s > one.from_s) & (mine < one.to_s)
            ready[:, one.nodes] = np.where(barred, np.float32(one.to_s), mine)
        return ready

    def later(self, place: Place) -> Array | None:
        """(path,) before when it may not start, as one of its nodes is closed then; None: it may start as it stands."""
        barred = np.zeros(len(place.start_s), bool)
        for one in self.closures:
            inside = (place.start_s + self.run_s > one.from_s) & (place.start_s < one.to_s)
            barred |= inside & (one.nodes[place.nodes] & (place.nodes >= 0)).any(axis=1)
        return np.where(barred, place.start_s, self.allowed_s) if barred.any() else None


def earliest_place(
    request: PlacementRequest, calendar: Calendar, rooms: Rooms, planned_s: float | None, bars: Bars | None = None
) -> Place:
    """Where and when the gang starts; with `planned_s` also in gaps that last so long from its start on."""
    place = _earliest_open(request, calendar, rooms, planned_s, bars)
    for _ in bars.closures if bars is not None else ():
        assert bars is not None
        allowed_s = bars.later(place)
        if allowed_s is None:
            break
        bars = replace(bars, allowed_s=allowed_s)
        place = _earliest_open(request, calendar, rooms, planned_s, bars)
    return place


def _earliest_open(
    request: PlacementRequest, calendar: Calendar, rooms: Rooms, planned_s: float | None, bars: Bars | None
) -> Place:
    room = rooms.of(request)
    free_s = calendar.free_s if bars is None else bars.opened(calendar.free_s)
    if planned_s is None:
        return _earliest(request, free_s, None, room, rooms)
    fits = (calendar.until_s - calendar.gap_s >= planned_s) & (room > 0)[:, None]
    if not fits.any():
        return _earliest(request, free_s, None, room, rooms)
    gap_s = calendar.gap_s if bars is None else bars.opened(calendar.gap_s)
    for _ in range(ROUNDS):
        ready = np.where(fits, gap_s, free_s)
        order = np.argsort(ready, axis=-1, kind="stable")
        place = _earliest(request, np.take_along_axis(ready, order, -1), order, room, rooms)
        start_s = np.where(np.isfinite(place.start_s), place.start_s, 0.0)[:, None, None]
        late = fits & (calendar.until_s < start_s + planned_s)
        if not late.any():
            break
        fits &= ~late
    else:
        return _earliest(request, free_s, None, room, rooms)
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
    if members == 1:  # the first slot of a node is free first
        ready = ready[:, :, :each]
    slots = _slots(ready, np.minimum(room, 1) if request.spread else room, each)
    paths, n, s = slots.shape
    if not n * s:
        return _nowhere(paths)
    if level is None or level is Level.NODE:
        among = slots.reshape(paths, 1, n * s)
        rows = np.arange(n)[None, :]
    else:
        rows = rooms.block(level)
        among = slots.take(rows.ravel(), axis=1)
        among[:, np.flatnonzero(rows < 0)] = np.inf
        among = among.reshape(paths, len(rows), -1)
    if among.shape[2] < members:
        return _nowhere(paths)
    path, best, mine = np.arange(paths), np.zeros(paths, np.int64), among[:, 0]
    if len(rows) > 1:
        best = np.partition(among, members - 1, axis=2)[:, :, members - 1].argmin(axis=1)
        mine = among[path, best]
    if members == 1:
        chosen = mine.argmin(axis=1)[:, None]
        start_s = mine[path, chosen[:, 0]]
    else:
        start_s = np.partition(mine, members - 1, axis=1)[:, members - 1]
        key = np.where(mine <= start_s[:, None], -mine, np.inf)  # of what is free by then, what is free last
        chosen = np.argpartition(key, members - 1, axis=1)[:, :members]
    nodes = rows[best[:, None] if len(rows) > 1 else 0, chosen // s]
    gpus = (chosen % s)[:, :, None] * each + np.arange(each)
    if order is not None:
        gpus = order[path[:, None, None], nodes[:, :, None], gpus]
    nodes = np.where(np.isfinite(start_s)[:, None], nodes, -1)
    return Place(start_s.astype(np.float32), nodes.astype(np.int32), gpus)


def _slots(ready: Array, room: NDArray[np.int64], each: int) -> Array:
    """(path, node, slot) when the GPUs of each slot are free; never those beyond a node's room."""
    slots = ready[:, :, each - 1 :: each]
    if room.min(initial=slots.shape[2]) >= slots.shape[2]:
        return slots
    return np.where(np.arange(slots.shape[2]) < room[:, None], slots, np.float32(np.inf))


def _nowhere(paths: int) -> Place:
    """What never fits has no members: a gang of a million would else cost their memory."""
    never = np.full(paths, np.inf, np.float32)
    return Place(never, np.zeros((paths, 0), np.int32), np.zeros((paths, 0, 0), np.int64))


def hold(calendar: Calendar, place: Place, run_s: Array, job: int) -> None:
    """Write a gang into the calendar: it holds its GPUs for `run_s` (path,), as `job`."""
    fits = np.flatnonzero(np.isfinite(place.start_s))
    n, g = calendar.free_s.shape[1:]
    rows = fits[:, None] * n + place.nodes[fits]
    at = (rows[:, :, None] * g + place.gpus[fits]).reshape(len(fits), -1)
    start_s = np.broadcast_to(place.start_s[fits][:, None], at.shape)
    end_s = start_s + run_s[fits][:, None]
    free_s, gap_s, until_s = calendar.free_s.take(at), calendar.gap_s.take(at), calendar.until_s.take(at)
    in_gap = start_s < free_s
    opens = ~in_gap & (start_s - free_s >= SHORTEST_GAP_S) & np.isinf(gap_s)
    calendar.gap_s.put(at, np.where(in_gap, end_s, np.where(opens, free_s, gap_s)))
    calendar.until_s.put(at, np.where(opens, start_s, until_s))
    calendar.holder.put(at, np.where(in_gap, calendar.holder.take(at), job))
    calendar.free_s.put(at, np.where(in_gap, np.maximum(free_s, end_s), end_s))
    if place.gpus.shape[2] < g:  # else all GPUs of a node are in order still
        _sort(calendar, rows.ravel())


def _sort(calendar: Calendar, rows: NDArray[np.int64]) -> None:
    """Bring the GPUs of some nodes back into ascending order. rows: path times n plus node."""
    g = calendar.free_s.shape[2]
    at = rows[:, None] * g + np.arange(g)
    order = rows[:, None] * g + np.argsort(calendar.free_s.take(at), axis=-1, kind="stable")
    for column in (calendar.free_s, calendar.gap_s, calendar.until_s, calendar.holder):
        column.put(at, column.take(order))
