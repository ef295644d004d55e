"""The engine and `POST /v1/risk/gang` tell the same risk of the same nodes."""

from dataclasses import replace

import numpy as np
import pytest

from fleet.requests import PlacementRequest
from fleet.topology import Level, Topology
from models.gang_risk import gang_risk
from models.scores import RISK_HORIZONS_S
from placement.filters import screen
from placement.options import Options
from placement.scorers import NodeScores
from placement.view import NOT_GIVEN


def scores_of(view):
    request, options = PlacementRequest(request_id="r", gpus_per_node=8), Options(max_risk=1.0)
    return NodeScores(request, view, options, screen(request, view, options))


def powered(view, *domains):
    """The view with power domains."""
    nodes = [replace(node, power_domain=name) for node, name in zip(view.topology.nodes, domains, strict=True)]
    return replace(view, topology=Topology.build(nodes, generation=4), inventory=NOT_GIVEN)


def test_the_risk_of_a_gang_is_that_of_the_forecast(make_view) -> None:
    p = np.array([0.001, 0.2, 0.001, 0.001, 0.001])
    view = make_view({"r1": [8, 8, 8], "r2": [8, 8]}, p_fail=p)
    gang = np.array([0, 1, 3])
    found = scores_of(view).of_gangs(gang, np.ones(3, np.int64), np.zeros(3, np.int64), Level.BLOCK, 1)
    within = np.broadcast_to(p[None, None, :], (3, len(RISK_HORIZONS_S), 5))
    domains = [("rack", ["r1", "r1", "r2"]), ("rail", ["rg1", "rg1", "rg1"])]
    told = gang_risk(within[:, :, gang], domains, 3600, np.full((3, len(RISK_HORIZONS_S)), 0.001))
    assert found["risk"][0] == pytest.approx(1 - told.p_interrupted)


def test_members_of_one_power_domain_are_worth_less_than_of_two(make_view) -> None:
    p = np.array([0.2, 0.001, 0.2, 0.001])
    view = make_view({"r1": [8], "r2": [8], "r3": [8], "r4": [8]}, p_fail=p)
    scores = scores_of(powered(view, "a", "a", "b", ""))
    at, domain = np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1])
    shared = scores.shared_risk(at, domain, 2) - scores_of(view).shared_risk(at, domain, 2)
    assert shared[0] > 0.01
    assert shared[1] == 0
