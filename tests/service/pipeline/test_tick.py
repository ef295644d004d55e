"""What a tick says of nodes and GPUs: each thing once, and one answer for every reader."""

import numpy as np
import pytest

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeRecord, NodeState
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.models.risk.scores import RISK_HORIZONS_S, RISK_KINDS, RiskScores
from fleetcast.service.pipeline.documents import STATES, compute_state_codes
from tests.service.ticks import GPUS, tick_of

NOW_MS = 1_789_000_000_000
UP, AWAY, NEVER = 1.0, 0.0, np.nan


@pytest.mark.parametrize(
    ("said", "flagged", "up", "state"),
    [
        (NodeState.IN_SERVICE, False, UP, "ok"),
        (NodeState.IN_SERVICE, False, AWAY, "stale"),
        (NodeState.IN_SERVICE, False, NEVER, "unknown"),
        (NodeState.IN_SERVICE, True, UP, "degraded"),
        (NodeState.IN_SERVICE, True, AWAY, "degraded"),
        (NodeState.IN_SERVICE, True, NEVER, "degraded"),
        (NodeState.DRAINED, True, UP, "drained"),
        (NodeState.DRAINED, False, AWAY, "drained"),
        (NodeState.LOST, True, UP, "lost"),
        (NodeState.LOST, False, NEVER, "lost"),
        (NodeState.MAINTENANCE, False, UP, "withheld"),
        (NodeState.RESERVED, True, UP, "withheld"),
        (NodeState.WITHHELD, False, NEVER, "withheld"),
    ],
)
def test_events_come_before_flags_and_these_before_silence(
    said: NodeState, flagged: bool, up: float, state: str
) -> None:
    (code,) = compute_state_codes(np.array([said], np.int8), np.array([flagged]), np.array([up])).tolist()
    assert STATES[code] == state


def test_a_node_that_is_lost_and_drained_is_lost() -> None:
    assert NodeRecord("n1", drained=True, lost=True).state is NodeState.LOST


def test_states_and_gpus_are_worked_out_once_for_all_readers() -> None:
    n = 3
    values = np.full((len(RISK_KINDS), len(RISK_HORIZONS_S), n), 0.01)
    running = JobAttempt("a", 1, started_ms=NOW_MS, ranks=(RankPlacement(0, "n0", (0, 3)),))
    tick = tick_of(
        NOW_MS,
        Topology.build([NodeSpec("n0", 4), NodeSpec("n1", 8), NodeSpec("n2", 8)]),
        ScoredFleet(RiskScores(values, {}, {}, np.zeros(n, bool), "rules"), {}),
        [running],
        nodes={"n1": NodeRecord("n1", drained=True), "elsewhere": NodeRecord("elsewhere", lost=True)},
    )
    assert tick.node_state.tolist() == [NodeState.IN_SERVICE, NodeState.DRAINED, NodeState.IN_SERVICE]
    assert tick.states == ["unknown", "drained", "unknown"]
    assert tick.held.nonzero()[0].tolist() == [0, 0]
    assert tick.gpu_exists.sum(axis=1).tolist() == [4, GPUS, GPUS]
    assert tick.usable.tolist() == tick.gpu_exists.tolist()  # none has vanished from a page
    for name in ("rows", "node_state", "flagged", "state_codes", "states", "occupancy", "held", "gpu_exists", "usable"):
        assert getattr(tick, name) is getattr(tick, name), name
