"""Forecasts of demand for a few series, for tests."""

from collections.abc import Mapping
from typing import Any

from fleetcast.models.demand.rows import DemandRow
from fleetcast.schedulers.weather import DemandKey
from tests.schedulers.small_fleet import NOW_MS

QUANTILES = [0.1, 0.5, 0.9]
HORIZONS_S = [60, 300, 600]
FLEET = DemandKey("all", "all", "all", "wanted")
LLAMA = DemandKey("serve", "inference", "llama-70b", "request_rate")


def row(key: DemandKey, now: float, values: list[list[float | None]], **more: Any) -> DemandRow:
    """values: one list a quantile of QUANTILES, one number a horizon of HORIZONS_S."""
    queue, class_, group, target, pool = key
    told = {"model": "trees", "issued_ms": NOW_MS, "record": None} | more
    return DemandRow(
        queue=queue,
        pool=pool,
        class_=class_,
        group=group,
        target=target,
        now=now,
        horizons_s=HORIZONS_S,
        quantiles=QUANTILES,
        values=values,
        **told,
    )


def small_demand() -> Mapping[DemandKey, DemandRow]:
    """The fleet's grows by 1 GPU a minute at p50; requests grow from 20/s to 80/s, and nobody knows of 600 s."""
    fleet = [[800.0, 800.0, 800.0], [801.0, 805.0, 810.0], [810.0, 830.0, 850.0]]
    llama: list[list[float | None]] = [[20.0, 30.0, None], [24.0, 40.0, None], [32.0, 80.0, None]]
    return {FLEET: row(FLEET, 800.0, [list(values) for values in fleet]), LLAMA: row(LLAMA, 20.0, llama)}
