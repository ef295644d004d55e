"""DemandForecaster: forecasts of demand a minute to three days ahead, for all targets of a fleet.

The targets are arriving, running, queued and wanted GPUs, and request rates. `DemandForecaster`
turns histories into rows of `/demand`. Each target has up to three contests
(models/demand/contest.py). One has all series by the minute, for the nearest horizons. One has
pools and classes by ten minutes, with the costliest forecasters. One has user groups, which are
sparse, by ten minutes. The medians of queues add up to "all", as do those of pools of machines. The
medians of classes and of groups add up to their queue (hierarchy.py).

Every call forecasts from the newest values. The gates change only when a bin is over. Each call tests
only a part of every long history, so that all contests soon have a record.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.contribution import DemandScope
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.models.demand import contest as demand_contest
from fleetcast.models.demand.contest import Contest
from fleetcast.models.demand.hierarchy import reconcile_hierarchy
from fleetcast.models.demand.naive import FORECASTERS, forward_fill
from fleetcast.models.demand.rows import DemandRow
from fleetcast.models.demand.smoothers import make_group_smoothers, make_smoothers
from fleetcast.models.demand.units import are_whole_numbers
from fleetcast.models.forecast import QUANTILES, Forecaster, Panel

Array = NDArray[np.float64]

EVERYTHING = "all"
MINUTE_S, BIN_S = 60, 600
MINUTE_MS, BIN_MS = MINUTE_S * 1000, BIN_S * 1000
MINUTE_HORIZONS_S = (60, 300)
BIN_HORIZONS_S = (600, 1800, 3600, 10_800, 21_600, 43_200, 86_400, 259_200)
HORIZONS_S = (*MINUTE_HORIZONS_S, *BIN_HORIZONS_S)
TARGETS = ("arriving", "running", "queued", "wanted", "request_rate")
MINUTES, POOLS, GROUPS = "minutes", "pools", "groups"  # the contests of a target
ORIGIN_BINS = {MINUTES: 5, POOLS: 6, GROUPS: 12}
OLD_MS = 3_600_000
MAX_ISSUED = 10  # forecasts, one a bin: a good hour and a half
DRAWN_BINS = 144
DRAWN_SERIES = 300
FAN = tuple(QUANTILES.index(level) for level in (0.05, 0.25, 0.5, 0.75, 0.95))
LEVEL_TARGETS = ("running", "wanted")
FAR_SHARE, FAR_GPUS = 0.25, 8.0  # from its level: a forecast of a minute or ten is nearer
MIDDLE = 2  # of [time_ms, p05, p50, p95]
OLD_FAN = tuple(QUANTILES.index(level) for level in (0.05, 0.5, 0.95))
Points = list[list[float]]


class SeriesKey(NamedTuple):
    """The key of a series: its queue, job class, user group and pool of machines.

    A field is EVERYTHING where the series is not divided by it.
    """

    queue: str = EVERYTHING
    class_: str = EVERYTHING
    group: str = EVERYTHING
    pool: str = EVERYTHING

    @property
    def name(self) -> str:
        """The name of the series in a panel."""
        return "|".join(self if self.pool != EVERYTHING else self[:3])

    @property
    def is_part(self) -> bool:
        """True if the series is that of a user group or, for request rates, of one served model."""
        return self.group != EVERYTHING


@dataclass(frozen=True, slots=True)
class Histories:
    """The series of one target up to now, NaN where unknown.

    minutes, ten_minute: (series, bin). capacity: (series,) the ceiling, NaN for none. covariates: name ->
    (series, bin) in bins of ten minutes.
    """

    target: str
    keys: tuple[SeriesKey, ...]
    minutes: Array
    ten_minute: Array
    capacity: Array
    covariates: Mapping[str, Array] = field(default_factory=dict)

    def make_panel(self, rows: NDArray[np.intp], now_ms: int, bin_s: int) -> Panel:
        """Return the series at `rows` as a panel for forecasters. The panel's last bin contains `now_ms`."""
        values = self.minutes if bin_s == MINUTE_S else self.ten_minute
        names = tuple(self.keys[row].name for row in rows.tolist())
        first_ms = (now_ms // (bin_s * 1000) - values.shape[1] + 1) * bin_s * 1000
        covariates = {} if bin_s == MINUTE_S else {name: table[rows] for name, table in self.covariates.items()}
        return Panel(self.target, names, bin_s, first_ms, values[rows], self.capacity[rows], covariates)


@dataclass(slots=True)
class ForecastSeries:
    """The state of one series: its last forecast, the history for charts, and recently issued forecasts."""

    values: Array = field(default_factory=lambda: np.zeros((len(QUANTILES), len(HORIZONS_S))))
    history: Array = field(default_factory=lambda: np.zeros(0))
    issued: deque[tuple[int, Points]] = field(default_factory=lambda: deque(maxlen=MAX_ISSUED))
    old: tuple[int, Points] | None = None
    bin: int = -1

    def drop_forecasts_from_partial_history(self, levels: Array, now_bin: int) -> None:
        """Drop forecasts that were issued before all events of their time had arrived.

        levels: (bin,) the values of the series as known now.
        """
        current = [row for row in self.issued if _is_near_levels(row, levels, now_bin)]
        if len(current) < len(self.issued):
            self.issued.clear()
            self.issued.extend(current)
        if self.old is not None and not _is_near_levels(self.old, levels, now_bin):
            self.old, self.bin = None, -1


class DemandForecaster(Stateful):
    """The forecasts of all series of a fleet. Only one task may change them.

    Challengers compete with the built-in forecasters in the series of ten minutes. Forecasters in `sparse`
    compete only for user groups. Shadows are scored and never serve. The names of forecasters must not
    change after the object is made.
    """

    def __init__(
        self,
        challengers: Sequence[Forecaster] = (),
        sparse: Sequence[Forecaster] = (),
        shadows: Sequence[Forecaster] = (),
    ) -> None:
        self._forecasters = {
            MINUTES: (),
            POOLS: (*challengers, *shadows),
            GROUPS: tuple(sparse),
        }  # beside the built-in ones
        self._shadows = tuple(shadow.name for shadow in shadows)
        self._contests: dict[tuple[str, str], Contest] = {}  # target, which
        self._series: dict[tuple[SeriesKey, str], ForecastSeries] = {}
        self._versions: dict[str, str] = {}  # forecaster -> the version that its record is of
        self._now_ms = 0
        self._behind = 0  # contests with more history to test than the last call did
        self._tests = 0  # of history for each of them in this call

    @property
    def forecasters(self) -> tuple[Forecaster, ...]:
        """All forecasters that the caller passed in, each once."""
        return tuple({id(one): one for which in self._forecasters.values() for one in which}.values())

    @property
    def is_behind(self) -> bool:
        """Return whether the last call left a part of the history untested."""
        return self._behind > 0

    def forecast_all(self, histories: Sequence[Histories], now_ms: int) -> list[DemandRow]:
        """Forecast all series, and return the rows of `/demand` in order.

        A series without a known value has no row.
        """
        self._now_ms = now_ms
        among = self._behind or sum(len(_group_series_by_contest(inputs)) for inputs in histories)
        self._behind, self._tests = 0, demand_contest.TESTS_A_CALL // max(1, among)
        known = {(key, inputs.target) for inputs in histories for key in inputs.keys}
        self._series = {key: series for key, series in self._series.items() if key in known}
        return [row for inputs in histories for row in self._make_rows(inputs)]

    def _find_or_add_contest(self, target: str, which: str) -> Contest:
        if (target, which) not in self._contests:
            bin_s, horizons_s = (MINUTE_S, MINUTE_HORIZONS_S) if which == MINUTES else (BIN_S, BIN_HORIZONS_S)
            steps = [horizon_s // bin_s for horizon_s in horizons_s]
            origin_bins = ORIGIN_BINS[which]
            shadows = self._shadows if which == POOLS else ()
            made = Contest(
                (*_list_builtin_forecasters(which), *self._forecasters[which]), steps, bin_s, origin_bins, shadows
            )
            self._contests[target, which] = made
        return self._contests[target, which]

    def _make_rows(self, inputs: Histories) -> Iterator[DemandRow]:
        has_known = _has_known_value(inputs)
        self._drop_partial_history(inputs, has_known)
        forecast = _TargetForecasts.empty(len(inputs.keys))
        old = np.full((len(QUANTILES), len(BIN_HORIZONS_S), len(inputs.keys)), np.nan)
        for which, rows in _group_series_by_contest(inputs).items():
            contest = self._find_or_add_contest(inputs.target, which)
            panel = inputs.make_panel(rows, self._now_ms, contest.bin_s)
            self._refresh_contest(contest, panel)
            forecast.add_served_forecasts(
                rows, which == MINUTES, contest.make_served_forecasts(panel), contest.list_accuracy()
            )
            if which == POOLS and self._lacks_old_forecast(inputs, rows):
                back = OLD_MS // BIN_MS
                if panel.bins > back:
                    old[:, :, rows] = contest.make_served_forecasts(panel, back).values
        reconcile_hierarchy(
            forecast.values, inputs.keys, has_known, _has_whole_numbers_only(inputs), _compute_ceilings(inputs)
        )
        for row in np.flatnonzero(has_known).tolist():
            yield self._make_row(inputs, row, forecast, old[:, :, row])

    def _refresh_contest(self, contest: Contest, panel: Panel) -> None:
        if not contest.is_behind(panel):
            contest.refresh_gate(panel)
            return
        contest.refresh_gate(panel, self._tests)
        self._behind += contest.is_behind(panel)

    def _drop_partial_history(self, inputs: Histories, has_known: NDArray[np.bool_]) -> None:
        for row in np.flatnonzero(has_known).tolist() if inputs.target in LEVEL_TARGETS else ():
            if not inputs.keys[row].is_part:
                series = self._find_or_add_series(inputs.keys[row], inputs.target)
                series.drop_forecasts_from_partial_history(inputs.ten_minute[row], self._now_ms // BIN_MS)

    def _lacks_old_forecast(self, inputs: Histories, rows: NDArray[np.intp]) -> bool:
        """Return whether the forecast of an hour ago is missing, so that it must be computed now.

        It is missing after a start, and if events of that hour arrived late.
        """
        now_bin = self._now_ms // BIN_MS
        found = (self._find_or_add_series(inputs.keys[row], inputs.target) for row in rows.tolist())
        return any(series.old is None and series.bin != now_bin for series in found)

    def _find_or_add_series(self, key: SeriesKey, target: str) -> ForecastSeries:
        return self._series.setdefault((key, target), ForecastSeries())

    def _make_row(self, inputs: Histories, row: int, forecast: "_TargetForecasts", old: Array) -> DemandRow:
        key = inputs.keys[row]
        series = self._find_or_add_series(key, inputs.target)
        series.values = forecast.values[:, :, row]
        if not key.is_part:
            self._store_chart_values(series, inputs.ten_minute[row], old)
        models = forecast.models[:, row].tolist()
        minutes = inputs.minutes[row]
        now = float(minutes[np.flatnonzero(np.isfinite(minutes))[-1]])
        digits = 3 if inputs.target == "request_rate" else 1
        return DemandRow(
            queue=key.queue,
            pool=key.pool,
            class_=key.class_,
            group=key.group,
            target=inputs.target,
            now=round(now, max(digits, 2)),
            model="+".join(dict.fromkeys(models)),
            models=models,
            issued_ms=self._now_ms,
            horizons_s=list(HORIZONS_S),
            quantiles=list(QUANTILES),
            values=np.round(series.values, digits).tolist(),
            record=forecast.find_record(row),
        )

    def _store_chart_values(self, series: ForecastSeries, ten_minute: Array, old: Array) -> None:
        """Store the history and the forecast of an hour ago, both for the charts.

        old: (quantile, horizon) the forecast that was computed now from the data of an hour ago, NaN if none was
        computed.
        """
        now_ms, now_bin = self._now_ms, self._now_ms // BIN_MS
        series.history = _find_recent_history(ten_minute)
        if now_bin == series.bin:
            return
        series.bin = now_bin
        current = [issued for issued in series.issued if now_ms - issued[0] >= OLD_MS]
        if current:
            series.old = current[-1]
        elif np.isfinite(old).all() and np.isfinite(ten_minute[: len(ten_minute) - OLD_MS // BIN_MS]).any():
            series.old = now_ms - OLD_MS, _make_points(old, now_ms - OLD_MS, BIN_HORIZONS_S, OLD_FAN)
        series.issued.append((now_ms, _make_points(series.values, now_ms, HORIZONS_S, OLD_FAN)))

    def switch_version(self, name: str, version: str) -> None:
        """Switch a forecaster to another model version, and replace its record by that of persistence.

        Nothing changes if it already has this version.
        """
        if self._versions.get(name, "") == version:
            return
        self._versions[name] = version
        for (_, which), contest in self._contests.items():
            if any(forecaster.name == name for forecaster in self._forecasters[which]):
                contest.drop_record(name)

    def compute_mean_losses(self) -> dict[str, dict[str, tuple[float, int]]]:
        """Return target -> forecaster -> (mean loss in persistence's units, number of losses).

        Only the contests of pools and classes are included.
        """
        return {
            target: contest.compute_mean_losses()
            for (target, which), contest in self._contests.items()
            if which == POOLS
        }

    def make_chart_record(self) -> dict[str, Any]:
        """Return series name -> its history, its forecast fan, and its forecast of an hour ago.

        The result has the DRAWN_SERIES largest series, and those of the whole fleet. A name is `queue|target`,
        `queue|target|class` or `all|target|all|pool`. Points: [time_ms, value] in `history`, [time_ms, p05,
        p25, p50, p75, p95] in `forecast`, and [time_ms, p05, p50, p95] in `old`.
        """
        drawn = {key: series for key, series in self._series.items() if len(series.history)}
        largest = sorted(drawn, key=lambda key: (-float(drawn[key].history[-1]), key))
        whole = [key for key in largest if key[0].queue == key[0].pool == EVERYTHING]
        shown = dict.fromkeys([*whole, *largest][: DRAWN_SERIES + len(whole)])
        return {format_series_name(*key): self._make_fan(drawn[key]) for key in shown}

    def _make_fan(self, series: ForecastSeries) -> dict[str, Any]:
        history = series.history.tolist()
        times = [self._now_ms - BIN_MS * back for back in range(len(history) - 1, -1, -1)]
        return {
            "history": [[time_ms, round(value, 2)] for time_ms, value in zip(times, history, strict=True)],
            "forecast": _make_points(series.values, self._now_ms, HORIZONS_S, FAN),
            "old": series.old[1] if series.old else [],
            "old_issued_ms": series.old[0] if series.old else None,
        }

    def dump(self) -> Dump:
        """Return copies of the state for a snapshot: parts that can be written as JSON, and arrays by name."""
        contests: list[dict[str, Any]] = []
        arrays: dict[str, NDArray[Any]] = {}
        for number, ((target, which), contest) in enumerate(self._contests.items()):
            about, parts = contest.dump()
            contests.append({"target": target, "which": which, **about})
            arrays |= {f"{number} {name}": array for name, array in parts.items()}
        issued = [
            {**key._asdict(), "target": target, "rows": [[issued_ms, points] for issued_ms, points in series.issued]}
            for (key, target), series in self._series.items()
            if series.issued
        ]
        return {"contests": contests, "issued": issued, "versions": dict(self._versions)}, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state that `dump` returned. A contest whose gate is missing from it tests its history again."""
        self._versions = dict(about["versions"])
        for row in about["issued"]:
            key = SeriesKey(*DemandScope.from_row(row))
            issued = [(int(issued_ms), points) for issued_ms, points in row["rows"]]
            self._find_or_add_series(key, row["target"]).issued.extend(issued)
        for number, row in enumerate(about["contests"]):
            begins = f"{number} "
            parts = {name.removeprefix(begins): rows for name, rows in arrays.items() if name.startswith(begins)}
            self._find_or_add_contest(row["target"], row["which"]).load(row, parts)


@dataclass(frozen=True, slots=True)
class _TargetForecasts:
    """The forecasts of all series of one target.

    values: (quantile, horizon, series). models: (horizon, series) the name of the serving model. records:
    series -> its past accuracy, once for the minute horizons and once for the ten-minute horizons.
    """

    values: Array
    models: NDArray[np.object_]
    records: dict[int, list[dict[str, float | int | None]]]

    @classmethod
    def empty(cls, series: int) -> "_TargetForecasts":
        shape = (len(HORIZONS_S), series)
        return cls(np.full((len(QUANTILES), *shape), np.nan), np.full(shape, "", object), {})

    def add_served_forecasts(
        self, rows: NDArray[np.intp], nearest: bool, served: Any, records: list[dict[str, Any]]
    ) -> None:
        at = slice(0, len(MINUTE_HORIZONS_S)) if nearest else slice(len(MINUTE_HORIZONS_S), None)
        self.values[:, at, rows] = served.values
        self.models[at, rows] = served.model
        for row, record in zip(rows.tolist(), records, strict=True):
            self.records.setdefault(row, []).append(record)

    def find_record(self, row: int) -> dict[str, float | int | None]:
        """Return the past accuracy of a series in bins of ten minutes.

        Until the first ten-minute forecast has matured, the result is the accuracy in bins of a minute.
        """
        nearest, *others = self.records[row]
        return next((record for record in others if record["origins"]), nearest)


def _list_builtin_forecasters(which: str) -> tuple[Forecaster, ...]:
    """Return the forecasters that every site has, for one contest.

    The minute contest has no smoother, because it sees only a day, which is too short for one.
    """
    smoothing = {MINUTES: (), POOLS: make_smoothers(), GROUPS: make_group_smoothers()}
    return (*FORECASTERS, *smoothing[which])


def _has_known_value(inputs: Histories) -> NDArray[np.bool_]:
    """Return (series,) whether the series has a known value, both by minutes and by ten minutes."""
    return np.asarray(np.isfinite(inputs.ten_minute).any(axis=1) & np.isfinite(inputs.minutes).any(axis=1))


def _group_series_by_contest(inputs: Histories) -> dict[str, NDArray[np.intp]]:
    """Return contest -> (series,) the indices of its series. Leaves out contests without series."""
    has_known, is_part = _has_known_value(inputs), np.array([key.is_part for key in inputs.keys], bool)
    chosen = {MINUTES: has_known, POOLS: has_known & ~is_part, GROUPS: has_known & is_part}
    return {which: np.flatnonzero(mask) for which, mask in chosen.items() if mask.any()}


def _has_whole_numbers_only(inputs: Histories) -> NDArray[np.bool_]:
    """Return (series,) whether all values of the series are whole numbers."""
    return np.asarray(are_whole_numbers(inputs.ten_minute).all(axis=1) & are_whole_numbers(inputs.minutes).all(axis=1))


def _compute_ceilings(inputs: Histories) -> Array:
    """Return (series,) the upper limit of forecasts: the capacity, or the highest value if that is larger.

    A series without a capacity has the limit inf.
    """
    reached = [np.nan_to_num(values).max(axis=1, initial=0.0) for values in (inputs.minutes, inputs.ten_minute)]
    return np.where(np.isfinite(inputs.capacity), np.maximum(inputs.capacity, np.maximum(*reached)), np.inf)


def _find_recent_history(ten_minute: Array) -> Array:
    """Return the newest DRAWN_BINS values, starting at the first known one.

    Gaps are filled with the last value.
    """
    newest = ten_minute[-DRAWN_BINS:]
    known = np.flatnonzero(np.isfinite(newest))
    return forward_fill(newest[None, known[0] :])[0] if len(known) else newest[:0]


def _is_near_levels(issued: tuple[int, Points], levels: Array, now_bin: int) -> bool:
    """Return whether a forecast's first median is near the level of its own bin, or of the bin before.

    Returns True if neither level is known.
    """
    issued_ms, points = issued
    at = len(levels) - 1 - (now_bin - issued_ms // BIN_MS)
    known = levels[max(0, at - 1) : at + 1] if 0 <= at < len(levels) else levels[:0]
    known = known[np.isfinite(known)]
    if not len(known) or not points:
        return True
    middle = points[0][MIDDLE]
    return bool((1 - FAR_SHARE) * known.min() - FAR_GPUS <= middle <= (1 + FAR_SHARE) * known.max() + FAR_GPUS)


def format_series_name(key: SeriesKey, target: str) -> str:
    """Return the name of a series in the record of forecasts."""
    parts = (key.queue, target, key.class_, key.pool)
    return "|".join(parts if key.pool != EVERYTHING else parts[:3] if key.class_ != EVERYTHING else parts[:2])


def _make_points(values: Array, issued_ms: int, horizons_s: Sequence[int], levels: tuple[int, ...]) -> Points:
    """Return [[time_ms, quantile...]...], one point for each horizon."""
    rows = np.round(values[list(levels)].T, 2).tolist()
    return [[issued_ms + horizon_s * 1000, *row] for horizon_s, row in zip(horizons_s, rows, strict=True)]
