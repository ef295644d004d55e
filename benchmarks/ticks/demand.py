"""Demand: retraining on months of a cluster, and forecasting many series at once.

`retraining`: features, run times of jobs, and the trees of every target. The data are demand/venus
below FLEETCAST_DATA: five months in bins of ten minutes. If they are missing, simulated data of that size
replace them. `forecasting`: QUANTILES at LEADS for many pools, four weeks each, features included. The peer
is persistence with the quantiles of its past errors.
"""

import os
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import Peer, make_record, measure
from fleetcast.models.demand.naive import Persistence
from fleetcast.models.demand.trees import DemandTrees
from fleetcast.models.forecast import QUANTILES, Panel

SIZES = (100, 1_000)  # series
LEADS = tuple(range(6, 150, 6))  # every hour of a day, in bins
BIN_S = 600
MONTHS_BINS, WEEKS_BINS = 22_032, 4032
VENUS = "demand/venus"
FIRST_MS = 1_585_699_200_000


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield one record of the retraining, and one of forecasts for each number of series."""
    panels, source = read_month_panels()
    size = {"targets": len(panels), "bins": panels[0].bins, "made_up": int(source != VENUS)}
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    _retrain_models(panels)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    yield make_record("demand", "retraining", size, [wall_s], "s", cpu_s=cpu_s)
    for series in sizes:
        yield _measure_forecasting(series)


def _retrain_models(panels: Sequence[Panel]) -> None:
    model = DemandTrees(0).fit(panels, [panel.bins for panel in panels])
    assert set(model.models) == {panel.target for panel in panels}


def _measure_forecasting(series: int) -> dict[str, Any]:
    panel, trees = make_synthetic_panel(series, WEEKS_BINS), _fit_trees()
    size = {"series": series, "quantiles": len(QUANTILES), "leads": len(LEADS)}
    now = np.array([panel.bins - 1])

    def forecast(forecaster: DemandTrees | Persistence) -> int:
        values = forecaster.forecast(panel, now, LEADS)
        assert np.isfinite(values).all()
        return values.size

    peer = Peer("persistence with empirical quantiles", lambda: forecast(Persistence()))
    return measure("demand", "forecasting", size, lambda: forecast(trees), "s", peer=peer, repeats=3)


@cache
def _fit_trees() -> DemandTrees:
    """Fit a model with all trees, on a history that is long enough for them."""
    panel = make_synthetic_panel(1, MONTHS_BINS)
    return DemandTrees(0).fit([panel], [panel.bins])


def read_month_panels() -> tuple[list[Panel], str]:
    """Return a panel for every target of one cluster, and the name of the data's source."""
    from fleetcast.training.sets.demand_sets import read_panels

    data = Path(os.environ.get("FLEETCAST_DATA", "../shared/data"))
    found = [one.panel for one in read_panels(data, None) if one.dataset == VENUS] if data.is_dir() else []
    if found:
        return found, VENUS
    flows = make_synthetic_panel(1, MONTHS_BINS)
    return [flows, *(_make_target_panel(flows, name) for name in ("arriving", "queued"))], "made up"


def _make_target_panel(panel: Panel, target: str) -> Panel:
    others = {name: rows for name, rows in panel.covariates.items() if name != target} | {"running": panel.values}
    return Panel(target, panel.names, BIN_S, FIRST_MS, panel.covariates[target], panel.capacity, others)


def make_synthetic_panel(series: int, bins: int, seed: int = 0) -> Panel:
    """Simulate pools of 64 to 4,096 GPUs with daily and weekly waves and noise.

    Arrivals and departures add up to the running GPUs.
    """
    rng = np.random.default_rng(seed)
    size = np.exp2(rng.integers(6, 13, (series, 1))).astype(np.float64)
    hour = np.arange(bins) * BIN_S / 3600
    usual = 0.6 + 0.15 * np.sin(2 * np.pi * (hour / 24 + rng.random((series, 1)))) - 0.1 * (hour // 24 % 7 >= 5)
    noise = np.cumsum(rng.normal(0, 0.01, (series, bins)), axis=1)
    running = np.round(size * np.clip(usual + noise - noise.mean(axis=1, keepdims=True), 0.0, 1.0))
    change = np.diff(running, axis=1, prepend=running[:, :1])
    begun = rng.poisson(0.02 * size, (series, bins)) + np.maximum(change, 0.0)
    rows = {
        "started": begun,
        "ended": begun - change,
        "arriving": begun,
        "queued": rng.poisson(0.05 * size, (series, bins)),
    }
    covariates = {name: row.astype(np.float64) for name, row in rows.items()}
    return Panel("running", tuple(f"p{row}" for row in range(series)), BIN_S, FIRST_MS, running, size[:, 0], covariates)
