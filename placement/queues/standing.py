"""The state of the queues in one pass: which queue is next, and how much more each may take.

After a queue receives x more GPUs, its share is

    max over r of max(0, held + x − guaranteed)_r / fleet_r / weight  +  decayed / (fleet · h/ln 2) / weight

where r is a resource and h the half-life (DRF: Ghodsi et al., NSDI 2011). Like Kueue's, the share counts only
GPUs beyond the guarantee.

The share is 0 while the queue is within its guarantee, so guarantees come first. Entries of a
higher priority class come before those of a lower one. Within a class the walk goes from the root
to the child with the least share. It adds the GPUs of each entry that it passes (progressive filling).

A queue lends its unused GPUs to other queues. When its own requests wait for GPUs, it stops lending these
GPUs, and gets them back as jobs end.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import WHOLE_GPU, Gang, PlacementRequest
from fleetcast.placement.columns import sort_rows_by_keys
from fleetcast.placement.queues.asks import WaitingColumns
from fleetcast.placement.queues.charges import LN2, LeafUse
from fleetcast.placement.queues.tree import ANY, ROOT, QueueNode, QueueTree
from fleetcast.placement.queues.walk import TreeWalk, WalkLine

LeafRanks = Callable[[WaitingColumns, Sequence[QueueNode]], NDArray[np.int64]]  # and the queue of each ask → (k,)
Amounts = Mapping[str, float]
NOTHING: Amounts = {}
LENDERS = "\n"  # no queue's name: what others lend is not enough


class Entry:
    """A waiting entry of the queue.

    It has the two fields of `fleetcast.placement.plan.queue.WaitingEntry`.
    """

    request: PlacementRequest
    queued_ms: int


@dataclass(slots=True)
class QueueTotals:
    """The GPUs that one queue, or one user in it, holds, waits for and is guaranteed.

    reserve: resource → the GPUs of the fleet that no other queue may take. path: it and the queues above it. limited:
    those of them that have a limit.
    """

    name: str
    node: QueueNode | None  # None: a user
    parent: "QueueTotals | None"
    weight: float
    guaranteed: Amounts = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    wanted: dict[str, float] = field(default_factory=dict)
    decayed_gpu_s: float = 0.0
    children: list["QueueTotals"] = field(default_factory=list)
    reserve: dict[str, float] = field(default_factory=dict)
    below: dict[str, float] = field(default_factory=dict)  # `reserve` of its children, in all
    path: tuple["QueueTotals", ...] = field(init=False, repr=False, compare=False)
    limited: tuple["QueueTotals", ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        above = self.parent
        has_limit = self.node is not None and bool(self.node.limit or self.node.borrow)
        self.path = (self,) if above is None else (self, *above.path)
        self.limited = ((self,) if has_limit else ()) + (() if above is None else above.limited)

    def find_limit(self, resource: str) -> float:
        return self.node.find_limit(resource) if self.node is not None else float("inf")

    def lacks_guarantee(self) -> bool:
        """Return whether the GPUs that the queue holds or waits for are fewer than its guarantee, for any resource."""
        return any(
            self.held.get(name, 0.0) + self.wanted.get(name, 0.0) < gpus for name, gpus in self.guaranteed.items()
        )

    def is_within_guarantee(self, amounts: Amounts) -> bool:
        """Return whether the queue would stay within its guarantee with these amounts added."""
        if not self.guaranteed:
            return False
        return all(
            self.held.get(name, 0.0) + gpus <= self.guaranteed[name]
            for name, gpus in amounts.items()
            if name in self.guaranteed
        ) and (ANY in self.guaranteed or (amounts.keys() - {ANY} <= self.guaranteed.keys() and len(amounts) > 1))

    def compute_own_amount(self, resource: str) -> float:
        """Return the number of GPUs of a resource that no other queue may take.

        This is the largest of three numbers: the GPUs that the queue holds, the guaranteed GPUs that it never
        lends, and the GPUs within its guarantee that it holds or waits for.
        """
        guaranteed, held = self.guaranteed.get(resource, 0.0), self.held.get(resource, 0.0)
        reserved = self.node.find_unlent_guarantee(resource) if self.node is not None else 0.0
        return max(held, reserved, min(guaranteed, held + self.wanted.get(resource, 0.0)))


class QueueStanding:
    """The state of all queues in one pass: the GPUs that each holds, waits for and may still take.

    capacity: resource → usable GPUs of the fleet, less those that jobs without a queue hold.
    """

    def __init__(
        self, tree: QueueTree, use: Mapping[str, LeafUse], capacity: Amounts, banked: Amounts = NOTHING
    ) -> None:
        self.tree = tree
        self.capacity = capacity
        self.version = 0  # of what is held and wanted
        self.stands: dict[str, QueueTotals] = {}
        for node in tree.nodes:
            parent = self.stands[tree.nodes[node.parent].name] if node.parent >= 0 else None
            self._add_queue(
                QueueTotals(node.name, node, parent, node.weight, self._add_credits_to_guarantee(node, banked))
            )
        for leaf, mine in use.items():
            if leaf:
                self._add_leaf_use(self.find_or_add_leaf(leaf), mine)
        for stand in reversed(self.stands.values()):
            self._update_reserve(stand)
        self._spelt = {name.casefold(): name for name in (*capacity, *tree.resources)}

    def _add_credits_to_guarantee(self, node: QueueNode, banked: Amounts) -> Amounts:
        """Return the guarantee of a queue, raised by its banked credits.

        Credits raise only the resource `gpu`, by the banked GPU-seconds divided by the half-life.
        """
        credit = banked.get(node.name, 0.0) / self.tree.policy.half_life_s
        return {name: gpus + (credit if name == ANY else 0.0) for name, gpus in node.guaranteed.items()}

    def _add_queue(self, stand: QueueTotals) -> QueueTotals:
        self.stands[stand.name] = stand
        if stand.parent is not None:
            stand.parent.children.append(stand)
        return stand

    def find_or_add_leaf(self, name: str) -> QueueTotals:
        """Return a leaf by name. Adds the leaf if it is missing.

        A missing leaf belongs to a user, or to a removed queue whose jobs still run.
        """
        stand = self.stands.get(name)
        if stand is None:
            above = name.rpartition("/")[0]
            parent = self.stands[above if above in self.stands else ROOT]
            stand = self._add_queue(QueueTotals(name, None, parent, 1.0))
        return stand

    @staticmethod
    def _add_leaf_use(leaf: QueueTotals, use: LeafUse) -> None:
        for stand in leaf.path:
            stand.decayed_gpu_s += use.decayed_gpu_s
            for name, gpus in use.held.items():
                stand.held[name] = stand.held.get(name, 0.0) + gpus

    def _update_reserve(self, stand: QueueTotals) -> None:
        for name in self.tree.resources:
            stand.below[name] = sum(child.reserve.get(name, 0.0) for child in stand.children)
            stand.reserve[name] = max(stand.compute_own_amount(name), stand.below[name])

    # -- who is next

    def compute_share(self, stand: QueueTotals, more: Amounts = NOTHING) -> float:
        """Return a queue's weighted share of the fleet if it had `more` GPUs. It is 0 within its guarantee."""
        if more and stand.is_within_guarantee(more):
            return 0.0
        fleet = max(1.0, self.capacity.get(ANY, 0.0))
        used = stand.decayed_gpu_s / (fleet * self.tree.policy.half_life_s / LN2)
        return (self._compute_dominant_share(stand, more) + used) / stand.weight

    def _compute_dominant_share(self, stand: QueueTotals, more: Amounts) -> float:
        held = {name: stand.held.get(name, 0.0) + more.get(name, 0.0) for name in {*stand.held, *more}}
        total = held.get(ANY, 0.0)
        over = max(0.0, total - stand.guaranteed.get(ANY, 0.0))
        scale = over / total if total and ANY in stand.guaranteed else 1.0
        shares = [over / max(1.0, self.capacity.get(ANY, 0.0))] if ANY in stand.guaranteed or len(held) < 2 else []
        for name, gpus in held.items():
            if name != ANY:
                beyond = max(0.0, gpus - stand.guaranteed.get(name, 0.0))
                shares.append(beyond * scale / max(1.0, self.capacity.get(name, 0.0)))
        return max(shares, default=0.0)

    def sort_entries(
        self, queue: Sequence[Any], ranks: LeafRanks, decided_by: dict[str, dict[str, float]] | None = None
    ) -> list[Any]:
        """Return the entries in the order in which they would start if each of them fitted.

        Entries without a queue come last. An entry that is above a limit now does not add to its queue's
        share.

        ranks: function that returns each entry's place within its leaf. decided_by: a dict that this call
        fills with the shares that decided the order. It becomes request_id → queue of the entry at each
        level → share.
        """
        waiters = WaitingColumns(queue)
        leaves = [self.tree.find_known_leaf(request) for request in waiters.first]
        own = {leaf: self.tree.list_path(leaf)[0] if leaf else self.tree.nodes[0] for leaf in set(leaves)}
        nodes = [own[leaf] for leaf in leaves]
        places = ranks(waiters, nodes)
        classes = np.array([node.priority for node in nodes], np.int64)
        known = np.array([bool(leaf) for leaf in leaves], bool)
        merge = self._make_entry_sorter(waiters, leaves, places, decided_by)
        found: list[Any] = []
        for priority in sorted(set(classes[known].tolist()), reverse=True):
            mine = np.flatnonzero((known & (classes == priority))[waiters.ask])
            found += [queue[at] for at in merge(mine).tolist()]
        outside = np.flatnonzero(~known[waiters.ask])
        return found + [queue[at] for at in outside[np.argsort(places[outside])].tolist()]

    def _make_entry_sorter(
        self,
        waiters: WaitingColumns,
        leaves: Sequence[str],
        places: NDArray[np.int64],
        decided_by: dict[str, dict[str, float]] | None,
    ) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
        """Return a function that sorts (k,) entries of one priority class.

        Each call takes into account the GPUs of the entries that earlier calls sorted. leaves: the leaf of
        each ask.
        """
        names = {leaf: self.find_or_add_leaf(leaf).name if leaf else ROOT for leaf in dict.fromkeys(leaves)}
        number = {name: at for at, name in enumerate(self.stands)}
        spelt = {model: self._spelt.get(model.casefold(), model) for model in {ask.model for ask in waiters.asks}}
        models = [spelt[ask.model] for ask in waiters.asks]
        stands = list(number)
        walk = TreeWalk(self._make_walk_lines(number), self.capacity, self.tree.policy.half_life_s, spelt.values())
        line = np.array([number[names[leaf]] for leaf in leaves], np.int64)[waiters.ask]
        milli = np.array([ask.milli for ask in waiters.asks], np.int64)[waiters.ask]
        model = np.array([walk.resources.index(name) for name in models], np.int64)[waiters.ask]

        def merge_entries(mine: NDArray[np.int64]) -> NDArray[np.int64]:
            mine = mine[sort_rows_by_keys(places[mine], line[mine])]
            asks = line[mine], milli[mine], model[mine], waiters.queued_ms[mine]
            if decided_by is None:
                return mine[walk.merge_entries(*asks)]
            table = np.zeros((len(mine), walk.deepest + 1))
            order = walk.merge_entries(*asks, table)
            for at, row in zip(mine.tolist(), table.tolist(), strict=True):
                levels = self.list_path(stands[line[at]])[-2::-1]
                decided_by[waiters.entries[at].request.request_id] = dict(zip(levels, row[1:], strict=False))
            return mine[order]

        return merge_entries

    def _make_walk_lines(self, number: Mapping[str, int]) -> list[WalkLine]:
        found: list[WalkLine] = []
        for stand in self.stands.values():
            parent = number[stand.parent.name] if stand.parent else -1
            room = {
                name: most - stand.held.get(name, 0.0)
                for name in self.tree.resources
                if (most := stand.find_limit(name)) < float("inf")
            }
            depth = found[parent].depth + 1 if stand.parent else 0
            own = stand.weight, stand.held, stand.guaranteed, stand.decayed_gpu_s
            found.append(WalkLine(stand.name, parent, depth, *own, room))
        return found

    # -- how much more each may take

    def limit_to_quota(self, request: PlacementRequest) -> PlacementRequest | str:
        """Return the request limited to its queue's quota, or the reason why it cannot start.

        An elastic request may get a smaller gang.
        """
        leaf, gang = self.find_or_add_leaf(self.tree.find_request_leaf(request)), request.members
        if not (why := self._explain_refusal(leaf, self.compute_amounts(request, gang.desired))):
            return request
        if gang.desired == gang.min:
            return why
        steps = (gang.desired - gang.min) // gang.step
        low, high = -1, steps
        while low < high:
            middle = (low + high + 1) // 2
            if said := self._explain_refusal(leaf, self.compute_amounts(request, gang.min + middle * gang.step)):
                why, high = said, middle - 1
            else:
                low = middle
        if low < 0:
            return why
        return msgspec.structs.replace(request, gang=Gang(gang.min, gang.min + low * gang.step, gang.step))

    def compute_amounts(self, request: PlacementRequest, members: int) -> dict[str, float]:
        """Return resource → GPUs that `members` members of a request need.

        Models are spelt as in the fleet and in the file.
        """
        found = compute_needed_gpus(request, members)
        return {self._spelt.get(name.casefold(), name): gpus for name, gpus in found.items()}

    def explain_permanent_refusal(self, request: PlacementRequest) -> str:
        """Return why the limits in the file never allow the GPUs that a request needs, whatever runs.

        Returns "" if they allow them.
        """
        return explain_never_fits(self.tree, self.tree.find_request_leaf(request), request)

    def find_refusing_queue(self, name: str, amounts: Amounts) -> str | None:
        """Return the queue whose limit does not allow a leaf to hold these additional amounts now.

        Returns LENDERS if other queues do not lend enough. Returns None if the leaf may hold the amounts.
        """
        leaf = self.find_or_add_leaf(name)
        limit = self._find_exceeded_limit(leaf, amounts)
        if limit is not None:
            return limit[0].name
        return LENDERS if self._explain_borrow_refusal(leaf, amounts) else None

    def is_refused_beyond(self, name: str, amounts: Amounts, most: float) -> bool:
        """Return whether a leaf may not hold these additional amounts, even if any jobs give back `most` GPUs.

        GPUs that are given back lower what a queue holds, and what is reserved, by no more than their number.
        """
        leaf, less = self.find_or_add_leaf(name), {resource: gpus - most for resource, gpus in amounts.items()}
        if self._find_exceeded_limit(leaf, less) is not None:
            return True
        return self._must_borrow(leaf, less) and any(
            self.capacity.get(resource, 0.0) + most < self._compute_new_reserve(leaf, resource, gpus)
            for resource, gpus in amounts.items()
            if resource in self.tree.resources
        )

    def list_path(self, leaf: str) -> list[str]:
        """Return the names of a leaf and of the queues above it."""
        return [stand.name for stand in self.find_or_add_leaf(leaf).path]

    def can_fit_later(self, request: PlacementRequest) -> bool:
        """Return whether a refused request could get all the GPUs that it needs once jobs have ended.

        GPUs that other queues reserve do not count as available.
        """
        leaf, amounts = (
            self.find_or_add_leaf(self.tree.find_request_leaf(request)),
            self.compute_amounts(request, request.members.min),
        )
        if self._find_exceeded_limit(leaf, amounts) is not None:
            return False
        for name, gpus in amounts.items():
            held = self.stands[ROOT].held.get(name, 0.0) + gpus
            reserved = self._compute_new_reserve(leaf, name, gpus) - held
            if name in self.tree.resources and gpus + reserved > self.capacity.get(name, 0.0):
                return False
        return True

    def _explain_refusal(self, leaf: QueueTotals, amounts: Amounts) -> str:
        limit = self._find_exceeded_limit(leaf, amounts)
        if limit is None:
            return self._explain_borrow_refusal(leaf, amounts)
        stand, name = limit
        most = format_gpus(name, stand.find_limit(name))
        said = f"{stand.held.get(name, 0.0):g} of {most} held, {amounts[name]:g} wanted"
        return f"queue {stand.name!r} is at its limit: {said}"

    @staticmethod
    def _find_exceeded_limit(leaf: QueueTotals, amounts: Amounts) -> tuple[QueueTotals, str] | None:
        """Return the queue whose limit these additional amounts would exceed, and the resource.

        Returns None if they exceed no limit.
        """
        for stand in leaf.limited:
            for name, gpus in amounts.items():
                if stand.held.get(name, 0.0) + gpus > stand.find_limit(name):
                    return stand, name
        return None

    def _explain_borrow_refusal(self, leaf: QueueTotals, amounts: Amounts) -> str:
        """Return why a leaf cannot borrow these amounts. Returns "" if it can, or need not borrow.

        Other queues lend neither the GPUs that they reserve, nor the GPUs within their guarantee that they wait for.
        """
        if not self._must_borrow(leaf, amounts):
            return ""
        for name, gpus in amounts.items():
            if name not in self.tree.resources:
                continue
            room = self.capacity.get(name, 0.0) - self._compute_new_reserve(leaf, name, gpus)
            if room < 0:
                free = max(0.0, room + gpus)
                return f"queue {leaf.name!r} wants {format_gpus(name, gpus)} more, and others leave it {free:g} now"
        return ""

    @staticmethod
    def _must_borrow(leaf: QueueTotals, amounts: Amounts) -> bool:
        """Return whether some queue of a leaf would hold more than its guarantee with these additional amounts."""
        return any(stand.node and stand.name != ROOT and not stand.is_within_guarantee(amounts) for stand in leaf.path)

    def _compute_new_reserve(self, leaf: QueueTotals, name: str, gpus: float) -> float:
        """Return how many GPUs of resource `name` would be reserved in the fleet if a leaf held `gpus` more."""
        more = 0.0
        for stand in leaf.path:
            reserve = stand.reserve.get(name, 0.0)
            more = max(reserve, stand.held.get(name, 0.0) + gpus, stand.below.get(name, 0.0) + more) - reserve
        return self.stands[ROOT].reserve.get(name, 0.0) + more

    def record_placement(self, request: PlacementRequest, amounts: Amounts) -> None:
        """Count the GPUs of a placement against the request's queue."""
        self.version += 1
        self.add_held(self.tree.find_request_leaf(request), amounts)

    def add_held(self, leaf: str, amounts: Amounts, sign: float = 1.0) -> None:
        """Add amounts to the GPUs that a leaf holds, or subtract them with sign −1."""
        for stand in self.find_or_add_leaf(leaf).path:
            for name, gpus in amounts.items():
                stand.held[name] = stand.held.get(name, 0.0) + sign * gpus
            self._update_reserve(stand)

    def count_waiting(self, request: PlacementRequest) -> bool:
        """Count the GPUs that a request waits for, so that they are not lent to other queues.

        Returns False if the leaf and all queues above it already hold or wait for their whole guarantees. The
        request is then not counted. The caller need not count further requests of this leaf.
        """
        leaf = self.tree.find_request_leaf(request)
        if not any(stand.lacks_guarantee() for stand in self.find_or_add_leaf(leaf).path):
            return False
        self.version += 1
        self.add_waiting(leaf, self.compute_amounts(request, request.members.min))
        return True

    def add_waiting(self, leaf: str, amounts: Amounts, sign: float = 1.0) -> None:
        """Add amounts to the GPUs that a leaf waits for, or subtract them with sign −1."""
        for stand in self.find_or_add_leaf(leaf).path:
            for name, gpus in amounts.items():
                stand.wanted[name] = stand.wanted.get(name, 0.0) + sign * gpus
            self._update_reserve(stand)

    def clear_waiting_counts(self) -> None:
        """Drop all counts of waiting requests."""
        for stand in reversed(self.stands.values()):
            stand.wanted.clear()
            self._update_reserve(stand)

    def copy(self) -> "QueueStanding":
        """Return a copy that can be changed independently."""
        other = copy(self)
        other.stands = {}
        for stand in self.stands.values():
            parent = other.stands[stand.parent.name] if stand.parent is not None else None
            mine = QueueTotals(stand.name, stand.node, parent, stand.weight, stand.guaranteed)
            mine.decayed_gpu_s, mine.held, mine.wanted = stand.decayed_gpu_s, stand.held.copy(), stand.wanted.copy()
            mine.reserve, mine.below = stand.reserve.copy(), stand.below.copy()
            other._add_queue(mine)
        return other


def explain_never_fits(tree: QueueTree, leaf: str, request: PlacementRequest) -> str:
    """Return why the limits in the file never allow a queue to hold the GPUs that a request needs.

    Returns "" if they allow it.
    """
    spelt = {name.casefold(): name for name in tree.resources}
    wanted = {
        spelt.get(name.casefold(), name): gpus
        for name, gpus in compute_needed_gpus(request, request.members.min).items()
    }
    for node in tree.list_path(leaf):
        for name, gpus in wanted.items():
            if gpus > node.find_limit(name):
                needs = format_gpus(name, gpus)
                return f"needs {needs}, and queue {node.name!r} may hold {node.find_limit(name):g} at most"
    return ""


def compute_needed_gpus(request: PlacementRequest, members: int) -> dict[str, float]:
    """Return resource → GPUs that `members` members of a request need.

    A request for any of several models counts as `gpu` only.
    """
    gpus = members * request.gpus_per_node * request.milli / WHOLE_GPU
    models = (request.gpu_model,) if request.gpu_model else request.gpu_models
    return {ANY: gpus, models[0]: gpus} if len(models) == 1 else {ANY: gpus}


def format_gpus(resource: str, gpus: float) -> str:
    """Format a number of GPUs of a resource for a sentence.

    >>> format_gpus("gpu", 1.0), format_gpus("H100", 8.0)
    ('1 GPU', '8 H100s')
    """
    noun = "GPU" if resource == ANY else resource
    return f"{gpus:g} {noun}" if gpus == 1 else f"{gpus:g} {noun}s"
