"""Turns: whose turn it is, and how much he may have. One function for the plan, for start times and for `GET /queue`.

Without a file of queues there is one line. With one, `TreeTurns` orders by the tree, and holds limits, what is lent,
reservations and maintenance.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.requests import WHOLE_GPU, Decision, PlacementRequest
from placement.charges import LeafUse
from placement.order import Order
from placement.standing import QueueStanding, amounts_of
from placement.timeline import RunTimeQuantiles
from placement.tree import ANY, QueueNode, QueueTree, Window
from placement.view import ClusterView

SHORTEST = Order("shortest", run_term="limit")  # no forecast has won a contest here
SLACK = 0.1  # of a run time: how long before its latest start a request with a deadline is due


class QueueTurns(Protocol):
    """Who is next, and what of his request he may have."""

    def in_order(self, queue: Sequence[Any]) -> list[Any]: ...

    def allow(self, request: PlacementRequest) -> PlacementRequest | str:
        """The request, as far as it may be placed now, or the reason why not at all."""

    def places(self, entries: Sequence[Any]) -> "Places":
        """Of entries in order: what a future sorts them by, and those that come."""

    def take(self, request: PlacementRequest, decision: Decision) -> None:
        """Count a placement."""

    def want(self, request: PlacementRequest) -> None:
        """Count a request that waits for GPUs."""


@dataclass(frozen=True, slots=True)
class Places:
    """orders: of each entry, the least is next. levels: never rising. newcomers: where who comes may stand behind."""

    orders: Sequence[tuple[float, float]]
    levels: Sequence[float]
    newcomers: Sequence[float]


class OneLine:
    """All wait in one line, and each may have what is free."""

    def __init__(self, key: Callable[[Any], Any]) -> None:
        self._key = key

    def in_order(self, queue: Sequence[Any]) -> list[Any]:
        return sorted(queue, key=self._key)

    def allow(self, request: PlacementRequest) -> PlacementRequest | str:
        return request

    def places(self, entries: Sequence[Any]) -> Places:
        orders = [(-float(entry.request.priority), entry.queued_ms / 1000) for entry in entries]
        levels = [entry.request.priority for entry in entries]
        return Places(orders, levels, [order for order, _ in orders] or [0.0])

    def take(self, request: PlacementRequest, decision: Decision) -> None:
        pass

    def want(self, request: PlacementRequest) -> None:
        pass


class TreeTurns:
    """Turns by a tree of queues, as it stands now. For one pass."""

    def __init__(
        self,
        tree: QueueTree,
        use: Mapping[str, LeafUse],
        view: ClusterView,
        run_times: RunTimeQuantiles,
        now_ms: int,
        banked: Mapping[str, float] | None = None,
    ) -> None:
        self.tree = tree
        self.view = view
        self.run_times = run_times
        self.now_ms = now_ms
        self.standing = QueueStanding(tree, use, capacity_of(view, use.get("")), banked or {})
        self._windows = [(window, nodes_of(window, view)) for window in tree.windows if window.to_ms > now_ms]
        self._closed: dict[tuple[str, ...], tuple[str, ...]] = {}

    def in_order(self, queue: Sequence[Any]) -> list[Any]:
        return self.standing.in_order(queue, self.key)

    def key(self, entry: Any, queue: QueueNode) -> tuple[Any, ...]:
        """An entry's place in its leaf: who is overdue, then the higher priority, the least area, the longer wait."""
        request = entry.request
        if self.now_ms >= self.due_ms(entry, queue):
            return 0, 0, entry.queued_ms, request.request_id
        gpus = request.members.desired * request.gpus_per_node * request.milli / WHOLE_GPU
        area = SHORTEST.key(gpus, None, request.limit_s) if queue.order == "shortest" else 0.0
        return 1, -self.tree.priority_of(request), area, entry.queued_ms, request.request_id

    def due_ms(self, entry: Any, queue: QueueNode) -> float:
        """From when on it goes before all of its queue: its longest wait, or its latest start for the deadline."""
        request, longest_s = entry.request, queue.max_wait_s
        if request.tolerated_wait_s is not None:
            longest_s = min(longest_s, request.tolerated_wait_s)
        due_ms = float(entry.queued_ms + 1000 * longest_s)
        if request.deadline_ms is not None:
            due_ms = min(due_ms, request.deadline_ms - 1000 * (1 + SLACK) * self._run_s(request))
        return due_ms

    def _run_s(self, request: PlacementRequest) -> float:
        gpus = request.members.desired * request.gpus_per_node
        return self.run_times.run_s(gpus, 0.9, limit_s=request.limit_s)

    def allow(self, request: PlacementRequest) -> PlacementRequest | str:
        allowed = self.standing.allow(request)
        if isinstance(allowed, str):
            return allowed
        closed = self._closed_to(allowed)
        return msgspec.structs.replace(allowed, avoid_nodes=(*allowed.avoid_nodes, *closed)) if closed else allowed

    def _closed_to(self, request: PlacementRequest) -> tuple[str, ...]:
        """Nodes kept for others before it would end, and those of models of which its queue may have no more."""
        end_ms = self.now_ms + 1000 * self._run_s(request) if self._windows else 0.0
        leaf = self.tree.leaf_of(request)
        names = [f"model {name}" for name in self._models_without_room(request)]
        names += [
            str(number)
            for number, (window, _) in enumerate(self._windows)
            if window.from_ms < end_ms and not (window.queue and is_below(leaf, window.queue))
        ]
        key = tuple(names)
        if key not in self._closed:
            mask = np.zeros(len(self.view), bool)
            for name in names:
                mask |= self._of_model(name[6:]) if name.startswith("model ") else self._windows[int(name)][1]
            nodes = self.view.topology.nodes
            self._closed[key] = tuple(nodes[row].name for row in np.flatnonzero(mask).tolist())
        return self._closed[key]

    def _models_without_room(self, request: PlacementRequest) -> list[str]:
        """Of a request for any model: those of which it would pass a limit, or take what others are not lending."""
        if request.gpu_model or len(request.gpu_models) == 1 or len(self.tree.resources) < 2:
            return []
        found = []
        for name in self.tree.resources:
            asked = msgspec.structs.replace(request, gpu_model=name, gpu_models=())
            if name != ANY and isinstance(self.standing.allow(asked), str):
                found.append(name)
        return found

    def _of_model(self, model: str) -> NDArray[np.bool_]:
        return np.array([node.gpu_model == model for node in self.view.topology.nodes], bool)

    def places(self, entries: Sequence[Any]) -> Places:
        """As they stand. Who comes stands behind the last of a leaf, each entry's with the same chance."""
        last: dict[str, float] = {}
        leaves = [self.tree.known_leaf(entry.request) for entry in entries]
        for number, leaf in enumerate(leaves):
            last[leaf] = float(number)
        orders = [(float(number), 0.0) for number in range(len(entries))]
        return Places(orders, [-number for number in range(len(entries))], [last[leaf] for leaf in leaves] or [0.0])

    def take(self, request: PlacementRequest, decision: Decision) -> None:
        self.standing.take(request, placed_amounts(decision, self.view))

    def want(self, request: PlacementRequest) -> None:
        self.standing.want(request)


def is_below(leaf: str, queue: str) -> bool:
    return leaf == queue or leaf.startswith(f"{queue}/")


def nodes_of(window: Window, view: ClusterView) -> NDArray[np.bool_]:
    """(n,) the nodes of a window."""
    mask = np.array([name in set(window.nodes) for name in view.topology.names], bool)
    for level, name in window.domains:
        names = view.topology.domain_names[level]
        if name in names:
            mask |= view.topology.domain[level] == names.index(name)
    return mask


def capacity_of(view: ClusterView, outside: LeafUse | None = None) -> dict[str, float]:
    """Resource → GPUs that can be used, without what jobs of no queue hold."""
    usable = np.count_nonzero(view.usable, axis=1)
    found = {ANY: float(usable.sum())}
    for row, node in enumerate(view.topology.nodes):
        if node.gpu_model:
            found[node.gpu_model] = found.get(node.gpu_model, 0.0) + float(usable[row])
    for name, gpus in (outside.held if outside else {}).items():
        found[name] = max(0.0, found.get(name, 0.0) - gpus)
    return found


def placed_amounts(decision: Decision, view: ClusterView) -> dict[str, float]:
    """Resource → GPUs of a placement."""
    found = {ANY: 0.0}
    for node, gpus in placed_gpus(decision, view):
        found[ANY] += gpus
        if node.gpu_model:
            found[node.gpu_model] = found.get(node.gpu_model, 0.0) + gpus
    return found


def placed_gpus(decision: Decision, view: ClusterView) -> Iterable[tuple[Any, float]]:
    """(node, GPUs) of each rank on a node that the view knows."""
    row = view.inventory.row
    nodes = view.topology.nodes
    return [
        (nodes[row[rank.node]], len(rank.gpus) * rank.milli / WHOLE_GPU) for rank in decision.ranks if rank.node in row
    ]


__all__ = ["OneLine", "QueueTurns", "TreeTurns", "amounts_of"]
