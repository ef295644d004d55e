"""Node faults in a play: which nodes are out of service when, and which jobs that stops."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fleetcast.fleet.nodes import NodeState
from fleetcast.placement.machines.view import ClusterView

DRAIN = "drain"  # a kind that lets running jobs end


class NodeFault(NamedTuple):
    """A time in which a node is out of service. node: its row. kind: `drain` lets running jobs end, others do not."""

    node: int
    start_s: float
    end_s: float
    kind: str


@dataclass(slots=True)
class PlayedFaults:
    """The faults of a play, in order of their start. active: the faults at the time of the last step."""

    faults: Sequence[NodeFault]
    active: tuple[NodeFault, ...] = ()
    _next: int = field(default=0)

    def advance(self, now_s: float) -> bool:
        """Go on to `now_s`. Returns whether a fault has begun or ended since the last step."""
        begun = self._next
        while self._next < len(self.faults) and self.faults[self._next].start_s <= now_s:
            self._next += 1
        active = tuple(one for one in (*self.active, *self.faults[begun : self._next]) if one.end_s > now_s)
        changed, self.active = active != self.active, active
        return changed

    def list_stopped_nodes(self) -> set[int]:
        """Return the rows of the nodes whose faults stop running jobs."""
        return {one.node for one in self.active if one.kind != DRAIN}

    def mark_nodes(self, view: ClusterView) -> ClusterView:
        """Return the view with each node out of service that has a fault, and all others in service."""
        state = np.full(len(view.state), NodeState.IN_SERVICE, np.int8)
        for one in self.active:
            state[one.node] = NodeState.DRAINED if one.kind == DRAIN else NodeState.LOST
        return replace(view, state=state)
