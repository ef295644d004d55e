"""The engine and `POST /v1/risk/gang` tell the same risk of the same nodes."""

from dataclasses import replace

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Level, Topology
from fleetcast.models.risk.gang_risk import compute_gang_risk
from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.placement.machines.chances import estimate_run_s
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.scorers import NodeScores
from fleetcast.placement.machines.view import NOT_GIVEN, RiskByTime


def scores_of(view, **asked):
    request, options = PlacementRequest(request_id="r", gpus_per_node=8, **asked), Options(max_risk=1.0)
    return NodeScores(request, view, options, screen(request, view, options))


def powered(view, *domains):
    """The view with power domains."""
    nodes = [replace(node, power_domain=name) for node, name in zip(view.topology.nodes, domains, strict=True)]
    return replace(view, topology=Topology.build(nodes, generation=4), inventory=NOT_GIVEN)


def test_the_risk_of_a_gang_is_that_of_the_forecast(make_view) -> None:
    p = np.array([0.001, 0.2, 0.001, 0.001, 0.001])
    view = make_view({"r1": [8, 8, 8], "r2": [8, 8]}, p_fail=p)
    gang = np.array([0, 1, 3])
    found = scores_of(view).score_gangs(gang, np.ones(3, np.int64), np.zeros(3, np.int64), Level.BLOCK, 1)
    within = np.broadcast_to(p[None, None, :], (3, len(RISK_HORIZONS_S), 5))
    domains = [("rack", ["r1", "r1", "r2"]), ("rail", ["rg1", "rg1", "rg1"])]
    told = compute_gang_risk(within[:, :, gang], domains, 3600, np.full((3, len(RISK_HORIZONS_S)), 0.001))
    assert found["risk"][0] == pytest.approx(1 - told.p_interrupted)


def test_members_of_one_power_domain_are_worth_less_than_of_two(make_view) -> None:
    p = np.array([0.2, 0.001, 0.2, 0.001])
    view = make_view({"r1": [8], "r2": [8], "r3": [8], "r4": [8]}, p_fail=p)
    scores = scores_of(powered(view, "a", "a", "b", ""))
    at, domain = np.array([0, 1, 2, 3]), np.array([0, 0, 1, 1])
    powered_risk, plain_risk = (
        found.compute_shared_risk(at, domain, np.array([2, 2]), None) for found in (scores, scores_of(view))
    )
    assert powered_risk[0] - plain_risk[0] > 0.01
    assert powered_risk[1] == plain_risk[1]


def over_time(view, p, heat=60.0):
    """The view with a hazard that stays what it is within the first hour."""
    hours = np.array(RISK_HORIZONS_S)[:, None] / 3600
    by_time = RiskByTime(RISK_HORIZONS_S, 1 - (1 - p) ** hours, np.full((4, len(p)), 1e-3), np.full(len(p), heat))
    return replace(view, risk=by_time, p_fail=p)


def test_the_risk_is_looked_at_for_as_long_as_the_job_runs(make_view) -> None:
    p = np.array([0.001, 0.02, 0.001, 0.001, 0.001])
    view = over_time(make_view({"r1": [8, 8, 8], "r2": [8, 8]}), p)
    gang, domains = np.array([0, 1, 3]), [("rack", ["r1", "r1", "r2"]), ("rail", ["rg1", "rg1", "rg1"])]
    within = np.broadcast_to(view.risk.p_fail[None], (3, len(RISK_HORIZONS_S), 5))
    prior = np.broadcast_to(view.risk.p_fail[:, 0], (3, len(RISK_HORIZONS_S)))
    for limit_s in (1800.0, 10 * 3600.0):
        scores = scores_of(view, limit_s=limit_s)
        found = scores.score_gangs(gang, np.ones(3, np.int64), np.zeros(3, np.int64), Level.BLOCK, 1)
        told = compute_gang_risk(within[:, :, gang], domains, limit_s, prior)
        assert found["risk"][0] == pytest.approx(1 - told.p_interrupted)


def test_jobs_run_as_long_as_such_jobs_did_and_never_beyond_their_limit(make_view) -> None:
    view = replace(over_time(make_view({"r1": [8]}), np.array([0.01])), usual_run_s={8: 7200.0, 0: 1000.0})
    asked = {gpus: PlacementRequest(request_id="r", gpus_per_node=gpus) for gpus in (8, 4)}
    limited = PlacementRequest(request_id="r", gpus_per_node=8, limit_s=3000.0)
    assert [estimate_run_s(request, view) for request in (asked[8], asked[4], limited)] == [7200, 1000, 3000]
    assert estimate_run_s(asked[8], replace(view, usual_run_s={})) == view.risk_horizon_s
    assert estimate_run_s(asked[8], replace(view, usual_run_s={0: 1e7})) == 86_400


def test_a_node_that_is_hot_from_the_job_before_is_worth_less(make_view) -> None:
    view = make_view({"r1": [8, 8]})
    cold, hot = (
        scores_of(over_time(view, np.full(2, 0.001), heat)).compute_node_parts(1)["slow"] for heat in (60.0, 88.0)
    )
    assert (hot < cold).all()
