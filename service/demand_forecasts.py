"""Forecasts of demand beside a running pipeline: made anew about once a minute, in a thread on copied series."""

import asyncio
import time
from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.demand_series import Target
from fleet.clock import Clock
from models.demand import DemandDesk
from service.fleet_metrics import demand_page
from service.state import FleetState

PERIOD_S = 60.0
SHORTEST_PAUSE_WALL_S = 0.2
BINS = 28 * 144
TARGETS: tuple[Target, ...] = ("arriving", "running", "queued", "wanted")
BIN_S = 600


class DemandForecasts:
    """The latest ones: `document` and `record` for the board, `page` for Prometheus.

    Who holds `free` has the desk to himself: a thread writes it while it forecasts.
    """

    def __init__(self, desk: DemandDesk, clock: Clock, began_ms: int) -> None:
        self.free = asyncio.Lock()
        self.document: dict[str, Any] = {"as_of_ms": began_ms, "series": []}
        self.record: dict[str, Any] = {}
        self.page = b""
        self._desk = desk
        self._clock = clock

    async def forecast_forever(self, state: FleetState) -> None:
        while True:
            began = time.monotonic()
            await self.forecast(state)
            period_s = self._clock.wall_s(PERIOD_S)
            await asyncio.sleep(max(SHORTEST_PAUSE_WALL_S, period_s - (time.monotonic() - began)))

    async def forecast(self, state: FleetState) -> None:
        """Forecast the demand of every pool anew."""
        now_ms, demand = self._clock.now_ms(), state.demand
        series: dict[tuple[str, str], NDArray[np.float64]] = {
            (pool, target): demand.series(pool, target, now_ms, BIN_S, BINS)
            for pool in demand.pools()
            for target in TARGETS
        }
        total = int(state.topology.gpus.sum())
        pools: Counter[str] = Counter()
        for node in state.topology.nodes:
            pools[node.pool] += node.gpus
        capacity = {pool: pools.get(pool, total) for pool in demand.pools()}
        async with self.free:
            rows = await asyncio.to_thread(self._desk.update, series, now_ms, capacity)
            self.record = self._desk.record()
            self.page = await asyncio.to_thread(demand_page, rows)
        self.document = {"as_of_ms": now_ms, "series": rows}
