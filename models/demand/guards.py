"""Two guards that keep a candidate from serving, although it won over four weeks.

`fleetcast evaluate demand` measures their constants (training/RESULTS.md, Demand).
"""

import numpy as np

from fleetcast.models.calibrate import QuantileTracker
from fleetcast.models.demand.evidence import FEW_ORIGINS
from fleetcast.models.demand.mean_weights import WEIGHT_HALF
from fleetcast.models.demand.units import MEDIAN, Array, Mask, measure_distance, scale_to_units

MOST_BEHIND = 6.0  # in persistence's usual errors; a candidate farther behind does not serve
MOST_APART = 1.5  # times the farthest from persistence that a candidate was right: beyond it, its record says nothing
LAST_OUTCOMES = 3  # within which a spike is over


class PageTest:
    """How far each candidate has lost to persistence lately (Page's test, 1954)."""

    def __init__(self, candidates: int, tracker: QuantileTracker) -> None:
        self._tracker = tracker
        self.behind = np.zeros((candidates, *tracker.seen.shape))  # in persistence's usual errors

    def update(self, at: int, losses: Array, known: Mask) -> None:
        """Add a lead's losses (candidate, series) to what was lost since a candidate and persistence were level."""
        lost = scale_to_units(losses - losses[0], self._tracker.size[at], -np.inf) / np.sqrt(self._tracker.overlap[at])
        moved = (self.behind[:, at] + lost).clip(0.0, 2 * MOST_BEHIND)
        self.behind[:, at] = np.where(known, moved, self.behind[:, at])

    def find_fallen(self, is_serving: Mask) -> Mask:
        """Return (candidate, step, series) whether the candidate fell behind at a lead that it had won.

        is_serving: (candidate, step, series) whether it may serve. A fallen candidate does not serve longer
        leads either, because their outcomes come later.
        """
        fell = is_serving & (self.behind > MOST_BEHIND)
        return np.asarray(np.logical_or.accumulate(fell, axis=1))


class DistanceRecord:
    """The farthest from persistence that each candidate was right. Old distances count less."""

    def __init__(self, candidates: int, series: int, tracker: QuantileTracker) -> None:
        self._tracker = tracker
        self.apart = np.zeros((candidates, *tracker.seen.shape))
        self.last = np.full((LAST_OUTCOMES, series), np.nan)  # outcomes

    def add_outcomes(self, outcomes: Array) -> None:
        self.last[:] = np.concatenate([self.last[1:], outcomes[None]])

    def update(self, at: int, raw: Array, losses: Array, known: Mask) -> None:
        """Record how far from persistence each candidate was right. losses: (candidate, series)."""
        right = np.where(losses <= losses[0], measure_distance(raw, raw[0, MEDIAN]), 0.0)
        remembered = self.apart[:, at] * 0.5 ** (1 / (self._tracker.overlap[at] * WEIGHT_HALF))
        self.apart[:, at] = np.where(known, np.maximum(remembered, right), self.apart[:, at])

    def find_beyond(self, candidates: Array) -> Mask:
        """Return (candidate, step, series) whether the candidate is too far from persistence to be trusted.

        That is so if it is clearly farther away than it was ever right. It must also be that far from the last
        outcomes. If it is near one of them, a level has shifted, or a single spike is over.
        """
        few = FEW_ORIGINS * self._tracker.overlap[:, None] / np.maximum(self._tracker.seen, 1.0)
        near = measure_distance(candidates, candidates[0, MEDIAN])
        for outcome in self.last:
            near = np.fmin(near, measure_distance(candidates, outcome))
        return np.asarray(near > MOST_APART * (1 + few) * self.apart)
