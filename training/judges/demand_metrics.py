"""Metrics of quantile forecasts of demand, by series and pooled, with intervals.

`coverage_80` counts outcomes inside the band or at its ends. `inside_80` leaves out outcomes at its ends.
If a series often stays at one number, that number is a quantile, and a band of no width covers more than it
promises. So a band is right if its promised share lies between the two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.units import compute_pinball_loss
from fleetcast.models.forecast import QUANTILES, Panel
from fleetcast.training.reports.results import ResultRow, Results, compute_interval
from fleetcast.training.reports.window_rows import make_window_rows
from fleetcast.training.windows import RollingWindow, find_window_numbers

Array = NDArray[np.float64]

POOLED, OURS, PERSISTENCE = "all", "ours", "persistence"
MEDIAN = QUANTILES.index(0.5)
INTERVALS = {50: (0.25, 0.75), 80: (0.1, 0.9), 90: (0.05, 0.95)}
BLOCK_HOURS = 24
METRICS = (
    "mase",
    "wql",
    "smape",
    "mae",
    *(f"coverage_{share}" for share in INTERVALS),
    "inside_80",
    "interval_score_80",
    "width_80",
)


@dataclass(frozen=True, slots=True)
class JudgedForecasts:
    """The forecasts of all methods for one set.

    methods: name → (quantile, step, origin, series). model: (step, origin, series) the model that the
    gate served. scale: (series,) the unit of MASE, or NaN.
    """

    dataset: str
    panel: Panel
    origins: NDArray[np.intp]
    steps: tuple[int, ...]
    methods: Mapping[str, Array]
    model: NDArray[np.str_]
    scale: Array

    def find_outcomes(self, at: int) -> Array:
        """Return (origin, series) the outcomes of the forecasts with step number `at`.

        An outcome is NaN if it is unknown, or lies beyond the panel's end.
        """
        bins = self.origins + self.steps[at]
        found = self.panel.values.T[np.minimum(bins, self.panel.bins - 1)].copy()
        found[bins >= self.panel.bins] = np.nan
        return found


def judge_set(results: Results, judged: JudgedForecasts, seed: int) -> None:
    """Add the rows and the predictions of one set. All methods are judged on the same outcomes.

    If a baseline has no forecast, persistence stands in for it. `stood_in` is the share of such forecasts.
    """
    missing = {name: _find_missing_forecasts(judged, name) for name in judged.methods}
    for at in range(len(judged.steps)):
        outcomes, known = _find_known_outcomes(judged, at)
        if not known.any():
            continue
        for method in judged.methods:
            parts = _compute_method_parts(judged, at, method, outcomes, known)
            results.rows.extend(_make_rows(judged, at, method, parts, known, seed))
            if (silent := missing[method][at] & known).any():
                results.rows.append(
                    _make_stand_in_row(judged, at, method, float(silent.sum() / known.sum()), int(known.sum()))
                )
        _add_predictions(results, judged, at, outcomes, known)


def judge_windows(results: Results, judged: JudgedForecasts, windows: Sequence[RollingWindow]) -> None:
    """Add the pooled numbers of each window, over the forecasts that were issued in it."""
    issued_s = judged.panel.first_ms / 1000 + (judged.origins + 1) * judged.panel.bin_s
    within = find_window_numbers(windows, issued_s)
    for at in range(len(judged.steps)):
        outcomes, known = _find_known_outcomes(judged, at)
        for number, window in enumerate(windows):
            own = known & (within == number)[:, None]
            if own.any():
                for method in judged.methods:
                    parts = _compute_method_parts(judged, at, method, outcomes, own)
                    results.windows += make_window_rows(
                        window, [_make_pooled_row(judged, at, method, metric, parts) for metric in METRICS]
                    )


def _find_known_outcomes(judged: JudgedForecasts, at: int) -> tuple[Array, NDArray[np.bool_]]:
    """Return (origin, series) outcomes, and (origin, series) whether each is judged.

    An outcome is judged if it is known and both persistence and our method have a forecast of it.
    """
    outcomes = judged.find_outcomes(at)
    known = np.isfinite(outcomes)
    for name in (OURS, PERSISTENCE):
        known &= np.isfinite(judged.methods[name][:, at]).all(axis=0)
    return outcomes, known


def _find_missing_forecasts(judged: JudgedForecasts, method: str) -> NDArray[np.bool_]:
    """Return (step, origin, series) whether a method has no forecast. Persistence then stands in for it."""
    return np.asarray(~np.isfinite(judged.methods[method]).all(axis=0))


def _compute_method_parts(
    judged: JudgedForecasts, at: int, method: str, outcomes: Array, known: NDArray[np.bool_]
) -> dict[str, tuple[Array, Array]]:
    own, usual = judged.methods[method][:, at], judged.methods[PERSISTENCE][:, at]
    values = np.where(np.isfinite(own).all(axis=0), own, usual)
    return _compute_metric_parts(np.where(known, values, np.nan), np.where(known, outcomes, np.nan), judged.scale)


def _make_stand_in_row(judged: JudgedForecasts, at: int, method: str, share: float, n: int) -> ResultRow:
    lead_s = judged.steps[at] * judged.panel.bin_s
    identity = (judged.dataset, judged.panel.target, POOLED, lead_s, method, method, "stood_in")
    return ResultRow(*identity, share, None, None, n)


def _make_pooled_row(
    judged: JudgedForecasts, at: int, method: str, metric: str, parts: Mapping[str, tuple[Array, Array]]
) -> ResultRow:
    """Return a metric over all series, without an interval."""
    top, below = (float(np.nansum(part)) for part in parts[metric])
    n, lead_s = int(np.isfinite(parts[metric][0]).sum()), judged.steps[at] * judged.panel.bin_s
    identity = (judged.dataset, judged.panel.target, POOLED, lead_s, method, method, metric)
    return ResultRow(*identity, top / below if below else None, None, None, n)


def _compute_metric_parts(values: Array, outcome: Array, scale: Array) -> dict[str, tuple[Array, Array]]:
    """Return metric -> (origin, series) numerator and denominator. A metric is the ratio of their sums."""
    one = np.where(np.isfinite(outcome), 1.0, np.nan)
    off = np.abs(outcome - values[MEDIAN])
    both = np.abs(outcome) + np.abs(values[MEDIAN])
    parts = {
        "mase": (off / scale, one * np.where(np.isfinite(scale), 1.0, np.nan)),
        "wql": (compute_pinball_loss(values, outcome), np.abs(outcome)),
        "smape": (np.divide(2 * off, both, out=np.zeros_like(off) * one, where=both > 0), one),
        "mae": (off, one),
    }
    for share, (low, high) in INTERVALS.items():
        inside = (values[QUANTILES.index(low)] <= outcome) & (outcome <= values[QUANTILES.index(high)])
        parts[f"coverage_{share}"] = (inside * one, one)
    low_80, high_80 = (values[QUANTILES.index(level)] for level in INTERVALS[80])
    parts["inside_80"] = (((low_80 < outcome) & (outcome < high_80)) * one, one)
    missed = np.maximum(low_80 - outcome, 0.0) + np.maximum(outcome - high_80, 0.0)
    parts["interval_score_80"] = (high_80 - low_80 + 2 / 0.2 * missed, one)
    parts["width_80"] = (high_80 - low_80, one)
    return parts


def _make_rows(
    judged: JudgedForecasts,
    at: int,
    method: str,
    parts: Mapping[str, tuple[Array, Array]],
    known: NDArray[np.bool_],
    seed: int,
) -> list[ResultRow]:
    names = judged.panel.names
    horizon_s = judged.steps[at] * judged.panel.bin_s
    chosen = [(name, np.array([n])) for n, name in enumerate(names) if known[:, n].any() and name != POOLED]
    chosen.append((POOLED, np.arange(len(names))))
    hours = max(1, round(horizon_s / 3600))
    rows = []
    for series, columns in chosen:
        model = _name_serving_models(judged.model[at][:, columns][known[:, columns]]) if method == OURS else method
        for metric in METRICS:
            top, below = (np.nansum(part[:, columns], axis=1) for part in parts[metric])
            n = int(np.isfinite(parts[metric][0][:, columns]).sum())
            counted = np.isfinite(parts[metric][1][:, columns]).any(axis=1)
            value, low, high = compute_interval(top[counted], below[counted], block=max(BLOCK_HOURS, hours), seed=seed)
            target = judged.panel.target
            rows.append(
                ResultRow(judged.dataset, target, series, horizon_s, method, model, metric, value, low, high, n)
            )
    return rows


def _name_serving_models(models: NDArray[np.str_]) -> str:
    """Return the names of the models that served, joined into one text. The most frequent comes first."""
    names, counts = np.unique(models, return_counts=True)
    return "+".join(names[np.argsort(-counts, kind="stable")].tolist())


def _add_predictions(
    results: Results, judged: JudgedForecasts, at: int, outcomes: Array, known: NDArray[np.bool_]
) -> None:
    """Add a block of predictions. It has a row for each origin, series and quantile of our forecasts."""
    panel = judged.panel
    values = judged.methods[OURS][:, at]  # (quantile, origin, series)
    mask = np.broadcast_to(known, values.shape)
    quantile, origin, series = np.nonzero(mask)
    issued = panel.first_ms + (judged.origins + 1) * panel.bin_s * 1000
    size = int(mask.sum())
    columns: dict[str, Any] = {
        "dataset": [judged.dataset] * size,
        "issued_ms": issued[origin],
        "target": [panel.target] * size,
        "series": np.array(panel.names)[series],
        "horizon_s": np.full(size, judged.steps[at] * panel.bin_s),
        "quantile": np.array(QUANTILES)[quantile],
        "value": values[mask],
        "actual": np.broadcast_to(outcomes, values.shape)[mask],
        "model": np.broadcast_to(judged.model[at], values.shape)[mask],
    }
    results.predictions.append(columns)
