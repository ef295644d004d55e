"""An outlook and a weather of a few nodes, and the demand for them, for tests."""

import numpy as np

from models.demand.rows import DemandRow
from schedulers.bands import BandRule, step_levels
from schedulers.weather import DemandKey, Outlook, Weather

NOW_MS = 1_760_000_000_000


def outlook(risk: dict[str, float], free: int = 8, **more: object) -> Outlook:
    """Nodes of 8 GPUs; the risk is that of the next hour, and grows by 0.1 with each further horizon."""
    n = len(risk)
    hour = np.array(list(risk.values()))
    values = {
        "rows": {name: row for row, name in enumerate(risk)},
        "risk": np.stack([hour + 0.1 * step for step in range(4)]),
        "level": step_levels(np.zeros(n, np.int8), hour, BandRule()),
        "state": np.zeros(n, np.int8),
        "gpus": np.full(n, 8),
        "free": np.full(n, free),
    }
    return Outlook(**(values | more))  # type: ignore[arg-type]


def wanted(now: float, *p90: float, issued_ms: int = NOW_MS) -> dict[DemandKey, DemandRow]:
    """The forecast of wanted GPUs in the pool `serve`, a minute, ten and an hour ahead."""
    row = DemandRow(
        pool="serve",
        class_="all",
        group="all",
        target="wanted",
        now=now,
        model="persistence",
        issued_ms=issued_ms,
        horizons_s=[60, 600, 3600][: len(p90)],
        quantiles=[0.5, 0.9],
        values=[[now] * len(p90), list(p90)],
        record=None,
    )
    return {DemandKey("serve", "all", "all", "wanted"): row}


def weather(risk: dict[str, float] | None, sequence: int = 1, **more: object) -> Weather:
    """A pool that is full, and will want a GPU more for each point of risk. None: a board without any forecast."""
    if risk is None:
        return Weather(sequence, NOW_MS, NOW_MS)
    now = 8.0 * len(risk)
    demand = wanted(now, now + 100 * float(np.nansum([*risk.values()])))
    return Weather(sequence, NOW_MS, NOW_MS, outlook(risk, **more), demand)  # type: ignore[arg-type]
