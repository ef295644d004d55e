"""Filters that reject the nodes that cannot host one member of a gang, each with a reason.

The reason of a node is the first one of `FILTERS` that applies. Each node counts once, so `nodes ==
candidates + sum(rejected)`. A node is also rejected if a property that the request demands is
unknown (its CPUs, its GPU model), because a promise needs evidence.
"""

from collections.abc import Iterable
from itertools import chain
from typing import get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import LEAST_AMOUNT, MAX_MEMBERS, PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.machines.options import Filter, Options, compute_worst_risk, find_highest_risk
from fleetcast.placement.machines.slots import WHOLE, count_true_per_row
from fleetcast.placement.machines.view import ClusterView, Hearing
from fleetcast.placement.queues.closed import ClosedReason, LimitedRequest, filter_closed_nodes, mask_named_nodes

Mask = NDArray[np.bool_]


class Screen(msgspec.Struct, frozen=True):
    """The result of all filters for one request.

    passes: (n,) bool, the candidates. room: (n,) members that a candidate can host, 0 elsewhere.
    by_reason: reason → the nodes that were rejected for it.
    """

    passes: Mask
    room: NDArray[np.int64]
    free_gpus: NDArray[np.int64]
    by_reason: dict[str, Mask]

    @property
    def rejected_counts(self) -> dict[str, int]:
        return {reason: int(np.count_nonzero(mask)) for reason, mask in self.by_reason.items()}

    def restrict_to_rows(self, rows: NDArray[np.int64]) -> "Screen":
        """Return a copy of the result in which only the nodes of `rows` remain candidates."""
        passes = np.zeros_like(self.passes)
        passes[rows] = True
        return msgspec.structs.replace(self, passes=passes, room=np.where(passes, self.room, 0))


def screen(request: PlacementRequest, view: ClusterView, options: Options) -> Screen:
    """Apply all filters in order. Returns the candidates and the rejected nodes.

    The operator's own filters run after the built-in ones. The filter `busy` is always the last.
    """
    by_reason: dict[str, Mask] = {}
    passes: Mask | None = None  # None: all of them

    def reject(reason: str, mask: Mask) -> None:
        nonlocal passes
        first = np.asarray(mask, bool) if passes is None else mask & passes
        if np.count_nonzero(first):  # faster than `any`
            by_reason[reason] = first
            passes = ~first if passes is None else passes ^ first

    for reason, rejects in _list_filters(request, view, options):
        mask = rejects(request, view, options)
        if mask is not None:
            reject(reason, mask)
    room, only_busy = count_room_on_gpus(request, view), passes is None and not request.spread
    reject("busy", room < 1)
    room = _count_member_room(request, view, room)
    if passes is None:
        return Screen(np.ones(len(view), bool), room, view.free_gpus, by_reason)
    return Screen(passes, room if only_busy else room * passes, view.free_gpus, by_reason)


def _list_filters(request: PlacementRequest, view: ClusterView, options: Options) -> Iterable[tuple[str, Filter]]:
    """Return the filters in order, without those that cannot reject any node.

    These are the filters for states in which no node is, and for closed nodes if the request lists none.
    """
    is_limited = isinstance(request, LimitedRequest)

    def choose() -> tuple[tuple[str, Filter], ...]:
        absent = {reason for reason, state in STATES.items() if not (view.state == state).any()}
        absent |= set() if is_limited else set(get_args(ClosedReason))
        return tuple((reason, rejects) for reason, rejects in FILTERS if reason not in absent)

    key = "filters of limited requests" if is_limited else "filters"
    found: tuple[tuple[str, Filter], ...] = view.memo.get_or_compute(key, (view.state,), choose)
    return chain(found, options.filters) if options.filters else found


def count_room_on_gpus(request: PlacementRequest, view: ClusterView) -> NDArray[np.int64]:
    """Return (n,) members that fit on the free GPUs, or free parts of GPUs, of each node."""
    if request.milli < WHOLE:
        return np.asarray((view.milli // request.milli).sum(axis=1, dtype=np.int64))
    if request.gpus_per_node == 1:
        return view.free_gpus
    return view.free_gpus // request.gpus_per_node if request.gpus_per_node else np.full(len(view), MAX_MEMBERS)


def _count_member_room(request: PlacementRequest, view: ClusterView, room: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (n,) members that fit on each node. CPUs and host memory are per member.

    room: (n,) members that fit by GPUs alone.
    """
    if request.spread:
        return np.ones(len(view), np.int64)
    for each, free in ((request.cpus, view.free_cpus), (request.host_memory_gib, view.free_host_memory_gib)):
        if each is not None:
            room = np.minimum(room, np.nan_to_num(free, nan=0.0) // max(each, LEAST_AMOUNT))
    return room.astype(np.int64, copy=False)


def reject_unknown_topology(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Reject nodes whose domain is unknown if the request requires a level."""
    level = request.required
    if level is None or level is Level.NODE or view.domains.ranges[level][0] >= 0:
        return None
    unknown: Mask = view.topology.domain[level] < 0
    return unknown


def reject_other_clusters(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Reject nodes that are known to be in another cluster than the requested one."""
    if not request.cluster or request.cluster in options.clusters:
        return None
    names = view.topology.domain_names[Level.CLUSTER]
    own = names.index(request.cluster) if request.cluster in names else -2
    domain = view.topology.domain[Level.CLUSTER]
    other: Mask = (domain >= 0) & (domain != own)
    return other


def reject_other_pools(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    if not request.pool:
        return None
    pools = view.inventory.pools
    other: Mask = view.inventory.pool != (pools.index(request.pool) if request.pool in pools else -1)
    return other


def reject_avoided_nodes(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    return mask_named_nodes(request.avoid_nodes, view.inventory.row, len(view)) if request.avoid_nodes else None


def _make_closed_filter(reason: str) -> Filter:
    """Make a filter that rejects the nodes that are closed to the request's queue for this reason."""

    def reject_closed(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
        groups = filter_closed_nodes(request, reason)
        if not groups:
            return None
        names = tuple(name for group in groups for name in group.nodes)
        return mask_named_nodes(names, view.inventory.row, len(view))

    return reject_closed


def reject_stale(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Reject nodes whose GPU telemetry is old, because what runs there now is unknown."""
    return _mask_by_hearing(view, Hearing.STALE)


def reject_unheard(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Reject nodes on which no exporter has ever reported a GPU."""
    return _mask_by_hearing(view, Hearing.UNHEARD)


def _mask_by_hearing(view: ClusterView, hearing: Hearing) -> Mask | None:
    return None if view.hearing is None else np.asarray(view.hearing == hearing)


def _make_state_filter(state: NodeState) -> Filter:
    """Make a filter that rejects nodes in this state."""

    def reject_in_state(request: PlacementRequest, view: ClusterView, options: Options) -> Mask:
        mask: Mask = view.state == state
        return mask

    return reject_in_state


def drained(request: PlacementRequest, view: ClusterView, options: Options) -> Mask:
    """Reject drained nodes."""
    mask: Mask = view.state == NodeState.DRAINED
    return mask


def lost(request: PlacementRequest, view: ClusterView, options: Options) -> Mask:
    """Reject lost nodes."""
    mask: Mask = view.state == NodeState.LOST
    return mask


def reject_other_gpu_models(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Reject nodes whose GPU model is not among those that the request names.

    Case does not matter, and a part of the name is enough: "H100" matches "NVIDIA H100 80GB HBM3".
    """
    wanted = request.models
    if not wanted:
        return None
    names = view.inventory.gpu_models
    codes = [code for code, name in enumerate(names) if any(part in name.casefold() for part in wanted)]
    return ~np.isin(view.inventory.gpu_model, codes)


def reject_small_gpu_memory(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    if request.gpu_memory_gib is None:
        return None
    return ~(view.inventory.gpu_memory_gib >= request.gpu_memory_gib)


def risk(request: PlacementRequest, view: ClusterView, options: Options) -> Mask:
    """Reject nodes whose probability of failing or slowing down is above the limit.

    The request's limit applies. Without one, the operator's applies.
    """
    return compute_worst_risk(view, options) > _find_risk_limit(request, options)


def _reject_risky_if_any(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Return the mask of nodes above the risk limit, or None if there are none."""
    too_risky = find_highest_risk(view, options) > _find_risk_limit(request, options)
    return risk(request, view, options) if too_risky else None


def _find_risk_limit(request: PlacementRequest, options: Options) -> float:
    return options.max_risk if request.max_risk is None else request.max_risk


def reject_few_cpus(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    return None if request.cpus is None else ~(view.free_cpus >= request.cpus)


def reject_small_host_memory(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    return None if request.host_memory_gib is None else ~(view.free_host_memory_gib >= request.host_memory_gib)


def reject_few_gpus(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Reject nodes with fewer GPUs than one member needs, free or not."""
    each = request.gpus_per_node
    return None if each <= 1 or view.domains.fewest_gpus >= each else view.topology.gpus < each


def reject_unknown_use(request: PlacementRequest, view: ClusterView, options: Options) -> Mask | None:
    """Reject nodes where unreported work takes the room that one member needs.

    No job event reports this work.
    """
    if view.unknown_use is None or not request.gpus_per_node or not view.unknown_use.any():
        return None
    taken = count_true_per_row(view.unknown_use)
    short: Mask = (count_room_on_gpus(request, view) < 1) & (view.free_gpus + taken >= request.gpus_per_node)
    return short


def busy(request: PlacementRequest, view: ClusterView, options: Options) -> Mask:
    """Reject nodes with too few free GPUs, or too small free parts of GPUs, for one member."""
    return count_room_on_gpus(request, view) < 1


STATES = {
    "drained": NodeState.DRAINED,
    "lost": NodeState.LOST,
    "maintenance": NodeState.MAINTENANCE,
    "reserved": NodeState.RESERVED,
    "withheld": NodeState.WITHHELD,
}
FILTERS: tuple[tuple[str, Filter], ...] = (
    ("unknown_topology", reject_unknown_topology),
    ("cluster", reject_other_clusters),
    ("pool", reject_other_pools),
    ("avoided", reject_avoided_nodes),
    ("reservation", _make_closed_filter("reservation")),
    ("maintenance_window", _make_closed_filter("maintenance_window")),
    ("model_quota", _make_closed_filter("model_quota")),
    ("spare", _make_closed_filter("spare")),
    *((reason, _make_state_filter(state)) for reason, state in STATES.items()),
    ("stale", reject_stale),
    ("unheard", reject_unheard),
    ("gpu_model", reject_other_gpu_models),
    ("gpu_memory", reject_small_gpu_memory),
    ("risk", _reject_risky_if_any),
    ("cpus", reject_few_cpus),
    ("host_memory", reject_small_host_memory),
    ("gpus_per_node", reject_few_gpus),
    ("unknown_use", reject_unknown_use),
)
