"""The gate: chooses which forecaster serves each series and lead, and calibrates its quantiles.

Issued forecasts wait for their outcome. Then the gate scores each candidate as it would have served, and
calibrates it:

    issue_forecast(origin) ──► pending ──► score_bin(bin): loss of each candidate, by blocks of origins
                                                           offsets of its quantiles (models/calibrate.py)

The candidates are the forecasters, and a weighted mean of their quantiles. Outcomes change the weights.
For each series and lead, the gate compares the losses of four weeks. The candidate with the lowest loss
serves, among those that meet three conditions:

    it beats persistence      a forecaster by 3 % and by more than chance. The mean, which hedges, by 1.5 %
                              and one standard error
    it has not fallen behind  persistence lately (Page's test, 1954)
    it is not too far away    from persistence, compared with the distances at which it was right

If none does, persistence serves, which is the first name. A candidate must win at the lead itself. Its
band of leads (up to an hour, up to six, longer) may show how certain that is.

Persistence, Theta and trees start with equal weights, the others with small ones. Outcomes change a
weight in their own series and in all others: exponentiated gradient of the pinball loss (Kivinen and
Warmuth, 1997; for quantiles Berrisch and Ziel, 2021). With few origins that do not overlap, a gain must
be clearer.

Everything is in units of persistence's own error in the same series. So no choice depends on the unit of
a series, or on how large its neighbours are. The effect of neighbours on a weight or a t is bounded. Only
matured outcomes change the state, so no forecast depends on later values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.calibrate import QuantileTracker
from fleetcast.models.demand.evidence import LeadRecord, compute_daily_t_statistic, compute_earned_losses
from fleetcast.models.demand.guards import DistanceRecord, PageTest
from fleetcast.models.demand.loss_table import A_DAY, LossTable
from fleetcast.models.demand.mean_weights import MeanWeights
from fleetcast.models.demand.units import are_whole_numbers, compute_pinball_loss
from fleetcast.models.forecast import QUANTILES

Array = NDArray[np.float64]

MEAN = "mean"
BAND_ENDS_S = (3600, 21_600)


@dataclass(frozen=True, slots=True)
class ServedForecasts:
    """The forecasts that the gate serves.

    values: (quantile, step, series), calibrated and within the bounds. model: (step, series) names of
    forecasters.
    """

    values: Array
    model: NDArray[np.str_]


@dataclass(frozen=True, slots=True)
class PendingForecast:
    """A forecast that waits for its outcome.

    raw: (candidate, quantile, series). served: (quantile, series).
    """

    origin: int
    step: int  # index of the step
    raw: Array
    served: Array


class Gate:
    """The gate of one target's series. Only one task may change it.

    names: the forecasters, persistence first. ceiling: (series,), inf or NaN for none. No forecast is below
    0. shadows: forecasters that are scored like the others and never serve, alone or in the mean. whole:
    (series,) whether the series has whole numbers only. The gate serves such a series in whole numbers, until an
    outcome is not whole.
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
        self.ceiling = _fill_ceilings(ceiling, len(self.series))
        self.whole = np.zeros(len(self.series), bool) if whole is None else whole
        bands = np.searchsorted(BAND_ENDS_S, [step * bin_s for step in self.steps])
        self._bands = [np.flatnonzero(bands == band) for band in np.unique(bands)]
        candidates = len(self.names)
        self.tracker = QuantileTracker.empty(QUANTILES, candidates, self.steps, len(self.series), bin_s)
        self._table = LossTable(self.names, len(self.steps), len(self.series), bin_s)
        self._weights = MeanWeights(names, self._shadow[:-1], self.tracker)
        self._page = PageTest(candidates, self.tracker)
        self._distance = DistanceRecord(candidates, len(self.series), self.tracker)
        # loss in units of persistence's, of candidates that beat it
        self._earned = np.full((candidates, len(self.steps), len(self.series)), np.inf)
        self._earned[0] = 1.0
        self._stamp = -1
        self._pending: dict[int, list[PendingForecast]] = {}

    def issue_forecast(self, origin: int, raw: Array) -> ServedForecasts:
        """Return the forecast to serve, and store it until its outcome is known.

        raw: (forecaster, quantile, step, series), NaN where a forecaster cannot forecast.
        """
        candidates = self._make_candidates(raw)
        served = self._choose_forecasts(candidates)
        for at, step in enumerate(self.steps):
            row = PendingForecast(origin, at, candidates[:, :, at].copy(), served.values[:, at].copy())
            self._pending.setdefault(origin + step, []).append(row)
        return served

    def make_served_forecast(self, raw: Array) -> ServedForecasts:
        """Return the forecast that would serve now, without storing it. raw: as in `issue_forecast`."""
        return self._choose_forecasts(self._make_candidates(raw))

    def score_bin(self, bin: int, outcomes: Array) -> None:
        """Score the forecasts of a bin that has ended.

        outcomes: (series,), NaN if unknown. An outcome above the ceiling raises the ceiling.
        """
        self.ceiling = np.fmax(self.ceiling, outcomes)
        self.whole = self.whole & are_whole_numbers(outcomes)
        self._distance.add_outcomes(outcomes)
        for row in self._pending.pop(bin, ()):
            self._score_forecast(row, outcomes)
        for late in [due for due in self._pending if due < bin]:
            del self._pending[late]
        stamp = bin // self._table.block
        if stamp != self._stamp:
            self._stamp = stamp
            self._update_eligibility()

    def list_accuracy(self) -> list[dict[str, float | int | None]]:
        """Return the past accuracy of each series, over four weeks and all leads.

        wql_vs_best_naive: the weighted quantile loss of served forecasts divided by that of the better naive
        forecaster. coverage_80: the share of outcomes within the 80 % band over DAYS_OF_COVERAGE days. It leaves out
        forecasts whose band is a single value that came true. origins: the number of forecasts that matured.
        """
        return self._table.list_records()

    def compute_mean_losses(self) -> dict[str, tuple[float, int]]:
        """Return candidate -> (mean loss in units of persistence's, number of forecasts)."""
        return self._table.compute_scaled_losses()

    def reset_forecaster(self, name: str) -> None:
        """Replace the record of a forecaster by persistence's record, because it switches to another version.

        The mean keeps its own record, because its weights follow the outcomes of any forecaster.
        """
        at = self.names.index(name)
        for table in (self._weights.standing, self._page.behind, self._distance.apart):
            table[at] = table[0]
        self._table.losses[:, at] = self._table.losses[:, 0]
        self.tracker.offset[at] = self.tracker.offset[0]
        for row in (row for rows in self._pending.values() for row in rows):
            row.raw[at] = row.raw[0]
        self._update_eligibility()

    def _make_candidates(self, raw: Array) -> Array:
        """Return (candidate, quantile, step, series) the forecasters' quantiles, and their weighted mean last.

        Persistence replaces a forecaster that cannot forecast.
        """
        is_known = np.asarray(np.isfinite(raw).all(axis=1))
        known = np.where(is_known[:, None], raw, raw[:1])
        is_known[0] = True
        weights = self._weights.compute_weights() * is_known
        mean = np.einsum("kqts,kts->qts", known, weights / weights.sum(axis=0))
        return np.concatenate([known, mean[None]])

    def _choose_forecasts(self, candidates: Array) -> ServedForecasts:
        is_held = self._page.has_fallen_behind(np.isfinite(self._earned)) | self._distance.is_too_far_away(candidates)
        chosen = np.where(is_held, np.inf, self._earned).argmin(axis=0)
        values = self._limit_values(self.tracker.apply_offsets(candidates, chosen))
        values = np.where(np.isfinite(values), values, self._limit_values(candidates[0]))
        return ServedForecasts(values, np.array(self.names)[chosen])

    def _limit_values(self, values: Array) -> Array:
        """Limit values to 0 and the ceiling. Round them if the series has whole numbers only.

        Rounding costs no coverage. The true quantiles of counts are whole numbers, and the offsets swing around them.
        """
        if self.whole.any():
            values = np.where(self.whole, np.rint(values), values)
        return np.clip(values, 0.0, self.ceiling)

    def _score_forecast(self, row: PendingForecast, outcomes: Array) -> None:
        """Score one forecast against its outcomes, and update the trackers with its raw quantiles.

        outcomes: (series,). The block of the forecast's origin receives its losses and hits.
        """
        at = row.step
        raw = row.raw
        known = np.isfinite(outcomes) & np.isfinite(raw[0]).all(axis=0)
        outcome = np.where(known, outcomes, 0.0)
        raw[:, :, ~known] = 0.0
        served = np.where(known, row.served, 0.0)
        given = self._limit_values(self.tracker.apply_offsets_at_step(raw, at))
        losses = np.concatenate(
            [compute_pinball_loss(given.transpose(1, 0, 2), outcome), compute_pinball_loss(served, outcome)[None]]
        )
        self._table.add(row.origin, at, losses, served, outcome, known)
        self._page.update(at, losses[:-1], known)
        self._distance.update(at, raw, losses[:-1], known)
        self.tracker.learn_outcome(at, raw, outcome, known)
        self._weights.update(at, raw, outcome, known)

    def _update_eligibility(self) -> None:
        """Compute which candidates may serve each lead and series, from the matured outcomes."""
        for band in self._bands:
            leads = [max(1, self.steps[at]) / self._table.block for at in band]
            records = [
                LeadRecord.from_sums(self._table.losses[:, :-1, at], self._table.counts[:, at].astype(np.float64), lead)
                for at, lead in zip(band, leads, strict=True)
            ]
            known = np.any([one.known for one in records], axis=0)
            t = compute_daily_t_statistic(np.sum([one.gain for one in records], axis=0), known, max(leads), A_DAY)
            for at, one, lead in zip(band, records, leads, strict=True):
                self._earned[:, at] = compute_earned_losses(one, t, lead, A_DAY, self._shadow)

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
        arrays = {"blocks": self._table.blocks, **self._list_state_arrays()}
        if rows:
            arrays["raw"] = np.stack([row.raw for _, row in rows])
            arrays["served"] = np.stack([row.served for _, row in rows])
        return about, {name: array.copy() for name, array in arrays.items()}

    def _list_state_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of the state by name. Their last axis is the series."""
        tracker, table = self.tracker, self._table
        return {
            "losses": table.losses,
            "hits": table.hits,
            "moved": table.moved,
            "counts": table.counts,
            "earned": self._earned,
            "standing": self._weights.standing,
            "behind": self._page.behind,
            "apart": self._distance.apart,
            "last": self._distance.last,
            "offset": tracker.offset,
            "seen": tracker.seen,
            "size": tracker.size,
        }

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, Array]) -> bool:
        """Restore the state that `dump` returned. Series may have been added or removed since then.

        Returns False, and restores nothing, if the dump has other forecasters, steps or arrays.
        """
        same = about["names"] == list(self.names) and about["steps"] == list(self.steps)
        if not same or not set(self._list_state_arrays()) <= set(arrays):
            return False
        old = {name: n for n, name in enumerate(about["series"])}
        pairs = [(n, old[name]) for n, name in enumerate(self.series) if name in old]
        to, source = (np.array([pair[side] for pair in pairs], np.intp) for side in (0, 1))
        self._stamp = int(about["stamp"])
        self._table.blocks[:] = arrays["blocks"]
        for name, array in self._list_state_arrays().items():
            array[..., to] = arrays[name][..., source]
        for number, (due, origin, step) in enumerate(about["pending"]):
            raw = np.full((len(self.names), len(QUANTILES), len(self.series)), np.nan)
            served = np.full((len(QUANTILES), len(self.series)), np.nan)
            raw[..., to], served[..., to] = arrays["raw"][number][..., source], arrays["served"][number][..., source]
            self._pending.setdefault(due, []).append(PendingForecast(origin, step, raw, served))
        return True


def _fill_ceilings(ceiling: Array | None, series: int) -> Array:
    """Return (series,) the ceilings, inf where there is none."""
    return np.full(series, np.inf) if ceiling is None else np.where(np.isfinite(ceiling), ceiling, np.inf)
