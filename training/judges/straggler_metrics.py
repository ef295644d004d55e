"""Rows of results made from counts: shares with exact bounds, rates with Poisson bounds, and delays."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fleetcast.training.reports.results import ResultRow, Results

LEVEL = 0.95


def compute_share_bounds(hits: int, of: int) -> tuple[float, float]:
    """Return Clopper and Pearson's 95 % interval of a share: `hits` of `of`.

    >>> [round(bound, 3) for bound in compute_share_bounds(10, 10)]
    [0.692, 1.0]
    """
    from scipy import stats  # takes a third of a second

    tail = (1 - LEVEL) / 2
    low = float(stats.beta.ppf(tail, hits, of - hits + 1)) if hits else 0.0
    high = float(stats.beta.ppf(1 - tail, hits + 1, of - hits)) if hits < of else 1.0
    return low, high


def compute_rate_bounds(count: int, exposure: float) -> tuple[float, float]:
    """Return Garwood's 95 % interval of a Poisson rate: `count` alarms in `exposure` units.

    >>> [round(bound, 2) for bound in compute_rate_bounds(0, 1.0)]
    [0.0, 3.69]
    """
    from scipy import stats

    tail = (1 - LEVEL) / 2
    low = float(stats.chi2.ppf(tail, 2 * count)) / 2 if count else 0.0
    return low / exposure, float(stats.chi2.ppf(1 - tail, 2 * count + 2)) / 2 / exposure


@dataclass(frozen=True, slots=True)
class Table:
    """A writer of result rows for one dataset and target."""

    results: Results
    dataset: str
    target: str

    def add_share(self, metric: str, method: str, hits: int, of: int, series: str = "all") -> None:
        """Add a share of outcomes. Adds no row if there are no outcomes."""
        if of:
            self.add_number(metric, method, hits / of, compute_share_bounds(hits, of), of, series)

    def add_rate(self, metric: str, method: str, count: int, exposure: float, series: str = "all") -> None:
        """Add a rate of events per unit of exposure. `n` is the number of events."""
        if exposure > 0:
            self.add_number(metric, method, count / exposure, compute_rate_bounds(count, exposure), count, series)

    def add_median(self, metric: str, method: str, values: Sequence[float], series: str = "all") -> None:
        """Add a median with its bootstrap interval."""
        self._add_quantile(metric, method, values, 0.5, series)

    def add_delays(self, metric: str, method: str, values: Sequence[float], series: str = "all") -> None:
        """Add the median and the 90th percentile (`METRIC_p90`) of delays, with their bootstrap intervals."""
        self._add_quantile(metric, method, values, 0.5, series)
        self._add_quantile(f"{metric}_p90", method, values, 0.9, series)

    def _add_quantile(self, metric: str, method: str, values: Sequence[float], level: float, series: str) -> None:
        known = np.array([value for value in values if np.isfinite(value)])
        if not len(known):
            return
        draws = np.random.default_rng(0).choice(known, (400, len(known)))
        low, high = np.quantile(np.quantile(draws, level, axis=1), (0.025, 0.975))
        self.add_number(metric, method, float(np.quantile(known, level)), (float(low), float(high)), len(known), series)

    def add_number(
        self,
        metric: str,
        method: str,
        value: float,
        bounds: tuple[float | None, float | None],
        n: int,
        series: str = "all",
    ) -> None:
        """Add one number with its bounds."""
        low, high = bounds
        self.results.rows.append(
            ResultRow(self.dataset, self.target, series, None, method, "", metric, value, low, high, n)
        )

    def add_detection(
        self, method: str, right: int, wrong: int, missed: int, series: str = "all", spells: int | None = None
    ) -> None:
        """Add precision, recall and F1. The bounds of F1 come from those of the other two.

        spells: the number of findings that detected faults, if one finding may detect several faults.
        """
        hits = right if spells is None else spells
        self.add_share("precision", method, hits, hits + wrong, series)
        self.add_share("recall", method, right, right + missed, series)
        parts = [compute_share_bounds(hits, hits + wrong), compute_share_bounds(right, right + missed)]
        if right + wrong + missed:
            low, high = (_compute_f1(*(part[side] for part in parts)) for side in (0, 1))
            value = _compute_f1(hits / max(1, hits + wrong), right / max(1, right + missed))
            self.add_number("f1", method, value, (low, high), right + wrong + missed, series)


def _compute_f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0
