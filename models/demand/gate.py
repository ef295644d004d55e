"""The gate chooses which forecaster serves each series and horizon band, and calibrates its quantiles.

Issued forecasts wait for their outcome. Then the gate scores each candidate as it would have served, and calibrates it:

    issue(origin) ──► pending ──► mature(bin): loss of each candidate, by blocks of origins
                                               offsets of its quantiles (models/calibrate.py)

    candidates = the forecasters, and the mean of their quantiles by weights that follow outcomes
    served     = per series and band the candidate with the lowest loss over four weeks of those that beat persistence:
                 a forecaster by 3 % and by more than chance in this series; the mean, which hedges, by 1.5 % and by
                 more than the standard error of its gain over all series. Else persistence, the first name

Persistence, Theta and trees begin with equal weights, others with little. Outcomes move a weight in its series and in
all: exponentiated gradient of the pinball loss (Kivinen and Warmuth, 1997; for quantiles Berrisch and Ziel, 2021). With
few origins without overlap a gain must be clearer; one over the whole panel needs less evidence in a series.

Neighbouring horizons share a band, so that a forecast does not jump from one hour to the next. Only matured outcomes
move the state, so no forecast depends on what came after it.
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
EQUALS = ("persistence", "theta", "trees")  # who begins with weight 1 in the mean
OTHERS_WEIGHT = 0.03
WEIGHT_RATE = 0.25  # of an outcome that does not overlap with others, in units of persistence's usual error
WEIGHT_HALF = 672.0  # such outcomes after which one counts half: four weeks of hours
MOST_REGRET, LEAST_STANDING = 3.0, -50.0
WIN, WIN_MEAN = 0.97, 0.985
SURE_T, SURE_T_MEAN = 2.0, 1.0
FEWEST_ORIGINS, FEW_ORIGINS = 3.0, 5.0  # a gain must be 1 + FEW_ORIGINS / origins times as sure
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
    """The gate of one target's series. One writer. names: the forecasters, persistence first. ceiling: (series,), inf
    or NaN for none; nothing is below 0. shadows are scored like the others and never serve, alone or in the mean."""

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
        self._band_of = np.unique(bands, return_inverse=True)[1]
        self._bands = [np.flatnonzero(bands == band) for band in range(len(BAND_ENDS_S) + 1) if (bands == band).any()]
        shape = (len(self.steps), len(self.series))
        candidates = len(self.names)
        self.tracker = QuantileTracker.of(QUANTILES, candidates, self.steps, len(self.series), bin_s)
        self._losses = np.zeros((kept, candidates + 1, *shape), np.float32)  # the last candidate is "as served"
        self._hits = np.zeros((kept, *shape), np.float32)
        self._counts = np.zeros((kept, *shape), np.float32)
        self._blocks = np.full(kept, -1, np.int64)  # which block each row holds
        self._chosen = np.zeros(shape, np.intp)
        start = np.where(np.isin(names, EQUALS), 1.0, OTHERS_WEIGHT)
        self._start = np.where(self._shadow[:-1], 0.0, start)
        self._standing = np.zeros((len(names), len(self._bands), len(self.series)))  # log of what a weight has gained
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
        """End a bin: score its forecasts. outcomes: (series,), NaN unknown; one above the ceiling raises it."""
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
        """Per series: what was served against the better naive one over four weeks, all leads together; None before any
        outcome. `origins` counts matured forecasts over all leads."""
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
        """Switch a forecaster to another version: its record becomes persistence's. The mean keeps its own, as its
        weights follow outcomes whoever forecasts."""
        at = self.names.index(name)
        self._standing[at] = self._standing[0]
        self._losses[:, at] = self._losses[:, 0]
        self.tracker.offset[at] = self.tracker.offset[0]
        for row in (row for rows in self._pending.values() for row in rows):
            row.raw[at] = row.raw[0]
        self._choose()

    def _candidates(self, raw: Array) -> Array:
        """(candidate, quantile, step, series): persistence stands in for who cannot forecast; the mean comes last."""
        heard = np.asarray(np.isfinite(raw).all(axis=1))
        known = np.where(heard[:, None], raw, raw[:1])
        heard[0] = True
        weights = self._weights() * heard
        mean = np.einsum("kqts,kts->qts", known, weights / weights.sum(axis=0))
        return np.concatenate([known, mean[None]])

    def _weights(self) -> Array:
        """(forecaster, step, series) of the mean. A series' own standings add to those of the panel."""
        size = self.tracker.size[[band[0] for band in self._bands]]
        total = size.sum(axis=1, keepdims=True)
        share = np.divide(size, total, out=np.zeros_like(size), where=total > 0)
        standing = self._standing.copy()
        if len(self.series) > 1:
            standing += (standing * share).sum(axis=2, keepdims=True)
        standing[self._start == 0] = -np.inf
        behind = np.maximum(standing - standing.max(axis=0), LEAST_STANDING)
        return np.asarray((self._start[:, None, None] * np.exp(behind))[:, self._band_of])

    def _weigh(self, at: int, raw: Array, outcome: Array, known: NDArray[np.bool_]) -> None:
        """Raise those who would have drawn the mean towards the outcome. raw: (candidate, quantile, series)."""
        mean, size, band = raw[-1], self.tracker.size[at], int(self._band_of[at])
        slope = (outcome <= mean) - LEVELS[:, None]
        regret = 2 * (slope * (raw[:-1] - mean)).mean(axis=1)
        regret = np.divide(regret, size, out=np.zeros_like(regret), where=size > 0).clip(-MOST_REGRET, MOST_REGRET)
        share = 1 / (len(self._bands[band]) * self.tracker.overlap[at])
        moved = self._standing[:, band] * 0.5 ** (share / WEIGHT_HALF) - WEIGHT_RATE * share * regret
        self._standing[:, band] = np.where(known, moved, self._standing[:, band])

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
        self._weigh(at, raw, outcome, known)

    def _choose(self) -> None:
        """Choose anew for every band, from what has matured."""
        for band in self._bands:
            loss, gain, size, origins = self._band_losses(band)
            lead = max(self.steps[at] for at in band) / self._block
            ratio, t, t_of_all = _judged(loss, *_units(gain, lead), size, origins)
            ratio[self._shadow] = np.inf
            doubt = np.where(origins < FEWEST_ORIGINS, np.inf, 1 + FEW_ORIGINS / np.maximum(origins, 1.0))
            earns = (ratio <= WIN) & (t > SURE_T * doubt)
            earns[-1] = (ratio[-1] <= WIN_MEAN) & (t_of_all[-1] > SURE_T_MEAN * doubt)
            earned = np.where(earns, ratio, np.inf)
            earned[0] = 1.0
            self._chosen[band] = earned.argmin(axis=0)

    def _band_losses(self, band: NDArray[np.intp]) -> tuple[Array, Array, Array, Array]:
        """loss (candidate, series), gain over persistence (block, candidate, series), size and origins (series,). size:
        persistence's mean loss, the unit at each lead, so leads weigh the same; origins: those that do not overlap."""
        sums = self._losses[:, :-1, band].astype(np.float64)
        counts = self._counts[:, band].astype(np.float64)
        unit = sums[:, 0].sum(axis=0) / np.maximum(counts.sum(axis=0), 1.0)
        scaled = np.divide(sums, unit, out=np.zeros_like(sums), where=unit > 0).sum(axis=2) / len(band)
        blocks = (counts.sum(axis=1) > 0).sum(axis=0)
        lead = max(1, min(self.steps[at] for at in band))
        origins = np.minimum(counts.sum(axis=0).max(axis=0), blocks * self._block / lead)
        return scaled.sum(axis=0), scaled[:, :1] - scaled, unit.sum(axis=0), origins

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
        """State by series, the last axis."""
        tracker = self.tracker
        return {
            "losses": self._losses,
            "hits": self._hits,
            "counts": self._counts,
            "chosen": self._chosen,
            "standing": self._standing,
            "offset": tracker.offset,
            "seen": tracker.seen,
            "size": tracker.size,
        }

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        """The inverse of `dump`; series may come and go. With other forecasters it takes nothing: False."""
        if about["names"] != list(self.names) or about["steps"] != list(self.steps):
            return False
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
        return True


def _ceiling(ceiling: Array | None, series: int) -> Array:
    """(series,) with inf for none."""
    return np.full(series, np.inf) if ceiling is None else np.where(np.isfinite(ceiling), ceiling, np.inf)


def _units(gain: Array, lead: float) -> tuple[Array, float]:
    """(unit, candidate, series) gains of days, or of blocks while days are few; and how many units overlap. lead: in
    blocks. Days even out what one hour of the day gains and another loses."""
    blocks = int((np.abs(gain).max(axis=(1, 2)) > 0).sum())
    a_day = DAY_S // BLOCK_S
    if blocks >= FEWEST_DAYS * a_day:
        gain, lead = gain.reshape(-1, a_day, *gain.shape[1:]).sum(axis=1), lead / a_day
    return gain, max(1.0, lead)


def _judged(loss: Array, gain: Array, overlap: float, size: Array, origins: Array) -> tuple[Array, Array, Array]:
    """(candidate, series) loss relative to persistence, drawn to that of all series; one-sided t of the gain; that t
    over all series, (candidate, 1). size: (series,) weights. Where a series gains, its t is the greater of both."""
    alone = np.divide(loss, loss[:1], out=np.ones_like(loss), where=loss[:1] > 0)
    total = (loss * size).sum(axis=1, keepdims=True)
    pooled = np.divide(total, total[:1], out=np.ones_like(total), where=total[:1] > 0)
    ratio = (origins * alone + POOL_ORIGINS * pooled) / (origins + POOL_ORIGINS) if loss.shape[1] > 1 else alone
    t = _t(gain, overlap)
    t_pooled = _t((gain * size).sum(axis=2, keepdims=True), overlap)
    return ratio, np.where(t > 0, np.maximum(t, t_pooled), t), t_pooled


def _t(gain: Array, overlap: float) -> Array:
    """(unit, candidate, series) -> (candidate, series): mean over its standard error; units without outcomes are 0.
    `overlap` units count as one. A gain that never varies is sure."""
    units = np.maximum((np.abs(gain).max(axis=1, keepdims=True) > 0).sum(axis=0), 2)
    mean = gain.sum(axis=0) / units
    variance = np.maximum((gain**2).sum(axis=0) / units - mean**2, 0.0) * units / (units - 1)
    error = np.sqrt(variance * overlap / units)
    return np.asarray(np.divide(mean, error, out=np.where(mean > 0, np.inf, 0.0), where=error > 0))
