"""Forecasters that anybody can check by hand.

Every forecaster here is a *base* (a value that it would bet on) plus the empirical quantiles of its own past errors at
the same lead. Persistence bets on the last value: on real GPU demand that is the baseline to fear, so it serves unless
a rolling back-test has shown a challenger to be better (models/backtest.py).

A history is (bin,) of ten minutes, oldest first. `base` and `errors` want it `trimmed` and `filled`.
"""

import numpy as np
from numpy.typing import NDArray

from models.forecast import Forecaster

Array = NDArray[np.float64]

BIN_S = 600
BIN_MS = BIN_S * 1000
DAY_BINS = 144
ERRORS_KEPT = 14 * DAY_BINS
FEWEST_ERRORS = 20
THIN_STEPS = 6
LEVEL_BINS = 7 * DAY_BINS
# Without any history: about 3 % of what there is within an hour, growing with the root of time (Venus: 1.7 % sMAPE).
PRIOR_SHARE_1H = 0.03
NORMAL_QUANTILES = {0.05: -1.645, 0.1: -1.2816, 0.25: -0.6745, 0.5: 0.0, 0.75: 0.6745, 0.9: 1.2816, 0.95: 1.645}


class Persistence:
    """The last value, and how far values moved over the same lead in the past two weeks."""

    name = "persistence"

    def base(self, history: Array, step: int) -> float:
        return float(history[-1]) if len(history) else float("nan")

    def errors(self, history: Array, step: int) -> Array:
        return _changes(history, step, step)


class SeasonalNaive:
    """The value at the same time of the last whole day that is known."""

    name = "seasonal_naive"

    def __init__(self, season: int = DAY_BINS) -> None:
        self.season = season

    def _lag(self, step: int) -> int:
        return -(-step // self.season) * self.season

    def base(self, history: Array, step: int) -> float:
        back = self._lag(step) - step + 1
        return float(history[-back]) if len(history) >= back else float("nan")

    def errors(self, history: Array, step: int) -> Array:
        return _changes(history, self._lag(step), step)


class RecentLevel:
    """The median of the last week, and its quantiles: what spiky arrivals are best foretold by."""

    name = "recent_level"

    def base(self, history: Array, step: int) -> float:
        recent = history[-LEVEL_BINS:]
        return float(np.median(recent)) if len(recent) >= DAY_BINS else float("nan")

    def errors(self, history: Array, step: int) -> Array:
        recent = history[-LEVEL_BINS:]
        return recent - np.median(recent) if len(recent) >= DAY_BINS else np.zeros(0)


FORECASTERS: tuple[Forecaster, ...] = (Persistence(), SeasonalNaive(), RecentLevel())


def _changes(history: Array, lag: int, step: int) -> Array:
    """(error,) changes over `lag` bins. At long leads neighbours tell the same, so they are thinned."""
    recent = history[-(ERRORS_KEPT + lag) :]
    thin = min(max(step // THIN_STEPS, 1), THIN_STEPS)
    return (recent[lag:] - recent[:-lag])[::-thin] if len(recent) > lag else np.zeros(0)


def filled(history: Array) -> Array:
    """Unknown bins carry the last known value on. The first bin must be known (see `trimmed`)."""
    known = np.isfinite(history)
    if known.all():
        return history
    return history[np.maximum.accumulate(np.where(known, np.arange(len(history)), 0))]


def trimmed(history: Array) -> Array:
    """The history from its first known value on."""
    known = np.flatnonzero(np.isfinite(history))
    return history[known[0] :] if len(known) else history[:0]


def error_quantiles(errors: Array, quantiles: tuple[float, ...], history: Array, step: int) -> Array:
    """(quantile,) of past errors; with too few of them, the spread of shorter leads grown by the root of time.

    A history of one value has no errors at all: then the spread is a prior, PRIOR_SHARE_1H.
    """
    known = errors if np.isfinite(errors).all() else errors[np.isfinite(errors)]
    if len(known) >= FEWEST_ERRORS:
        return sorted_quantiles(np.sort(known), quantiles)
    spread = _short_spread(history, step)
    return np.array([NORMAL_QUANTILES.get(level, _normal(level)) for level in quantiles]) * spread


def sorted_quantiles(ordered: Array, quantiles: tuple[float, ...]) -> Array:
    """(quantile,) of an ascending array, linear between order statistics (numpy's default, without its overhead)."""
    at = np.asarray(quantiles) * (len(ordered) - 1)
    low = np.floor(at).astype(np.intp)
    high = np.minimum(low + 1, len(ordered) - 1)
    return np.asarray(ordered[low] + (at - low) * (ordered[high] - ordered[low]))


def _short_spread(history: Array, step: int) -> float:
    moves = np.diff(history)
    moves = moves[np.isfinite(moves)]
    last = abs(float(history[-1])) if len(history) else 0.0
    prior = PRIOR_SHARE_1H * max(last, 1.0) * float(np.sqrt(step * BIN_S / 3600))
    if len(moves) < 3:
        return prior
    return max(prior, float(np.sqrt((moves**2).mean() * step)))


def _normal(level: float) -> float:
    """A standard normal quantile by interpolation between the ones in the table."""
    return float(np.interp(level, list(NORMAL_QUANTILES), list(NORMAL_QUANTILES.values())))
