"""The chances of nodes: the probability that nothing interrupts a job on a node, and that nothing slows it down."""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.shared_domains import compute_carried_heat, interpolate_hazard
from fleetcast.placement.machines.options import Options, fill_unknown_risk
from fleetcast.placement.machines.view import ClusterView

CHANCE_WEIGHTS = {"risk": 3.0, "slow": 2.0}  # the weight of each chance in the score of a gang
HIGHEST_RISK = 1 - 1e-9
SHORTEST_S, LONGEST_S = 600.0, 86_400.0
MOST_SPANS = 16  # whose weighted chances are remembered

Floats = NDArray[np.float64]  # an alias: an inner function would make the type at each call
Rows = NDArray[np.int64]


def estimate_run_s(request: PlacementRequest, view: ClusterView) -> float:
    """Return the seconds for which the risk of nodes matters to a request.

    This is the usual run time, but at most the job's limit and at most a day. If the run time is unknown,
    the risk horizon is used.
    """
    if view.risk is None:
        return float(view.risk_horizon_s)
    gpus = request.members.desired * request.gpus_per_node
    usual = view.usual_run_s.get(gpus, view.usual_run_s.get(0, np.inf))
    expected = min(usual, np.inf if request.limit_s is None else request.limit_s)
    if not np.isfinite(expected):
        return float(view.risk_horizon_s)
    return float(np.clip(expected, SHORTEST_S, LONGEST_S))


def interpolate_risks(view: ClusterView, duration_s: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (n,) probabilities of failing and (n,) of slowing down within `duration_s`. NaN if unknown."""
    by_time = view.risk
    if by_time is None:
        return view.p_fail, view.p_slow
    fails, slows = (
        np.where(
            np.isfinite(p).all(axis=0), interpolate_hazard(np.nan_to_num(p), by_time.horizons_s, duration_s), np.nan
        )
        for p in (by_time.p_fail, by_time.p_slow)
    )
    return 1 - np.exp(-fails), 1 - np.exp(-(slows + compute_carried_heat(by_time.gpu_temp_c, duration_s)))


class NodeChances:
    """The chances of all n nodes that nothing interrupts a job and nothing slows it down.

    They depend on the risk alone, so many decisions share them. logs: (2, n) log probabilities that a node does not
    fail, and that it does not slow down.
    """

    def __init__(self, logs: Floats) -> None:
        self.logs = logs
        self._by_span: dict[int, Floats] = {}

    @cached_property
    def of_one_node(self) -> Floats:
        """(2, n) the chances of a gang on one node."""
        return np.exp(self.logs)

    @cached_property
    def weighted_logs(self) -> Floats:
        """(n,) the weighted sum of both logarithms of each node."""
        return np.asarray(CHANCE_WEIGHTS["risk"] * self.logs[0] + CHANCE_WEIGHTS["slow"] * self.logs[1])

    def weigh_for_span(self, span: int) -> Floats:
        """Return (n,) the weighted sum of the chances of gangs of `span` nodes like each node."""
        found = self._by_span.get(span)
        if found is None:
            if len(self._by_span) >= MOST_SPANS:
                self._by_span.clear()
            risk, slow = self.of_one_node if span == 1 else np.exp(span * self.logs)
            found = self._by_span[span] = CHANCE_WEIGHTS["risk"] * risk + CHANCE_WEIGHTS["slow"] * slow
        return found


def compute_node_chances(view: ClusterView, options: Options, duration_s: float) -> NodeChances:
    """Return the chances of all nodes within `duration_s`."""

    def compute() -> NodeChances:
        known = [fill_unknown_risk(p, options.prior_risk) for p in interpolate_risks(view, duration_s)]
        return NodeChances(np.array([np.log1p(-np.clip(p, 0, HIGHEST_RISK)) for p in known]))

    ahead = () if view.risk is None else (view.risk.p_fail, view.risk.p_slow, view.risk.gpu_temp_c)
    parts = (view.p_fail, view.p_slow, view.risk, *ahead)
    found: NodeChances = view.memo.get_or_compute(
        ("chances", duration_s, options.prior_risk, len(parts)), parts, compute
    )
    return found
