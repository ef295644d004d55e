"""The times at which slots of nodes become free along sampled futures, and the first place of a gang.

A *slot* is the part of a node that one member of a gang needs: a number of its GPUs. `SlotTimes` reads
only the nodes of a calendar that have changed. So the next gang of the same shape costs little.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.machines.fit import get_widest_level

Array = NDArray[np.float32]
Ints = NDArray[np.int64]

NEVER_S = np.float32(np.inf)
MOST_STALE_SHARE = 0.25  # of all nodes and paths: beyond, copying the whole calendar costs less


@dataclass(frozen=True, slots=True)
class Place:
    """The nodes, GPUs and start time of one gang on every path.

    A gang that fits on no path has no members.
    """

    start_s: Array  # (path,), inf where it never fits
    nodes: NDArray[np.int32]  # (path, member), -1 where it never fits
    gpus: Ints  # (path, member, each) places along the calendar's last axis


class GangShape(NamedTuple):
    """The part of a request that decides where its gang may be placed.

    level: the level at which all members share one domain. None if they may be anywhere. each: GPUs of
    a member. room: (n,) int64, members that an empty node hosts.
    """

    level: Level | None
    members: int
    each: int
    room: Ints

    @classmethod
    def from_request(cls, request: PlacementRequest, room: Ints) -> "GangShape":
        """Return the shape of a request.

        room: (n,) members that each node hosts when it is empty, as the filters allow.
        """
        level, members, each = get_widest_level(request), request.members.min, request.gpus_per_node
        if level is Level.NODE:
            level, room, members, each = None, room // members, 1, each * members
        return cls(level, members, each, np.minimum(room, 1) if request.spread else room)


@dataclass(slots=True)
class SlotTimes:
    """The times at which each slot of each node is free, grouped by domain.

    rows: (domain, most nodes of a domain) node rows, padded with -1. slots: the number of slots on one
    node. times_s: (path, domain, most nodes × slots) float32 seconds from now.
    """

    shape: GangShape
    rows: Ints
    slots: int
    times_s: Array
    is_outdated: bool = False  # so much has changed that reading the calendar again costs less
    _at: Ints | None = None  # (path × n,) the row of a node's slots in `times_s`, -1 if it is in no domain
    _last: dict[int, tuple[Array, NDArray[np.bool_]]] = field(
        default_factory=dict
    )  # by members, as `_compute_last_starts`
    _stale: list[Ints] = field(default_factory=list)  # (k,) path × n + node, whose times have changed
    _changes: int = 0  # of `_stale`

    @classmethod
    def from_calendar(cls, free_s: Array, shape: GangShape, rows: Ints, *, is_followed: bool) -> "SlotTimes":
        """Read the slot times from a calendar.

        free_s: (path, node, gpu) seconds from now, ascending along a node. is_followed: whether the caller
        records later changes of the calendar. The times are then copied.
        """
        slots = free_s.shape[2] // shape.each
        if shape.members == 1:  # the first slot of a node is free first
            slots = min(slots, 1)
        times_s = _compute_slot_times(free_s, shape.each, slots, shape.room)
        if shape.level is not None and free_s.shape[1]:
            times_s = times_s.take(rows.ravel(), axis=1)
            times_s[:, np.flatnonzero(rows < 0)] = NEVER_S
        if is_followed:
            times_s = np.array(times_s, order="C")
        return cls(shape, rows, slots, times_s.reshape(len(free_s), len(rows), -1))

    def record_changes(self, nodes: Ints) -> None:
        """Record the nodes on which the calendar has changed.

        nodes: (k,) indices path × n + node, where n is the number of nodes.
        """
        if self.is_outdated:
            return
        self._stale.append(nodes)
        self._changes += len(nodes)
        if self._changes > MOST_STALE_SHARE * len(self.times_s) * len(self.shape.room):
            self._stale.clear()
            self.is_outdated = True

    def read_changed_nodes(self, free_s: Array) -> None:
        """Read the slot times of the recorded nodes again. free_s: (path, node, gpu) seconds from now."""
        if not self._stale or not self.slots:  # no node has as many GPUs as a member needs
            return
        nodes = np.concatenate(self._stale)
        self._stale.clear()
        self._changes = 0
        if self._at is None:
            self._at = self._map_nodes_to_rows()
        at = self._at.take(nodes)
        if self.shape.level is not None:
            nodes, at = nodes[at >= 0], at[at >= 0]
        some_s = free_s.reshape(-1, free_s.shape[2]).take(nodes, axis=0)
        room = self.shape.room.take(nodes % free_s.shape[1])
        self.times_s.reshape(-1, self.slots)[at] = _compute_slot_times(some_s, self.shape.each, self.slots, room)
        for _, is_stale in self._last.values():
            is_stale.put(at // self.rows.shape[1], True)

    def _map_nodes_to_rows(self) -> Ints:
        paths, known = len(self.times_s), np.flatnonzero(self.rows >= 0)
        at = np.full((paths, len(self.shape.room)), -1, np.int64)
        at[:, self.rows.ravel()[known]] = self.rows.size * np.arange(paths)[:, None] + known
        return at.ravel()

    def find_earliest_place(self, members: int, order: Ints | None = None) -> Place:
        """Return the earliest place of a gang with this number of members, on each path.

        order: (path, node, gpu) the position of each GPU in the calendar. None if the positions are the
        same.
        """
        paths, domains, size = self.times_s.shape
        if size < members or not size:
            return make_empty_place(paths)
        path, best, mine, start_s = np.arange(paths), np.zeros(paths, np.int64), self.times_s[:, 0], None
        if domains > 1:
            last_s = self._compute_last_starts(members)
            best = last_s.argmin(axis=1)
            mine, start_s = self.times_s[path, best], last_s[path, best]
        if members == 1:
            chosen = mine.argmin(axis=1)[:, None]
            start_s = mine[path, chosen[:, 0]]
        else:
            if start_s is None:
                start_s = np.partition(mine, members - 1, axis=1)[:, members - 1]
            chosen = _find_last_free_slots(mine, start_s, members)
        nodes = self.rows[best[:, None], chosen // self.slots]
        gpus = (chosen % self.slots)[:, :, None] * self.shape.each + np.arange(self.shape.each)
        if order is not None:
            gpus = order[path[:, None, None], nodes[:, :, None], gpus]
        nodes[~np.isfinite(start_s)] = -1
        return Place(start_s, nodes.astype(np.int32), gpus)

    def _compute_last_starts(self, members: int) -> Array:
        """Return (path, domain) the seconds until each domain has free slots for this number of members."""
        paths, domains, size = self.times_s.shape
        if members not in self._last:
            self._last[members] = np.empty((paths, domains), np.float32), np.ones((paths, domains), bool)
        last_s, is_stale = self._last[members]
        at = np.flatnonzero(is_stale)
        some_s = self.times_s.reshape(paths * domains, size).take(at, axis=0)
        some_s.partition(members - 1, axis=1)
        last_s.put(at, some_s[:, members - 1])
        is_stale[:] = False
        return last_s


def _find_last_free_slots(times_s: Array, start_s: Array, members: int) -> Ints:
    """Return (path, member) the indices of the slots that a gang takes. All are 0 where it never starts.

    Among the slots that are free by `start_s`, these are the ones that become free last. Among equal times
    the first slot comes first. times_s: (path, k).
    """
    starts = np.isfinite(start_s)
    free = np.flatnonzero(times_s <= np.where(starts, start_s, -NEVER_S)[:, None])  # few of many
    path, slot = np.divmod(free, times_s.shape[1])
    slot = slot[np.lexsort((-times_s.take(free), path))]
    chosen = np.zeros((len(times_s), members), np.int64)
    chosen[starts] = slot[path.searchsorted(np.flatnonzero(starts))[:, None] + np.arange(members)]
    return chosen


def _compute_slot_times(free_s: Array, each: int, slots: int, room: Ints) -> Array:
    """Return (…, slot) the seconds until all GPUs of each slot are free.

    free_s: (…, gpu). room: (…,) the slots of a node. The time of a slot beyond a node's room is inf.
    """
    times_s = free_s[..., each - 1 : each * slots : each]
    if room.min(initial=slots) >= slots:
        return times_s
    return np.where(np.arange(slots) < room[..., None], times_s, NEVER_S)


def make_empty_place(paths: int) -> Place:
    """Return a place without members, for a gang that fits on no path.

    A list of the members of a huge gang would only cost memory.
    """
    never = np.full(paths, np.inf, np.float32)
    return Place(never, np.zeros((paths, 0), np.int32), np.zeros((paths, 0, 0), np.int64))
