"""The protocol of what forecasts, and the quantiles that every forecast has."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)


class Forecaster(Protocol):
    """One way to forecast one regular series: a value to bet on, and how far earlier bets were off.

    `history`: (bin,) of ten minutes, oldest first, without gaps, the last one is now; `step`: how many bins ahead.
    A forecaster keeps nothing between calls and sees nothing but what it is given.
    """

    name: str

    def base(self, history: NDArray[np.float64], step: int) -> float:
        """What it would bet on, `step` bins after the end of the history; NaN when it cannot."""

    def errors(self, history: NDArray[np.float64], step: int) -> NDArray[np.float64]:
        """(error,) outcome less base of its own bets at this lead within the history."""
