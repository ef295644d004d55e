"""The sentences of decisions: what was placed or refused, and why."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.machines.domains import sum_room_by_domain
from fleetcast.placement.machines.filters import Screen
from fleetcast.placement.machines.fit import Fit
from fleetcast.placement.machines.growth import GangSize
from fleetcast.placement.machines.options import Options, compute_worst_risk, find_highest_risk
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.view import Advice, ClusterView, Hearing
from fleetcast.placement.queues.closed import filter_closed_nodes, mask_named_nodes

NAMED = 2
LEVEL_WORDS = {
    Level.NODE: "node",
    Level.NVLINK_DOMAIN: "NVLink domain",
    Level.RACK: "rack",
    Level.RAIL_GROUP: "rail group",
    Level.BLOCK: "block",
    Level.CLUSTER: "cluster",
}
REASON_WORDS = {
    "unknown_topology": "with no known place in the topology",
    "cluster": "of another cluster",
    "pool": "of another pool",
    "avoided": "on the request's own list to avoid",
    "reservation": "reserved for other queues",
    "maintenance_window": "in maintenance",
    "model_quota": "of models of which its queue may have no more now",
    "spare": "held ready for gangs that lose nodes",
    "drained": "drained",
    "lost": "lost",
    "maintenance": "in maintenance, as their scheduler says",
    "reserved": "reserved by their scheduler",
    "withheld": "withheld by their scheduler",
    "stale": "whose telemetry is old",
    "unheard": "of which no exporter has reported a GPU",
    "gpu_model": "with another GPU model",
    "gpu_memory": "with too little GPU memory",
    "risk": "too risky",
    "cpus": "with too few free CPUs",
    "host_memory": "with too little free host memory",
    "gpus_per_node": "too small",
    "unknown_use": "in use by work that no job event names",
    "busy": "busy",
}


ADVICE_WORDS = {Advice.AVOID: "avoided", Advice.DRAIN: "drained"}


def format_count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> format_count(1, "GPU"), format_count(1980, "GPU")
    ('1 GPU', '1,980 GPUs')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def describe_gang(request: PlacementRequest, members: int) -> str:
    """Describe a gang by its number of members and the GPUs of each.

    >>> describe_gang(PlacementRequest(request_id="a", gang=4, gpus_per_node=8), 4)
    '4 x 8 GPUs'
    >>> describe_gang(PlacementRequest(request_id="a", gpu_share=460), 2)
    '2 x 0.46 GPU'
    """
    return describe_member(request) if members == 1 else f"{members:,} x {describe_member(request)}"


def describe_member(request: PlacementRequest) -> str:
    """Describe the resources of one member: `8 GPUs`, `0.46 GPU` or `16 CPUs and 64 GiB of memory`."""
    if request.milli < WHOLE:
        return f"{request.milli / WHOLE:g} GPU"
    if request.gpus_per_node:
        return format_count(request.gpus_per_node, "GPU")
    memory = request.host_memory_gib
    wanted = (format_count(request.cpus, "CPU") if request.cpus else "", f"{memory:,g} GiB of memory" if memory else "")
    return " and ".join(filter(None, wanted))


def describe_fitting_room(request: PlacementRequest, members: int) -> str:
    """Describe the room for this number of members: `16 free GPUs fit`, `room for 3 x 0.46 GPU`."""
    if request.milli < WHOLE or not request.gpus_per_node:
        return f"room for {describe_gang(request, members)}" if members else f"no room for {describe_member(request)}"
    gpus = members * request.gpus_per_node
    return f"{format_count(gpus, 'free GPU')} {'fits' if gpus == 1 else 'fit'}"


def describe_placement(
    request: PlacementRequest,
    view: ClusterView,
    options: Options,
    screened: Screen,
    fit: Fit,
    level: Level | None,
    growth: GangSize,
) -> str:
    members = int(fit.takes.sum())
    sentence = f"placed {describe_gang(request, members)} {_describe_place(view, fit.rows, level)}"
    if members < request.members.desired:
        sentence += f" ({members:,} of {request.members.desired:,} members wanted{_explain_smaller_gang(growth)})"
    wide = level is None or (request.preferred is not None and _is_wider(level, request.preferred))
    if request.preferred is not None and wide:
        sentence += f", no single {LEVEL_WORDS[request.preferred]} had room"
    avoided = find_avoided_rows(request, view, options, screened, fit.rows)
    if avoided:
        sentence += f"; avoided {_describe_risky_nodes(view, options, avoided)}"
    return sentence + _describe_unknown_use(view, screened) + _describe_unconfirmed(request, view, fit.rows)


def _describe_unconfirmed(request: PlacementRequest, view: ClusterView, rows: NDArray[np.int64]) -> str:
    """Say that only a scheduler or an event, but no telemetry, reports the chosen GPUs as free.

    Returns "" if telemetry confirms it.
    """
    if view.hearing is None or not request.gpus_per_node or (view.hearing[rows] != Hearing.UNCONFIRMED).all():
        return ""
    return "; no telemetry confirmed that these GPUs are free"


def _describe_unknown_use(view: ClusterView, screened: Screen) -> str:
    """Name the nodes that were rejected because of work that no job event reports, the fullest first.

    Returns "" if there are none.
    """
    mask = screened.by_reason.get("unknown_use")
    if mask is None or view.unknown_use is None:
        return ""
    taken = np.where(mask, np.count_nonzero(view.unknown_use, axis=1), 0)
    rows = np.argsort(-taken, kind="stable")[: min(NAMED, int(mask.sum()))].tolist()
    named = [f"{format_count(int(taken[row]), 'GPU')} of node {view.topology.nodes[row].name}" for row in rows]
    left = int(mask.sum()) - len(rows)
    if left:
        named.append(f"{int(taken.sum() - taken[rows].sum()):,} on {left:,} more")
    total = int(taken.sum())
    return f"; {' and '.join(named)} {'is' if total == 1 else 'are'} in use by work that no job event names"


def _explain_smaller_gang(growth: GangSize) -> str:
    if not growth.advised and not growth.risky:
        return ""
    reasons = [f"to be {ADVICE_WORDS[advice]}" for advice in sorted(growth.advised, reverse=True)]
    if growth.risky:
        reasons.append("too risky for what they add")
    return f": the other nodes with room are {' or '.join(reasons)}"


def _is_wider(level: Level, than: Level) -> bool:
    order = list(Level)
    return order.index(level) > order.index(than)


def _describe_place(view: ClusterView, rows: NDArray[np.int64], level: Level | None) -> str:
    names = view.topology.nodes
    if len(rows) == 1:
        return f"on {names[int(rows[0])].name}"
    if level is None:
        return f"on {format_count(len(rows), 'node')}"
    name = view.topology.domain_names[level][int(view.topology.domain[level][rows[0]])]
    return f"in {LEVEL_WORDS[level]} {name}"


def find_avoided_rows(
    request: PlacementRequest, view: ClusterView, options: Options, screened: Screen, chosen: NDArray[np.int64]
) -> list[int]:
    """Return the rows of the nodes that were too risky, or notably riskier than all chosen nodes.

    Nodes with room for a member come before the others. In both groups the riskiest come first.
    """
    if "risk" not in screened.by_reason and find_highest_risk(view, options) <= options.notable_risk:
        return []
    p = compute_worst_risk(view, options)
    mask = screened.by_reason.get("risk", np.zeros(len(view), bool)).copy()
    notable = screened.passes & (p > max(options.notable_risk, float(p[chosen].max(initial=0.0))))
    notable[chosen] = False
    mask |= notable
    rows = np.flatnonzero(mask)
    roomy = screened.free_gpus[rows] >= request.gpus_per_node
    order: list[int] = rows[np.lexsort((-p[rows], ~roomy))].tolist()
    return order


def _describe_risky_nodes(view: ClusterView, options: Options, rows: Sequence[int]) -> str:
    p = compute_worst_risk(view, options)
    named = [
        f"{view.topology.nodes[row].name}: {view.reason.get(row, f'risk {p[row]:.2g}').rstrip('.')}"
        for row in rows[:NAMED]
    ]
    more = len(rows) - len(named)
    return "; ".join(named) + (f"; and {more:,} more" if more > 0 else "")


def describe_needs(request: PlacementRequest) -> str:
    """Describe a request in a phrase: `64 GPUs inside one rack`."""
    total, members = request.members.min * request.gpus_per_node, request.members.min
    text = format_count(total, "GPU") if total and request.milli == WHOLE else describe_gang(request, members)
    if request.gpus_per_node > 1 and members > 1:
        text += f" ({describe_gang(request, members)})"
    if models := request.gpu_models or ((request.gpu_model,) if request.gpu_model else ()):
        text = f"{text} of model {' or '.join(models)}"
    if request.pool:
        text += f" in pool {request.pool}"
    if request.required is not None:
        text += f" inside one {LEVEL_WORDS[request.required]}"
    elif request.spread and request.members.min > 1:
        text += f" on {request.members.min:,} different nodes"
    return text


def describe_refusal(request: PlacementRequest, view: ClusterView, screened: Screen) -> str:
    return f"refused: {explain_shortage(request, view, screened)}{_describe_unknown_use(view, screened)}"


def explain_shortage(request: PlacementRequest, view: ClusterView, screened: Screen) -> str:
    """Explain why a gang does not fit: its needs, the room there is, and why nodes are rejected."""
    text = f"needs {describe_needs(request)}"
    rejected = screened.rejected_counts
    if not len(view):
        return f"{text}; no node is known yet"
    rows = np.flatnonzero(screened.passes)
    members = int(screened.room.sum())
    if rejected.get("gpus_per_node") and int(view.topology.gpus.max()) < request.gpus_per_node:
        return f"{text}, {request.gpus_per_node} of them on one node; the largest node has {view.topology.gpus.max()}"
    level = request.required
    if level is not None and members >= request.members.min:
        return f"{text}; {_describe_scattered_room(request, view, screened, level, rows)}"
    text += f"; {describe_fitting_room(request, members)}"
    if len(rows):
        text += f", on {format_count(len(rows), 'node')}"
    out = [
        part
        for name, count in rejected.items()
        for part in _describe_rejected_nodes(request, view, screened, name, count)
    ]
    return f"{text}; of {format_count(len(view), 'node')}: {', '.join(out)}" if out else text


def _describe_rejected_nodes(
    request: PlacementRequest, view: ClusterView, screened: Screen, reason: str, count: int
) -> list[str]:
    """Describe the nodes that are rejected for one reason, in phrases.

    `4 held by reservation 'mlperf' for queue 'production' until …`. A node in two windows counts for the
    first.
    """
    left, parts = screened.by_reason[reason].copy(), []
    for group in filter_closed_nodes(request, reason):
        mine = left & mask_named_nodes(group.nodes, view.inventory.row, len(view))
        left &= ~mine
        if mine.any():
            parts.append(f"{int(mine.sum())} {group.words}")
    return parts or [f"{count} {REASON_WORDS.get(reason, reason)}"]


def _describe_scattered_room(
    request: PlacementRequest,
    view: ClusterView,
    screened: Screen,
    level: Level,
    rows: NDArray[np.int64],
) -> str:
    room = sum_room_by_domain(level, view.topology, rows, screened.room[rows])
    best = int(room.members.argmax())
    names = view.topology.domain_names
    name = view.topology.nodes[int(rows[best])].name if level is Level.NODE else names[level][best]
    word = LEVEL_WORDS[level]
    domains = int((room.members > 0).sum())
    total = int(screened.room.sum())
    if request.milli < WHOLE or not request.gpus_per_node:
        return (
            f"the best {word} {name} has {describe_fitting_room(request, room.most_members)}; "
            f"{describe_fitting_room(request, total)} is scattered over {domains:,} {word}s"
        )
    most, free = room.most_members * request.gpus_per_node, total * request.gpus_per_node
    return f"the best {word} {name} has {most:,} free; {free:,} free GPUs are scattered over {domains:,} {word}s"
