"""The evidence that a candidate beats persistence, from the gate's four weeks of losses at one lead.

All numbers are in units of persistence's own loss in that series, so none depends on the unit of a
series.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

FEWEST_DAYS = 7


@dataclass(frozen=True, slots=True)
class LeadRecord:
    """The losses of four weeks at one lead, in units of persistence's loss.

    ratio: (candidate, series). gain: (block, candidate, series), compared with persistence. known: (block,
    series). origins: (series,) number of origins that do not overlap.
    """

    ratio: Array
    gain: Array
    known: Mask
    origins: Array

    @classmethod
    def of(cls, losses: Array, counts: Array, lead: float) -> "LeadRecord":
        """Build the record from sums of losses.

        losses: (block, candidate, series) sums, persistence first. counts: (block, series). lead: in blocks.
        """
        unit = losses[:, 0].sum(axis=0)
        scaled = np.divide(losses, unit, out=np.zeros_like(losses), where=unit > 0)
        ratio = np.where(unit > 0, scaled.sum(axis=0), 1.0)
        known = counts > 0
        return cls(ratio, scaled[:, :1] - scaled, known, np.minimum(counts.sum(axis=0), known.sum(axis=0) / lead))


def compute_mean_of_others(values: Array, known: Mask) -> Array:
    """Return (..., series) the mean over the other series that are known, 0 if there are none."""
    filled = np.where(known, values, 0.0)
    others = known.sum(axis=-1, keepdims=True) - known
    return np.asarray((filled.sum(axis=-1, keepdims=True) - filled) / np.maximum(others, 1))


def compute_daily_t_statistic(gain: Array, known: Mask, lead: float, a_day: int) -> Array:
    """Return the mean divided by its standard error: (block, candidate, series) -> (candidate, series).

    If there are enough days, the mean is over days. They even out what one hour of the day gains and
    another loses. Otherwise it is over blocks. lead: in blocks. a_day: the blocks of a day.
    """
    by_day = gain.reshape(-1, a_day, *gain.shape[1:]).sum(axis=1)
    days = np.asarray(known.reshape(-1, a_day, known.shape[-1]).any(axis=1))
    many = known.sum(axis=0) >= FEWEST_DAYS * a_day
    return np.where(many, _compute_t_statistic(by_day, days, lead / a_day), _compute_t_statistic(gain, known, lead))


def _compute_t_statistic(gain: Array, known: Mask, lead: float) -> Array:
    """Return the mean gain divided by its standard error, with `lead` units counted as one.

    Units without outcomes are 0. A positive gain that never varies gives inf.
    """
    units = np.maximum(known.sum(axis=0), 2)
    mean = gain.sum(axis=0) / units
    variance = np.maximum((gain**2).sum(axis=0) / units - mean**2, 0.0) * units / (units - 1)
    error = np.sqrt(variance * max(1.0, lead) / units)
    return np.asarray(np.divide(mean, error, out=np.where(mean > 0, np.inf, 0.0), where=error > 0))
