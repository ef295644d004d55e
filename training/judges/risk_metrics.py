"""Metrics of risk: rankings of node-days and probabilities, with intervals by bootstrap over days."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.training.reports.results import DRAWS

Array = NDArray[np.float64]

TOP_NODES = 20
TOP_SHARE = 0.05
TENTHS = 10
BLOCK_DAYS = 7  # drawn together: a week's labels overlap
METRICS = ("auroc", "ap", "precision_top20", "recall_top5pct", "brier_skill")


@dataclass(frozen=True, slots=True)
class NodeDays:
    """A table of n node-days in order of day.

    day: (n,) 0, 1, 2, ... of `days`. labels: (n,) whether a fault began within the horizon.
    """

    day: NDArray[np.int64]
    labels: NDArray[np.bool_]
    days: int


class RankedScores:
    """One method's scores, sorted once.

    Equal scores form one group, so that their order does not count.
    """

    def __init__(self, rows: NodeDays, score: Array, p: Array | None = None, base: Array | float = 0.0) -> None:
        """Sort the rows by score.

        p: (n,) the method's probabilities, None if it only ranks the rows. base: the probabilities with which the
        Brier skill compares them.
        """
        order = np.argsort(-score, kind="stable")
        self._day, self._labels = rows.day[order], rows.labels[order].astype(np.float64)
        ranked = score[order]
        self._starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
        self._top = compute_top_precision(rows, score)
        self._squares = None if p is None else _sum_daily_squared_errors(rows, p, base)

    def compute_metrics(self, weight: Array) -> dict[str, float]:
        """Return metric → value, with a weight for each day.

        weight: (days,) how many times each day counts.
        """
        rows = weight[self._day]
        hits = np.add.reduceat(self._labels * rows, self._starts)
        size = np.add.reduceat(rows, self._starts)
        total, events = size.sum(), hits.sum()
        if events in (0, total):
            return {}
        misses, seen = size - hits, np.cumsum(size)
        beaten = (total - events) - np.cumsum(misses) + misses / 2
        inside = np.clip((TOP_SHARE * total - (seen - size)) / np.where(size > 0, size, 1.0), 0.0, 1.0)
        precision = np.cumsum(hits) / np.where(seen > 0, seen, 1.0)
        found = {
            "auroc": float((hits * beaten).sum() / (events * (total - events))),
            "ap": float((hits * precision).sum() / events),
            "precision_top20": float((self._top * weight).sum() / weight.sum()),
            "recall_top5pct": float((hits * inside).sum() / events),
        }
        if self._squares is not None:
            own, base = (self._squares * weight).sum(axis=1)
            found["brier_skill"] = float(1 - own / base)
        return found


def compute_top_precision(rows: NodeDays, score: Array) -> Array:
    """Return (days,) the share of the TOP_NODES highest-ranked nodes of each day that failed.

    Nodes with equal scores at the edge share the remaining places.
    """
    found = np.zeros(rows.days)
    bounds = np.searchsorted(rows.day, np.arange(rows.days + 1))
    for day, (begin, end) in enumerate(pairwise(bounds.tolist())):
        own, labels = score[begin:end], rows.labels[begin:end]
        top = min(TOP_NODES, len(own))
        if not top:
            continue
        edge = np.sort(own)[-top]
        above, level = own > edge, own == edge
        found[day] = (labels[above].sum() + (top - above.sum()) * labels[level].mean()) / top
    return found


def _sum_daily_squared_errors(rows: NodeDays, p: Array, base: Array | float) -> Array:
    """Return (2, days) the squared errors of `p`, and those of the base rate, summed for each day."""
    labels = rows.labels.astype(np.float64)
    errors = ((p - labels) ** 2, (base - labels) ** 2)
    return np.stack([np.bincount(rows.day, error, rows.days) for error in errors])


def measure_reliability(
    predictions: Iterable[Mapping[str, Sequence[Any]]], dataset: str, horizon_s: int
) -> list[tuple[float, float, float, float]]:
    """Return (predicted, observed, low, high) for each tenth of the node-days in order of probability.

    low and high are the ends of Wilson's 95 % interval of the observed share.
    """
    blocks = [row for row in predictions if row["dataset"][:1] == [dataset] and row["horizon_s"][:1] == [horizon_s]]
    if not blocks:
        return []
    p, actual = (np.concatenate([np.asarray(row[name], np.float64) for row in blocks]) for name in ("value", "actual"))
    edges = np.unique(np.quantile(p, np.linspace(0, 1, TENTHS + 1)[1:-1]))
    tenth = np.searchsorted(edges, p, side="left")  # equal probabilities share a place
    found = []
    for own in (tenth == at for at in range(len(edges) + 1)):
        if own.any():
            share = float(actual[own].mean())
            low, high = _compute_wilson_interval(share, int(own.sum()))
            found.append((float(p[own].mean()), share, min(low, share), max(high, share)))
    return found


def _compute_wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of n (Wilson, 1927)."""
    z = 1.96
    middle = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z * np.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return float(middle - half), float(middle + half)


Interval = tuple[float, float | None, float | None]


def compute_metric_intervals(ranked: RankedScores, days: int, seed: int) -> dict[str, Interval]:
    """Return metric → its value and 95 % interval.

    The interval is a bootstrap in which days are drawn in circular blocks. Every method gets the same
    blocks.
    """
    return _bootstrap_intervals(ranked.compute_metrics, days, seed)


def compute_differences(ours: RankedScores, rival: RankedScores, days: int, seed: int) -> dict[str, Interval]:
    """Return metric → our value minus the rival's, with its 95 % interval.

    Both are evaluated on the same drawn days.
    """

    def compute_lead(weight: Array) -> dict[str, float]:
        own, other = ours.compute_metrics(weight), rival.compute_metrics(weight)
        return {name: own[name] - other[name] for name in own if name in other}

    return _bootstrap_intervals(compute_lead, days, seed)


def _bootstrap_intervals(metrics: Callable[[Array], dict[str, float]], days: int, seed: int) -> dict[str, Interval]:
    value = metrics(np.ones(days))
    if days < 2 * BLOCK_DAYS:
        return {name: (number, None, None) for name, number in value.items()}
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(DRAWS):
        starts = rng.integers(0, days, -(-days // BLOCK_DAYS))
        chosen = (starts[:, None] + np.arange(BLOCK_DAYS)[None, :]).ravel()[:days] % days
        drawn.append(metrics(np.bincount(chosen, minlength=days).astype(np.float64)))
    found: dict[str, Interval] = {}
    for name, number in value.items():
        low, high = np.quantile([one[name] for one in drawn if name in one], (0.025, 0.975))
        found[name] = number, min(float(low), number), max(float(high), number)
    return found
