"""Evaluation of site risk out of sample, on rolling windows over the last part of a site's days.

`ours` is a fit on the rows whose outcomes were known when the window began. `shipped` is the
prediction of a service without that fit, with the history hazard that it fits by itself. Rows are
nodes at work, once a day. Each kind and horizon is judged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.fault_log import OWN_DAYS, OWN_FAULTS
from fleetcast.models.risk.hazard import HORIZONS_DAYS, HistoryFit, fit_history
from fleetcast.models.risk.scores import RISK_KINDS
from fleetcast.models.risk.site_risk import SiteFit
from fleetcast.training.fits.site_risk import fit_site
from fleetcast.training.judges.risk_metrics import NodeDays, RankedScores
from fleetcast.training.reports.results import ResultRow, Results, compute_interval
from fleetcast.training.sites.site_days import DAY_MS, SiteDays
from fleetcast.training.windows import RollingWindow, make_rolling_windows

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

SHARE = 0.5  # of the days that is judged
DAY_S = 86_400
FLOOR = 1e-6  # of a probability, for its logarithm
TENTHS = 10
BLOCK_DAYS = 7
SHIPPED, OURS, BASE = "shipped", "ours", "base_rate"
SERVING, BESIDE = "serving", "ours_beside_serving"  # of the rows after the data of the version that serves
METRICS = (
    "log_loss",
    "brier",
    "auroc",
    "precision_top1pct",
    "precision_top5pct",
    "told_over_came",
    "calibration_error",
)
CHOSEN = ("log_loss", "brier")  # with an interval


@dataclass(frozen=True, slots=True)
class JudgedDays:
    """The rows of all windows, with the predictions of each method.

    p: method → (kind, HORIZONS_DAYS, n) probabilities, NaN without a prediction. window: (n,) the number of each
    row's window.
    """

    rows: SiteDays
    p: Mapping[str, Array]
    window: NDArray[np.int64]
    fits: tuple[SiteFit, ...]


def make_windows(days: SiteDays, count: int) -> tuple[RollingWindow, ...]:
    """Return windows over the last share of the days that have outcomes."""
    first_ms = int(days.time_ms.min(initial=days.end_ms))
    end_ms = days.end_ms - HORIZONS_DAYS[-1] * DAY_MS
    begin_ms = first_ms + (1 - SHARE) * (end_ms - first_ms)
    return make_rolling_windows(begin_ms / 1000, end_ms / 1000, count)


def judge_windows(days: SiteDays, count: int, served: SiteFit | None = None, since_ms: int = 0) -> JudgedDays:
    """Fit the risk before each window, and return the predictions of all methods for the rows of the windows.

    served: the serving version. Its training data end at `since_ms`, so it is judged only on later rows.
    """
    windows = make_windows(days, count)
    parts, said, numbers, fits = [], list[dict[str, Array]](), [], []
    for number, window in enumerate(windows):
        rows = days.select_rows((days.time_ms >= window.begin_ms) & (days.time_ms < window.end_ms))
        known = days.select_rows(days.time_ms < window.begin_ms)
        fit = fit_site(known, window.begin_ms)
        refit = fit_own_history(days, window.begin_ms)
        p = {
            OURS: rows.compute_probabilities(fit),
            SHIPPED: rows.compute_probabilities(None, refit),
            BASE: _compute_base_rates(known, rows, window),
        }
        if served is not None:
            later = rows.time_ms >= since_ms
            p[SERVING] = np.where(later, rows.compute_probabilities(served), np.nan)
            p[BESIDE] = np.where(later, p[OURS], np.nan)
        parts.append(rows)
        said.append(p)
        numbers.append(np.full(len(rows), number))
        fits.append(fit)
    whole = days.select_rows(np.isin(days.time_ms, np.concatenate([part.time_ms for part in parts]))) if parts else days
    joined = {name: np.concatenate([p[name] for p in said], axis=2) for name in (said[0] if said else {})}
    return JudgedDays(whole, joined, np.concatenate([*numbers, np.zeros(0, np.int64)]), tuple(fits))


def fit_own_history(days: SiteDays, at_ms: int) -> HistoryFit | None:
    """Fit the history hazard as a service does from its own faults (models/risk/fault_log.py).

    Returns None if the site has too few days or faults for that.
    """
    first_day, at_day = int(days.time_ms.min()) // DAY_MS, at_ms // DAY_MS
    if at_day - first_day < OWN_DAYS or len(days.faults.truncate(at_day).node) < OWN_FAULTS:
        return None
    return fit_history(days.faults, first_day, at_day, len(days.names))


def _compute_base_rates(known: SiteDays, rows: SiteDays, window: RollingWindow) -> Array:
    """Return (kind, horizon, n) base rates: the share of known rows with an event of each kind within the horizon.

    Only rows whose outcome was known when the window began count.
    """
    found = np.zeros((len(RISK_KINDS), len(HORIZONS_DAYS), len(rows)))
    for k, kind in enumerate(RISK_KINDS):
        for h, span in enumerate(HORIZONS_DAYS):
            matured = known.time_ms + span * DAY_MS <= window.begin_ms
            found[k, h] = known.compute_labels(kind, span)[matured].mean() if matured.any() else 0.0
    return found


def make_risk_results(judged: JudgedDays, dataset: str, seed: int = 0) -> Results:
    """Return results with a row for each kind, horizon, method and metric.

    Each window is also a series of its own.
    """
    results = Results("risk")
    for k, kind in enumerate(RISK_KINDS):
        for h, span in enumerate(HORIZONS_DAYS):
            labels = judged.rows.compute_labels(kind, span)
            for method, p in judged.p.items():
                is_judged = np.isfinite(p[k, h])
                given = (dataset, kind, span * DAY_S, method)
                _add_rows(
                    results, given, "all", judged.rows.time_ms[is_judged], p[k, h][is_judged], labels[is_judged], seed
                )
                for number in range(len(judged.fits)):
                    own = is_judged & (judged.window == number)
                    name = f"window {number + 1} of {len(judged.fits)}"
                    _add_rows(results, given, name, judged.rows.time_ms[own], p[k, h][own], labels[own], None)
    return results


def _add_rows(
    results: Results,
    given: tuple[str, str, int, str],
    series: str,
    time_ms: NDArray[np.int64],
    p: Array,
    labels: Mask,
    seed: int | None,
) -> None:
    """Add the metrics of one series to the results.

    given: (data set, kind, horizon in seconds, method). seed: None to leave out the intervals.
    """
    if not len(p) or not labels.any():
        return
    dataset, kind, horizon_s, method = given
    for metric, value in compute_metrics(time_ms, p, labels).items():
        found: tuple[float | None, float | None, float | None] = value, None, None
        if metric in CHOSEN and seed is not None:
            found = _measure_with_interval(metric, time_ms, p, labels, seed)
        model = "site_risk" if method == OURS else ""
        results.rows.append(
            ResultRow(dataset, kind, series, horizon_s, method, model, metric, *found, int(labels.sum()))
        )


def compute_metrics(time_ms: NDArray[np.int64], p: Array, labels: Mask) -> dict[str, float]:
    """Return metric → value for all of METRICS. Rows with equal probabilities share their ranks."""
    came, is_judged = float(labels.mean()), float(p.mean())
    days = np.unique(time_ms, return_inverse=True)[1]
    ranked = RankedScores(NodeDays(days, labels, int(days.max()) + 1), p).compute_metrics(np.ones(int(days.max()) + 1))
    return {
        "log_loss": float(compute_log_losses(p, labels).mean()),
        "brier": float(((p - labels) ** 2).mean()),
        "auroc": ranked.get("auroc", 0.5),
        "precision_top1pct": _compute_precision(p, labels, 0.01),
        "precision_top5pct": _compute_precision(p, labels, 0.05),
        "told_over_came": is_judged / came if came else float("nan"),
        "calibration_error": _compute_calibration_error(p, labels),
    }


def compute_log_losses(p: Array, labels: Mask) -> Array:
    """Return (n,) the log loss of each row, in nats."""
    sure = np.clip(p, FLOOR, 1 - FLOOR)
    return np.asarray(-np.where(labels, np.log(sure), np.log1p(-sure)))


def _compute_precision(p: Array, labels: Mask, share: float) -> float:
    """Return the share of events among the rows with the highest probabilities.

    share: the part of all rows that is counted. Equal rows at the edge share the remaining places.
    """
    top = max(1, round(share * len(p)))
    edge = np.partition(p, -top)[-top]
    above, level = p > edge, p == edge
    return float((labels[above].sum() + (top - above.sum()) * labels[level].mean()) / top)


def _compute_calibration_error(p: Array, labels: Mask) -> float:
    """Return the mean gap between predicted and observed frequency, divided by the base rate. 0 is best.

    The gap is computed in each tenth of the rows in order of probability.
    """
    order = np.argsort(p, kind="stable")
    gaps = [
        abs(p[part].mean() - labels[part].mean()) * len(part) for part in np.array_split(order, TENTHS) if len(part)
    ]
    return float(sum(gaps) / len(p) / labels.mean())


def _measure_with_interval(
    metric: str, time_ms: NDArray[np.int64], p: Array, labels: Mask, seed: int
) -> tuple[float | None, float | None, float | None]:
    """Return a metric's value and the low and high ends of its interval.

    The bootstrap draws whole weeks, because the labels of the days of a week overlap.
    """
    losses = compute_log_losses(p, labels) if metric == "log_loss" else (p - labels) ** 2
    day = np.unique(time_ms, return_inverse=True)[1]
    return compute_interval(np.bincount(day, losses), np.bincount(day).astype(float), block=BLOCK_DAYS, seed=seed)


def compare_geometric_means(
    results: Results, kinds: Sequence[str], rival: str, own: str = OURS, metric: str = "log_loss"
) -> tuple[float, float, int]:
    """Return the geometric means of our metric and of the rival's, and the number of outcomes.

    The means cover the kinds and horizons for which both have a value.
    """
    pairs = []
    for row in results.select(series="all", method=own, metric=metric):
        others = results.select(
            series="all", method=rival, metric=metric, target=row.target, horizon_s=row.horizon_s, dataset=row.dataset
        )
        if row.target in kinds and others and row.value and others[0].value:
            pairs.append((row.value, others[0].value, row.n))
    if not pairs:
        return float("nan"), float("nan"), 0
    ours, theirs = (float(np.exp(np.mean([np.log(pair[at]) for pair in pairs]))) for at in (0, 1))
    return ours, theirs, sum(pair[2] for pair in pairs)
