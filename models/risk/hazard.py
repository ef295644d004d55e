"""Estimation of the history hazard: the expected faults of a node, from its own past faults.

The model is a discrete-time logistic regression with three features. Each decays with the time since an event:
the node's last fault, its last return from repair, and its last fault if that was a hardware fault. Weights
have the sign that the data gives them, because a node whose part was replaced may be better than an old one.
Both evaluation (training/judges/risk.py) and serving (models/risk/fault_log.py) use
`make_feature_columns`, `fit_history` and `HistoryFit`.

Half of the faults hit nodes that never had one. The history cannot tell these nodes apart. All times are days
of one clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ConfigError

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

FAULTS_PER_NODE_DAY = 4.2e-3  # InfiniteHBD; the fleet's rate as long as it has shown few faults of its own
PRIOR_DAYS = 60.0  # of the fleet's rate, in a node's own: a gamma prior
FEATURES = ("fault_30d", "return_2d", "hardware_60d")
HISTORY_FILE = "fault_history.json"
HORIZONS_DAYS = (1, 7)
WARM_UP_DAYS = 14  # of history before the first row that is fitted on
PENALTY = 400.0  # on squared weights of features scaled to one standard deviation
STEPS, CLOSE = 50, 1e-8  # of Newton's method
ROWS_AT_MOST = 400_000  # of a fit: of longer or wider histories every k-th day


@dataclass(frozen=True, slots=True)
class FaultHistory:
    """The past faults of all nodes. All arrays are (f,), one value for each fault.

    node: row of the node. start_day: when the fault began. end_day: when the node returned from repair, NaN
    if unknown. hardware: whether a part was at fault, False if unknown.
    """

    node: NDArray[np.int64]
    start_day: Array
    end_day: Array
    hardware: Mask

    def truncate(self, at_day: float) -> "FaultHistory":
        """Return the history as known at a moment: without later faults and later returns from repair."""
        begun = self.start_day <= at_day
        end_day = np.where(self.end_day <= at_day, self.end_day, np.nan)
        return FaultHistory(self.node[begun], self.start_day[begun], end_day[begun], self.hardware[begun])

    def find_latest(self, times: Array, nodes: int) -> Array:
        """Return (nodes,) the latest of the times (f,) on each node, -inf if it has none. NaN times do not count."""
        found = np.full(nodes, -np.inf)
        is_finite = np.isfinite(times)
        np.maximum.at(found, self.node[is_finite], times[is_finite])
        return found

    def count_faults(self, nodes: int) -> Array:
        """Return (nodes,) the number of faults of each node."""
        return np.bincount(self.node, minlength=nodes).astype(np.float64)


def is_in_repair(known: FaultHistory, nodes: int) -> Mask:
    """Return (nodes,) whether the node is in repair: its last fault has no end yet.

    known: the history as `FaultHistory.truncate` returns it.
    """
    last = known.find_latest(known.start_day, nodes)
    away = np.zeros(nodes, bool)
    away[known.node[np.isnan(known.end_day) & (known.start_day >= last[known.node])]] = True
    return away


def compute_features(since_fault: Array, since_return: Array, hardware: Mask) -> Array:
    """Return (n, feature) the values of FEATURES.

    since_fault, since_return: (n,) days since the last fault and the last return, inf if there was none.
    hardware: (n,) whether the last fault was one of hardware.
    """
    part = np.where(hardware, np.exp(-since_fault / 60), 0.0)
    return np.stack((np.exp(-since_fault / 30), np.exp(-since_return / 2), part), axis=1)


def make_feature_columns(known: FaultHistory, at_day: float, nodes: int) -> Array:
    """Return (nodes, feature) the features of every node at a moment.

    known: the history as `FaultHistory.truncate` returns it.
    """
    last = known.find_latest(known.start_day, nodes)
    hardware = np.zeros(nodes, bool)
    hardware[known.node[known.hardware & (known.start_day == last[known.node])]] = True
    return compute_features(at_day - last, at_day - known.find_latest(known.end_day, nodes), hardware)


def compute_fleet_rate(known: FaultHistory, watched_days: float, nodes: int) -> float:
    """Return the fleet's faults per node and day.

    The rate is drawn towards the published rate, which has the weight of one fault.
    """
    return (len(known.node) + 1) / (nodes * watched_days + 1 / FAULTS_PER_NODE_DAY)


def compute_own_rates(known: FaultHistory, watched_days: float, nodes: int) -> Array:
    """Return (nodes,) the faults per day of each node, drawn towards the fleet's rate.

    >>> known = FaultHistory(np.array([0]), np.array([3.0]), np.array([4.0]), np.array([False]))
    >>> compute_own_rates(known, 10.0, 100)[:2].round(4).tolist()
    [0.0157, 0.0014]
    """
    fleet = compute_fleet_rate(known, watched_days, nodes)
    return (known.count_faults(nodes) + fleet * PRIOR_DAYS) / (watched_days + PRIOR_DAYS)


class HorizonFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The logistic fit of one horizon: the intercept, and the weights by feature.

    There is no isotonic step after it, because such a step made the predictions of later days worse.
    """

    intercept: float
    weights: dict[str, float]

    def predict_probability(self, columns: Array, names: Sequence[str] = FEATURES) -> Array:
        """Return (n,) the probability of a fault within the horizon.

        columns: (n, feature). names: the features of the columns.
        """
        weights = np.array([self.weights.get(name, 0.0) for name in names])
        return np.asarray(1 / (1 + np.exp(-(self.intercept + columns @ weights))))


class HistoryFit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fits of the history hazard: days of a horizon -> its fit. `notes`: where the fit comes from."""

    horizons: dict[int, HorizonFit]
    notes: dict[str, Any] = {}

    def compute_hazard(self, columns: Array, horizons_s: Sequence[float]) -> Array:
        """Return (horizon, node) the expected number of faults within each horizon. columns: (node, feature).

        Below a day, the number grows linearly with the horizon. A longer horizon never has a smaller number.
        """
        return interpolate_fitted_hazard(
            np.stack([self.horizons[days].predict_probability(columns) for days in HORIZONS_DAYS]), horizons_s
        )


def interpolate_fitted_hazard(p: Array, horizons_s: Sequence[float]) -> Array:
    """Return (horizon, node) the expected number of faults, interpolated between the fitted horizons.

    p: (HORIZONS_DAYS, node) probabilities.
    """
    fitted = np.maximum.accumulate(-np.log1p(-np.minimum(p, 1 - 1e-9)), axis=0)
    days = np.array((0, *HORIZONS_DAYS), np.float64)
    at = np.array(horizons_s, np.float64) / 86_400
    upper = np.clip(np.searchsorted(days, at), 1, len(HORIZONS_DAYS))
    known = np.concatenate((np.zeros_like(fitted[:1]), fitted))
    share = (at - days[upper - 1]) / (days[upper] - days[upper - 1])
    return np.asarray(known[upper - 1] + (known[upper] - known[upper - 1]) * share[:, None])


def load_history(folder: Path) -> HistoryFit:
    """Load the fit that `fleetcast train history` wrote into a folder, or PUBLISHED if there is none.

    Raises ConfigError if the file is not a fitted history, or lacks a horizon.
    """
    path = folder / HISTORY_FILE
    if not path.is_file():
        return PUBLISHED
    try:
        fit = msgspec.json.decode(path.read_bytes(), type=HistoryFit)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no fitted history: {explain_json_error(error)}") from None
    if set(HORIZONS_DAYS) - set(fit.horizons):
        raise ConfigError(f"{path}: horizons of {sorted(fit.horizons)} days, need {list(HORIZONS_DAYS)}")
    return fit


# Fitted on days 14 to 160 of InfiniteHBD's trace (StepFun, SIGCOMM 2025, Apache-2.0: 400 servers of 8 GPUs, 294 faults)
# by `fleetcast train history`; it stands for a site until that has a history of its own.
PUBLISHED = HistoryFit(
    {
        1: HorizonFit(-5.67572, {"fault_30d": 0.8503, "return_2d": 2.23903, "hardware_60d": 0.49076}),
        7: HorizonFit(-3.82559, {"fault_30d": 1.03836, "return_2d": 1.58997, "hardware_60d": 0.87671}),
    },
    {"source": "InfiniteHBD, days 14 to 160", "faults": 294, "nodes": 400, "days": 157},
)


@dataclass(frozen=True, slots=True)
class PastDays:
    """The features of each working node at the beginning of past days.

    There is one row for each day and each node that was not in repair.
    """

    day: NDArray[np.int64]
    node: NDArray[np.int64]
    columns: Array

    def has_new_fault(self, history: FaultHistory, horizon_days: int) -> Mask:
        """Return (n,) whether the row's node has a new fault within the horizon after the row's day."""
        first, days = int(self.day.min()), int(np.ptp(self.day)) + 1
        nodes = max(int(self.node.max()), int(history.node.max(initial=0))) + 1
        found = np.zeros((days, nodes), bool)
        begin = np.clip(np.ceil(history.start_day - horizon_days) - first, 0, days).astype(np.int64)
        end = np.clip(np.ceil(history.start_day) - first, 0, days).astype(np.int64)
        for node, low, high in zip(history.node.tolist(), begin.tolist(), end.tolist(), strict=True):
            found[low:high, node] = True
        return np.asarray(found[self.day - first, self.node])


def make_past_days(history: FaultHistory, days: range, nodes: int) -> PastDays:
    """Return one row for each day and each node that was not in repair on it. days: at least one."""
    parts = []
    for day in days:
        known = history.truncate(day)
        works = np.flatnonzero(~is_in_repair(known, nodes))
        parts.append((np.full(len(works), day), works, make_feature_columns(known, day, nodes)[works]))
    return PastDays(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def fit_history(history: FaultHistory, first_day: int, until_day: int, nodes: int) -> HistoryFit:
    """Fit the history hazard to the faults that were known by `until_day`.

    first_day: when the record of faults starts. Raises ValueError if the record is too short: it must be
    longer than WARM_UP_DAYS plus the longest horizon.
    """
    known = history.truncate(until_day)
    begin = first_day + WARM_UP_DAYS
    if until_day - begin <= HORIZONS_DAYS[-1]:
        raise ValueError(f"{until_day - first_day} days of history are too few to fit on")
    every = 1 + (until_day - begin) * nodes // ROWS_AT_MOST
    rows = make_past_days(known, range(begin, until_day, every), nodes)
    fits = {}
    for days in HORIZONS_DAYS:
        matured = rows.day + days <= until_day
        fits[days] = fit_horizon(rows.columns[matured], rows.has_new_fault(known, days)[matured])
    return HistoryFit(fits, {"faults": len(known.node), "nodes": nodes, "days": until_day - first_day})


def fit_horizon(columns: Array, labels: Mask) -> HorizonFit:
    """Fit the logistic of one horizon. columns: (n, feature). labels: (n,) whether a fault followed."""
    intercept, weights = fit_logistic(columns, labels)
    named = {name: round(float(weight), 5) for name, weight in zip(FEATURES, weights, strict=True)}
    return HorizonFit(round(intercept, 5), named)


def fit_logistic(columns: Array, labels: Mask, penalty: float = PENALTY) -> tuple[float, Array]:
    """Fit a logistic regression with a ridge penalty, and return the intercept and (feature,) weights.

    The weight of a constant feature is 0.
    """
    spread = columns.std(axis=0)
    used = np.flatnonzero(spread > 0)
    theta = _fit_by_newton(columns[:, used] / spread[used], labels, penalty)
    weights = np.zeros(columns.shape[1])
    weights[used] = theta[1:] / spread[used]
    return float(theta[0]), weights


def _fit_by_newton(scaled: Array, labels: Mask, penalty: float) -> Array:
    """Return (1 + feature,) the intercept and weights, found by Newton's method.

    scaled: (n, feature) with a standard deviation of 1. The method uses no BLAS. On such narrow matrices, BLAS
    threads only wait for each other: on a busy machine, for minutes.
    """
    rows = np.column_stack((np.ones(len(scaled)), scaled))
    ridge = np.concatenate(([0.0], np.full(scaled.shape[1], 2 * penalty)))
    share = float(np.clip(labels.mean(), 1e-6, 1 - 1e-6))
    theta = np.zeros(rows.shape[1])
    theta[0] = np.log(share / (1 - share))
    for _ in range(STEPS):
        p = 1 / (1 + np.exp(-np.einsum("ni,i->n", rows, theta)))
        slope = np.einsum("ni,n->i", rows, p - labels) + ridge * theta
        curve = np.einsum("ni,nj->ij", rows * (p * (1 - p))[:, None], rows) + np.diag(ridge + 1e-9)
        step = np.linalg.solve(curve, slope)
        loss = _compute_loss(rows, labels, ridge, theta)
        while np.abs(step).max() > CLOSE and not _compute_loss(rows, labels, ridge, theta - step) <= loss:
            step /= 2  # too far: the curve is another one there
        theta = theta - step
        if np.abs(step).max() < CLOSE:
            break
    return np.asarray(theta)


def _compute_loss(rows: Array, labels: Mask, ridge: Array, theta: Array) -> float:
    """Return the negative log-likelihood plus the penalty."""
    logit = np.einsum("ni,i->n", rows, theta)
    return float(np.logaddexp(0.0, logit).sum() - logit[labels].sum() + (ridge * theta**2).sum() / 2)
