"""The order in which queues take turns, for all waiting entries at once (progressive filling).

From the root, the walk goes to the child whose first entry would leave it with the least share.
Each queue on the way counts the entry's GPUs as received. Among equal shares the longer wait comes
first, then the queue's name.

The share after the next entry of a child depends only on the child's own entries. So each level of
the tree is merged at once, from the leaves up. The entries of one child stay in their order. So an entry
cannot go before the earlier entries of its child. Its sort key is the highest share of the child so far.

Arrays are over k entries and r resources. The first resource is GPUs of any model.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.placement.columns import find_run_begins, sort_rows_by_keys
from fleetcast.placement.queues.charges import LN2
from fleetcast.placement.queues.tree import ANY, Amounts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class WalkLine:
    """One queue of the tree, as the walk needs it.

    parent: index into the lines, -1 for the root. room: resource → GPUs that it may still receive
    within its limits.
    """

    name: str
    parent: int
    depth: int
    weight: float
    held: Amounts
    guaranteed: Amounts
    decayed_gpu_s: float
    room: Amounts


class TreeWalk:
    """A walk over the queues of a tree, with the GPUs that each queue has received on the way.

    lines: the queues, parents before children. capacity: resource → GPUs of the fleet.
    """

    def __init__(
        self, lines: Sequence[WalkLine], capacity: Amounts, half_life_s: float, models: Iterable[str] = ()
    ) -> None:
        named = {name for line in lines for kind in (line.held, line.guaranteed, line.room) for name in kind}
        self.resources = (ANY, *sorted({*named, *models} - {ANY}))
        self._parent = np.array([line.parent for line in lines], np.int64)
        self._depth = np.array([line.depth for line in lines], np.int64)
        self.deepest = int(self._depth.max(initial=0))
        self._by_name = np.argsort(np.argsort([line.name for line in lines]))
        self._weight = np.array([line.weight for line in lines])
        self._held, self._holds = self._make_columns([line.held for line in lines], 0.0)
        self._own, self._has_own = self._make_columns([line.guaranteed for line in lines], 0.0)
        self._room, _ = self._make_columns([line.room for line in lines], np.inf)
        for at in range(1, len(lines)):
            self._room[at] = np.minimum(self._room[at], self._room[lines[at].parent])
        self._fleet = np.array([max(1.0, capacity.get(name, 0.0)) for name in self.resources])
        used_gpu_s = np.array([line.decayed_gpu_s for line in lines])
        self._used = used_gpu_s / (self._fleet[0] * half_life_s / LN2)
        self._given = np.zeros(self._held.shape, np.int64)  # thousandths of GPUs
        self._gives = np.zeros(self._held.shape, bool)

    def _make_columns(self, amounts: Sequence[Amounts], otherwise: float) -> tuple[Floats, Mask]:
        """Return (lines, r) the amount of each resource, and (lines, r) whether a line names the resource.

        otherwise: the amount of a resource that a line does not name.
        """
        values = np.array([[one.get(name, otherwise) for name in self.resources] for one in amounts])
        return values, np.array([[name in one for name in self.resources] for one in amounts])

    def merge_entries(
        self, leaf: Ints, milli: Ints, model: Ints, queued_ms: Ints, decided_by: Floats | None = None
    ) -> Ints:
        """Return (k,) indices of the entries in the order in which they take turns.

        Entries are sorted by leaf, and within a leaf in their own order. leaf: index into the lines. milli:
        thousandths of GPUs. model: index into the resources, 0 for any. decided_by: (k, depth), filled with
        the shares that decided the order. Each is the highest share of the entry's queue at this depth, up
        to and including the entry.
        """
        asked = np.zeros((len(leaf), len(self.resources)), np.int64)
        asked[np.arange(len(leaf)), model] = milli
        asked[:, 0] = milli
        names = np.zeros(asked.shape, bool)
        names[np.arange(len(leaf)), model] = names[:, 0] = True
        within = asked <= WHOLE_GPU * self._room[leaf]
        takes = np.asarray(within.all(axis=1))  # who is above a limit takes nothing on the way
        order, line = np.zeros(0, np.int64), leaf.copy()
        for depth in range(int(self._depth[leaf].max(initial=0)), 0, -1):
            own = np.flatnonzero(self._depth[leaf] == depth)
            order = np.concatenate([order, own])
            order = order[sort_rows_by_keys(line[order])]
            place, shares = self._compute_places(
                line[order], asked[order], names[order], takes[order], queued_ms[order]
            )
            if decided_by is not None:
                decided_by[order, depth] = _compute_running_max(shares, line[order])
            line[order] = self._parent[line[order]]
            order = order[sort_rows_by_keys(place, line[order])]
        return order

    def _compute_places(
        self, line: Ints, asked: Ints, names: Mask, takes: Mask, queued_ms: Ints
    ) -> tuple[Ints, Floats]:
        """Return (k,) the place of each entry within its level, and (k,) its queue's share with the entry.

        Entries are sorted by line. This call counts their GPUs as received.
        """
        new = find_run_begins(line)
        first, group = np.flatnonzero(new), np.cumsum(new) - 1
        given = np.where(takes[:, None], asked, 0)
        named = names & takes[:, None]
        before = _cumsum_before_rows(given, first, group) + self._given[line]
        seen = np.asarray(_cumsum_before_rows(named.astype(np.int64), first, group) > 0) | self._gives[line]
        shares = self._compute_shares(line, (before + asked) / WHOLE_GPU, seen | names)
        self._given[line[first]] += np.add.reduceat(given, first, axis=0)
        self._gives[line[first]] |= np.add.reduceat(named, first, axis=0, dtype=np.int64) > 0
        place = np.empty(len(line), np.int64)
        place[np.lexsort((self._by_name[line], queued_ms, shares))] = np.arange(len(line))
        return np.asarray(np.maximum.accumulate(place + group * len(line)) - group * len(line)), shares

    def _compute_shares(self, line: Ints, more: Floats, seen: Mask) -> Floats:
        """Return (k,) the weighted shares of the lines with `more` added, for the resources `seen`.

        A share is defined as in `fleetcast.placement.queues.standing`.
        """
        held, own, has_own = self._held[line] + more, self._own[line], self._has_own[line]
        within = has_own.any(axis=1) & (~(seen & has_own) | (held <= own)).all(axis=1)
        only_models = (~seen[:, 1:] | has_own[:, 1:]).all(axis=1) & (seen.sum(axis=1) > 1)
        within &= has_own[:, 0] | only_models
        seen = seen | self._holds[line]
        beyond = np.maximum(0.0, held - own)
        total, over = held[:, 0], beyond[:, 0]
        scale = np.divide(over, total, out=np.ones(len(line)), where=has_own[:, 0] & (total != 0))
        counts = has_own[:, 0] | (seen.sum(axis=1) < 2)
        dominant = np.where(counts, over / self._fleet[0], 0.0)
        by_model = np.where(seen[:, 1:], beyond[:, 1:] * scale[:, None] / self._fleet[1:], 0.0)
        dominant = np.maximum(dominant, by_model.max(axis=1, initial=0.0))
        return np.asarray(np.where(within, 0.0, (dominant + self._used[line]) / self._weight[line]))


def _compute_running_max(shares: Floats, line: Ints) -> Floats:
    """Return (k,) the running maximum of the shares within each line. Entries are sorted by line."""
    ends = [*np.flatnonzero(find_run_begins(line))[1:].tolist(), len(line)]
    found, begin = np.empty_like(shares), 0
    for end in ends:
        found[begin:end] = np.maximum.accumulate(shares[begin:end])
        begin = end
    return found


def _cumsum_before_rows(values: Ints, first: Ints, group: Ints) -> Ints:
    """Return (k, r) the sum of all rows before each row, within each group.

    first: the index at which each group begins. group: (k,) the group of each row.
    """
    before = np.cumsum(values, axis=0) - values
    return np.asarray(before - before[first][group])
