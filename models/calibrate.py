"""Calibration: isotonic steps applied to probabilities, and quantiles that follow their outcomes online."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def apply_isotonic(p: Array, x: Sequence[float], y: Sequence[float]) -> Array:
    """Piecewise linear map through (x, y), flat outside; the identity when there are no points.

    >>> apply_isotonic(np.array([0.25]), (0.0, 0.5), (0.0, 0.2))
    array([0.1])
    """
    return np.interp(p, x, y) if len(x) else p


@dataclass(slots=True)
class QuantileTracker:
    """Offsets that bring each quantile's hit rate to its level, from matured outcomes only.

    theta += eta * scale * (level - 1[y <= q + theta]): quantile tracking, the P part of conformal PID control
    (Angelopoulos et al., 2023). Feedback may be late; it must be in order.
    """

    levels: Array  # (quantile,)
    offset: Array  # (quantile,)
    eta: float = 0.02

    @classmethod
    def of(cls, levels: Sequence[float], eta: float = 0.02) -> "QuantileTracker":
        return cls(np.array(levels), np.zeros(len(levels)), eta)

    def apply(self, quantiles: Array) -> Array:
        """(quantile, ...) shifted, and sorted so that they do not cross."""
        shape = (-1,) + (1,) * (quantiles.ndim - 1)
        return np.sort(quantiles + self.offset.reshape(shape), axis=0)

    def learn(self, quantiles: Array, outcome: float, scale: float) -> None:
        """One matured forecast: `quantiles` as they were before `apply`, what happened, a typical size of change."""
        hit = outcome <= quantiles + self.offset
        self.offset += self.eta * scale * (self.levels - hit)
