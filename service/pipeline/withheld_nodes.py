"""The nodes that a maintenance window or a reservation withholds now.

Schedulers and the queue file name them. A node that is drained, lost or withheld for another reason is
out of service, and does not count here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeRecord, NodeState
from fleetcast.fleet.topology import Topology
from fleetcast.placement.queues.closed import describe_closing_window, mask_window_nodes
from fleetcast.placement.queues.tree import Window
from fleetcast.service.board.gpu_use import Occupant

BY_STATE = {NodeState.MAINTENANCE: Occupant.WINDOW, NodeState.RESERVED: Occupant.RESERVATION}


@dataclass(frozen=True, slots=True)
class WithheldNodes:
    """The nodes that a maintenance window or a reservation withholds.

    use: (n,) int8 WINDOW, RESERVATION or NOTHING for each node. words: node → why it gets no other work.
    `words` also has the reasons of nodes that are out of service.
    """

    use: NDArray[np.int8]
    words: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_records(
        cls,
        topology: Topology,
        state: NDArray[np.int8],
        records: Mapping[str, NodeRecord],
        windows: Sequence[Window],
        now_ms: int,
    ) -> "WithheldNodes":
        """Combine the schedulers' facts, (n,) `state` and `records`, with the windows that are open now.

        If a node has both, maintenance wins over the reservation.
        """
        use = np.full(len(topology), Occupant.NOTHING, np.int8)
        words = {name: [record.withheld_reason] for name, record in records.items() if record.withheld}
        is_in_service = np.isin(state, [NodeState.IN_SERVICE, *BY_STATE])
        for node_state, kind in BY_STATE.items():
            use[state == node_state] = kind
        for window in windows:
            if not window.from_ms <= now_ms < window.to_ms:
                continue
            nodes = mask_window_nodes(window, topology) & is_in_service
            if window.queue is None:
                use[nodes] = Occupant.WINDOW
            else:
                use[nodes & (use == Occupant.NOTHING)] = Occupant.RESERVATION
            for row in np.flatnonzero(nodes).tolist():
                words.setdefault(topology.names[row], []).append(describe_closing_window(window))
        return cls(use, {name: "; ".join(filter(None, said)) for name, said in words.items()})
