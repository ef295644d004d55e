"""Requests that list the nodes which their queue may not use now.

A node is closed by a reservation or a maintenance window, because it is a spare node, or because
the queue has used up its quota of the node's GPU model. `fleetcast.placement.plan.turns` makes such a request from each
request that it allows. The filters reject these nodes, each with its reason, and the sentence of a
refusal names the windows.
"""

from datetime import UTC, datetime
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Topology
from fleetcast.placement.queues.tree import Window

ClosedReason = Literal["reservation", "maintenance_window", "model_quota", "spare"]
_FIELDS = PlacementRequest.__struct_fields__


class ClosedNodes(msgspec.Struct, frozen=True, cache_hash=True):
    """Nodes that are closed to a request for one reason.

    words: the text that follows the number of nodes in a sentence.
    """

    reason: ClosedReason
    nodes: tuple[str, ...]
    words: str


class LimitedRequest(PlacementRequest, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True):
    """A request with a list of nodes that it may not use.

    It never leaves the placer. The ledger stores the original request.
    """

    closed: tuple[ClosedNodes, ...] = ()


def close_nodes(request: PlacementRequest, closed: tuple[ClosedNodes, ...]) -> PlacementRequest:
    """Return the request with these nodes closed to it, and no others."""
    if closed == (request.closed if isinstance(request, LimitedRequest) else ()):
        return request
    return LimitedRequest(**{name: getattr(request, name) for name in _FIELDS}, closed=closed)


def filter_closed_nodes(request: PlacementRequest, reason: str) -> list[ClosedNodes]:
    """Return the nodes that are closed to a request for one reason."""
    return [one for one in request.closed if one.reason == reason] if isinstance(request, LimitedRequest) else []


def mask_named_nodes(nodes: tuple[str, ...], row: dict[str, int], size: int) -> NDArray[np.bool_]:
    """Return (n,) whether each node is among the named ones. row: node name → row. size: n."""
    mask = np.zeros(size, bool)
    mask[[row[name] for name in nodes if name in row]] = True
    return mask


def mask_window_nodes(window: Window, topology: Topology) -> NDArray[np.bool_]:
    """Return (n,) whether each node is in the window."""
    named = set(window.nodes)
    mask = np.array([name in named for name in topology.names], bool)
    for level, name in window.domains:
        names = topology.domain_names[level]
        if name in names:
            mask |= topology.domain[level] == names.index(name)
    return mask


def choose_window_reason(window: Window) -> ClosedReason:
    """Return the reason for which a window closes its nodes."""
    return "maintenance_window" if window.queue is None else "reservation"


def describe_closing_window(window: Window) -> str:
    """Describe in words for whom a window keeps its nodes, and until when.

    >>> describe_closing_window(Window("mlperf", "production", ("n1",), (), 0, 1_796_284_800_000))
    "held by reservation 'mlperf' for queue 'production' until 2026-12-03 08:00 UTC"
    """
    end = f"until {format_date(window.to_ms)} UTC"
    if window.queue is None:
        return f"held free by maintenance {window.name!r} {end}"
    return f"held by reservation {window.name!r} for queue {window.queue!r} {end}"


def format_date(time_ms: int) -> str:
    """Format a time as date and time in UTC, to the minute."""
    return f"{datetime.fromtimestamp(time_ms / 1000, UTC):%Y-%m-%d %H:%M}"
