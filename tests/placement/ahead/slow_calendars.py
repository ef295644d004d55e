"""Places and holds in calendars as they are defined: whole arrays, all four columns sorted again."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.ahead.calendars import SHORTEST_GAP_S, Array, Calendar, RoomCache
from fleetcast.placement.ahead.searches import ARRAY_PROGRAMS, Searches, load_searches
from fleetcast.placement.ahead.slot_times import Place, SlotTimes, make_empty_place
from fleetcast.placement.machines.fit import get_widest_level


def earliest(
    request: PlacementRequest,
    ready: Array,
    order: NDArray[np.int64] | None,
    room: NDArray[np.int64],
    rooms: RoomCache,
) -> Place:
    """ready: (path, node, gpu), ascending along a node; order: the calendar's place of each, None: the same."""
    level, members, each = get_widest_level(request), request.members.min, request.gpus_per_node
    if level is Level.NODE:
        room, members, each = room // members, 1, each * members
    slots = _slots(ready, np.minimum(room, 1) if request.spread else room, each)
    paths, n, s = slots.shape
    if not n * s:
        return make_empty_place(paths)
    if level is None or level is Level.NODE:
        among = slots.reshape(paths, 1, n * s)
        rows = np.arange(n)[None, :]
    else:
        rows = rooms.find_domain_rows(level)
        among = np.where(rows[None, :, :, None] >= 0, slots[:, rows], np.inf).reshape(paths, len(rows), -1)
    if among.shape[2] < members:
        return make_empty_place(paths)
    last = among.min(axis=2) if members == 1 else np.partition(among, members - 1, axis=2)[:, :, members - 1]
    best = last.argmin(axis=1)
    start_s = last[np.arange(paths), best]
    mine = among[np.arange(paths), best]
    key = np.where(mine <= start_s[:, None], -mine, np.inf)  # of what is free by then, what is free last
    chosen = np.where(np.isfinite(start_s)[:, None], key.argsort(axis=1, kind="stable")[:, :members], 0)
    nodes = rows[best[:, None] if len(rows) > 1 else 0, chosen // s]
    gpus = (chosen % s)[:, :, None] * each + np.arange(each)
    if order is not None:
        gpus = order[np.arange(paths)[:, None, None], nodes[:, :, None], gpus]
    nodes = np.where(np.isfinite(start_s)[:, None], nodes, -1)
    return Place(start_s.astype(np.float32), nodes.astype(np.int32), gpus)


def list_searches() -> list[Searches]:
    """Return the searches there are: the array programs, and the compiled ones if numba is installed."""
    return list(dict.fromkeys((ARRAY_PROGRAMS, load_searches())))


@dataclass(slots=True)
class PlainFinder:
    """A finder of places that looks at the whole calendar for each gang."""

    rooms: RoomCache
    slot_times: type[SlotTimes] = SlotTimes

    def find_place(self, request: PlacementRequest, calendar: Calendar) -> Place:
        return earliest(request, calendar.free_s, None, self.rooms.count_members_per_node(request), self.rooms)

    def record_changes(self, nodes: None) -> None:
        """Ignore changes of the calendar."""


def _slots(ready: Array, room: NDArray[np.int64], each: int) -> Array:
    """(path, node, slot) when the GPUs of each slot are free; never those beyond a node's room."""
    slots = ready[:, :, each - 1 :: each]
    return np.where(np.arange(slots.shape[2]) < room[:, None], slots, np.float32(np.inf))


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
