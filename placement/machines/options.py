"""The operator's settings for placements, which hold for all requests."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.shapes import ShapeDemand
from fleetcast.placement.machines.view import ClusterView


@dataclass(frozen=True, slots=True)
class Options:
    """The operator's settings for placements.

    Plugins are pairs (name, function), in addition to the built-in ones.
    """

    max_risk: float = 0.5  # where a request names none
    prior_risk: float = 0.01  # in place of a missing score
    notable_risk: float = 0.1  # a node above it that is passed over is worth a word
    now_ms: int = 0
    intent_expires_s: float = 300.0
    demand: ShapeDemand | None = None  # of the newest requests; None: too few are known to pack for
    clusters: tuple[str, ...] = ()  # names of the whole fleet: a request that states one may use every node
    filters: tuple[tuple[str, "Filter"], ...] = ()  # the name becomes the reason of a rejection
    scorers: tuple[tuple[str, "Scorer"], ...] = ()  # the name becomes the key in `Decision.parts`


Floats = NDArray[np.float64]  # an alias: an inner function would make the type at each call

Filter = Callable[[PlacementRequest, ClusterView, Options], NDArray[np.bool_] | None]
"""(n,) True where the node is rejected; None when the request does not ask for it.

A filter may read all of a request but its ids and times (`fleetcast.placement.queues.asks.IDS_AND_TIMES`), since a pass
over the queue
remembers a refusal for all requests that differ in those alone. It rejects no fewer nodes when less is free.
"""

Scorer = Callable[[PlacementRequest, ClusterView, Options], NDArray[np.float64]]
"""(n,) in [0, 1], higher is better."""


def fill_unknown_risk(p: NDArray[np.float64], prior: float) -> NDArray[np.float64]:
    """Return the probabilities with the mean of the known ones in place of NaN.

    So an unknown node is neither the best nor the worst. If none is known, `prior` is used.

    >>> fill_unknown_risk(np.array([0.1, np.nan, 0.3]), 0.01).round(3).tolist()
    [0.1, 0.2, 0.3]
    """
    unknown = np.isnan(p)
    if not unknown.any():
        return p
    mean = prior if unknown.all() else float(p[~unknown].mean())
    return np.where(unknown, mean, p)


def compute_worst_risk(view: ClusterView, options: Options) -> NDArray[np.float64]:
    """Return (n,) the higher of each node's probabilities of failing and of slowing down.

    A node of unknown risk gets the prior. The mean of the known nodes is not used here, because a single risky
    node would raise the mean too far.
    """

    def compute() -> Floats:
        known = np.fmax(view.p_fail, view.p_slow)
        return np.where(np.isnan(known), options.prior_risk, known)

    found: NDArray[np.float64] = view.memo.get_or_compute(
        ("worst", options.prior_risk), (view.p_fail, view.p_slow), compute
    )
    return found


def find_highest_risk(view: ClusterView, options: Options) -> float:
    """Return the highest `compute_worst_risk` of all nodes, 0 if there are none."""

    def compute() -> float:
        return float(compute_worst_risk(view, options).max(initial=0.0))

    found: float = view.memo.get_or_compute(("highest", options.prior_risk), (view.p_fail, view.p_slow), compute)
    return found
