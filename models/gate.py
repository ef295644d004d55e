"""The gate: which forecaster serves each series and horizon band, and quantiles that follow their outcomes.

Every forecast that is issued waits for its outcome. When the bin is over, every candidate is scored at it as it would
have been served, and its calibration learns:

    issue(origin) ──► pending ──► mature(bin): loss of each candidate, by blocks of origins
                                               offsets of its quantiles (models/calibrate.py)

    candidates = the forecasters, and the equal-weight mean of the quantiles of the best three that are near the best
    served     = per series and band the one with the lowest loss over four weeks, if it beats persistence by 3 %, by
                 more than chance, over at least 20 origins that do not overlap; else persistence (the first name)

Neighbouring horizons share a band and so a forecaster: a forecast does not jump where the lead grows by an hour. The
series of a panel are judged together and alone: what wins over all of them needs less evidence in one.
Nothing but matured outcomes moves the state. So a forecast never depends on what came after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.calibrate import QuantileTracker
from models.forecast import QUANTILES

Array = NDArray[np.float64]

MEAN = "mean"
DAY_S = 86_400
DAYS_KEPT = 28
BLOCK_S = 21_600  # losses are summed by the block of the origin; so often a choice is made anew
BAND_ENDS_S = (3600, 21_600)  # up to an hour, up to six, longer
BEST = 3
NEAR = 1.1  # how much worse than the best one may be to enter the mean
WIN = 0.97
SURE_T = 2.0
FEWEST_ORIGINS = 20.0
FEWEST_BLOCKS = 12
FEWEST_DAYS = 7
POOL_ORIGINS = 60.0  # a series is judged as if it had this many origins of the mean series
BASELINES = ("persistence", "seasonal_naive")
LEVELS = np.array(QUANTILES)
LOW_80, HIGH_80 = QUANTILES.index(0.1), QUANTILES.index(0.9)


def pinball(quantiles: Array, outcome: Array) -> Array:
    """(quantile, ..., series), (series,) -> (..., series): mean over the levels of 2 * pinball loss.

    >>> pinball(np.full((7, 1), 3.0), np.array([5.0])).tolist()
    [2.0]
    """
    gap = outcome - quantiles
    levels = LEVELS.reshape(-1, *[1] * (quantiles.ndim - 1))
    return np.asarray(2 * np.maximum(levels * gap, (levels - 1) * gap).mean(axis=0))


@dataclass(frozen=True, slots=True)
class Served:
    """values: (quantile, step, series), calibrated and within the bounds; model: (step, series) of names."""

    values: Array
    model: NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Pending:
    """A forecast that waits. raw: (candidate, quantile, series); served: (quantile, series)."""

    origin: int
    step: int  # index of the step
    raw: NDArray[np.float32]
    served: NDArray[np.float32]


class Gate:
    """The gate of the series of one target. One writer.

    names: the forecasters, persistence first. ceiling: (series,), inf or NaN for none; nothing is below 0.
    shadows: names that are scored like the others and never serve, alone or in the mean.
    """

    def __init__(
        self,
        names: Sequence[str],
        steps: Sequence[int],
        series: Sequence[str],
        bin_s: int = 600,
        ceiling: Array | None = None,
        shadows: Sequence[str] = (),
    ) -> None:
        self.names = (*names, MEAN)
        self._shadow = np.isin(self.names, list(shadows))
        self.steps = tuple(steps)
        self.series = tuple(series)
        self.bin_s = bin_s
        self._block = max(1, BLOCK_S // bin_s)
        kept = DAYS_KEPT * DAY_S // BLOCK_S
        self.ceiling = _ceiling(ceiling, len(self.series))
        ends = [step * bin_s for step in self.steps]
        bands = np.searchsorted(BAND_ENDS_S, ends)
        self._bands = [np.flatnonzero(bands == band) for band in range(len(BAND_ENDS_S) + 1) if (bands == band).any()]
        shape = (len(self.steps), len(self.series))
        candidates = len(self.names)
        self.tracker = QuantileTracker.of(QUANTILES, candidates, self.steps, len(self.series), bin_s)
        self._losses = np.zeros((kept, candidates + 1, *shape), np.float32)  # the last candidate is "as served"
        self._hits = np.zeros((kept, *shape), np.float32)
        self._counts = np.zeros((kept, *shape), np.float32)
        self._blocks = np.full(kept, -1, np.int64)  # which block each row holds
        self._chosen = np.zeros(shape, np.intp)
        self._best = np.zeros((BEST, *shape), np.intp)
        self._stamp = -1
        self._pending: dict[int, list[Pending]] = {}

    def issue(self, origin: int, raw: Array) -> Served:
        """Serve, and remember for the outcome. raw: (forecaster, quantile, step, series), NaN where one cannot."""
        candidates = self._candidates(raw)
        served = self._serve(candidates)
        for at, step in enumerate(self.steps):
            row = Pending(origin, at, candidates[:, :, at].astype(np.float32), served.values[:, at].astype(np.float32))
            self._pending.setdefault(origin + step, []).append(row)
        return served

    def serve(self, raw: Array) -> Served:
        """What would be served now; nothing is remembered."""
        return self._serve(self._candidates(raw))

    def mature(self, bin: int, outcomes: Array) -> None:
        """A bin is over. outcomes: (series,), NaN is unknown. Forecasts for it and for earlier bins are done with.

        What lies above the ceiling shows that the ceiling was wrong: it rises.
        """
        self.ceiling = np.fmax(self.ceiling, outcomes)
        for row in self._pending.pop(bin, ()):
            self._score(row, outcomes)
        for late in [due for due in self._pending if due < bin]:
            del self._pending[late]
        stamp = bin // self._block
        if stamp != self._stamp:
            self._stamp = stamp
            self._choose()

    def record(self) -> list[dict[str, float | int | None]]:
        """Per series: what was served against the better of the naive ones over four weeks, all leads together.

        `origins` counts matured forecasts over all leads; the rest is None before the first.
        """
        sums = self._losses.sum(axis=0, dtype=np.float64)  # (candidate, step, series)
        counts, hits = self._counts.sum(axis=(0, 1)), self._hits.sum(axis=(0, 1))
        naive = [self.names.index(name) for name in BASELINES if name in self.names] or [0]
        best = sums[naive].min(axis=0).sum(axis=0)
        served = sums[-1].sum(axis=0)
        return [
            {
                "wql_vs_best_naive": round(float(served[n] / best[n]), 3) if best[n] > 0 else None,
                "coverage_80": round(float(hits[n] / counts[n]), 3) if counts[n] else None,
                "origins": int(counts[n]),
            }
            for n in range(len(self.series))
        ]

    def losses(self) -> dict[str, tuple[float, int]]:
        """Candidate -> mean loss in units of persistence's, over leads and series; and how many forecasts that is."""
        sums = self._losses[:, :-1].sum(axis=0, dtype=np.float64)
        counts = np.where(sums[0] > 0, self._counts.sum(axis=0), 0.0)
        scaled = np.divide(sums * counts, sums[0], out=np.zeros_like(sums), where=sums[0] > 0)
        n = int(counts.sum())
        return {name: (float(scaled[at].sum() / n) if n else 1.0, n) for at, name in enumerate(self.names)}

    def forget(self, name: str) -> None:
        """A forecaster is another one from now on: as if the one before had said what persistence said."""
        for at in (self.names.index(name), self.names.index(MEAN)):
            self._losses[:, at] = self._losses[:, 0]
            self.tracker.offset[at] = self.tracker.offset[0]
            for row in (row for rows in self._pending.values() for row in rows):
                row.raw[at] = row.raw[0]
        self._choose()

    def _candidates(self, raw: Array) -> Array:
        """(candidate, quantile, step, series): who cannot forecast says what persistence says; the mean at the end."""
        known = np.where(np.isfinite(raw).all(axis=1, keepdims=True), raw, raw[:1])
        best = np.take_along_axis(known, self._best[:, None], axis=0)
        return np.concatenate([known, best.mean(axis=0, keepdims=True)])

    def _serve(self, candidates: Array) -> Served:
        calibrated = self._bounded(self.tracker.apply(candidates))
        values = np.take_along_axis(calibrated, self._chosen[None, None], axis=0)[0]
        return Served(values, np.array(self.names)[self._chosen])

    def _bounded(self, values: Array) -> Array:
        return np.clip(values, 0.0, self.ceiling)

    def _score(self, row: Pending, outcomes: Array) -> None:
        """Add losses and hits to the block of the origin; then the trackers learn from the raw forecast."""
        at = row.step
        raw = row.raw.astype(np.float64)
        known = np.isfinite(outcomes) & np.isfinite(raw[0]).all(axis=0)
        outcome = np.where(known, outcomes, 0.0)
        raw[:, :, ~known] = 0.0
        served = np.where(known, row.served, 0.0)
        given = self._bounded(self.tracker.apply_step(raw, at))
        block = row.origin // self._block
        slot = block % len(self._blocks)
        if self._blocks[slot] != block:
            self._blocks[slot] = block
            for table in (self._losses, self._hits, self._counts):
                table[slot] = 0.0
        losses = np.concatenate([pinball(given.transpose(1, 0, 2), outcome), pinball(served, outcome)[None]])
        self._losses[slot, :, at] += losses * known
        self._hits[slot, at] += (served[LOW_80] <= outcome) & (outcome <= served[HIGH_80]) & known
        self._counts[slot, at] += known
        self.tracker.learn(at, raw, outcome, known)

    def _choose(self) -> None:
        """Choose anew for every band, from what has matured."""
        for band in self._bands:
            loss, gain, evidence = self._band_losses(band)
            lead = max(self.steps[at] for at in band) / self._block
            ratio, sure = _judged(loss, *_units(gain, lead), evidence)
            ratio[self._shadow] = np.inf
            ratio[1:][loss[1:] == loss[0]] = np.inf  # who says nothing of a series is persistence, once in the mean
            earned = np.where(sure & (ratio <= WIN), ratio, np.inf)
            earned[0] = 1.0
            self._chosen[band] = earned.argmin(axis=0)
            self._best[:, band] = _best(ratio[:-1], evidence)[:, None]

    def _band_losses(self, band: NDArray[np.intp]) -> tuple[Array, Array, Array]:
        """loss (candidate, series), gain over persistence (block, candidate, series), origins (series,).

        Losses of a lead are in units of persistence's mean loss at that lead, so that leads weigh the same.
        """
        sums = self._losses[:, :-1, band].astype(np.float64)
        counts = self._counts[:, band].astype(np.float64)
        unit = sums[:, 0].sum(axis=0) / np.maximum(counts.sum(axis=0), 1.0)
        scaled = np.divide(sums, unit, out=np.zeros_like(sums), where=unit > 0).sum(axis=2) / len(band)
        gain = scaled[:, :1] - scaled
        lead = max(1, min(self.steps[at] for at in band))
        blocks = (counts.sum(axis=1) > 0).sum(axis=0)
        evidence = np.minimum(counts.sum(axis=0).max(axis=0), blocks * self._block / lead)
        return scaled.sum(axis=0), gain, np.where(blocks >= FEWEST_BLOCKS, evidence, 0.0)

    def dump(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """JSON-able, and arrays by name; `load` takes them into a gate of the same names, steps and series."""
        rows = [(due, row) for due, rows in sorted(self._pending.items()) for row in rows]
        about = {
            "names": list(self.names),
            "steps": list(self.steps),
            "series": list(self.series),
            "stamp": self._stamp,
            "pending": [[due, row.origin, row.step] for due, row in rows],
        }
        arrays = {"blocks": self._blocks, **self._arrays()}
        if rows:
            arrays["raw"] = np.stack([row.raw for _, row in rows])
            arrays["served"] = np.stack([row.served for _, row in rows])
        return about, {name: array.astype(np.float64) for name, array in arrays.items()}

    def _arrays(self) -> dict[str, NDArray[Any]]:
        """What is kept by series, the last axis."""
        tracker = self.tracker
        return {
            "losses": self._losses,
            "hits": self._hits,
            "counts": self._counts,
            "chosen": self._chosen,
            "best": self._best,
            "offset": tracker.offset,
            "seen": tracker.seen,
            "size": tracker.size,
        }

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> None:
        """The inverse of `dump`. Other forecasters or steps: the gate begins anew. Series may come and go."""
        if about["names"] != list(self.names) or about["steps"] != list(self.steps):
            return
        old = {name: n for n, name in enumerate(about["series"])}
        pairs = [(n, old[name]) for n, name in enumerate(self.series) if name in old]
        to, source = (np.array([pair[side] for pair in pairs], np.intp) for side in (0, 1))
        self._stamp = int(about["stamp"])
        self._blocks[:] = arrays["blocks"]
        for name, array in self._arrays().items():
            array[..., to] = arrays[name][..., source]
        for number, (due, origin, step) in enumerate(about["pending"]):
            raw = np.full((len(self.names), len(QUANTILES), len(self.series)), np.nan, np.float32)
            served = np.full((len(QUANTILES), len(self.series)), np.nan, np.float32)
            raw[..., to], served[..., to] = arrays["raw"][number][..., source], arrays["served"][number][..., source]
            self._pending.setdefault(due, []).append(Pending(origin, step, raw, served))


def _ceiling(ceiling: Array | None, series: int) -> Array:
    """(series,) with inf for none."""
    return np.full(series, np.inf) if ceiling is None else np.where(np.isfinite(ceiling), ceiling, np.inf)


def _best(ratio: Array, evidence: Array) -> NDArray[np.intp]:
    """(BEST, series) the members of the mean: the best three, as far as they are near the best."""
    order = ratio.argsort(axis=0, kind="stable")[:BEST]
    near = np.take_along_axis(ratio, order, axis=0) <= NEAR * ratio.min(axis=0)
    best = np.zeros((BEST, ratio.shape[1]), np.intp)
    best[:] = order[0]
    best[: len(order)] = np.where(near, order, order[0])
    best[:, evidence < FEWEST_ORIGINS] = 0
    return best


def _units(gain: Array, lead: float) -> tuple[Array, float]:
    """(unit, candidate, series) gains of days, or of blocks while there are few days; how many units overlap.

    lead: in blocks. Days are better units: what one hour of the day gains and another loses evens out.
    """
    blocks = int((np.abs(gain).max(axis=(1, 2)) > 0).sum())
    a_day = DAY_S // BLOCK_S
    if blocks >= FEWEST_DAYS * a_day:
        gain, lead = gain.reshape(-1, a_day, *gain.shape[1:]).sum(axis=1), lead / a_day
    return gain, max(1.0, lead)


def _judged(loss: Array, gain: Array, overlap: float, evidence: Array) -> tuple[Array, NDArray[np.bool_]]:
    """(candidate, series) loss relative to persistence, drawn to that of all series; and where a gain is sure.

    The gain of a unit of time is tested by a one-sided t; `overlap` units count as one. In one series a gain that all
    series show is sure enough when it shows there at all.
    """
    alone = np.divide(loss, loss[:1], out=np.ones_like(loss), where=loss[:1] > 0)
    total = loss.sum(axis=1, keepdims=True)
    pooled = np.divide(total, total[:1], out=np.ones_like(total), where=total[:1] > 0)
    ratio = (evidence * alone + POOL_ORIGINS * pooled) / (evidence + POOL_ORIGINS) if loss.shape[1] > 1 else alone
    seen = (loss[0] > 0) & (evidence >= FEWEST_ORIGINS)
    t_alone = _t(gain, overlap)
    t_pooled = _t(gain.sum(axis=2, keepdims=True), overlap)
    return ratio, ((t_alone > SURE_T) | ((t_pooled > SURE_T) & (t_alone > 0))) & seen


def _t(gain: Array, overlap: float) -> Array:
    """(unit, candidate, series) -> (candidate, series): mean by its standard error; units without outcomes are 0."""
    units = np.maximum((np.abs(gain).max(axis=1, keepdims=True) > 0).sum(axis=0), 2)
    mean = gain.sum(axis=0) / units
    variance = np.maximum((gain**2).sum(axis=0) / units - mean**2, 0.0) * units / (units - 1)
    error = np.sqrt(variance * overlap / units)
    return np.asarray(np.divide(mean, error, out=np.zeros_like(mean), where=error > 0))
