"""Calendars of when GPUs become free along sampled futures, and the search for the earliest start of a gang.

Arrays are (path, node, gpu) float32 seconds from now. The times of one node are ascending, because the GPUs
of a node are interchangeable.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level, Topology
from fleetcast.placement.ahead.slot_times import GangShape, Place, SlotTimes
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.asks import FitKey, make_fit_key
from fleetcast.placement.queues.queues_ahead import Closure

ROUNDS = 3
SHORTEST_GAP_S = 60.0
MAX_CACHED_ROOMS = 1024
MAX_FOLLOWED_SHAPES = 32  # each is as large as the times of its slots in a calendar
MAX_FOLLOWED_BYTES = 2**27  # together

Array = NDArray[np.float32]
ShapeKey = tuple[Level | None, int, bool, bytes]


@dataclass(slots=True)
class Calendar:
    """The times at which GPUs become free along sampled paths, and the jobs that hold them until then.

    Each column is (path, node, gpu), C-contiguous. Times are in seconds from now.
    """

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
class RoomCache:
    """A cache of how many members of a request each node could host if no job ran.

    The counts are stored by fit key, because requests with equal fit keys fit on the same nodes.
    """

    empty: ClusterView
    options: Options
    known: dict[FitKey, NDArray[np.int64]] = field(default_factory=dict)
    blocks: dict[Level | None, NDArray[np.int64]] = field(default_factory=dict)

    def count_members_per_node(self, request: PlacementRequest) -> NDArray[np.int64]:
        """Return (n,) int64, the members of a request that each node could host if nothing ran."""
        key = make_fit_key(request, has_plugins=bool(self.options.filters))
        room = self.known.get(key)
        if room is None:
            room = screen(request, self.empty, self.options).room
            if len(self.known) >= MAX_CACHED_ROOMS:
                self.known.clear()
            self.known[key] = room
        return room

    def find_domain_rows(self, level: Level | None) -> NDArray[np.int64]:
        """Return (domain, k) int64, the node rows of each domain, where k is the size of the largest domain.

        Smaller domains are padded with -1. For level None, all nodes are one domain.
        """
        if level not in self.blocks:
            everywhere = np.arange(len(self.empty))[None]
            self.blocks[level] = everywhere if level is None else _group_rows_by_domain(self.empty.topology, level)
        return self.blocks[level]


def _group_rows_by_domain(topology: Topology, level: Level) -> NDArray[np.int64]:
    domain = topology.domain[level].astype(np.int64)
    known = np.flatnonzero(domain >= 0)
    order = known[np.argsort(domain[known], kind="stable")]
    counts = np.bincount(domain[known], minlength=max(1, len(topology.domain_names[level])))
    rows = np.full((len(counts), max(1, int(counts.max(initial=0)))), -1, np.int64)
    rows[np.arange(rows.shape[1])[None, :] < counts[:, None]] = order
    return rows


@dataclass(frozen=True, slots=True)
class StartRestrictions:
    """The rules that keep a gang from using free GPUs: the quota of its queue, and closed nodes.

    run_s: seconds that the gang is planned to run. allowed_s: (path,) seconds until the quota of its queue
    allows the gang. closures: the time spans in which nodes are closed to the gang.
    """

    run_s: float
    allowed_s: Array
    closures: tuple[Closure, ...] = ()

    def delay_ready_times(self, ready: Array) -> Array:
        """Return (path, node, gpu) seconds until the gang may use each GPU, delayed by quota and closures.

        ready: (path, node, gpu) seconds until each GPU is free. The times stay ascending along a node.
        """
        ready = np.maximum(ready, self.allowed_s[:, None, None])
        for one in self.closures:
            mine = ready[:, one.nodes]
            barred = (mine + self.run_s > one.from_s) & (mine < one.to_s)
            ready[:, one.nodes] = np.where(barred, np.float32(one.to_s), mine)
        return ready

    def find_next_allowed_s(self, place: Place) -> Array | None:
        """Return (path,) the next `allowed_s` to try if a closure bars the gang from `place`.

        Returns None if no closure bars it.
        """
        barred = np.zeros(len(place.start_s), bool)
        for one in self.closures:
            inside = (place.start_s + self.run_s > one.from_s) & (place.start_s < one.to_s)
            barred |= inside & (one.nodes[place.nodes] & (place.nodes >= 0)).any(axis=1)
        return np.where(barred, place.start_s, self.allowed_s) if barred.any() else None


def find_earliest_start(
    request: PlacementRequest,
    calendar: Calendar,
    rooms: RoomCache,
    planned_s: float | None,
    bars: StartRestrictions | None = None,
) -> Place:
    """Return the earliest place of a gang on each path, with its start time.

    Idle gaps before reservations are used only if `planned_s` is given. The gang must then end within
    the gap.
    """
    place = _find_earliest_place(request, calendar, rooms, planned_s, bars)
    for _ in bars.closures if bars is not None else ():
        assert bars is not None
        allowed_s = bars.find_next_allowed_s(place)
        if allowed_s is None:
            break
        bars = replace(bars, allowed_s=allowed_s)
        place = _find_earliest_place(request, calendar, rooms, planned_s, bars)
    return place


def _find_earliest_place(
    request: PlacementRequest,
    calendar: Calendar,
    rooms: RoomCache,
    planned_s: float | None,
    bars: StartRestrictions | None,
) -> Place:
    room = rooms.count_members_per_node(request)
    free_s = calendar.free_s if bars is None else bars.delay_ready_times(calendar.free_s)
    if planned_s is None:
        return _search_slot_times(request, free_s, None, room, rooms)
    fits = (calendar.until_s - calendar.gap_s >= planned_s) & (room > 0)[:, None]
    if not fits.any():
        return _search_slot_times(request, free_s, None, room, rooms)
    gap_s = calendar.gap_s if bars is None else bars.delay_ready_times(calendar.gap_s)
    for _ in range(ROUNDS):
        ready = np.where(fits, gap_s, free_s)
        order = np.argsort(ready, axis=-1, kind="stable")
        place = _search_slot_times(request, np.take_along_axis(ready, order, -1), order, room, rooms)
        start_s = np.where(np.isfinite(place.start_s), place.start_s, 0.0)[:, None, None]
        late = fits & (calendar.until_s < start_s + planned_s)
        if not late.any():
            break
        fits &= ~late
    else:
        return _search_slot_times(request, free_s, None, room, rooms)
    return place


def _search_slot_times(
    request: PlacementRequest,
    ready: Array,
    order: NDArray[np.int64] | None,
    room: NDArray[np.int64],
    rooms: RoomCache,
) -> Place:
    """Return the earliest place of a gang on GPUs with the given ready times.

    ready: (path, node, gpu) seconds from now, ascending along a node. order: the position of each GPU
    in the calendar. None if the positions are the same.
    """
    shape = GangShape.from_request(request, room)
    times = SlotTimes.from_calendar(ready, shape, rooms.find_domain_rows(shape.level), is_followed=False)
    return times.find_earliest_place(shape.members, order)


@dataclass(slots=True)
class PlaceFinder:
    """A search for the earliest places of many gangs, one after another.

    Between two gangs the calendar changes on few nodes. The caller records every change. The search does not
    use idle gaps before reservations.
    """

    rooms: RoomCache
    slot_times: type[SlotTimes] = SlotTimes
    _shapes: dict[FitKey, tuple[GangShape, ShapeKey]] = field(default_factory=dict)
    _times: dict[ShapeKey, SlotTimes] = field(default_factory=dict)

    def find_place(self, request: PlacementRequest, calendar: Calendar) -> Place:
        """Return the earliest place of a gang on each path.

        The result is that of `find_earliest_start` without `planned_s` and without restrictions.
        """
        shape, key = self._find_shape(request)
        times = self._times.get(key)
        if times is None or times.is_outdated:
            block = self.rooms.find_domain_rows(shape.level)
            self._times.pop(key, None)
            times = self.slot_times.from_calendar(calendar.free_s, shape, block, is_followed=True)
            followed_bytes = sum(one.times_s.nbytes for one in self._times.values()) + times.times_s.nbytes
            if len(self._times) >= MAX_FOLLOWED_SHAPES or followed_bytes > MAX_FOLLOWED_BYTES:
                self._times.clear()
            if times.times_s.nbytes <= MAX_FOLLOWED_BYTES:
                self._times[key] = times
        times.read_changed_nodes(calendar.free_s)
        return times.find_earliest_place(shape.members)

    def _find_shape(self, request: PlacementRequest) -> tuple[GangShape, ShapeKey]:
        """Return the shape of a request, and a key of the shape.

        Shapes with equal keys have slots that become free at the same times.
        """
        alike = make_fit_key(request, has_plugins=bool(self.rooms.options.filters))
        if alike not in self._shapes:
            if len(self._shapes) >= MAX_CACHED_ROOMS:
                self._shapes.clear()
            shape = GangShape.from_request(request, self.rooms.count_members_per_node(request))
            self._shapes[alike] = shape, (shape.level, shape.each, shape.members == 1, shape.room.tobytes())
        return self._shapes[alike]

    def record_changes(self, nodes: NDArray[np.int64]) -> None:
        """Record the nodes on which the calendar has changed.

        nodes: (k,) indices path × n + node, where n is the number of nodes.
        """
        for times in self._times.values():
            times.record_changes(nodes)


def record_gang_hold(calendar: Calendar, place: Place, run_s: Array, job: int) -> NDArray[np.int64]:
    """Record in the calendar that a gang holds its GPUs.

    run_s: (path,) seconds that the gang holds them. job: the gang's index among the holders of GPUs. Returns
    (k,) the changed nodes as indices path × n + node.
    """
    fits = np.flatnonzero(np.isfinite(place.start_s))
    n, g = calendar.free_s.shape[1:]
    members, each = place.gpus.shape[1:]
    start_s, place_nodes, place_gpus = place.start_s, place.nodes, place.gpus
    if len(fits) < len(start_s):
        start_s, run_s, place_nodes, place_gpus = start_s[fits], run_s[fits], place_nodes[fits], place_gpus[fits]
    rows = fits[:, None] * n + place_nodes
    nodes: NDArray[np.int64] = rows.ravel()
    end_s = start_s + run_s
    if each == g:  # whole nodes stay in order
        _write_job_times(
            calendar, (-1, g), nodes, start_s.repeat(members)[:, None], end_s.repeat(members)[:, None], job
        )
    else:
        gpus = (rows[:, :, None] * g + place_gpus).ravel()
        _write_job_times(calendar, (-1,), gpus, start_s.repeat(members * each), end_s.repeat(members * each), job)
        _sort_gpus(calendar, nodes)
    return nodes


def _write_job_times(
    calendar: Calendar, shape: tuple[int, ...], at: NDArray[np.int64], start_s: Array, end_s: Array, job: int
) -> None:
    """Record that a job holds GPUs from start_s to end_s.

    at: indices along the first axis of the calendar's columns after they are reshaped to `shape`.
    """
    free, gap, until, holder = (
        column.reshape(shape) for column in (calendar.free_s, calendar.gap_s, calendar.until_s, calendar.holder)
    )
    free_s = free.take(at, axis=0)
    idle_s = start_s - free_s
    if (idle_s < 0).any():
        in_gap = start_s < free_s
        gap[at] = np.where(in_gap, end_s, gap.take(at, axis=0))
        holder[at] = np.where(in_gap, holder.take(at, axis=0), job)
        free[at] = np.where(in_gap, np.maximum(free_s, end_s), end_s)
    else:
        holder[at] = job
        free[at] = end_s
    opens = idle_s >= SHORTEST_GAP_S
    if opens.any():
        gap_s = gap.take(at, axis=0)
        opens &= np.isinf(gap_s)
        if opens.any():  # mostly each of these GPUs has had a gap before
            gap[at] = np.where(opens, free_s, gap_s)
            until[at] = np.where(opens, start_s, until.take(at, axis=0))


def _sort_gpus(calendar: Calendar, rows: NDArray[np.int64]) -> None:
    """Sort the GPUs of some nodes by the time at which they become free.

    rows: (k,) indices path × n + node, where n is the number of nodes.
    """
    g = calendar.free_s.shape[2]
    at = rows[:, None] * g + np.arange(g)
    order = rows[:, None] * g + np.argsort(calendar.free_s.take(at), axis=-1, kind="stable")
    for column in (calendar.free_s, calendar.gap_s, calendar.until_s, calendar.holder):
        column.put(at, column.take(order))
