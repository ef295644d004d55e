"""`fleetcast evaluate demand`: our forecasts beside persistence, the seasonal naive and Theta, at the same origins.

    train folder  |── fit ──────────────|── fit again on all ──|
                                        |── warm-up: origins ──|── judged: origins ─────────| both folders
                                        the gate sees the outcomes of forecasts that were issued out of sample

Judged origins are ends of hours after the train folder; each sees all history before it. The first fit forecasts the
warm-up, of which it saw nothing. A set without a train part is judged after some history of its own
(`sets/demand_sets.py`), by trees that were fitted on the others.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.demand.boosting import Settings
from models.demand.gate import Gate, Served
from models.demand.naive import FORECASTERS, day_bins, forward_filled, shifted
from models.demand.sparse import Sparse
from models.demand.theta import Theta
from models.demand.trees import DemandTrees
from models.forecast import QUANTILES, Forecaster, Panel
from training.judges.demand_metrics import JudgedForecasts, judge
from training.reports.results import Results
from training.sets.demand_sets import DemandSet, read_panels

Array = NDArray[np.float64]
Bins = NDArray[np.intp]
Say = Callable[[str], None]

HORIZONS_S = (600, 1800, 3600, 10_800, 21_600, 43_200, 86_400)
BASELINES = ("persistence", "seasonal_naive", "theta")
ORIGIN_S = 3600
WARM_DAYS = 28
WARM_SHARE = 0.5  # of the train part at most
# The trees of the warm-up tell the gate how good the others will be; half of the effort tells it as well.
WARM_TREES = Settings(rows=20_000, trees=100, learning_rate=0.08)
TREES = Settings()


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Judge every set that has outcomes after the train part."""
    results = Results("demand")

    def skip(line: str) -> None:
        (results.skipped.append(line.removeprefix("skipped ")) if line.startswith("skipped ") else say(line))

    found = read_panels(train, test, skip)
    sets = [one for one in found if len(judged_origins(one))]
    judged_names = {one.dataset for one in sets}
    for dataset in dict.fromkeys(one.dataset for one in found if one.dataset not in judged_names):
        results.skipped.append(f"{dataset}: no full hour comes after the train folder and some of its own history")
    known = read_panels(train, None) if sets else []
    models = Models.fit(known, sets, seed, say)
    for one in sets:
        judged = run(one, models)
        judge(results, judged, seed)
        say(f"{one.dataset} {one.panel.target}: {len(judged.origins)} origins, {len(one.panel.names)} series")
    return results


@dataclass(frozen=True, slots=True)
class Models:
    """The trees of the warm-up and of what is judged: dataset -> model; None where there was nothing to fit on."""

    warm: dict[str, DemandTrees | None]
    last: dict[str, DemandTrees | None]

    @classmethod
    def fit(cls, known: Sequence[DemandSet], sets: Sequence[DemandSet], seed: int, say: Say) -> "Models":
        """Fit twice on the train folder: without the warm-up, and on all of it."""
        warm: dict[str, DemandTrees | None] = {}
        last: dict[str, DemandTrees | None] = {}
        of_others: dict[tuple[str, ...], DemandTrees | None] = {}
        for dataset, panel in {one.dataset: one.panel for one in sets}.items():
            own = [one for one in known if one.dataset == dataset]
            if own:
                until = [warm_start(one.train_bins, one.panel.bin_s) for one in own]
                warm[dataset] = _fitted(own, until, seed, WARM_TREES)
                last[dataset] = _fitted(own, [one.train_bins for one in own], seed, TREES)
            else:  # on what is not of later years or of another clock
                others = [one for one in known if one.panel.first_ms < panel.end_ms(panel.bins - 1)]
                names = tuple(one.dataset for one in others)
                if names not in of_others:
                    of_others[names] = _fitted(others, [one.train_bins for one in others], seed, TREES)
                warm[dataset] = last[dataset] = of_others[names]
            say(f"{dataset}: fitted on {'its train part' if own else 'the other sets'}")
        return cls(warm, last)


def _fitted(sets: Sequence[DemandSet], until: Sequence[int], seed: int, settings: Settings) -> DemandTrees | None:
    from fleet.errors import ModelError

    try:
        return DemandTrees(seed, settings).fit([one.panel for one in sets], until)
    except ModelError:
        return None


def warm_start(train_bins: int, bin_s: int) -> int:
    """The first bin of the warm-up within a train part."""
    return train_bins - min(WARM_DAYS * day_bins(bin_s), int(train_bins * WARM_SHARE))


def judged_origins(one: DemandSet) -> Bins:
    """Bins at whose end a judged forecast is issued: ends of hours after the train part with an outcome to come."""
    return _hours(one.panel, one.begin - 1, one.panel.bins - 1)


def warm_origins(one: DemandSet) -> Bins:
    panel = one.panel
    first = warm_start(one.train_bins, panel.bin_s) if one.train_bins else min(day_bins(panel.bin_s), one.begin // 2)
    return _hours(panel, first, one.begin - 1)


def _hours(panel: Panel, first: int, end: int) -> Bins:
    bins = np.arange(first, max(end, first), dtype=np.intp)
    ends_s = panel.first_ms // 1000 + (bins + 1) * panel.bin_s
    return np.asarray(bins[ends_s % max(ORIGIN_S, panel.bin_s) == 0])


def run(one: DemandSet, models: Models) -> JudgedForecasts:
    """Forecast at every origin, the gate between them, as a service would."""
    panel = one.panel
    steps = tuple(sorted({max(1, round(horizon_s / panel.bin_s)) for horizon_s in HORIZONS_S}))
    warm, judged = warm_origins(one), judged_origins(one)
    plain: list[Forecaster] = [*FORECASTERS, Theta(), Sparse()]
    origins = np.concatenate([warm, judged])
    raw = [forecaster.forecast(panel, origins, steps).astype(np.float32) for forecaster in plain]
    names = [forecaster.name for forecaster in plain]
    trees = [
        _trees(models.warm[one.dataset], panel, warm, steps),
        _trees(models.last[one.dataset], panel, judged, steps),
    ]
    table = np.stack([*raw, np.concatenate(trees, axis=2).astype(np.float32)])
    gate = Gate([*names, "trees"], steps, panel.names, panel.bin_s, panel.capacity)
    values = np.empty((len(QUANTILES), len(steps), len(judged), len(panel.names)))
    model = np.empty(values.shape[1:], dtype="U24")
    for number, served in _served(gate, panel, origins, table):
        if number >= len(warm):
            values[:, :, number - len(warm)] = served.values
            model[:, number - len(warm)] = served.model
    methods = {"ours": values}
    for name in BASELINES:
        methods[name] = np.maximum(table[names.index(name)][:, :, len(warm) :].astype(np.float64), 0.0)
    return JudgedForecasts(one.dataset, panel, judged, steps, methods, model, seasonal_scale(one))


def _served(gate: Gate, panel: Panel, origins: Bins, table: NDArray[np.float32]) -> Iterator[tuple[int, Served]]:
    """The gate bin by bin: outcomes first, then the forecast of that moment."""
    waiting = {int(origin): number for number, origin in enumerate(origins)}
    for bin in range(int(origins[0]), int(origins[-1]) + 1):
        gate.mature(bin, panel.values[:, bin])
        if bin in waiting:
            yield waiting[bin], gate.issue(bin, table[:, :, :, waiting[bin]].astype(np.float64))


def _trees(model: DemandTrees | None, panel: Panel, origins: Bins, steps: Sequence[int]) -> Array:
    if model is None:
        return np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.nan)
    return model.forecast(panel, origins, steps)


def seasonal_scale(one: DemandSet) -> Array:
    """(series,) mean absolute change over a day before the judged origins: the unit of MASE."""
    panel = one.panel
    filled = forward_filled(panel.values[:, : one.begin])
    change = np.abs(panel.values[:, : one.begin] - shifted(filled, day_bins(panel.bin_s)))
    known = np.isfinite(change)
    total = np.where(known, change, 0.0).sum(axis=1)
    return np.asarray(np.divide(total, known.sum(axis=1), out=np.full(len(total), np.nan), where=total > 0))
