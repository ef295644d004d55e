"""The number of spare nodes that a site needs: the least number that failures rarely exceed within a repair.

The number of failures is a sum of unequal Bernoulli variables, which has the Poisson binomial distribution.
It is computed exactly, by convolution (Y. Hong, "On computing the distribution function for the Poisson
binomial distribution", Computational Statistics & Data Analysis 59, 2013).
"""

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.tree import SparesPolicy

Floats = NDArray[np.float64]


def compute_repair_risk(p_fail: Floats, horizon_s: float, repair_s: float) -> Floats:
    """Return (n,) the probability that each node fails within a repair, at an even hazard.

    p_fail: (n,) probability within `horizon_s`.
    """
    hazard = -np.log1p(-np.clip(p_fail, 0.0, 1 - 1e-15)) / horizon_s
    return np.asarray(-np.expm1(-hazard * repair_s))


def compute_failure_distribution(p: Floats) -> Floats:
    """Return (n + 1,) the probability of each number of failures among n independent nodes.

    p: (n,) probability of each node's failure.

    >>> compute_failure_distribution(np.array([0.5, 0.5])).tolist()
    [0.25, 0.5, 0.25]
    """
    parts = [np.array([1 - one, one]) for one in p.tolist()] or [np.ones(1)]
    while len(parts) > 1:
        odd = parts[len(parts) - len(parts) % 2 :]
        parts = [np.convolve(a, b) for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return np.asarray(parts[0])


def count_spares(p: Floats, epsilon: float) -> int:
    """Return the least number with P(more failures than that) ≤ epsilon.

    p: (n,) probability of each node's failure within a repair.

    >>> count_spares(np.full(250, 0.004), 0.05)
    3
    """
    beyond = np.cumsum(compute_failure_distribution(p)[::-1])[::-1]  # k → P(k or more)
    more = np.append(beyond[1:], 0.0)  # k → P(more than k)
    return int(np.argmax(more <= epsilon))


def choose_spare_nodes(view: ClusterView, policy: SparesPolicy) -> NDArray[np.bool_]:
    """Return (n,) whether a node is a spare one: whole, free, and of the least risk in its domain.

    A domain that has fewer free nodes than it needs holds all of them ready. A domain without any known risk needs
    none by `epsilon`.
    """
    spares = np.zeros(len(view), bool)
    domain = view.topology.domain[policy.level]
    is_free = view.is_open & (view.free_gpus == view.topology.gpus) & (view.free_gpus > 0)
    p = np.nan_to_num(view.p_fail, nan=0.0)
    for number in np.unique(domain[domain >= 0]).tolist():
        own = domain == number
        needed = policy.count
        if needed is None:
            risk = compute_repair_risk(p[own], view.risk_horizon_s, policy.repair_s)
            needed = count_spares(risk, policy.epsilon)
        rows = np.flatnonzero(own & is_free)
        spares[rows[np.argsort(p[rows], kind="stable")[:needed]]] = True
    return spares
