"""Forecast, and the protocol of what makes one."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class Forecast:
    """Quantile paths of several series.

    values: (quantile, horizon, series), non-decreasing along the quantiles; model: (series,) which one served.
    """

    target: str
    quantiles: tuple[float, ...]
    horizons_s: tuple[int, ...]
    values: NDArray[np.float64]
    issued_ms: int
    model: tuple[str, ...]


class Forecaster(Protocol):
    """One way to forecast one regular series.

    `history`: (bin,) values, oldest first, NaN where unknown, the last one is "now"; `steps`: how many bins ahead
    each horizon lies, ascending. Returns (quantile, horizon). It must not look beyond what it is given.
    """

    name: str

    def predict(
        self, history: NDArray[np.float64], steps: tuple[int, ...], quantiles: tuple[float, ...]
    ) -> NDArray[np.float64]: ...
