"""Quantiles of actual waits divided by forecast waits, by Kaplan and Meier (JASA, 1958).

Jobs that still wait are right-censored.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_RATIOS = 120
NEAR = 50
FEWEST = 15
UNKNOWN = {0.1: 0.3, 0.5: 1.0, 0.94: 5.0}  # log-normal, until enough is known


@dataclass(frozen=True, slots=True)
class _IssuedForecast:
    at_s: int
    forecast_s: float
    start_s: int


class WaitRatios:
    """A record of issued wait forecasts and of the real waits.

    The record uses the real start of a job only once it has happened.
    """

    def __init__(self) -> None:
        self._issued: deque[_IssuedForecast] = deque(maxlen=MAX_RATIOS)

    def record_forecast(self, now_s: int, forecast_s: float, start_s: int) -> None:
        """Record that a wait of `forecast_s` seconds was forecast at `now_s`.

        start_s: when the job really starts. It is not used before that time.
        """
        self._issued.append(_IssuedForecast(now_s, forecast_s, start_s))

    def compute_quantiles(self, levels: Sequence[float], now_s: int, near_s: float | None = None) -> tuple[float, ...]:
        """Return the quantiles of real waits divided by forecast waits, as known at `now_s`.

        No quantile exceeds the largest known ratio. near_s: a forecast wait. If it is given, only forecasts nearest to
        it count.
        """
        issued = list(self._issued)
        if near_s is not None:
            issued = sorted(issued, key=lambda row: abs(np.log(row.forecast_s / near_s)))[:NEAR]
        over = np.array([row.start_s < now_s for row in issued], bool)
        if over.sum() < FEWEST:
            return tuple(float(np.interp(level, list(UNKNOWN), list(UNKNOWN.values()))) for level in levels)
        waited = np.array([min(row.start_s, now_s) - row.at_s for row in issued], float)
        ratio = np.maximum(waited, 1.0) / np.array([row.forecast_s for row in issued])
        order = np.lexsort((~over, ratio))
        ratio, over = ratio[order], over[order]
        at_risk = np.arange(len(ratio), 0, -1)
        survived = np.cumprod(np.where(over, 1 - 1 / at_risk, 1.0))
        found = []
        for level in levels:
            below = np.flatnonzero(over & (survived <= 1 - level))
            found.append(float(ratio[below[0]] if len(below) else ratio.max()))
        return tuple(found)
