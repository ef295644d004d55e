"""`fleetcast evaluate demand`: our forecasts compared with every fair baseline, over rolling windows.

    train folder |── fit ──────────────|── fit again on all ──|
                                        |── warm-up: origins ──|─ window 1 ─|─ window 2 ─| …   both folders
                 |── fit before each window on all that came before it ─────|
                                        the gate sees the outcomes of forecasts that were issued out of sample

All methods forecast at the same origins: one random bin in each hour after the train folder. A
forecast may use all history before its origin. As in the service, the trees are fitted again before
each window, and the gate continues through all of them. The first fit forecasts the warm-up, which
it was not fitted on. Series that are not in the train folder are never fitted on. A set without a
train part is not fitted on either. It is judged after some history of its own
(`sets/demand_sets.py`), by trees that were fitted on the other sets.

The baselines are the naive ones, Theta, the rolling median, and three of statsmodels
(`classical.py`). If one cannot forecast, persistence stands in for it. The results report this as
`stood_in`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.boosting import Settings
from fleetcast.models.demand.flows import cap_lone_spikes
from fleetcast.models.demand.gate import Gate, ServedForecasts
from fleetcast.models.demand.naive import FORECASTERS, count_bins_per_day, forward_fill, shift_bins
from fleetcast.models.demand.smoothers import RollingMedian, make_smoothers
from fleetcast.models.demand.sparse import SparseForecaster
from fleetcast.models.demand.trees import DemandTrees
from fleetcast.models.demand.units import are_whole_numbers
from fleetcast.models.forecast import QUANTILES, Forecaster, Panel
from fleetcast.training.judges.classical import METHODS, Method, RefittedForecaster
from fleetcast.training.judges.demand_metrics import JudgedForecasts, judge_set, judge_windows
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets.demand_sets import DemandSet, read_panels
from fleetcast.training.windows import RollingWindow, make_rolling_windows

Array = NDArray[np.float64]
Bins = NDArray[np.intp]
Say = Callable[[str], None]

HORIZONS_S = (600, 1800, 3600, 10_800, 21_600, 43_200, 86_400)
PERSISTENCE = "persistence"
BASELINES = (PERSISTENCE, "seasonal_naive", "theta")
ORIGIN_S = 3600
WARM_DAYS = 28
WARM_SHARE = 0.5  # of the train part at most
# The trees of the warm-up tell the gate how good the others will be; half of the effort tells it as well.
WARM_TREES = Settings(rows=20_000, trees=100, learning_rate=0.08)
TREES = Settings()


def evaluate(
    train: Path,
    test: Path,
    seed: int,
    say: Say,
    *,
    windows: int = 0,
    own: Sequence[Forecaster] = (),
    classical: Mapping[str, Method] = METHODS,
) -> Results:
    """Evaluate forecasts of demand on every set that has outcomes after the train part.

    windows: the number of windows, 0 for as many as each set allows. own: further forecasters, which get rows of
    their own.
    """
    results = Results("demand")

    def report_or_skip(line: str) -> None:
        (results.skipped.append(line.removeprefix("skipped ")) if line.startswith("skipped ") else say(line))

    found = read_panels(train, test, report_or_skip)
    sets = [one for one in found if len(draw_judged_origins(one, seed))]
    judged_names = {one.dataset for one in sets}
    for dataset in dict.fromkeys(one.dataset for one in found if one.dataset not in judged_names):
        results.skipped.append(f"{dataset}: no full hour comes after the train folder and some of its own history")
    known = read_panels(train, None) if sets else []
    models = DemandModels.fit(known, sets, seed, say, windows)
    for number, one in enumerate(sets):
        say(
            f"{number + 1} of {len(sets)}: {one.dataset} {one.panel.target}, {len(models.windows[one.dataset])} windows"
        )
        add_set_results(results, one, models, seed, own=own, classical=classical)
    return results


def add_set_results(
    results: Results,
    one: DemandSet,
    models: "DemandModels",
    seed: int,
    *,
    own: Sequence[Forecaster] = (),
    classical: Mapping[str, Method] | None = None,
) -> None:
    """Add the results of one set: over its whole judged span, and for each of its windows."""
    refitted = [RefittedForecaster(name, method, one.bins_before_judging) for name, method in (classical or {}).items()]
    judged = run_forecasts(one, models, seed, [*refitted, *own])
    judge_set(results, judged, seed)
    judge_windows(results, judged, models.windows[one.dataset])
    for baseline in refitted:
        results.rows.append(
            _make_count_row(one, baseline.name, "failed_fits", sum(baseline.failed.values()), baseline.fits)
        )
    results.skipped += [
        f"{one.dataset} {one.panel.target}: {count} of {baseline.fits} fits of {baseline.name} failed: {reason}"
        for baseline in refitted
        for reason, count in baseline.failed.items()
    ]


def _make_count_row(one: DemandSet, method: str, metric: str, value: float, n: int) -> ResultRow:
    return ResultRow(one.dataset, one.panel.target, "all", None, method, method, metric, value, None, None, n)


@dataclass(frozen=True, slots=True)
class DemandModels:
    """The fitted demand trees: those of the warm-up, and those of each window.

    Trees are None if there was nothing to fit on.
    """

    windows: dict[str, tuple[RollingWindow, ...]]
    warm: dict[str, DemandTrees | None]
    rolled: dict[str, tuple[DemandTrees | None, ...]]

    @classmethod
    def fit(
        cls, known: Sequence[DemandSet], sets: Sequence[DemandSet], seed: int, say: Say, windows: int = 0
    ) -> "DemandModels":
        """Fit trees for the warm-up, and further trees before each window.

        known: the sets of the train folder. sets: those of both folders.
        """
        found = cls({}, {}, {})
        of_others: dict[tuple[str, ...], DemandTrees | None] = {}
        for dataset, panel in {one.dataset: one.panel for one in sets}.items():
            mine = [one for one in sets if one.dataset == dataset]
            rolling = make_windows(mine, windows)
            found.windows[dataset] = rolling
            if own := [one for one in known if one.dataset == dataset]:
                until = [find_warm_up_start(one.train_bins, one.panel.bin_s) for one in own]
                found.warm[dataset] = _fit_trees(own, until, seed, WARM_TREES)
                found.rolled[dataset] = tuple(_refit_by_window(own, mine, rolling, seed, say))
            else:  # on what is not of later years or of another clock
                others = [one for one in known if one.panel.first_ms < panel.end_ms(panel.bins - 1)]
                names = tuple(one.dataset for one in others)
                if names not in of_others:
                    of_others[names] = _fit_trees(others, [one.train_bins for one in others], seed, TREES)
                found.warm[dataset] = of_others[names]
                found.rolled[dataset] = (of_others[names],) * len(rolling)
                say(f"{dataset}: fitted on the other sets")
        return found


def make_windows(sets: Sequence[DemandSet], count: int = 0) -> tuple[RollingWindow, ...]:
    """Return the rolling windows over the sets of one folder.

    They cover the time from the earliest judged bin of any set to the latest bin of any set.
    """
    begins = [one.panel.end_ms(one.bins_before_judging - 1) for one in sets]
    ends = [one.panel.end_ms(one.panel.bins - 1) for one in sets]
    return make_rolling_windows(min(begins) / 1000, max(ends) / 1000, count)


def _refit_by_window(
    own: Sequence[DemandSet], whole: Sequence[DemandSet], rolling: Sequence[RollingWindow], seed: int, say: Say
) -> Iterator[DemandTrees | None]:
    """Yield the trees of each window, fitted on the bins of both folders before it.

    Only series that are in the train folder are fitted on.
    """
    names = {one.panel.target: one.panel.names for one in own}
    parts = [
        replace(one, panel=_select_series(one.panel, names[one.panel.target]))
        for one in whole
        if one.panel.target in names
    ]
    for number, window in enumerate(rolling):
        if not number:  # the train folder itself
            yield _fit_trees(own, [one.train_bins for one in own], seed, TREES)
        else:
            until = [_count_bins_before(one.panel, window.begin_ms) for one in parts]
            yield _fit_trees(parts, until, seed, TREES)
        say(f"{whole[0].dataset}: fitted on its train part, window {number + 1} of {len(rolling)}")


def _select_series(panel: Panel, names: Sequence[str]) -> Panel:
    """Return the panel with only the series that have one of these names."""
    rows = np.flatnonzero(np.isin(panel.names, list(names)))
    return replace(
        panel,
        names=tuple(panel.names[row] for row in rows.tolist()),
        values=panel.values[rows],
        capacity=panel.capacity[rows],
        covariates={name: table[rows] for name, table in panel.covariates.items()},
    )


def _count_bins_before(panel: Panel, time_ms: int) -> int:
    """Return how many bins of a panel have ended by `time_ms`."""
    return min(panel.bins, max(0, (time_ms - panel.first_ms) // (panel.bin_s * 1000)))


def _fit_trees(sets: Sequence[DemandSet], until: Sequence[int], seed: int, settings: Settings) -> DemandTrees | None:
    from fleetcast.fleet.errors import ModelError

    try:
        return DemandTrees(seed, settings).fit([one.panel for one in sets], until)
    except ModelError:
        return None


def find_warm_up_start(train_bins: int, bin_s: int) -> int:
    """Return the first bin of the warm-up within a train part."""
    return train_bins - min(WARM_DAYS * count_bins_per_day(bin_s), int(train_bins * WARM_SHARE))


def draw_judged_origins(one: DemandSet, seed: int = 0) -> Bins:
    """Return one random bin of each hour after the train part. Judged forecasts are issued when these bins end.

    The last bin is left out, because its forecasts have no outcome.
    """
    return _draw_hourly_bins(
        one.panel, one.bins_before_judging - 1, one.panel.bins - 1, np.random.default_rng((seed, 0))
    )


def draw_warm_up_origins(one: DemandSet, seed: int = 0) -> Bins:
    panel = one.panel
    first = (
        find_warm_up_start(one.train_bins, panel.bin_s)
        if one.train_bins
        else min(count_bins_per_day(panel.bin_s), one.bins_before_judging // 2)
    )
    return _draw_hourly_bins(panel, first, one.bins_before_judging - 1, np.random.default_rng((seed, 1)))


def _draw_hourly_bins(panel: Panel, first: int, end: int, rng: np.random.Generator) -> Bins:
    """Return one random bin of each hour from bin `first` to before bin `end`.

    The random choice keeps hourly patterns from favouring a method.
    """
    per = max(1, ORIGIN_S // panel.bin_s)
    hours = np.arange(first, end - per + 1, per, dtype=np.intp)
    return np.asarray(hours + rng.integers(0, per, len(hours)))


def run_forecasts(
    one: DemandSet, models: DemandModels, seed: int, further: Sequence[Forecaster] = ()
) -> JudgedForecasts:
    """Forecast at every origin with all methods. As in the service, the gate chooses among them.

    further: baselines in addition to the usual ones.
    """
    panel = one.panel
    steps = tuple(sorted({max(1, round(horizon_s / panel.bin_s)) for horizon_s in HORIZONS_S}))
    warm, judged = draw_warm_up_origins(one, seed), draw_judged_origins(one, seed)
    plain: list[Forecaster] = [*FORECASTERS, *make_smoothers(), SparseForecaster()]
    origins = np.concatenate([warm, judged])
    usable = cap_lone_spikes(panel)
    raw = [forecaster.forecast(usable, origins, steps) for forecaster in plain]
    names = [forecaster.name for forecaster in plain]
    begins = [
        max(one.bins_before_judging, _count_bins_before(panel, window.begin_ms))
        for window in models.windows[one.dataset]
    ]
    table = np.stack([*raw, _forecast_by_trees(one, models, origins, begins, steps)])
    whole = np.asarray(are_whole_numbers(panel.values[:, : origins[0] + 1]).all(axis=1))
    gate = Gate([*names, "trees"], steps, panel.names, panel.bin_s, panel.capacity, whole=whole)
    values = np.empty((len(QUANTILES), len(steps), len(judged), len(panel.names)))
    model = np.empty(values.shape[1:], dtype="U24")
    for number, served in _run_gate(gate, panel, origins, table):
        if number >= len(warm):
            values[:, :, number - len(warm)] = served.values
            model[:, number - len(warm)] = served.model
    methods = {name: table[names.index(name)][:, :, len(warm) :] for name in BASELINES}
    for forecaster in (RollingMedian(), *further):
        methods[forecaster.name] = forecaster.forecast(panel, judged, steps)
    clipped = {name: np.maximum(rows, 0.0) for name, rows in methods.items()}
    return JudgedForecasts(
        one.dataset, panel, judged, steps, {"ours": values, **clipped}, model, compute_seasonal_scale(one)
    )


def _run_gate(gate: Gate, panel: Panel, origins: Bins, table: Array) -> Iterator[tuple[int, ServedForecasts]]:
    """Run the gate bin by bin. Yields (number of the origin, the forecast that the gate serves there).

    In each bin the gate first receives the outcomes. Then it issues the forecast for that bin.
    """
    waiting = {int(origin): number for number, origin in enumerate(origins)}
    for bin in range(int(origins[0]), int(origins[-1]) + 1):
        gate.score_bin(bin, panel.values[:, bin])
        if bin in waiting:
            yield waiting[bin], gate.issue_forecast(bin, table[:, :, :, waiting[bin]])


def _forecast_by_trees(
    one: DemandSet, models: DemandModels, origins: Bins, begins: Sequence[int], steps: Sequence[int]
) -> Array:
    """Return (quantile, step, origin, series) forecasts, each by the trees that serve at its origin.

    The trees of the warm-up serve first, then those of each window in turn.
    """
    fits = [models.warm[one.dataset], *models.rolled[one.dataset]]
    parts = np.split(origins, np.searchsorted(origins, np.array(begins) - 1))
    found = [_forecast_or_nan(model, one.panel, part, steps) for model, part in zip(fits, parts, strict=True)]
    return np.concatenate(found, axis=2)


def _forecast_or_nan(model: DemandTrees | None, panel: Panel, origins: Bins, steps: Sequence[int]) -> Array:
    if model is None:
        return np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.nan)
    return model.forecast(panel, origins, steps)


def compute_seasonal_scale(one: DemandSet) -> Array:
    """Return (series,) the mean absolute change over a day, the unit of MASE.

    Only bins before the judged origins count.
    """
    panel = one.panel
    filled = forward_fill(panel.values[:, : one.bins_before_judging])
    change = np.abs(panel.values[:, : one.bins_before_judging] - shift_bins(filled, count_bins_per_day(panel.bin_s)))
    known = np.isfinite(change)
    total = np.where(known, change, 0.0).sum(axis=1)
    return np.asarray(np.divide(total, known.sum(axis=1), out=np.full(len(total), np.nan), where=total > 0))
