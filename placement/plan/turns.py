"""Queue order and quota: one implementation for the plan, for start times and for `GET /queue`.

Without a file of queues, all requests wait in one line. With a file, `TreeTurns` orders them by the tree,
and applies limits, loans between queues, reservations and maintenance windows.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import WHOLE_GPU, Decision, PlacementRequest
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.reserved_nodes import ReservedNodes, list_reserved_nodes
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.queues.asks import WaitingColumns
from fleetcast.placement.queues.charges import LeafUse
from fleetcast.placement.queues.closed import ClosedNodes, ClosedReason, close_nodes
from fleetcast.placement.queues.order import DAY_S
from fleetcast.placement.queues.queues_ahead import Closure, QueueHold
from fleetcast.placement.queues.standing import LENDERS, QueueStanding, compute_needed_gpus
from fleetcast.placement.queues.tree import ANY, QueueNode, QueueTree, Window

SLACK = 0.1  # of a run time: how long before its latest start a request with a deadline is due


class QueueTurns(Protocol):
    """An order of the queue with quotas: which entry is next, and how much of its request may start."""

    def sort_entries(self, queue: Sequence[Any]) -> list[Any]: ...

    def sort_behind_head(self, queue: Sequence[Any]) -> list[Any]:
        """Return entries in the order in which they may pass the head of the queue.

        How long they have waited does not affect this order (`fleetcast.placement.play.backfill`).
        """

    def is_overdue(self, request: PlacementRequest) -> bool:
        """Return whether a request has waited longer than it may.

        The answer covers only the requests of the last call of `sort_entries`.
        """

    def make_later_request(self, request: PlacementRequest) -> PlacementRequest | None:
        """Return a refused request limited to the nodes that it may use once running jobs have ended.

        Returns None if it lacks GPUs that other queues keep for themselves.
        """

    def limit_to_quota(self, request: PlacementRequest) -> PlacementRequest | str:
        """Return the request limited to its quota and to open nodes, or the reason why it cannot start."""

    def find_reserved_nodes(self, request: PlacementRequest) -> tuple[ReservedNodes, ...]:
        """Return the windows and spare nodes that are not for a request."""

    def exclude_closed_nodes(self, request: PlacementRequest, start_ms: int | None = None) -> PlacementRequest:
        """Return the request without the nodes that are closed to it if it starts at `start_ms`, or else now."""

    def may_claim(self, request: PlacementRequest) -> bool:
        """Return whether the queue of a request could hold its GPUs besides those of the claims of this pass."""

    def record_claim(self, request: PlacementRequest) -> None:
        """Count the claim of a request against the further claims of its queue."""

    def is_at_limit(self, request: PlacementRequest) -> bool:
        """Return whether the request's queue, or a queue above it, has reached its limit."""

    def make_sort_keys(self, entries: Sequence[Any]) -> "SortKeys":
        """Return the keys by which a sampled future sorts these waiting entries and jobs that arrive later."""

    def record_placement(self, request: PlacementRequest, decision: Decision) -> None:
        """Count a placement's GPUs against its queue's quota, for the rest of this pass."""

    def count_waiting(self, request: PlacementRequest) -> bool:
        """Count the GPUs that a request waits for, so that its queue's guarantee is not lent to others.

        Returns False if further requests of its queue need not be counted.
        """

    def make_fresh_copy(self) -> "QueueTurns":
        """Return a copy of the turns as they were before any placement of this pass."""

    def find_hold(self, request: PlacementRequest) -> QueueHold | None:
        """Return the queue of a request, and the GPUs that its smallest gang counts against the queue's quota.

        Returns None if the request belongs to no queue.
        """

    def find_closures(self, request: PlacementRequest) -> tuple[Closure, ...]:
        """Return the nodes that are closed to a request, each with the time span in which they are."""

    @property
    def window_names(self) -> frozenset[str]:
        """The kind and name of each window that has not ended."""

    @property
    def standing(self) -> QueueStanding | None:
        """The state of the queues. None without a tree of queues."""

    @property
    def holds(self) -> Mapping[str, QueueHold]:
        """Job → the GPUs that it holds, and the queue that they count against."""

    @property
    def version(self) -> int:
        """A number that changes whenever `limit_to_quota` may give another answer."""

    @property
    def most_claims(self) -> int:
        """The number of waiting requests for which a pass reserves GPUs."""


@dataclass(frozen=True, slots=True)
class SortKeys:
    """The keys by which a sampled future sorts waiting entries and newcomers.

    orders: the key of each entry. The smallest is next. levels: the precedence of each entry, in descending
    order. newcomers: keys of waiting entries. A newcomer draws one of them, and waits behind the entry with
    this key.
    """

    orders: Sequence[tuple[float, float]]
    levels: Sequence[float]
    newcomers: Sequence[float]


class OneLine:
    """An order without quotas, in which all requests wait in one line."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self._key = key

    def sort_entries(self, queue: Sequence[Any]) -> list[Any]:
        return sorted(queue, key=self._key)

    def sort_behind_head(self, queue: Sequence[Any]) -> list[Any]:
        return list(queue)

    def is_overdue(self, request: PlacementRequest) -> bool:
        return False

    def make_later_request(self, request: PlacementRequest) -> PlacementRequest | None:
        return None

    def limit_to_quota(self, request: PlacementRequest) -> PlacementRequest | str:
        return request

    def find_reserved_nodes(self, request: PlacementRequest) -> tuple[ReservedNodes, ...]:
        return ()

    def exclude_closed_nodes(self, request: PlacementRequest, start_ms: int | None = None) -> PlacementRequest:
        return request

    def may_claim(self, request: PlacementRequest) -> bool:
        return True

    def record_claim(self, request: PlacementRequest) -> None:
        pass

    def is_at_limit(self, request: PlacementRequest) -> bool:
        return False

    def make_sort_keys(self, entries: Sequence[Any]) -> SortKeys:
        orders = [(-float(entry.request.priority), entry.queued_ms / 1000) for entry in entries]
        levels = [entry.request.priority for entry in entries]
        return SortKeys(orders, levels, [order for order, _ in orders] or [0.0])

    def record_placement(self, request: PlacementRequest, decision: Decision) -> None:
        pass

    def count_waiting(self, request: PlacementRequest) -> bool:
        return False

    def make_fresh_copy(self) -> "OneLine":
        return self

    def find_hold(self, request: PlacementRequest) -> QueueHold | None:
        return None

    def find_closures(self, request: PlacementRequest) -> tuple[Closure, ...]:
        return ()

    @property
    def window_names(self) -> frozenset[str]:
        return frozenset()

    @property
    def standing(self) -> None:
        return None

    @property
    def holds(self) -> Mapping[str, QueueHold]:
        return {}

    @property
    def version(self) -> int:
        return 0

    @property
    def most_claims(self) -> int:
        return 1


class TreeTurns:
    """The order and quotas of a tree of queues in its present state, for one pass.

    jobs: running job → the GPUs that it holds, and the queue that they count against.
    """

    def __init__(
        self,
        tree: QueueTree,
        use: Mapping[str, LeafUse],
        view: ClusterView,
        run_times: RunTimeQuantiles,
        now_ms: int,
        banked: Mapping[str, float] | None = None,
        jobs: Mapping[str, QueueHold] | None = None,
    ) -> None:
        self._state = use, banked, jobs
        self.tree = tree
        self.view = view
        self.run_times = run_times
        self.now_ms = now_ms
        self.standing = QueueStanding(tree, use, compute_capacity(view, use.get(""), jobs), banked or {})
        self._reserved = list_reserved_nodes(tree, view, now_ms)
        self._closed: dict[tuple[str | ReservedNodes, ...], tuple[ClosedNodes, ...]] = {}
        self._overdue: frozenset[str] = frozenset()  # requests, in the last order
        self._sated: set[str] = set()  # leaves that lack nothing of what they are guaranteed any more
        self._closures = {
            row: Closure(row.nodes, (row.start_ms - now_ms) / 1000, (row.end_ms - now_ms) / 1000, row.name)
            for row in self._reserved
            if row.window is not None
        }
        self.holds = dict(jobs or {})
        self._with_claims: QueueStanding | None = None  # the queues as if they held the GPUs of their claims

    def make_fresh_copy(self) -> "TreeTurns":
        use, banked, jobs = self._state
        return TreeTurns(self.tree, use, self.view, self.run_times, self.now_ms, banked, jobs)

    def sort_entries(self, queue: Sequence[Any]) -> list[Any]:
        return self.standing.sort_entries(queue, self.rank_entries) if len(queue) > 1 else list(queue)

    def compute_deciding_shares(self, queue: Sequence[Any]) -> dict[str, dict[str, float]]:
        """Return the queue shares that decided the order of the entries.

        The result is request_id → queue → share, with the entry's queue at each level from the root.
        """
        found: dict[str, dict[str, float]] = {}
        self.standing.sort_entries(queue, self.rank_entries, found)
        return found

    def sort_behind_head(self, queue: Sequence[Any]) -> list[Any]:
        return self.standing.sort_entries(queue, self.rank_without_overdue) if self._overdue else list(queue)

    def is_overdue(self, request: PlacementRequest) -> bool:
        return request.request_id in self._overdue

    def rank_entries(self, waiters: WaitingColumns, queues: Sequence[QueueNode]) -> NDArray[np.int64]:
        """Return (k,) the place of each waiting entry within its leaf of the tree.

        Overdue entries come first. Then the higher priority, the smaller area and the longer wait decide.
        queues: the queue of each different ask.
        """
        on_time = ~(self.now_ms >= self.compute_due_ms(waiters, queues))
        self._overdue = frozenset(waiters.entries[at].request.request_id for at in np.flatnonzero(~on_time).tolist())
        return self._compute_ranks(waiters, queues, on_time)

    def rank_without_overdue(self, waiters: WaitingColumns, queues: Sequence[QueueNode]) -> NDArray[np.int64]:
        """Return (k,) the place of each waiting entry within its leaf if overdue entries get no precedence."""
        return self._compute_ranks(waiters, queues, np.ones(len(waiters.entries), bool))

    def _compute_ranks(
        self, waiters: WaitingColumns, queues: Sequence[QueueNode], on_time: NDArray[np.bool_]
    ) -> NDArray[np.int64]:
        priority = np.array([self.tree.compute_priority(request) for request in waiters.first], np.int64)[waiters.ask]
        gpus = np.array([ask.wished for ask in waiters.asks], np.int64) / WHOLE_GPU
        counts = [queue.order == "shortest" for queue in queues]
        area = np.where(counts, gpus, 0.0)[waiters.ask] * waiters.list_times("limit_s", DAY_S)
        return waiters.rank_rows(on_time, np.where(on_time, -priority, 0), np.where(on_time, area, 0.0))

    def compute_due_ms(self, waiters: WaitingColumns, queues: Sequence[QueueNode]) -> NDArray[np.float64]:
        """Return (k,) the time in ms from which each entry is overdue and goes before the others of its leaf.

        An entry is overdue after the longest wait that its queue or its request allows. If the request has a
        deadline, it is overdue at the latest after its last possible start that meets the deadline.
        """
        longest_s = np.array([queue.max_wait_s for queue in queues])[waiters.ask]
        due_ms = waiters.queued_ms + 1000 * np.minimum(longest_s, waiters.list_times("tolerated_wait_s", np.inf))
        deadline_ms = waiters.list_times("deadline_ms", np.inf)
        for at in np.flatnonzero(np.isfinite(deadline_ms)).tolist():
            latest_ms = deadline_ms[at] - 1000 * (1 + SLACK) * self._estimate_run_s(waiters.entries[at].request)
            due_ms[at] = min(due_ms[at], latest_ms)
        return np.asarray(due_ms)

    def _estimate_run_s(self, request: PlacementRequest) -> float:
        gpus = request.members.desired * request.gpus_per_node
        return self.run_times.estimate_run_s(gpus, 0.9, limit_s=request.limit_s)

    def limit_to_quota(self, request: PlacementRequest) -> PlacementRequest | str:
        allowed = self.standing.limit_to_quota(request) if self._is_in_tree(request) else request
        return allowed if isinstance(allowed, str) else self.exclude_closed_nodes(allowed)

    def may_claim(self, request: PlacementRequest) -> bool:
        if self._with_claims is None or not self._is_in_tree(request):
            return True
        return self._with_claims.can_fit_later(request)

    def record_claim(self, request: PlacementRequest) -> None:
        self._with_claims = self._with_claims or self.standing.copy()
        hold = self.find_hold(request)
        if hold is not None:
            self._with_claims.add_held(hold.leaf, hold.amounts)

    def make_later_request(self, request: PlacementRequest) -> PlacementRequest | None:
        return self.exclude_closed_nodes(request) if self.standing.can_fit_later(request) else None

    def is_at_limit(self, request: PlacementRequest) -> bool:
        if not self._is_in_tree(request):
            return False
        least = self.standing.compute_amounts(request, request.members.min)
        return self.standing.find_refusing_queue(self.tree.find_request_leaf(request), least) not in (None, LENDERS)

    def exclude_closed_nodes(self, request: PlacementRequest, start_ms: int | None = None) -> PlacementRequest:
        return close_nodes(request, self._find_closed_nodes(request, self.now_ms if start_ms is None else start_ms))

    def _is_in_tree(self, request: PlacementRequest) -> bool:
        """Return whether the request belongs to a queue of the tree.

        Jobs that wait for other schedulers may belong to none.
        """
        return bool(self.tree.find_known_leaf(request))

    def _find_closed_nodes(self, request: PlacementRequest, start_ms: int) -> tuple[ClosedNodes, ...]:
        """Return the nodes that the request may not use if it starts at `start_ms`, grouped by reason.

        A node is closed if it is reserved for others before the request would end. A node is also closed if the
        request's queue may use no more GPUs of the node's model.
        """
        models, barring = self._list_full_models(request), self._find_barring_nodes(request, start_ms)
        key: tuple[str | ReservedNodes, ...] = (*models, *barring)
        if key not in self._closed:
            found: list[tuple[ClosedReason, NDArray[np.bool_], str]] = [
                ("model_quota", self._mask_by_model(name), f"of model {name}, of which its queue may have no more now")
                for name in models
            ]
            found += [(row.reason, row.nodes, row.words) for row in barring]
            nodes = self.view.topology.nodes
            self._closed[key] = tuple(
                ClosedNodes(reason, tuple(nodes[row].name for row in np.flatnonzero(mask).tolist()), words)
                for reason, mask, words in found
                if mask.any()
            )
        return self._closed[key]

    def find_reserved_nodes(self, request: PlacementRequest) -> tuple[ReservedNodes, ...]:
        if not self._reserved:
            return ()
        leaf, can_leave = self.tree.find_known_leaf(request), self._can_leave(request)
        return tuple(row for row in self._reserved if not row.is_free_for(leaf, can_leave))

    def _can_leave(self, request: PlacementRequest) -> bool:
        """Return whether the running job may be stopped at any time, by the word of its owner or its queue."""
        if request.preemptible is not None or not self._is_in_tree(request):
            return bool(request.preemptible)
        return self.tree.list_path(self.tree.find_request_leaf(request))[0].preemptible == "all"

    def _find_barring_nodes(self, request: PlacementRequest, start_ms: int) -> list[ReservedNodes]:
        """Return the reserved nodes that a request may not use if it starts at `start_ms`."""
        if not self._reserved:
            return []
        end_ms = start_ms + 1000 * self._estimate_run_s(request)
        return [row for row in self.find_reserved_nodes(request) if row.overlaps(start_ms, end_ms)]

    def list_barring_windows(self, request: PlacementRequest) -> list[tuple[Window, int]]:
        """Return the windows that keep a request from their nodes now, each with its number of nodes."""
        found = self._find_barring_nodes(request, self.now_ms)
        return [(row.window, int(row.nodes.sum())) for row in found if row.window is not None]

    def _list_full_models(self, request: PlacementRequest) -> list[str]:
        """Return the GPU models that a request for any model may not use now.

        More GPUs of such a model would exceed a limit, or other queues do not lend them.
        """
        named = request.gpu_model or len(request.gpu_models) == 1
        if named or len(self.tree.resources) < 2 or not self._is_in_tree(request):
            return []
        found = []
        for name in self.tree.resources:
            asked = msgspec.structs.replace(request, gpu_model=name, gpu_models=())
            if name != ANY and isinstance(self.standing.limit_to_quota(asked), str):
                found.append(name)
        return found

    def _mask_by_model(self, model: str) -> NDArray[np.bool_]:
        codes = [code for code, name in enumerate(self.view.inventory.gpu_models) if name == model]
        return np.isin(self.view.inventory.gpu_model, codes)

    def make_sort_keys(self, entries: Sequence[Any]) -> SortKeys:
        """Return the keys of the waiting entries in their present order.

        A newcomer joins the leaf of a random waiting entry, behind the last entry of that leaf.
        """
        last: dict[str, float] = {}
        leaves = [self.tree.find_known_leaf(entry.request) for entry in entries]
        for number, leaf in enumerate(leaves):
            last[leaf] = float(number)
        orders = [(float(number), 0.0) for number in range(len(entries))]
        return SortKeys(orders, [-number for number in range(len(entries))], [last[leaf] for leaf in leaves] or [0.0])

    def record_placement(self, request: PlacementRequest, decision: Decision) -> None:
        if not self._is_in_tree(request):
            return
        amounts = sum_placed_amounts(decision, self.view)
        self.holds[request.job_name] = QueueHold(self.tree.find_request_leaf(request), amounts)
        self.standing.record_placement(request, amounts)
        if self._with_claims is not None:
            self._with_claims.add_held(self.holds[request.job_name].leaf, amounts)

    def find_hold(self, request: PlacementRequest) -> QueueHold | None:
        if not self._is_in_tree(request):
            return None
        return QueueHold(
            self.tree.find_request_leaf(request), self.standing.compute_amounts(request, request.members.min)
        )

    def find_closures(self, request: PlacementRequest) -> tuple[Closure, ...]:
        return tuple(self._closures[row] for row in self.find_reserved_nodes(request) if row.window is not None)

    def count_waiting(self, request: PlacementRequest) -> bool:
        leaf = self.tree.find_known_leaf(request)
        if not leaf or leaf in self._sated:
            return False
        if not self.standing.count_waiting(request):
            self._sated.add(leaf)
            return False
        return True

    @property
    def window_names(self) -> frozenset[str]:
        return frozenset(row.name for row in self._reserved if row.window is not None)

    @property
    def version(self) -> int:
        return self.standing.version

    @property
    def most_claims(self) -> int:
        return self.tree.policy.claims


def compute_capacity(
    view: ClusterView, outside: LeafUse | None = None, jobs: Collection[str] | None = None
) -> dict[str, float]:
    """Return resource → usable GPUs of the fleet, minus those that jobs without a queue hold.

    outside: the GPUs that jobs without a queue hold, including those on nodes outside the fleet. jobs: all jobs that
    have a queue.
    """
    found = count_gpus_by_resource(view, view.usable)
    if outside is None:
        return found
    of_fleet = outside.held
    if jobs is not None:
        is_outside = np.array([*(name not in jobs for name in view.jobs), False])  # the last is of -1: nobody
        of_fleet = count_gpus_by_resource(view, view.usable & is_outside[view.holders])
    for name, gpus in outside.held.items():
        found[name] = max(0.0, found.get(name, 0.0) - min(gpus, of_fleet.get(name, 0.0)))
    return found


def count_gpus_by_resource(view: ClusterView, mask: NDArray[np.bool_]) -> dict[str, float]:
    """Return resource → number of GPUs in a mask. mask: (n, g) bool."""
    counts, models = np.count_nonzero(mask, axis=1), view.inventory.gpu_models
    by_model = np.bincount(view.inventory.gpu_model + 1, counts, len(models) + 1)[1:].tolist()
    return {ANY: float(counts.sum()), **dict(zip(models, by_model, strict=True))}


def sum_placed_amounts(decision: Decision, view: ClusterView) -> dict[str, float]:
    """Return resource → number of GPUs that a placement takes."""
    found = {ANY: 0.0}
    for node, gpus in list_placed_gpus(decision, view):
        found[ANY] += gpus
        if node.gpu_model:
            found[node.gpu_model] = found.get(node.gpu_model, 0.0) + gpus
    return found


def list_placed_gpus(decision: Decision, view: ClusterView) -> Iterable[tuple[Any, float]]:
    """Return (node, GPUs) of each rank that is on a known node."""
    row = view.inventory.row
    nodes = view.topology.nodes
    return [
        (nodes[row[rank.node]], len(rank.gpus) * rank.milli / WHOLE_GPU) for rank in decision.ranks if rank.node in row
    ]


__all__ = ["OneLine", "QueueTurns", "TreeTurns", "compute_needed_gpus"]
