"""Forecasts of intermittent series: demand of small groups, which is zero most of the time.

A hurdle model predicts whether there is any demand at a lead, and how much if there is. It suits levels
that come and go (running GPUs of one user) as well as bursts (arrivals).

    P(any at b + step | none / any at b)   from transitions at this very lead, older ones counting less. If
                                           there are few, it is drawn to the decaying share of bins with
                                           any demand (TSB: Teunter, Syntetos and Babai, 2011)
    size given any                         recent sizes. If there is demand now, it is the last value plus recent
                                           changes over the lead, if those vary less

    quantile(level) = 0 where level <= P(none), else the size's quantile at (level - P(none)) / P(any)

The model forecasts only series whose bins with demand are far apart: their mean interval over the two weeks
before the origin is above MOST_INTERVAL (Syntetos, Boylan and Croston, 2005).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.naive import count_bins_per_day, forward_fill
from fleetcast.models.forecast import QUANTILES, Panel

Array = NDArray[np.float64]
Bins = NDArray[np.intp]
Mask = NDArray[np.bool_]

MOST_INTERVAL = 1.32
WINDOW_DAYS = 14
FEWEST_DAYS = 1  # known bins before anything is said
FEWEST_SIZES = 8
HALF_LIFE_DAYS = 14.0
PRIOR_PAIRS = 1.0  # transitions that the share of bins with any is worth; those at a long lead overlap, so per bin
SIZES = 128  # a forecast's sample, even over the last RECENT bins with any
RECENT = 2048
LEVELS = np.array(QUANTILES)


class SparseForecaster:
    """The forecaster of intermittent demand. It returns NaN for other series, and never negative values."""

    name = "sparse"

    def forecast(self, panel: Panel, origins: Bins, steps: Sequence[int]) -> Array:
        out = np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.nan)
        chosen = is_intermittent(panel.values, origins, count_bins_per_day(panel.bin_s))  # (series, origin)
        rows = np.flatnonzero(chosen.any(axis=1))
        if not len(rows):
            return out
        past = _SparsePast.from_values(panel.values[rows], origins, count_bins_per_day(panel.bin_s))
        for at, step in enumerate(steps):
            found = past.forecast(step)
            found[:, ~chosen[rows].T] = np.nan
            out[:, at][:, :, rows] = found
        return out


def is_intermittent(values: Array, origins: Bins, day: int) -> Mask:
    """Return (series, origin) whether demand is intermittent in the WINDOW_DAYS before the origin.

    There must be enough known bins, enough of them with demand, and a mean interval above MOST_INTERVAL.
    """
    known = _count_in_window(np.isfinite(values), origins, WINDOW_DAYS * day)
    sized = _count_in_window(values > 0, origins, WINDOW_DAYS * day)
    return np.asarray((known >= FEWEST_DAYS * day) & (sized >= FEWEST_SIZES) & (known > MOST_INTERVAL * sized))


def _count_in_window(mask: Mask, origins: Bins, window: int) -> Array:
    """Return (series, origin) how many of the last `window` bins are set. mask: (series, bin)."""
    return compute_prefix_sums(mask, origins) - compute_prefix_sums(mask, origins - window)


def compute_prefix_sums(rows: NDArray[Any], origins: Bins) -> Array:
    """Return (series, origin) the sum of all bins up to and including each origin.

    The sum is 0 for an origin before the first bin. rows: (series, bin).

    >>> compute_prefix_sums(np.array([[1.0, 2.0, 4.0]]), np.array([1, -3, 2])).tolist()
    [[3.0, 0.0, 7.0]]
    """
    ends = np.unique(origins[origins >= 0]) + 1
    if not len(ends):
        return np.zeros((len(rows), len(origins)))
    parts = np.add.reduceat(rows[:, : ends[-1]], np.append(0, ends[:-1]), axis=1, dtype=np.float64)
    sums = np.concatenate([np.zeros((len(rows), 1)), parts.cumsum(axis=1)], axis=1)
    return np.asarray(sums[:, np.searchsorted(ends, origins + 1, side="right")])


@dataclass(frozen=True, slots=True)
class _SparsePast:
    """The past of intermittent series at some origins.

    values: (series, bin). some, none: (series, bin) whether there is any demand, and whether there is none.
    last: (series, origin) the last value. share: (series, origin) the share of bins with demand. sizes:
    (series, origin, SIZES) recent values. age: (bin,) weights, which are less for older bins.
    """

    values: Array
    some: Mask
    none: Mask
    age: Array
    origins: Bins
    last: Array
    share: Array
    sizes: Array

    @classmethod
    def from_values(cls, values: Array, origins: Bins, day: int) -> "_SparsePast":
        some, none = values > 0, values == 0
        age = 2.0 ** (np.arange(values.shape[1]) / (HALF_LIFE_DAYS * day))
        seen = compute_prefix_sums(some * age, origins), compute_prefix_sums(none * age, origins)
        share = seen[0] / np.maximum(seen[0] + seen[1], 1.0)
        last = forward_fill(values)[:, origins]
        return cls(values, some, none, age, origins, last, share, sample_recent(values, some, origins))

    def forecast(self, step: int) -> Array:
        """Return (quantile, origin, series) the forecast `step` bins after each origin."""
        now, p_any = self.last > 0, self.estimate_p_any(step)
        values, some, ends = self.values[:, step:], self.some[:, step:], self.origins - step
        began = sample_recent(values, some & self.none[:, :-step], ends)
        began = np.where(_has_enough_values(began), began, self.sizes)
        both = some & self.some[:, :-step]
        moved = np.maximum(self.last[..., None] + sample_recent(values - self.values[:, :-step], both, ends), 0.0)
        follows = _has_enough_values(moved) & (_compute_spread(moved) < _compute_spread(self.sizes))
        given = np.where(now[..., None], np.where(follows, moved, self.sizes), began)
        return compute_mixture_quantiles(p_any, np.sort(given, axis=-1)).transpose(0, 2, 1)

    def estimate_p_any(self, step: int) -> Array:
        """Return (series, origin) the probability of any demand `step` bins after the origin.

        The probability depends on whether there is demand at the origin.
        """
        age, own, ends = self.age[step:], self.age[self.origins], self.origins - step
        prior = PRIOR_PAIRS * step
        found = []
        for start in (self.none[:, :-step], self.some[:, :-step]):
            hits = compute_prefix_sums((start & self.some[:, step:]) * age, ends) / own
            misses = compute_prefix_sums((start & self.none[:, step:]) * age, ends) / own
            found.append((hits + prior * self.share) / (hits + misses + prior))
        return np.where(self.last > 0, found[1], found[0])


def sample_recent(values: Array, mask: Mask, origins: Bins) -> Array:
    """Return (series, origin, SIZES) a sample of the last RECENT masked values up to each origin.

    values, mask: (series, bin). If there are fewer than SIZES, the rest is NaN.

    >>> sample_recent(np.array([[1.0, 2.0, 3.0]]), np.array([[True, False, True]]), np.array([2]))[0, 0, :3].tolist()
    [3.0, 1.0, nan]
    """
    picked, counts = values[mask], np.count_nonzero(mask, axis=1)
    begin = counts.cumsum() - counts
    upto = compute_prefix_sums(mask, origins).astype(np.intp)
    held = np.minimum(upto, RECENT)[..., None]
    back = np.arange(SIZES) * np.maximum(held, SIZES) // SIZES
    missing = back >= held
    if not len(picked):
        return np.full(missing.shape, np.nan)
    at = np.where(missing, 0, begin[:, None, None] + upto[..., None] - 1 - back)
    return np.where(missing, np.nan, picked[at])


def _has_enough_values(sample: Array) -> Mask:
    """Return (..., 1) whether at least FEWEST_SIZES values of a sample (..., value) are known."""
    return np.asarray(np.isfinite(sample).sum(axis=-1, keepdims=True) >= FEWEST_SIZES)


def _compute_spread(sample: Array) -> Array:
    """Return (..., 1) the mean distance of a sample (..., value) from its mean."""
    known = np.isfinite(sample)
    count = np.maximum(known.sum(axis=-1, keepdims=True), 1)
    mean = np.where(known, sample, 0.0).sum(axis=-1, keepdims=True) / count
    return np.asarray(np.where(known, np.abs(sample - mean), 0.0).sum(axis=-1, keepdims=True) / count)


def compute_mixture_quantiles(p_any: Array, sizes: Array) -> Array:
    """Return (quantile, ...) QUANTILES of a value that is 0, or one of `sizes` with probability `p_any`.

    p_any: (...). sizes: (..., value) ascending, NaN last.

    >>> compute_mixture_quantiles(np.array([0.5]), np.array([[1.0, 2.0, 3.0]]))[:, 0].tolist()
    [0.0, 0.0, 0.0, 0.0, 2.0, 2.6, 2.8]
    """
    levels = LEVELS.reshape(-1, *[1] * p_any.ndim)
    beyond = levels - (1 - p_any)
    within = np.clip(np.divide(beyond, p_any, out=np.zeros_like(beyond), where=p_any > 0), 0.0, 1.0)
    top = np.maximum(np.isfinite(sizes).sum(axis=-1) - 1, 0)
    at = within * top
    low = np.floor(at).astype(np.intp)
    rows = np.moveaxis(sizes, -1, 0)
    below, above = np.take_along_axis(rows, low, axis=0), np.take_along_axis(rows, np.minimum(low + 1, top), axis=0)
    quantiles = np.where(beyond > 0, below + (at - low) * (above - below), 0.0)
    return np.asarray(np.maximum.accumulate(quantiles, axis=0))
