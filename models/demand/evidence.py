"""The evidence that a candidate beats persistence, from four weeks of losses at one lead.

All numbers are in units of persistence's own loss in the same series. So they do not depend on the unit of
the series. `fleetcast evaluate demand` measures the constants (training/RESULTS.md, Demand).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]

FEWEST_DAYS = 7
WIN, WIN_MEAN = 0.97, 0.985  # a loss below this share of persistence's
SURE_T, SURE_T_MEAN = 2.0, 1.0  # standard errors by which it must be better
FEWEST_ORIGINS, FEW_ORIGINS = 3.0, 8.0  # a gain must be 1 + FEW_ORIGINS / origins times as sure
MOST_SAID = 2.0  # what the other series together add to a t


@dataclass(frozen=True, slots=True)
class LeadRecord:
    """The losses of the last four weeks at one lead, in units of persistence's loss.

    ratio: (candidate, series) loss divided by persistence's. gain: (block, candidate, series)
    persistence's loss less the candidate's. known: (block, series). origins: (series,) number of
    origins that do not overlap.
    """

    ratio: Array
    gain: Array
    known: Mask
    origins: Array

    @classmethod
    def from_sums(cls, losses: Array, counts: Array, lead: float) -> "LeadRecord":
        """Build the record from sums of losses by block of origins.

        losses: (block, candidate, series), persistence first. counts: (block, series) number of losses.
        lead: in blocks.
        """
        unit = losses[:, 0].sum(axis=0)
        scaled = np.divide(losses, unit, out=np.zeros_like(losses), where=unit > 0)
        ratio = np.where(unit > 0, scaled.sum(axis=0), 1.0)
        known = counts > 0
        return cls(ratio, scaled[:, :1] - scaled, known, np.minimum(counts.sum(axis=0), known.sum(axis=0) / lead))


def compute_mean_of_others(values: Array, known: Mask) -> Array:
    """Return (..., series) for each series the mean over all other known series, 0 if there are none."""
    filled = np.where(known, values, 0.0)
    others = known.sum(axis=-1, keepdims=True) - known
    return np.asarray((filled.sum(axis=-1, keepdims=True) - filled) / np.maximum(others, 1))


def compute_daily_t_statistic(gain: Array, known: Mask, lead: float, a_day: int) -> Array:
    """Return (candidate, series) the t statistic of the gain: its mean divided by its standard error.

    gain: (block, candidate, series). If there are enough days, daily means are used, because gains and losses
    of different hours cancel within a day. Otherwise, blocks are used. lead: in blocks. a_day: the number of
    blocks of a day.
    """
    by_day = gain.reshape(-1, a_day, *gain.shape[1:]).sum(axis=1)
    days = np.asarray(known.reshape(-1, a_day, known.shape[-1]).any(axis=1))
    many = known.sum(axis=0) >= FEWEST_DAYS * a_day
    return np.where(many, _compute_t_statistic(by_day, days, lead / a_day), _compute_t_statistic(gain, known, lead))


def _compute_t_statistic(gain: Array, known: Mask, lead: float) -> Array:
    """Return the mean gain divided by its standard error. Gains within one lead count as a single observation.

    gain: (unit, candidate, series), 0 in units without outcomes. lead: in units. A positive gain that never
    varies gives inf.
    """
    units = np.maximum(known.sum(axis=0), 2)
    mean = gain.sum(axis=0) / units
    variance = np.maximum((gain**2).sum(axis=0) / units - mean**2, 0.0) * units / (units - 1)
    error = np.sqrt(variance * max(1.0, lead) / units)
    return np.asarray(np.divide(mean, error, out=np.where(mean > 0, np.inf, 0.0), where=error > 0))


def compute_earned_losses(one: LeadRecord, t_band: Array, lead: float, a_day: int, is_shadow: Mask) -> Array:
    """Return (candidate, series) the loss of each candidate that may serve one lead, inf for all others.

    The loss is in units of persistence's. A candidate that gains at this lead is judged by the greater of two t
    statistics: that of the lead, and `t_band`, that of its band of leads. The mean is the last candidate. lead:
    in blocks. a_day: the number of blocks of a day. is_shadow: (candidate,) whether it never serves.
    """
    win, sure = (np.full((len(one.ratio), 1), limit) for limit in (WIN, SURE_T))
    win[-1], sure[-1] = WIN_MEAN, SURE_T_MEAN
    t = compute_daily_t_statistic(one.gain, one.known, lead, a_day)
    t = np.where(t > 0, np.maximum(t, t_band), t)
    said = compute_mean_of_others(t.clip(-MOST_SAID, MOST_SAID), one.origins >= FEWEST_ORIGINS)
    doubt = np.where(one.origins < FEWEST_ORIGINS, np.inf, 1 + FEW_ORIGINS / np.maximum(one.origins, 1.0))
    earns = (one.ratio <= win) & (t > 0) & (t + said > sure * doubt) & ~is_shadow[:, None]
    earned = np.where(earns, one.ratio, np.inf)
    earned[0] = 1.0
    return earned
