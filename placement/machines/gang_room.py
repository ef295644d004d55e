"""Counts of free GPUs on nodes, and the nodes on which gangs have room now or will have it soonest.

The arrays of a `Fleet` cover all slots and all nodes. So the cost of a change depends only on the
number of nodes that change.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.queues.queues_ahead import Closure, QueueHold

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEVER_S = np.array([np.inf])


@dataclass(frozen=True, eq=False)
class Slot:
    """The part of a node that one member of a gang takes.

    each: thousandths of GPUs. most: (n,) the number of members that each node hosts when empty. domain:
    (n,) int, -1 for a node without a domain. None if the members may be anywhere.
    """

    each: int
    most: Ints
    domain: Ints | None = None

    @cached_property
    def fewest_members(self) -> int:
        """The smallest number of members that an empty node hosts, among nodes that host any."""
        return int(self.most[self.most > 0].min(initial=np.iinfo(np.int64).max))

    @cached_property
    def is_uniform(self) -> bool:
        """Return whether all nodes that host any members host equally many."""
        return bool((self.most[self.most > 0] == self.fewest_members).all())

    @cached_property
    def domain_count(self) -> int:
        """The number of domains. Without domains, all nodes count as one."""
        return 1 if self.domain is None else int(self.domain.max(initial=0)) + 1

    @cached_property
    def nodes_without_members(self) -> Ints:
        """The nodes that host no member."""
        return np.flatnonzero(self.most == 0)

    @cached_property
    def rows(self) -> Ints:
        """(domain, most nodes of a domain) the node rows, ascending. A smaller domain is padded with n.

        Without domains, all nodes are in one row.
        """
        if self.domain is None:
            return np.arange(len(self.most))[None]
        known = np.flatnonzero(self.domain >= 0)
        known = known[np.argsort(self.domain[known], kind="stable")]
        counts = np.bincount(self.domain[known], minlength=self.domain_count)
        rows = np.full((self.domain_count, max(1, int(counts.max(initial=0)))), len(self.most), np.int64)
        rows[np.arange(rows.shape[1]) < counts[:, None]] = known
        return rows

    @cached_property
    def max_members_in_rows(self) -> Ints:
        """(domain, most nodes of a domain) the members that each node in `rows` hosts when empty."""
        return np.append(self.most, 0)[self.rows]


@dataclass(frozen=True, slots=True, eq=False)
class GangAsk:
    """The slots that one job asks for, one for each member.

    slot: an index into the fleet's slots. planned_s: seconds that the queue expects the job to run.
    hold: the GPUs that count against its queue's quota. closures: times at which nodes are closed to
    it.
    """

    slot: int  # an index into the slots
    members: int
    planned_s: float
    hold: QueueHold | None = None
    closures: tuple[Closure, ...] = ()

    def mask_closed_nodes(self, now_s: float) -> NDArray[np.bool_] | None:
        """Return (n,) whether each node is closed to the job if it starts now. Returns None if no node is closed."""
        masks = [one.nodes for one in self.closures if one.bars(now_s, self.planned_s)]
        return np.any(masks, axis=0) if masks else None


@dataclass(slots=True)
class Fleet:
    """The free thousandths of GPUs on each node, and how many members of each slot fit.

    The members are counted on each node, in each domain and in the best domain. free: (n,). ready_s:
    (n,) seconds until all jobs on a node should have ended.
    """

    free: Ints
    ready_s: Floats
    slots: Sequence[Slot]
    _each: Ints = field(init=False)  # (slot, 1)
    _most: Ints = field(init=False)  # (slot, n)
    _room: Ints = field(init=False)  # (slot, n)
    _at: Ints = field(init=False)  # (slot, n) where `_total` counts the room of a node, the last if in no domain
    _first: Ints = field(init=False)  # (slot + 1,) where the domains of each slot begin in `_total`
    _total: Ints = field(init=False)  # room of the domains of all slots, one slot after the other
    _best: list[int] = field(init=False)  # room of each slot in its best domain

    def __post_init__(self) -> None:
        self._each = np.array([slot.each for slot in self.slots], np.int64)[:, None]
        self._most = np.array([slot.most for slot in self.slots], np.int64).reshape(len(self.slots), len(self.free))
        self._room = np.minimum(self._most, self.free // self._each)
        self._first = np.cumsum([0, *(slot.domain_count for slot in self.slots)])
        self._at = np.full(self._room.shape, self._first[-1], np.int64)
        for at, slot in enumerate(self.slots):
            domain = np.zeros(len(self.free), np.int64) if slot.domain is None else slot.domain
            self._at[at, domain >= 0] = self._first[at] + domain[domain >= 0]
        self._total = np.zeros(self._first[-1] + 1, np.int64)
        self._add_room(self._at, self._room)

    def copy(self) -> "Fleet":
        """Return a copy that can be changed independently."""
        other = copy(self)
        other.free, other.ready_s, other._room = self.free.copy(), self.ready_s.copy(), self._room.copy()
        other._total = self._total.copy()
        return other

    def change_free_gpus(self, nodes: Ints, gpus: Ints) -> None:
        """Add to the free thousandths of GPUs of some nodes. A negative number takes GPUs away.

        Each node may occur only once.
        """
        free = self.free.take(nodes) + gpus
        self.free[nodes] = free
        room = np.minimum(self._most.take(nodes, 1), free // self._each)
        more = room - self._room.take(nodes, 1)
        self._room[:, nodes] = room
        self._add_room(self._at.take(nodes, 1), more)

    def _add_room(self, at: Ints, more: Ints) -> None:
        """Add room to domains, and update the best domain of each slot.

        at, more: (slot, node) indices of `_total`, and the members to add there.
        """
        np.add.at(self._total, at, more)
        self._best = np.maximum.reduceat(self._total, self._first).tolist()

    def has_room(self, slot: int, members: int) -> bool:
        """Return whether this many members of a slot fit in one domain now."""
        return self._best[slot] >= members

    def fits(self, ask: GangAsk) -> bool:
        """Return whether there is room for a gang now."""
        return self._best[ask.slot] >= ask.members

    def choose_gang_nodes(self, ask: GangAsk, reserved: Ints | None) -> tuple[Ints, Ints] | None:
        """Return (nodes, GPUs of each) for a gang, the fullest first. Returns None if there is no room.

        The nodes `reserved` are left out.
        """
        slot, room = self.slots[ask.slot], self._room[ask.slot]
        if reserved is not None:
            room = room.copy()
            room[reserved] = 0
        nodes = (room > 0).nonzero()[0]
        if slot.domain is not None:
            nodes = _choose_fullest_domain(slot.domain[nodes], room[nodes], nodes, ask.members)
        return _choose_nodes(room, self.free, nodes, ask.members, slot.each)

    def find_soonest_nodes(self, ask: GangAsk, now_s: float = 0.0) -> tuple[Ints, float]:
        """Return the nodes that should first be free for a gang, and the time when all of them are free.

        The time is in seconds from now. It is inf if it is unknown, and the nodes then have no meaning.
        """
        slot, closed = self.slots[ask.slot], ask.mask_closed_nodes(now_s)
        ready_s = np.where(self._room[ask.slot] == slot.most, 0.0, self.ready_s)
        if len(slot.nodes_without_members):
            ready_s[slot.nodes_without_members] = np.inf
        if closed is not None:
            ready_s[closed] = np.inf
        first = _choose_first_nodes if slot.domain is None else _choose_first_domain
        nodes = first(slot, ready_s, ask.members)
        return nodes, float(ready_s.take(nodes).max(initial=0.0))


def _choose_fullest_domain(domain: Ints, room: Ints, nodes: Ints, members: int) -> Ints:
    """Return the nodes of the domain with the least room among those with enough room.

    domain, room, nodes: (k,).
    """
    total = np.bincount(domain + 1, room)[1:]  # the first is of no domain
    holds = (total >= members).nonzero()[0]
    if not len(holds):
        return holds
    return np.asarray(nodes[domain == holds[total[holds].argmin()]])


def _choose_nodes(room: Ints, free: Ints, nodes: Ints, members: int, each: int) -> tuple[Ints, Ints] | None:
    """Return the nodes that a gang takes, and the thousandths on each. None if there is no room.

    nodes: (k,) nodes that have room.
    """
    if members == 1:
        return (nodes[[free[nodes].argmin()]], np.array([each])) if len(nodes) else None
    nodes = nodes[free[nodes].argsort(kind="stable")]
    count = room[nodes]
    total = count.cumsum()
    if not len(nodes) or total[-1] < members:
        return None
    last = int(total.searchsorted(members))
    count = count[: last + 1]
    count[last] -= total[last] - members
    return nodes[: last + 1], count * each


def _choose_first_nodes(slot: Slot, ready_s: Floats, members: int) -> Ints:
    """Return the nodes that are ready first and together host all members.

    ready_s: (n,) seconds until each node is ready. Only the first nodes are sorted: enough for all members
    if every node had the least room.
    """
    most = min(-(-members // slot.fewest_members), len(ready_s)) - 1
    nodes = (ready_s <= np.partition(ready_s, most)[most]).nonzero()[0]
    nodes = nodes[ready_s[nodes].argsort(kind="stable")]
    return np.asarray(nodes[: int(slot.most[nodes].cumsum().searchsorted(members)) + 1])


def _choose_first_domain(slot: Slot, ready_s: Floats, members: int) -> Ints:
    """Return the nodes of the domain that first has room for all members. ready_s: (n,)."""
    rows, most = slot.rows, slot.max_members_in_rows
    each_s = np.concatenate((ready_s, NEVER_S)).take(rows)
    if slot.is_uniform:  # all domains need equally many nodes, so that few of them have to be sorted
        nth = -(-members // slot.fewest_members) - 1
        last_s = np.partition(each_s, nth, axis=1)[:, nth]
        first = (last_s == last_s.min()).nonzero()[0]
        if len(first) == 1:
            return np.asarray(rows[first[0]].take(each_s[first[0]].argsort(kind="stable")[: nth + 1]))
        rows, most, each_s = rows.take(first, 0), most.take(first, 0), each_s.take(first, 0)
    order = each_s.argsort(axis=1, kind="stable")
    at = np.arange(len(rows))
    enough = most[at[:, None], order].cumsum(axis=1) >= members
    last = enough.argmax(axis=1)
    node = order[at, last]
    best = np.lexsort((rows[at, node], each_s[at, node], ~enough[at, last]))[0] if len(rows) > 1 else 0
    return np.asarray(rows[best, order[best, : last[best] + 1]])
