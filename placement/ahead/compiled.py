"""The searches along sampled futures as loops that numba compiles, if the extra `compiled` is installed.

Each class and function answers as the array program that it replaces, to the bit. Among equal nodes,
slots or domains the first one comes first.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
from numba import njit
from numpy.typing import NDArray

from fleetcast.placement.ahead.calendars import SHORTEST_GAP_S, Calendar
from fleetcast.placement.ahead.slot_times import Array, Ints, Place, SlotTimes, make_empty_place
from fleetcast.placement.machines.gang_room import Fleet, Floats, GangAsk

Loop = TypeVar("Loop", bound=Callable[..., Any])
Mask = NDArray[np.bool_]

NO_NODES = np.zeros(0, np.int64)
ALL_OPEN = np.zeros(0, bool)
BLOCK = 16  # slots


def compile_loop(loop: Loop) -> Loop:
    """Compile a function when it is first called. The machine code is stored beside the module."""
    return cast(Loop, njit(cache=True)(loop))


@dataclass(slots=True)
class CompiledFleet(Fleet):
    """A fleet whose changes and searches are compiled."""

    _largest: Ints = field(init=False)  # `_best` as an array

    def __post_init__(self) -> None:
        Fleet.__post_init__(self)
        self._largest = np.array(self._best, np.int64)

    def copy(self) -> "CompiledFleet":
        """Return a copy that can be changed independently."""
        other = cast(CompiledFleet, Fleet.copy(self))
        other._largest = self._largest.copy()
        return other

    def change_free_gpus(self, nodes: Ints, gpus: Ints) -> None:
        """Add thousandths of GPUs to the free ones of nodes. A negative number takes GPUs."""
        each, most, at, first = self._each, self._most, self._at, self._first
        _change_free_gpus(self.free, self._room, self._total, self._largest, each, most, at, first, nodes, gpus)
        self._best = self._largest.tolist()

    def choose_gang_nodes(self, ask: GangAsk, reserved: Ints | None) -> tuple[Ints, Ints] | None:
        """Return (nodes, GPUs of each) for a gang, the fullest first. Returns None if there is no room."""
        slot, without = self.slots[ask.slot], NO_NODES if reserved is None else reserved
        nodes, gpus = _choose_fullest_nodes(self._room[ask.slot], self.free, without, slot.rows, ask.members, slot.each)
        return (nodes, gpus) if len(nodes) else None

    def find_soonest_nodes(self, ask: GangAsk, now_s: float = 0.0) -> tuple[Ints, float]:
        """Return the nodes that should first be free for a gang, and the time when the last of them is."""
        slot, closed = self.slots[ask.slot], ask.mask_closed_nodes(now_s)
        return _find_soonest_nodes(
            self._room[ask.slot],
            slot.most,
            self.ready_s,
            ALL_OPEN if closed is None else closed,
            slot.rows,
            ask.members,
        )


@dataclass(slots=True)
class CompiledSlotTimes(SlotTimes):
    """Slot times whose search for the earliest place is compiled."""

    def find_earliest_place(self, members: int, order: Ints | None = None) -> Place:
        """Return the earliest place of a gang with this number of members, on each path."""
        paths, domains, size = self.times_s.shape
        if order is not None:
            return SlotTimes.find_earliest_place(self, members, order)
        if size < members or not size:
            return make_empty_place(paths)
        if members not in self._last:
            self._last[members] = np.full((paths, domains), -np.inf, np.float32), np.ones((paths, domains), bool)
        return Place(
            *_find_earliest_place(self.times_s, self.rows, self.slots, members, self.shape.each, *self._last[members])
        )


def record_gang_hold(calendar: Calendar, place: Place, run_s: Array, job: int) -> Ints:
    """Record in the calendar that a gang holds its GPUs for `run_s` seconds (path,).

    job: the gang's index among the holders of GPUs. Returns (k,) the changed nodes as path × n + node.
    """
    columns = calendar.free_s, calendar.gap_s, calendar.until_s, calendar.holder
    return _record_gang_hold(*columns, place.start_s, place.nodes, place.gpus, run_s, job)


@compile_loop
def _change_free_gpus(
    free: Ints,
    room: Ints,
    total: Ints,
    largest: Ints,
    each: Ints,
    most: Ints,
    at: Ints,
    first: Ints,
    nodes: Ints,
    gpus: Ints,
) -> None:
    """Change `free` by `gpus`, and with it the columns of a fleet that are counted from it."""
    for k in range(len(nodes)):
        node = nodes[k]
        free[node] += gpus[k]
        for slot in range(len(each)):
            members = min(most[slot, node], free[node] // each[slot, 0])
            total[at[slot, node]] += members - room[slot, node]
            room[slot, node] = members
    for slot in range(len(each)):
        largest[slot] = total[first[slot] : first[slot + 1]].max()


@compile_loop
def _choose_fullest_nodes(
    room: Ints, free: Ints, reserved: Ints, rows: Ints, members: int, each: int
) -> tuple[Ints, Ints]:
    """Return the fullest nodes for a gang, and the thousandths of GPUs that it gets on each.

    The nodes belong to the domain with the least room that suffices. Both arrays are empty if no domain has room.
    room: (n,) members that fit on each node now. rows: (domain, k) node rows of each domain, padded with n.
    """
    n = len(room)
    reserved_room = room[reserved]
    room[reserved] = 0
    best, least = 0, n * 1_000_000
    for domain in range(len(rows)):
        total = 0
        for at in range(rows.shape[1]):
            if rows[domain, at] == n:
                break
            total += room[rows[domain, at]]
        if members <= total < least:
            best, least = domain, total
    chosen = np.empty(min(members, rows.shape[1]), np.int64)
    count, held = 0, 0
    for at in range(rows.shape[1]):
        node = rows[best, at]
        if node == n:
            break
        if room[node] == 0 or (held >= members and free[node] >= free[chosen[count - 1]]):
            continue
        if held >= members and count == len(chosen):
            count -= 1
            held -= room[chosen[count]]
        place = count
        while place > 0 and free[chosen[place - 1]] > free[node]:
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = node
        count += 1
        held += room[node]
        while held - room[chosen[count - 1]] >= members:
            count -= 1
            held -= room[chosen[count]]
    if held < members:
        count = 0
    nodes = chosen[:count].copy()
    gpus = room[nodes] * each
    if count:
        gpus[count - 1] -= (held - members) * each
    room[reserved] = reserved_room
    return nodes, gpus


@compile_loop
def _find_soonest_nodes(
    room: Ints, most: Ints, ready_s: Floats, closed: Mask, rows: Ints, members: int
) -> tuple[Ints, float]:
    """Return the nodes that should first be free for a gang, and when. None and inf if that is unknown.

    room, most: (n,) members that fit on each node now, and when it is empty. closed: (n,), or empty if all
    nodes are open. rows: (domain, most nodes of a domain), padded with n.
    """
    n = len(room)
    best_s, best_last, best = np.inf, n, np.empty(0, np.int64)
    chosen, times_s = np.empty(min(members, rows.shape[1]), np.int64), np.empty(min(members, rows.shape[1]))
    for domain in range(len(rows)):
        count, held = 0, 0
        for at in range(rows.shape[1]):
            node = rows[domain, at]
            if node == n:
                break
            if most[node] == 0 or (len(closed) and closed[node]):
                continue
            time_s = 0.0 if room[node] == most[node] else ready_s[node]
            if time_s > best_s or time_s == np.inf or (held >= members and time_s >= times_s[count - 1]):
                continue
            if held >= members and count == len(chosen):
                count -= 1
                held -= most[chosen[count]]
            place = count
            while place > 0 and times_s[place - 1] > time_s:
                chosen[place], times_s[place] = chosen[place - 1], times_s[place - 1]
                place -= 1
            chosen[place], times_s[place] = node, time_s
            count += 1
            held += most[node]
            while held - most[chosen[count - 1]] >= members:
                count -= 1
                held -= most[chosen[count]]
        if held >= members:
            last_s, last = times_s[count - 1], chosen[count - 1]
            if last_s < best_s or (last_s == best_s and last < best_last):
                best_s, best_last, best = last_s, last, chosen[:count].copy()
    return best, best_s


@compile_loop
def _count_free_slots(times_s: Array, by_s: np.float32) -> int:
    """Return how many slots are free by then. A compiler compares the slots side by side."""
    count = np.int32(0)
    for slot in range(len(times_s)):
        count += np.int32(times_s[slot] <= by_s)
    return count  # type: ignore[return-value]


@compile_loop
def _find_last_start(times_s: Array, least_s: np.float32, latest_s: Array) -> np.float32:
    """Return the seconds until as many slots are free as there are members, if not before `least_s`.

    times_s: (slot,). latest_s: (member,) a buffer.
    """
    missing, count = len(latest_s) - _count_free_slots(times_s, least_s), 0
    if missing <= 0:
        return least_s
    last_s = np.float32(np.inf)
    for begin in range(0, len(times_s), BLOCK):
        block_s = times_s[begin : begin + BLOCK]
        if count == missing and not _count_free_slots(block_s, last_s):
            continue
        for time_s in block_s:
            if time_s <= least_s or (count == missing and time_s >= last_s):
                continue
            count -= count == missing
            place = count
            while place > 0 and latest_s[place - 1] > time_s:
                latest_s[place] = latest_s[place - 1]
                place -= 1
            latest_s[place] = time_s
            count += 1
            last_s = latest_s[count - 1]
    return last_s


@compile_loop
def _choose_last_slots(times_s: Array, by_s: np.float32, chosen: Ints) -> None:
    """Write the slots that are free last among those free by then into `chosen` (member,), the last first."""
    count = 0
    for begin in range(0, len(times_s), BLOCK):
        if not _count_free_slots(times_s[begin : begin + BLOCK], by_s):
            continue
        for slot in range(begin, min(begin + BLOCK, len(times_s))):
            time_s = times_s[slot]
            if time_s > by_s or (count == len(chosen) and time_s <= times_s[chosen[count - 1]]):
                continue
            count -= count == len(chosen)
            place = count
            while place > 0 and times_s[chosen[place - 1]] < time_s:
                chosen[place] = chosen[place - 1]
                place -= 1
            chosen[place] = slot
            count += 1


@compile_loop
def _find_earliest_place(
    times_s: Array, rows: Ints, slots: int, members: int, each: int, last_s: Array, is_stale: Mask
) -> tuple[Array, NDArray[np.int32], Ints]:
    """Return the columns of the earliest place of a gang.

    times_s, rows, slots: as in `SlotTimes`. last_s, is_stale: (path, domain) the seconds until each domain
    has free slots for all members, and whether it may have become later since then.
    """
    paths, domains = last_s.shape
    start_s = np.empty(paths, np.float32)
    nodes = np.full((paths, members), -1, np.int32)
    gpus = np.empty((paths, members, each), np.int64)
    latest_s, chosen = np.empty(members, np.float32), np.empty(members, np.int64)
    for path in range(paths):
        best = 0
        for domain in range(domains):
            if is_stale[path, domain]:
                last_s[path, domain] = _find_last_start(times_s[path, domain], last_s[path, domain], latest_s)
                is_stale[path, domain] = False
            if last_s[path, domain] < last_s[path, best]:
                best = domain
        start_s[path] = last_s[path, best]
        chosen[:] = 0
        if start_s[path] < np.inf:
            _choose_last_slots(times_s[path, best], start_s[path], chosen)
            for member in range(members):
                nodes[path, member] = rows[best, chosen[member] // slots]
        for member in range(members):
            for gpu in range(each):
                gpus[path, member, gpu] = chosen[member] % slots * each + gpu
    return start_s, nodes, gpus


@compile_loop
def _record_gang_hold(
    free_s: Array,
    gap_s: Array,
    until_s: Array,
    holder: NDArray[np.int32],
    start_s: Array,
    nodes: NDArray[np.int32],
    gpus: Ints,
    run_s: Array,
    job: int,
) -> Ints:
    """Write a gang into the columns of a calendar, and return (k,) the changed nodes as path × n + node."""
    paths, members, each = gpus.shape
    n, g = free_s.shape[1:]
    changed, count = np.empty(paths * members, np.int64), 0
    for path in range(paths):
        begin_s, end_s = start_s[path], start_s[path] + run_s[path]
        if begin_s == np.inf:
            continue
        for member in range(members):
            node = nodes[path, member]
            changed[count] = path * n + node
            count += 1
            for one in range(each):
                at = path, node, gpus[path, member, one]
                idle_s = begin_s - free_s[at]
                if idle_s < 0:
                    gap_s[at] = end_s
                    free_s[at] = max(free_s[at], end_s)
                    continue
                if idle_s >= SHORTEST_GAP_S and gap_s[at] == np.inf:
                    gap_s[at], until_s[at] = free_s[at], begin_s
                holder[at], free_s[at] = job, end_s
        for member in range(members if each < g else 0):
            _sort_gpus(path, nodes[path, member], free_s, gap_s, until_s, holder)
    return changed[:count]


@compile_loop
def _sort_gpus(path: int, node: int, free_s: Array, gap_s: Array, until_s: Array, holder: NDArray[np.int32]) -> None:
    """Sort the GPUs of a node by the time at which they become free, with all columns."""
    for gpu in range(1, free_s.shape[2]):
        at = path, node, gpu
        row = free_s[at], gap_s[at], until_s[at], holder[at]
        place = gpu
        while place > 0 and free_s[path, node, place - 1] > row[0]:
            to, at = (path, node, place), (path, node, place - 1)
            free_s[to], gap_s[to], until_s[to], holder[to] = free_s[at], gap_s[at], until_s[at], holder[at]
            place -= 1
        if place < gpu:
            to = path, node, place
            free_s[to], gap_s[to], until_s[to], holder[to] = row
