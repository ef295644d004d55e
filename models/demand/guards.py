"""Two guards against candidates that won over four weeks but should not serve now.

`fleetcast evaluate demand` measures the constants of both guards (training/RESULTS.md, Demand).
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
    """Page's test (1954) of each candidate: the sum of its recent losses in excess of persistence's."""

    def __init__(self, candidates: int, tracker: QuantileTracker) -> None:
        self._tracker = tracker
        self.behind = np.zeros((candidates, *tracker.seen.shape))  # in persistence's usual errors

    def update(self, at: int, losses: Array, known: Mask) -> None:
        """Add the losses of one lead to each candidate's sum of losses in excess of persistence's.

        losses: (candidate, series). The sum never falls below 0, so earlier gains do not offset later losses.
        """
        lost = scale_to_units(losses - losses[0], self._tracker.size[at], -np.inf) / np.sqrt(self._tracker.overlap[at])
        moved = (self.behind[:, at] + lost).clip(0.0, 2 * MOST_BEHIND)
        self.behind[:, at] = np.where(known, moved, self.behind[:, at])

    def has_fallen_behind(self, is_serving: Mask) -> Mask:
        """Return (candidate, step, series) whether a candidate that may serve has fallen behind persistence.

        is_serving: (candidate, step, series) whether it may serve. A candidate that is behind at one lead also
        counts as behind at all longer leads, because the outcomes of longer leads come later.
        """
        fell = is_serving & (self.behind > MOST_BEHIND)
        return np.asarray(np.logical_or.accumulate(fell, axis=1))


class DistanceRecord:
    """The largest distance from persistence at which each candidate was right. Older distances count less."""

    def __init__(self, candidates: int, series: int, tracker: QuantileTracker) -> None:
        self._tracker = tracker
        self.apart = np.zeros((candidates, *tracker.seen.shape))
        self.last = np.full((LAST_OUTCOMES, series), np.nan)  # outcomes

    def add_outcomes(self, outcomes: Array) -> None:
        self.last[:] = np.concatenate([self.last[1:], outcomes[None]])

    def update(self, at: int, raw: Array, losses: Array, known: Mask) -> None:
        """Record the distance from persistence of each candidate that was right at one lead.

        A candidate is right if it loses no more than persistence. losses: (candidate, series).
        """
        right = np.where(losses <= losses[0], measure_distance(raw, raw[0, MEDIAN]), 0.0)
        remembered = self.apart[:, at] * 0.5 ** (1 / (self._tracker.overlap[at] * WEIGHT_HALF))
        self.apart[:, at] = np.where(known, np.maximum(remembered, right), self.apart[:, at])

    def is_too_far_away(self, candidates: Array) -> Mask:
        """Return (candidate, step, series) whether the candidate is too far from persistence to be trusted.

        It is too far away if the distance is clearly larger than any at which it was right. It must also be that far
        from the last outcomes: near one of them, it may follow a shift of the level or the end of a spike.
        """
        few = FEW_ORIGINS * self._tracker.overlap[:, None] / np.maximum(self._tracker.seen, 1.0)
        near = measure_distance(candidates, candidates[0, MEDIAN])
        for outcome in self.last:
            near = np.fmin(near, measure_distance(candidates, outcome))
        return np.asarray(near > MOST_APART * (1 + few) * self.apart)
