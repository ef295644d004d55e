"""Nodes that are free only for some requests: the windows of the file of queues, and the spare nodes.

They are rows of the profile of a pass (`fleetcast.placement.plan.profile`). Each says which requests may use its nodes,
and until when other requests may not.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.closed import (
    ClosedReason,
    choose_window_reason,
    describe_closing_window,
    mask_window_nodes,
)
from fleetcast.placement.queues.tree import QueueTree, Window, describe_window, is_at_or_below
from fleetcast.placement.recovery.spares import choose_spare_nodes


@dataclass(frozen=True, slots=True, eq=False)
class ReservedNodes:
    """Nodes that are free only for some requests, from `start_ms` until `end_ms`.

    nodes: (n,) bool. window: None for spare nodes, which are reserved at all times.
    """

    nodes: NDArray[np.bool_]
    window: Window | None = None

    @property
    def start_ms(self) -> float:
        return -math.inf if self.window is None else self.window.from_ms

    @property
    def end_ms(self) -> float:
        return math.inf if self.window is None else self.window.to_ms

    @property
    def name(self) -> str:
        return "spare nodes" if self.window is None else describe_window(self.window)

    @property
    def reason(self) -> ClosedReason:
        """The reason for which the nodes are closed to a request."""
        return "spare" if self.window is None else choose_window_reason(self.window)

    @property
    def words(self) -> str:
        """The text that follows the number of nodes in a sentence."""
        return "held ready for gangs that lose nodes" if self.window is None else describe_closing_window(self.window)

    def is_free_for(self, leaf: str, can_leave: bool) -> bool:
        """Return whether a request of a leaf may use the nodes. can_leave: whether its job may be stopped any time."""
        if self.window is None:
            return can_leave
        return self.window.queue is not None and is_at_or_below(leaf, self.window.queue)

    def overlaps(self, start_ms: float, end_ms: float) -> bool:
        """Return whether the nodes are reserved at some time between `start_ms` and `end_ms`."""
        return self.start_ms < end_ms and start_ms < self.end_ms


def list_reserved_nodes(tree: QueueTree, view: ClusterView, now_ms: int) -> tuple[ReservedNodes, ...]:
    """Return the windows that have not ended, in the order of the file, and then the spare nodes."""
    windows: Iterable[Window] = (window for window in tree.windows if window.to_ms > now_ms)
    found = [ReservedNodes(mask_window_nodes(window, view.topology), window) for window in windows]
    if tree.spares is not None:
        found.append(ReservedNodes(choose_spare_nodes(view, tree.spares)))
    return tuple(found)
