"""The losses of candidates and of served forecasts over four weeks, by the block of the origin."""

from collections.abc import Sequence

import numpy as np

from fleetcast.models.demand.units import Array, Mask
from fleetcast.models.forecast import QUANTILES

DAY_S = 86_400
HISTORY_DAYS, DAYS_OF_COVERAGE = 28, 7
BLOCK_S = 21_600  # losses are summed by the block of the origin; so often a choice is made anew
A_DAY = DAY_S // BLOCK_S
BASELINES = ("persistence", "seasonal_naive")
LOW_80, HIGH_80 = QUANTILES.index(0.1), QUANTILES.index(0.9)


class LossTable:
    """Sums of losses and hits by block of origins, step and series, over four weeks.

    A newer block overwrites the oldest one. names: the candidates, the mean last.
    """

    def __init__(self, names: Sequence[str], steps: int, series: int, bin_s: int) -> None:
        self.names = tuple(names)
        self.block = max(1, BLOCK_S // bin_s)  # in bins
        rows = HISTORY_DAYS * DAY_S // BLOCK_S
        shape = (rows, steps, series)
        self.losses = np.zeros((rows, len(names) + 1, steps, series))  # the last candidate is "as served"
        self.hits = np.zeros(shape, np.float32)  # of those that moved: outcomes within the 80 % band
        self.moved = np.zeros(shape, np.float32)  # forecasts of which band or outcome was not one value
        self.counts = np.zeros(shape, np.float32)
        self.blocks = np.full(rows, -1, np.int64)  # which block each row holds

    def add(self, origin: int, at: int, losses: Array, served: Array, outcome: Array, known: Mask) -> None:
        """Add the outcome of one step to the block that contains the forecast's origin.

        at: index of the step. losses: (candidate and served, series). served: (quantile, series). outcome,
        known: (series,).
        """
        block = origin // self.block
        slot = block % len(self.blocks)
        if self.blocks[slot] != block:
            self.blocks[slot] = block
            for table in (self.losses, self.hits, self.moved, self.counts):
                table[slot] = 0.0
        self.losses[slot, :, at] += losses * known
        moved = known & ~((served[LOW_80] == outcome) & (served[HIGH_80] == outcome))
        self.hits[slot, at] += (served[LOW_80] <= outcome) & (outcome <= served[HIGH_80]) & moved
        self.moved[slot, at] += moved
        self.counts[slot, at] += known

    def list_records(self) -> list[dict[str, float | int | None]]:
        """Return the past accuracy of each series, over four weeks and all leads.

        A row has the loss of served forecasts divided by that of the better naive forecaster. It also has the
        coverage of DAYS_OF_COVERAGE days, and the number of forecasts that matured. The coverage leaves out
        forecasts whose band is a single value that came true.
        """
        sums = self.losses.sum(axis=0)  # (candidate, step, series)
        recent, counts = self.blocks > self.blocks.max() - DAYS_OF_COVERAGE * A_DAY, self.counts.sum(axis=(0, 1))
        hits, moved = (rows[recent].sum(axis=(0, 1)) for rows in (self.hits, self.moved))
        naive = [self.names.index(name) for name in BASELINES if name in self.names] or [0]
        best = sums[naive].min(axis=0).sum(axis=0)
        served = sums[-1].sum(axis=0)
        return [
            {
                "wql_vs_best_naive": round(float(served[n] / best[n]), 3) if best[n] > 0 else None,
                "coverage_80": round(float(hits[n] / moved[n]), 3) if moved[n] else None,
                "origins": int(counts[n]),
            }
            for n in range(served.size)
        ]

    def compute_scaled_losses(self) -> dict[str, tuple[float, int]]:
        """Return candidate -> (mean loss in units of persistence's, number of forecasts).

        The mean is over leads and series.
        """
        sums = self.losses[:, :-1].sum(axis=0)
        counts = np.where(sums[0] > 0, self.counts.sum(axis=0), 0.0)
        scaled = np.divide(sums * counts, sums[0], out=np.zeros_like(sums), where=sums[0] > 0)
        n = int(counts.sum())
        return {name: (float(scaled[at].sum() / n) if n else 1.0, n) for at, name in enumerate(self.names)}
