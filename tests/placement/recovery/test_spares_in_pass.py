"""Spare nodes: which they are, and which jobs may use them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.engine import decide
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import SparesPolicy
from fleetcast.placement.recovery.spares import choose_spare_nodes
from tests.placement.conftest import build

FILE = "[queue.a]\n[queue.b]\npreemptible = 'all'\n"


def limit(view: ClusterView, table: str, **fields: object) -> PlacementRequest:
    """Return a request for two whole nodes as the pass limits it."""
    turns = TreeTurns(read_queues(FILE + table), {}, view, RunTimeQuantiles.from_durations({}), 0)
    request = PlacementRequest(request_id="r", gang=2, gpus_per_node=8, **({"queue": "a"} | fields))  # type: ignore[arg-type]
    allowed = turns.limit_to_quota(request)
    assert isinstance(allowed, PlacementRequest)
    return allowed


@pytest.mark.parametrize(
    ("fields", "table", "outcome"),
    [
        ({}, "", "placed"),
        ({}, "[spares]\nlevel = 'rack'\ncount = 1", "refused"),
        ({"preemptible": True}, "[spares]\nlevel = 'rack'\ncount = 1", "placed"),
        ({"queue": "b"}, "[spares]\nlevel = 'rack'\ncount = 1", "placed"),
        ({"queue": "b", "preemptible": False}, "[spares]\nlevel = 'rack'\ncount = 1", "refused"),
        ({}, "[spares]\nlevel = 'rack'\ncount = 0", "placed"),
    ],
)
def test_only_jobs_that_can_leave_use_the_last_free_nodes(fields: dict[str, object], table: str, outcome: str) -> None:
    view = build({"r1": [0, 8, 8]})
    decision = decide(limit(view, table, **fields), view)
    assert decision.outcome == outcome
    assert decision.rejected.get("spare", 0) == (outcome == "refused")


def test_the_free_nodes_of_least_risk_are_the_spares() -> None:
    view = replace(build({"r1": [8, 8, 0, 4], "r2": [8, 8]}), p_fail=np.array([0.2, 0.1, 0.0, 0.0, 0.1, 0.3]))
    assert choose_spare_nodes(view, SparesPolicy(Level.RACK, count=1)).tolist() == [0, 1, 0, 0, 1, 0]


@given(st.floats(0.001, 0.9), st.floats(0.001, 0.9), st.floats(60, 1e6), st.floats(60, 1e6))
def test_less_risk_accepted_or_longer_repairs_hold_no_fewer_nodes(a: float, b: float, s: float, t: float) -> None:
    view = replace(build({"r1": [8] * 6}), p_fail=np.full(6, 0.002))

    def count(epsilon: float, repair_s: float) -> int:
        return int(choose_spare_nodes(view, SparesPolicy(Level.RACK, epsilon, None, repair_s)).sum())

    assert count(min(a, b), s) >= count(max(a, b), s)
    assert count(a, max(s, t)) >= count(a, min(s, t))
