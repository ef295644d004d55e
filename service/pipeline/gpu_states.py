"""The state of each GPU, computed in one place for both `/v1/fleet` and `/metrics`."""

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.service.board.gpu_use import Occupant
from fleetcast.service.pipeline.tick import Tick


def compute_gpu_states(tick: Tick) -> dict[str, NDArray[np.bool_]]:
    """Return state → mask of the GPUs in this state: (n, g). Every GPU that exists is in exactly one state.

    A GPU that has vanished from its exporter's page is `unusable`, unless a job holds it, it is promised to a
    request, or it is busy.
    """
    use, usable = tick.gpu_use, tick.usable
    nothing = tick.gpu_exists & ~np.isin(use, (Occupant.JOB, Occupant.UNKNOWN, Occupant.PROMISE))
    free = nothing & usable & (use == Occupant.NOTHING)
    serving, in_service = tick.is_placeable[:, None], (tick.node_state == NodeState.IN_SERVICE)[:, None]
    return {
        "running": np.isin(use, (Occupant.JOB, Occupant.UNKNOWN)),
        "promised": use == Occupant.PROMISE,
        "free": free & serving,
        "unheard": free & in_service & ~serving,
        "unusable": nothing & ~usable,
        "window": nothing & usable & (use == Occupant.WINDOW),
        "reservation": nothing & usable & (use == Occupant.RESERVATION),
        "out_of_service": free & ~in_service,
    }
