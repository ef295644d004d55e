"""The weights of the forecasters in their mean.

The weights start with priors and follow outcomes: exponentiated gradient of the pinball loss (Kivinen and
Warmuth, 1997; for quantiles Berrisch and Ziel, 2021). `fleetcast evaluate demand` measures the constants
(training/RESULTS.md, Demand).
"""

from collections.abc import Sequence

import numpy as np

from fleetcast.models.calibrate import QuantileTracker
from fleetcast.models.demand.evidence import compute_mean_of_others
from fleetcast.models.demand.units import LEVELS, Array, Mask, scale_to_units

EQUALS = ("persistence", "theta", "trees")  # these begin with weight 1 in the mean
OTHERS_WEIGHT = 0.03
WEIGHT_RATE = 0.25  # of an outcome that does not overlap with others, in units of persistence's usual error
WEIGHT_HALF = 672.0  # such outcomes after which one counts half: four weeks of hours
LEAST_STANDING = -50.0
MOST_LENT = 3.0  # what the other series together add to a standing


class MeanWeights:
    """The weights of forecasters in the mean, by step and series.

    is_shadow: (forecaster,) whether it never joins the mean.
    """

    def __init__(self, names: Sequence[str], is_shadow: Mask, tracker: QuantileTracker) -> None:
        self._tracker = tracker
        start = np.where(np.isin(names, EQUALS), 1.0, OTHERS_WEIGHT)
        self._start = np.where(is_shadow, 0.0, start)
        self.standing = np.zeros((len(names), *tracker.seen.shape))  # log of what a weight has gained

    def compute_weights(self) -> Array:
        """Return (forecaster, step, series) the weights, before they are normalised.

        A weight follows from the forecaster's gains in the series itself, and from those in all other series.
        """
        known = self._tracker.seen > 0
        lent = (self.standing - self.standing[0]).clip(-MOST_LENT, MOST_LENT)
        standing = self.standing + compute_mean_of_others(lent, known)
        standing[self._start == 0] = -np.inf
        behind = np.maximum(standing - standing.max(axis=0), LEAST_STANDING)
        return np.asarray(self._start[:, None, None] * np.exp(behind))

    def update(self, at: int, raw: Array, outcome: Array, known: Mask) -> None:
        """Raise the weights of forecasters that would have moved the mean towards the outcome. Lower the others.

        raw: (candidate, quantile, series), the mean last. outcome, known: (series,).
        """
        mean = raw[-1]
        slope = (outcome <= mean) - LEVELS[:, None]
        regret = scale_to_units(
            2 * (np.add.reduce(slope * (raw[:-1] - mean), axis=1) / len(LEVELS)), self._tracker.size[at]
        )
        share = 1 / self._tracker.overlap[at]
        moved = self.standing[:, at] * 0.5 ** (share / WEIGHT_HALF) - WEIGHT_RATE * share * regret
        self.standing[:, at] = np.where(known, moved, self.standing[:, at])
