"""Calibration of forecasts: probabilities by isotonic steps, quantiles by the outcomes so far."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ETA_FLOOR = 0.01
SIZE_RATE = 0.01
FAR, FEW_SEEN = 100.0, 20  # after so many outcomes one counts as at most FAR times the size (or one unit)
HALF_TRUST = 30.0  # outcomes that do not overlap
ETA_START, ETA_HALF = 3.0, 50.0  # eta is 0.06 at first and halves with 50 outcomes that do not overlap


def map_probabilities(p: Array, x: Sequence[float], y: Sequence[float]) -> Array:
    """Map probabilities by the piecewise linear function through the points (x, y).

    Outside the points the function is flat. Without points, `p` is returned unchanged.

    >>> map_probabilities(np.array([0.25]), (0.0, 0.5), (0.0, 0.2))
    array([0.1])
    """
    return np.interp(p, x, y) if len(x) else p


@dataclass(slots=True)
class QuantileTracker:
    """Offsets that calibrate forecast quantiles: the outcome should exceed each quantile as often as its level says.

    The tracker learns the offsets from matured outcomes only:
    offset += eta * size * (level - 1[y <= q + offset]). This is quantile tracking, the P part of conformal
    PID control (Angelopoulos et al., 2023). eta starts large, so the first weeks set the offset as split
    conformal does. Then eta falls to a floor (Angelopoulos et al., 2024). The floor is lower for long leads,
    because their outcomes overlap and repeat each surprise.
    """

    levels: Array  # (quantile,)
    offset: Array  # (candidate, quantile, step, series)
    seen: Array  # (step, series) outcomes
    size: Array  # (step, series) how far outcomes lie from the first candidate's median
    overlap: Array  # (step,) in hours: so many hourly forecasts share one outcome

    @classmethod
    def empty(
        cls, levels: Sequence[float], candidates: int, steps: Sequence[int], series: int, bin_s: int
    ) -> "QuantileTracker":
        shape = (len(steps), series)
        overlap = np.maximum(np.array(steps, np.float64) * bin_s / 3600, 1.0)
        return cls(
            np.array(levels), np.zeros((candidates, len(levels), *shape)), np.zeros(shape), np.zeros(shape), overlap
        )

    def apply_offsets(self, quantiles: Array, chosen: NDArray[np.intp]) -> Array:
        """Return (quantile, step, series) the quantiles of the chosen candidates, shifted by the offsets.

        quantiles: (candidate, quantile, step, series). chosen: (step, series) index of the candidate. The result
        is sorted, so that quantiles do not cross.
        """
        taken, offset = (np.take_along_axis(rows, chosen[None, None], axis=0)[0] for rows in (quantiles, self.offset))
        return np.sort(taken + offset * self.compute_trust(), axis=0)

    def apply_offsets_at_step(self, quantiles: Array, step: int) -> Array:
        """Return (candidate, quantile, series) the quantiles at one step, shifted by the offsets and sorted.

        quantiles: (candidate, quantile, series) before the offsets are added.
        """
        trust = self.seen[step] / (self.seen[step] + HALF_TRUST * self.overlap[step])
        return np.sort(quantiles + self.offset[:, :, step] * trust, axis=1)

    def compute_trust(self) -> Array:
        """Return (step, series) the share of each offset that is applied, from 0 to 1.

        The share starts at 0 and grows with the number of outcomes, because a few days of outcomes say little
        about the next days.
        """
        return np.asarray(self.seen / (self.seen + HALF_TRUST * self.overlap[:, None]))

    def learn_outcome(self, step: int, quantiles: Array, outcome: Array, known: NDArray[np.bool_]) -> None:
        """Update the offsets of one step with the outcome of a forecast.

        quantiles: (candidate, quantile, series) before offsets were applied. outcome: (series,). known:
        (series,) whether the outcome is known.
        """
        self.seen[step] += known
        rate = np.maximum(1 / np.maximum(self.seen[step], 1.0), SIZE_RATE) * known
        off = np.abs(outcome - quantiles[0, quantiles.shape[1] // 2])
        known_size = (self.seen[step] > FEW_SEEN) & (self.size[step] > 0)
        most = np.where(known_size, FAR * self.size[step], np.inf)
        off = np.minimum(off, most)  # one absurd job must not widen every band for weeks
        self.size[step] += rate * (off - self.size[step])
        eta = self.compute_learning_rate(step) * self.size[step] * known
        hit = outcome <= quantiles + self.offset[:, :, step]
        self.offset[:, :, step] += eta * (self.levels[:, None] - hit)

    def compute_learning_rate(self, step: int) -> Array:
        """Return (series,) the current learning rate (eta) of the offsets of one step."""
        overlap = self.overlap[step]
        return np.asarray(np.maximum(ETA_FLOOR / overlap**0.25, ETA_START / (ETA_HALF * overlap + self.seen[step])))
