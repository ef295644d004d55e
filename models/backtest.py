"""The gate: a rolling back-test of every forecaster, and which one serves.

Origins lie a lead apart, or six hours where that is less: then several count as one. At each origin a forecaster sees
only what was known then. An origin's scores never change, so each is computed once and kept.

    WQL = 2 sum(pinball) / sum |y| over the quantile levels; the challenger with the lowest serves
          when it beats persistence by 3 %, and by more than chance, over at least 20 origins; else persistence does
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.calibrate import QuantileTracker
from models.forecast import QUANTILES, Forecaster
from models.naive import FORECASTERS, error_quantiles, trimmed

Array = NDArray[np.float64]

ORIGINS_KEPT = 100  # at a lead of a day four origins count as one, so 20 of them take 80
FEWEST_ORIGINS = 20
CLOSEST_ORIGINS, WIDEST_ORIGINS = 6, 36  # bins
WARM_BINS = 144
WIN = 0.97
SURE_T = 2.0
BASELINES = ("persistence", "seasonal_naive")
LEVELS = np.array(QUANTILES)
LOW_80, HIGH_80 = QUANTILES.index(0.1), QUANTILES.index(0.9)


def pinball(quantiles: Array, outcome: float) -> float:
    """Mean over the levels of 2 * pinball loss: with an infinity of levels, the CRPS.

    >>> pinball(np.full(7, 3.0), 3.0)
    0.0
    """
    gap = outcome - quantiles
    return float(2 * np.maximum(LEVELS * gap, (LEVELS - 1) * gap).mean())


@dataclass(slots=True)
class LeadTest:
    """One series at one lead: per kept origin the loss and the 80 % hit of each forecaster, and their trackers."""

    step: int
    names: tuple[str, ...]
    losses: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=ORIGINS_KEPT))
    hits: deque[tuple[bool, ...]] = field(default_factory=lambda: deque(maxlen=ORIGINS_KEPT))
    size: deque[float] = field(default_factory=lambda: deque(maxlen=ORIGINS_KEPT))
    trackers: list[QuantileTracker] = field(init=False)
    done: int = -1  # absolute bin of the last origin

    def __post_init__(self) -> None:
        self.trackers = [QuantileTracker.of(QUANTILES) for _ in self.names]

    @property
    def spacing(self) -> int:
        return min(max(self.step, CLOSEST_ORIGINS), WIDEST_ORIGINS)

    @property
    def overlap(self) -> float:
        """How many origins share one lead: so many count as one."""
        return max(1.0, self.step / self.spacing)

    def loss(self) -> Array:
        """(forecaster,) mean loss over the kept origins; inf for one that missed any of them."""
        if not self.losses:
            return np.full(len(self.names), np.inf)
        table = np.array(self.losses)
        return np.where(np.isfinite(table).all(axis=0), np.nan_to_num(table, nan=0.0).mean(axis=0), np.inf)

    def chosen(self) -> int:
        """Which forecaster serves: 0, persistence, unless a challenger has earned it."""
        if len(self.losses) < FEWEST_ORIGINS * self.overlap:
            return 0
        loss = self.loss()
        best = int(loss.argmin())
        return best if bool(loss[best] <= WIN * loss[0]) and self._surely(best) else 0

    def _surely(self, challenger: int) -> bool:
        """Is the gain over persistence larger than chance gives? One-sided t of the paired losses."""
        table = np.array(self.losses)
        gain = table[:, 0] - table[:, challenger]
        error = float(gain.std(ddof=1)) * (self.overlap / len(gain)) ** 0.5
        return bool(gain.mean() > SURE_T * error)


class SeriesTest:
    """All leads of one series."""

    def __init__(self, steps: Sequence[int], forecasters: Sequence[Forecaster] = FORECASTERS) -> None:
        self.forecasters = tuple(forecasters)
        self.names = tuple(forecaster.name for forecaster in self.forecasters)
        self.leads = [LeadTest(step, self.names) for step in steps]

    def extend(self, history: Array, last_bin: int) -> None:
        """Test the origins that have matured since the last call. `last_bin`: absolute number of the newest bin."""
        known = trimmed(history)
        first_bin = last_bin - len(known) + 1
        for lead in self.leads:
            # The newest bin is not over yet, so an outcome may lie before it at the latest.
            latest = last_bin - 1 - lead.step
            earliest = max(first_bin + WARM_BINS + lead.step, lead.done + 1, latest - ORIGINS_KEPT * lead.spacing + 1)
            start = -(-earliest // lead.spacing) * lead.spacing
            for origin in range(start, latest + 1, lead.spacing):
                self._test(lead, known[: origin - first_bin + 1], float(known[origin - first_bin + lead.step]))
                lead.done = origin

    def _test(self, lead: LeadTest, past: Array, outcome: float) -> None:
        if not np.isfinite(outcome):
            return
        losses, hits = [], []
        for forecaster, tracker in zip(self.forecasters, lead.trackers, strict=True):
            errors = forecaster.errors(past, lead.step)
            raw = forecaster.base(past, lead.step) + error_quantiles(errors, QUANTILES, past, lead.step)
            given = np.maximum(tracker.apply(raw), 0.0)
            losses.append(pinball(given, outcome))
            hits.append(bool(given[LOW_80] <= outcome <= given[HIGH_80]))
            if np.isfinite(raw).all():
                tracker.learn(raw, outcome, float(raw[HIGH_80] - raw[LOW_80]) / 2.56)
        lead.losses.append(tuple(losses))
        lead.hits.append(tuple(hits))
        lead.size.append(abs(outcome))

    def record(self) -> dict[str, float | int | None]:
        """How the served forecasters did against the better of the two naive ones, all leads together.

        `origins` counts tested forecasts over all leads; the rest is None before the first.
        """
        served = best = 0.0
        hits: list[bool] = []
        for lead in self.leads:
            if not lead.losses:
                continue
            loss, at = lead.loss(), lead.chosen()
            rivals = [loss[self.names.index(name)] for name in BASELINES if name in self.names]
            if not np.isfinite(loss[at]) or not np.isfinite(min(rivals)):
                continue
            served += float(loss[at])
            best += float(min(rivals))
            hits += [row[at] for row in lead.hits]
        return {
            "wql_vs_best_naive": round(served / best, 3) if best > 0 else None,
            "coverage_80": round(sum(hits) / len(hits), 3) if hits else None,
            "origins": len(hits),
        }
