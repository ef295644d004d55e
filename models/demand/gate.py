"""The gate: chooses which forecaster serves each series and lead, and calibrates its quantiles.

Issued forecasts wait for their outcome. Then the gate scores each candidate as it would have served, and
calibrates it:

    issue(origin) ──► pending ──► mature(bin): loss of each candidate, by blocks of origins
                                               offsets of its quantiles (models/calibrate.py)

The candidates are the forecasters, and the mean of their quantiles by weights that follow outcomes. For
each series and lead, the candidate with the lowest loss over four weeks serves, of those that meet three
conditions:

    it beats persistence      a forecaster by 3 % and by more than chance. The mean, which hedges, by 1.5 %
                              and one standard error
    it has not fallen behind  persistence lately (Page's test, 1954)
    it is not too far away    from persistence, compared with the distances at which it was right

If none does, persistence serves, which is the first name. A candidate must win at the lead itself. Its
band (up to an hour, up to six, longer) may show how certain that is.

Persistence, Theta and trees start with equal weights, the others with small ones. Outcomes change a
weight in their own series and in all others: exponentiated gradient of the pinball loss (Kivinen and
Warmuth, 1997; for quantiles Berrisch and Ziel, 2021). With few origins that do not overlap, a gain must
be clearer.

Everything is in units of persistence's own error in that series. So no choice depends on the unit of a
series, or on how large its neighbours are. The effect of neighbours on a weight or a t is bounded. Only
matured outcomes change the state, so no forecast depends on what came after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.calibrate import QuantileTracker
from fleetcast.models.demand.evidence import LeadRecord, compute_daily_t_statistic, compute_mean_of_others
from fleetcast.models.forecast import QUANTILES

Array = NDArray[np.float64]

MEAN = "mean"
DAY_S = 86_400
HISTORY_DAYS, DAYS_OF_COVERAGE = 28, 7
BLOCK_S = 21_600  # losses are summed by the block of the origin; so often a choice is made anew
A_DAY = DAY_S // BLOCK_S
BAND_ENDS_S = (3600, 21_600)
EQUALS = ("persistence", "theta", "trees")  # who begins with weight 1 in the mean
OTHERS_WEIGHT = 0.03
WEIGHT_RATE = 0.25  # of an outcome that does not overlap with others, in units of persistence's usual error
WEIGHT_HALF = 672.0  # such outcomes after which one counts half: four weeks of hours
MOST_REGRET, LEAST_STANDING = 3.0, -50.0
WIN, WIN_MEAN = 0.97, 0.985
SURE_T, SURE_T_MEAN = 2.0, 1.0
FEWEST_ORIGINS, FEW_ORIGINS = 3.0, 8.0  # a gain must be 1 + FEW_ORIGINS / origins times as sure
MOST_SAID, MOST_LENT = 2.0, 3.0  # what the other series together add to a t, and to a standing
MOST_BEHIND = 6.0  # in persistence's usual errors; who is farther behind does not serve
MOST_APART = 1.5  # times the farthest from persistence that a candidate was right: beyond it, its record says nothing
LAST_OUTCOMES = 3  # within which a spike is over
BASELINES = ("persistence", "seasonal_naive")
LEVELS = np.array(QUANTILES)
MEDIAN = QUANTILES.index(0.5)
LOW_80, HIGH_80 = QUANTILES.index(0.1), QUANTILES.index(0.9)


def pinball(quantiles: Array, outcome: Array) -> Array:
    """Return (..., series) the mean over the levels of 2 * pinball loss.

    quantiles: (quantile, ..., series). outcome: (series,).

    >>> pinball(np.full((7, 1), 3.0), np.array([5.0])).tolist()
    [2.0]
    """
    gap = outcome - quantiles
    levels = LEVELS.reshape(-1, *[1] * (quantiles.ndim - 1))
    return np.asarray(2 * np.maximum(levels * gap, (levels - 1) * gap).mean(axis=0))


@dataclass(frozen=True, slots=True)
class Served:
    """The forecasts that the gate serves.

    values: (quantile, step, series), calibrated and within the bounds. model: (step, series) names.
    """

    values: Array
    model: NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class Pending:
    """A forecast that waits for its outcome.

    raw: (candidate, quantile, series). served: (quantile, series).
    """

    origin: int
    step: int  # index of the step
    raw: Array
    served: Array


class Gate:
    """The gate of one target's series, with one writer.

    names: the forecasters, persistence first. ceiling: (series,), inf or NaN for none. Nothing is below 0.
    shadows: forecasters that are scored like the others and never serve, alone or in the mean. whole:
    (series,) whether the series has whole numbers only. It is then served in whole numbers, until an outcome
    is not whole.
    """

    def __init__(
        self,
        names: Sequence[str],
        steps: Sequence[int],
        series: Sequence[str],
        bin_s: int = 600,
        ceiling: Array | None = None,
        shadows: Sequence[str] = (),
        whole: NDArray[np.bool_] | None = None,
    ) -> None:
        self.names = (*names, MEAN)
        self._shadow = np.isin(self.names, list(shadows))
        self.steps = tuple(steps)
        self.series = tuple(series)
        self.bin_s = bin_s
        self._block = max(1, BLOCK_S // bin_s)
        remembered = HISTORY_DAYS * DAY_S // BLOCK_S
        self.ceiling = _fill_ceilings(ceiling, len(self.series))
        self.whole = np.zeros(len(self.series), bool) if whole is None else whole
        bands = np.searchsorted(BAND_ENDS_S, [step * bin_s for step in self.steps])
        self._bands = [np.flatnonzero(bands == band) for band in np.unique(bands)]
        shape = (len(self.steps), len(self.series))
        candidates = len(self.names)
        self.tracker = QuantileTracker.of(QUANTILES, candidates, self.steps, len(self.series), bin_s)
        self._losses = np.zeros((remembered, candidates + 1, *shape))  # the last candidate is "as served"
        self._hits = np.zeros((remembered, *shape), np.float32)  # of those that moved: outcomes within the 80 % band
        self._moved = np.zeros((remembered, *shape), np.float32)  # forecasts of which band or outcome was not one value
        self._counts = np.zeros((remembered, *shape), np.float32)
        self._blocks = np.full(remembered, -1, np.int64)  # which block each row holds
        self._earned = np.full((candidates, *shape), np.inf)  # loss in units of persistence's, of who beat it
        self._earned[0] = 1.0
        start = np.where(np.isin(names, EQUALS), 1.0, OTHERS_WEIGHT)
        self._start = np.where(self._shadow[:-1], 0.0, start)
        self._standing = np.zeros((len(names), *shape))  # log of what a weight has gained
        self._behind = np.zeros((candidates, *shape))  # persistence lately, in its usual errors
        self._apart = np.zeros((candidates, *shape))  # the farthest from persistence that it was right, older ones less
        self._last = np.full((LAST_OUTCOMES, len(self.series)), np.nan)
        self._stamp = -1
        self._pending: dict[int, list[Pending]] = {}

    def issue(self, origin: int, raw: Array) -> Served:
        """Serve a forecast, and keep it until its outcome is known.

        raw: (forecaster, quantile, step, series), NaN where a forecaster cannot forecast.
        """
        candidates = self._make_candidates(raw)
        served = self._serve(candidates)
        for at, step in enumerate(self.steps):
            row = Pending(origin, at, candidates[:, :, at].copy(), served.values[:, at].copy())
            self._pending.setdefault(origin + step, []).append(row)
        return served

    def serve(self, raw: Array) -> Served:
        """Return what would be served now. Stores nothing."""
        return self._serve(self._make_candidates(raw))

    def mature(self, bin: int, outcomes: Array) -> None:
        """End a bin, and score the forecasts of it.

        outcomes: (series,), NaN if unknown. An outcome above the ceiling raises the ceiling.
        """
        self.ceiling = np.fmax(self.ceiling, outcomes)
        self.whole = self.whole & are_whole_numbers(outcomes)
        self._last[:] = np.concatenate([self._last[1:], outcomes[None]])
        for row in self._pending.pop(bin, ()):
            self._score(row, outcomes)
        for late in [due for due in self._pending if due < bin]:
            del self._pending[late]
        stamp = bin // self._block
        if stamp != self._stamp:
            self._stamp = stamp
            self._choose()

    def record(self) -> list[dict[str, float | int | None]]:
        """Return, for each series, the loss of served forecasts relative to that of the better naive one.

        It is over four weeks and all leads. Each row also has the coverage of DAYS_OF_COVERAGE days, and the
        number of forecasts that matured. The coverage leaves out forecasts whose band is one value that came true.
        """
        sums = self._losses.sum(axis=0)  # (candidate, step, series)
        recent, counts = self._blocks > self._blocks.max() - DAYS_OF_COVERAGE * A_DAY, self._counts.sum(axis=(0, 1))
        hits, moved = (rows[recent].sum(axis=(0, 1)) for rows in (self._hits, self._moved))
        naive = [self.names.index(name) for name in BASELINES if name in self.names] or [0]
        best = sums[naive].min(axis=0).sum(axis=0)
        served = sums[-1].sum(axis=0)
        return [
            {
                "wql_vs_best_naive": round(float(served[n] / best[n]), 3) if best[n] > 0 else None,
                "coverage_80": round(float(hits[n] / moved[n]), 3) if moved[n] else None,
                "origins": int(counts[n]),
            }
            for n in range(len(self.series))
        ]

    def losses(self) -> dict[str, tuple[float, int]]:
        """Return candidate -> (mean loss in units of persistence's, number of forecasts).

        The mean is over leads and series.
        """
        sums = self._losses[:, :-1].sum(axis=0)
        counts = np.where(sums[0] > 0, self._counts.sum(axis=0), 0.0)
        scaled = np.divide(sums * counts, sums[0], out=np.zeros_like(sums), where=sums[0] > 0)
        n = int(counts.sum())
        return {name: (float(scaled[at].sum() / n) if n else 1.0, n) for at, name in enumerate(self.names)}

    def forget(self, name: str) -> None:
        """Replace a forecaster's record by persistence's, because it switches to another version.

        The mean keeps its own record, because its weights follow the outcomes of any forecaster.
        """
        at = self.names.index(name)
        for table in (self._standing, self._behind, self._apart):
            table[at] = table[0]
        self._losses[:, at] = self._losses[:, 0]
        self.tracker.offset[at] = self.tracker.offset[0]
        for row in (row for rows in self._pending.values() for row in rows):
            row.raw[at] = row.raw[0]
        self._choose()

    def _make_candidates(self, raw: Array) -> Array:
        """Return (candidate, quantile, step, series), with the mean last.

        Persistence replaces a forecaster that cannot forecast.
        """
        is_known = np.asarray(np.isfinite(raw).all(axis=1))
        known = np.where(is_known[:, None], raw, raw[:1])
        is_known[0] = True
        weights = self._compute_weights() * is_known
        mean = np.einsum("kqts,kts->qts", known, weights / weights.sum(axis=0))
        return np.concatenate([known, mean[None]])

    def _compute_weights(self) -> Array:
        """Return (forecaster, step, series) the weights in the mean, before they are normalised.

        The standings in other series add to those of a series itself.
        """
        known = self.tracker.seen > 0
        lent = (self._standing - self._standing[0]).clip(-MOST_LENT, MOST_LENT)
        standing = self._standing + compute_mean_of_others(lent, known)
        standing[self._start == 0] = -np.inf
        behind = np.maximum(standing - standing.max(axis=0), LEAST_STANDING)
        return np.asarray(self._start[:, None, None] * np.exp(behind))

    def _update_standing(self, at: int, raw: Array, outcome: Array, known: NDArray[np.bool_]) -> None:
        """Raise the weights of forecasters that would have drawn the mean towards the outcome.

        raw: (candidate, quantile, series).
        """
        mean = raw[-1]
        slope = (outcome <= mean) - LEVELS[:, None]
        regret = _scale_to_units(2 * (slope * (raw[:-1] - mean)).mean(axis=1), self.tracker.size[at])
        share = 1 / self.tracker.overlap[at]
        moved = self._standing[:, at] * 0.5 ** (share / WEIGHT_HALF) - WEIGHT_RATE * share * regret
        self._standing[:, at] = np.where(known, moved, self._standing[:, at])

    def _update_page_test(self, at: int, losses: Array, known: NDArray[np.bool_]) -> None:
        """Apply Page's test: how far each candidate has lost to persistence since the two were last level.

        losses: (candidate, series).
        """
        lost = _scale_to_units(losses - losses[0], self.tracker.size[at], -np.inf) / np.sqrt(self.tracker.overlap[at])
        moved = (self._behind[:, at] + lost).clip(0.0, 2 * MOST_BEHIND)
        self._behind[:, at] = np.where(known, moved, self._behind[:, at])

    def _record_distance(self, at: int, raw: Array, losses: Array, known: NDArray[np.bool_]) -> None:
        """Record how far from persistence each candidate was right. losses: (candidate, series)."""
        right = np.where(losses <= losses[0], _apart(raw, raw[0, MEDIAN]), 0.0)
        remembered = self._apart[:, at] * 0.5 ** (1 / (self.tracker.overlap[at] * WEIGHT_HALF))
        self._apart[:, at] = np.where(known, np.maximum(remembered, right), self._apart[:, at])

    def _serve(self, candidates: Array) -> Served:
        chosen = np.where(self._has_fallen_behind() | self._beyond(candidates), np.inf, self._earned).argmin(axis=0)
        values = self._bounded(self.tracker.apply(candidates, chosen))
        values = np.where(np.isfinite(values), values, self._bounded(candidates[0]))
        return Served(values, np.array(self.names)[chosen])

    def _has_fallen_behind(self) -> NDArray[np.bool_]:
        """Return (candidate, step, series) whether the candidate fell behind at a lead that it had won.

        Such a candidate does not serve longer leads either, because their outcomes come later.
        """
        fell = np.isfinite(self._earned) & (self._behind > MOST_BEHIND)
        return np.asarray(np.logical_or.accumulate(fell, axis=1))

    def _beyond(self, candidates: Array) -> NDArray[np.bool_]:
        """Return (candidate, step, series) whether the candidate is too far from persistence to be trusted.

        That is so if it is clearly farther away than it was ever right. It must also be that far from the last
        outcomes. If it is near one of them, a level has shifted, or a single spike is over.
        """
        few = FEW_ORIGINS * self.tracker.overlap[:, None] / np.maximum(self.tracker.seen, 1.0)
        near = _apart(candidates, candidates[0, MEDIAN])
        for outcome in self._last:
            near = np.fmin(near, _apart(candidates, outcome))
        return np.asarray(near > MOST_APART * (1 + few) * self._apart)

    def _bounded(self, values: Array) -> Array:
        """Limit values to 0 and the ceiling. Round them if the series has whole numbers only.

        Offsets of counts swing around a whole number, which is the quantile. So a rounded band covers no less
        than before.
        """
        if self.whole.any():
            values = np.where(self.whole, np.rint(values), values)
        return np.clip(values, 0.0, self.ceiling)

    def _score(self, row: Pending, outcomes: Array) -> None:
        """Add losses and hits to the block of the origin, and let the trackers learn from the raw forecast."""
        at = row.step
        raw = row.raw
        known = np.isfinite(outcomes) & np.isfinite(raw[0]).all(axis=0)
        outcome = np.where(known, outcomes, 0.0)
        raw[:, :, ~known] = 0.0
        served = np.where(known, row.served, 0.0)
        given = self._bounded(self.tracker.apply_step(raw, at))
        block = row.origin // self._block
        slot = block % len(self._blocks)
        if self._blocks[slot] != block:
            self._blocks[slot] = block
            for table in (self._losses, self._hits, self._moved, self._counts):
                table[slot] = 0.0
        losses = np.concatenate([pinball(given.transpose(1, 0, 2), outcome), pinball(served, outcome)[None]])
        self._losses[slot, :, at] += losses * known
        moved = known & ~((served[LOW_80] == outcome) & (served[HIGH_80] == outcome))
        self._hits[slot, at] += (served[LOW_80] <= outcome) & (outcome <= served[HIGH_80]) & moved
        self._moved[slot, at] += moved
        self._counts[slot, at] += known
        self._update_page_test(at, losses[:-1], known)
        self._record_distance(at, raw, losses[:-1], known)
        self.tracker.learn(at, raw, outcome, known)
        self._update_standing(at, raw, outcome, known)

    def _choose(self) -> None:
        """Compute, from the matured outcomes, which candidates may serve each lead and series."""
        for band in self._bands:
            leads = [max(1, self.steps[at]) / self._block for at in band]
            records = [
                LeadRecord.of(self._losses[:, :-1, at], self._counts[:, at].astype(np.float64), lead)
                for at, lead in zip(band, leads, strict=True)
            ]
            known = np.any([one.known for one in records], axis=0)
            t = compute_daily_t_statistic(np.sum([one.gain for one in records], axis=0), known, max(leads), A_DAY)
            for at, one, lead in zip(band, records, leads, strict=True):
                self._earned[:, at] = self._earning(one, t, lead)

    def _earning(self, one: LeadRecord, t_band: Array, lead: float) -> Array:
        """Return (candidate, series) the loss of candidates that may serve one lead, else inf.

        The loss is in units of persistence's. If a candidate gains at this lead, its t is the greater of this
        lead's and the band's. lead: in blocks.
        """
        win, sure = (np.full((len(self.names), 1), limit) for limit in (WIN, SURE_T))
        win[-1], sure[-1] = WIN_MEAN, SURE_T_MEAN
        t = compute_daily_t_statistic(one.gain, one.known, lead, A_DAY)
        t = np.where(t > 0, np.maximum(t, t_band), t)
        said = compute_mean_of_others(t.clip(-MOST_SAID, MOST_SAID), one.origins >= FEWEST_ORIGINS)
        doubt = np.where(one.origins < FEWEST_ORIGINS, np.inf, 1 + FEW_ORIGINS / np.maximum(one.origins, 1.0))
        earns = (one.ratio <= win) & (t > 0) & (t + said > sure * doubt) & ~self._shadow[:, None]
        earned = np.where(earns, one.ratio, np.inf)
        earned[0] = 1.0
        return earned

    def dump(self) -> tuple[dict[str, Any], dict[str, Array]]:
        """Return copies of the state: a JSON-able part, and arrays by name.

        `load` restores them in a gate with the same names and steps.
        """
        rows = [(due, row) for due, rows in sorted(self._pending.items()) for row in rows]
        about = {
            "names": list(self.names),
            "steps": list(self.steps),
            "series": list(self.series),
            "stamp": self._stamp,
            "pending": [[due, row.origin, row.step] for due, row in rows],
        }
        arrays = {"blocks": self._blocks, **self._list_state_arrays()}
        if rows:
            arrays["raw"] = np.stack([row.raw for _, row in rows])
            arrays["served"] = np.stack([row.served for _, row in rows])
        return about, {name: array.copy() for name, array in arrays.items()}

    def _list_state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the state by name. Their last axis is the series."""
        tracker = self.tracker
        return {
            "losses": self._losses,
            "hits": self._hits,
            "moved": self._moved,
            "counts": self._counts,
            "earned": self._earned,
            "standing": self._standing,
            "behind": self._behind,
            "apart": self._apart,
            "last": self._last,
            "offset": tracker.offset,
            "seen": tracker.seen,
            "size": tracker.size,
        }

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        """Load a dump. Series may have been added or removed since.

        Returns False, and loads nothing, if the dump has other forecasters, steps or arrays.
        """
        same = about["names"] == list(self.names) and about["steps"] == list(self.steps)
        if not same or not set(self._list_state_arrays()) <= set(arrays):
            return False
        old = {name: n for n, name in enumerate(about["series"])}
        pairs = [(n, old[name]) for n, name in enumerate(self.series) if name in old]
        to, source = (np.array([pair[side] for pair in pairs], np.intp) for side in (0, 1))
        self._stamp = int(about["stamp"])
        self._blocks[:] = arrays["blocks"]
        for name, array in self._list_state_arrays().items():
            array[..., to] = arrays[name][..., source]
        for number, (due, origin, step) in enumerate(about["pending"]):
            raw = np.full((len(self.names), len(QUANTILES), len(self.series)), np.nan)
            served = np.full((len(QUANTILES), len(self.series)), np.nan)
            raw[..., to], served[..., to] = arrays["raw"][number][..., source], arrays["served"][number][..., source]
            self._pending.setdefault(due, []).append(Pending(origin, step, raw, served))
        return True


def _fill_ceilings(ceiling: Array | None, series: int) -> Array:
    """Return (series,) the ceilings, inf for none."""
    return np.full(series, np.inf) if ceiling is None else np.where(np.isfinite(ceiling), ceiling, np.inf)


def are_whole_numbers(values: Array) -> NDArray[np.bool_]:
    """Return which values are whole numbers or unknown.

    >>> are_whole_numbers(np.array([2.0, 0.2, np.nan])).tolist()
    [True, False, True]
    """
    return np.asarray((values == np.rint(values)) | np.isnan(values))


def _apart(raw: Array, level: Array) -> Array:
    """Return (candidate, ...) how far each median is from a level. raw: (candidate, quantile, ...)."""
    return np.asarray(np.abs(raw[:, MEDIAN] - level))


def _scale_to_units(values: Array, size: Array, least: float = -MOST_REGRET) -> Array:
    """Return (..., series) values in units of `size`, limited to `least` and MOST_REGRET.

    Where the size is 0, any value other than 0 counts as MOST_REGRET units.
    """
    units = np.divide(values, size, out=np.sign(values) * MOST_REGRET, where=size > 0)
    return np.nan_to_num(units, posinf=np.inf, neginf=-np.inf).clip(least, MOST_REGRET)
