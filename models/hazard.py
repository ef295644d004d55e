"""History hazard: the probability that a node fails again, from its own faults alone.

A discrete-time hazard on the state of a node at one moment: a logistic on what decays since its last fault and since
its last return from repair. No weight is negative, so a fault never lowers the probability. Counts, classes, a node's
own shrunk rate and more decays were tried: on later days than they were fitted on, each made probabilities worse.
Half of the faults hit nodes that never had one: of those a history knows nothing, and they are all alike.

Times are in days of any one clock.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

FAULTS_PER_NODE_DAY = 4.2e-3  # InfiniteHBD; the fleet's rate as long as it has shown few faults of its own
PRIOR_DAYS = 60.0  # of the fleet's rate, in a node's own: a gamma prior
FEATURES = ("fault_14d", "return_2d")


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """f faults. node: (f,) row of the node; start_day: (f,); end_day: (f,) its return from repair, NaN unknown."""

    node: NDArray[np.int64]
    start_day: Array
    end_day: Array

    def until(self, at_day: float) -> "FaultHistory":
        """What is known at a moment: faults that had begun, and returns that had happened."""
        begun = self.start_day <= at_day
        end_day = np.where(self.end_day <= at_day, self.end_day, np.nan)
        return FaultHistory(self.node[begun], self.start_day[begun], end_day[begun])

    def latest(self, times: Array, nodes: int) -> Array:
        """(nodes,) the greatest of (f,) times on each node, -inf where there is none; NaN is no time."""
        found = np.full(nodes, -np.inf)
        told = np.isfinite(times)
        np.maximum.at(found, self.node[told], times[told])
        return found

    def counts(self, nodes: int) -> Array:
        """(nodes,) faults of each node."""
        return np.bincount(self.node, minlength=nodes).astype(np.float64)


def in_repair(known: FaultHistory, nodes: int) -> Mask:
    """(nodes,) away with a fault. known: as `until` gives it. A later fault shows that an open one had ended."""
    last = known.latest(known.start_day, nodes)
    away = np.zeros(nodes, bool)
    away[known.node[np.isnan(known.end_day) & (known.start_day >= last[known.node])]] = True
    return away


def features(since_fault: Array, since_return: Array) -> Array:
    """(n, feature) of FEATURES, from days since the last fault and since the last return, inf where there was none."""
    return np.stack((np.exp(-since_fault / 14), np.exp(-since_return / 2)), axis=1)


def fleet_rate(known: FaultHistory, watched_days: float, nodes: int) -> float:
    """Faults a node and day; the published rate weighs as much as one fault."""
    return (len(known.node) + 1) / (nodes * watched_days + 1 / FAULTS_PER_NODE_DAY)


def own_rate(known: FaultHistory, watched_days: float, nodes: int) -> Array:
    """(nodes,) faults a day of each node, shrunk towards the fleet's rate.

    >>> known = FaultHistory(np.array([0]), np.array([3.0]), np.array([4.0]))
    >>> own_rate(known, 10.0, 100)[:2].round(4).tolist()
    [0.0157, 0.0014]
    """
    fleet = fleet_rate(known, watched_days, nodes)
    return (known.counts(nodes) + fleet * PRIOR_DAYS) / (watched_days + PRIOR_DAYS)


class HorizonFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One horizon: intercept, and weights by feature. An isotonic step on top was tried: on later days it was worse."""

    intercept: float
    weights: dict[str, float]

    def predict(self, columns: Array) -> Array:
        """(n,) probability within the horizon, of (n, feature) columns."""
        weights = np.array([self.weights.get(name, 0.0) for name in FEATURES])
        return np.asarray(1 / (1 + np.exp(-(self.intercept + columns @ weights))))
