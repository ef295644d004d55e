"""Forecasts of demand beside a running pipeline: made anew about once a minute, in a thread on copied series.

    ticks ── watch ──> what is heard of served models and seen of GPUs ─┐ noted in the loop
    events ── fold ──> DemandSeries ── read in slices ──────────────────┴─> histories ── thread ──> rows, fans, sections

The demand model is worked out at a new bin of ten minutes: it changes no faster. While gates have a history to learn,
forecasts follow each other faster, for at most a third of the time. Until the first one, the board goes on telling what
the process before forecast.
"""

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from features.gpu_residency import Look
from features.job_records import JobRecord
from features.request_series import Served, request_rates
from features.serving import ServedInstance
from fleet.clock import Clock
from models.demand import BIN_MS, DemandDesk, Histories
from models.demand_model import Key, Running, cold_starts, demand_model, nearest
from models.prescale import prescale
from service.board import Board
from service.demand_histories import read_histories
from service.demand_metrics import parts_page, trees_page
from service.demand_sections import demand_again, demand_sections
from service.fleet_metrics import demand_page
from service.gpu_looks import gpu_looks
from service.publish import Tick
from service.served_trees import ServedTrees
from service.shadow_trees import Shadow, ShadowTrees, shadow_of
from service.state import FleetState
from service.thread_work import in_thread

PERIOD_S = 60.0
SHORTEST_PAUSE_WALL_S = 0.2
BEHIND_REST = 2.0  # times what a forecast took, at most, while there is a history to test
AGAIN_MS = 3_600_000  # a forecast that is older is not told again
HEARD_KEPT = 60  # ticks between two forecasts, with room to spare


class DemandForecasts:
    """The latest ones: `sections` for the board, `page` for Prometheus.

    Who holds `free` has the desk to himself: a thread writes it while it forecasts.
    """

    def __init__(self, desk: DemandDesk, clock: Clock, board: Board | None = None) -> None:
        """board: of the process before."""
        self.free = asyncio.Lock()
        self.sections = demand_again(board) if board and clock.now_ms() - board.as_of_ms < AGAIN_MS else []
        self.rows: list[dict[str, Any]] = []  # of `/v1/demand`
        self.page = b""
        self._desk = desk
        self._clock = clock
        fitted = [one for one in desk.forecasters if isinstance(one, ServedTrees)]
        self._trees = next((one for one in fitted if not isinstance(one, ShadowTrees)), None)
        self._shadow = next((one for one in fitted if isinstance(one, ShadowTrees)), None)
        self.shadow: Shadow | None = None  # how the challenger did
        self._heard: deque[tuple[int, Sequence[ServedInstance], Mapping[Key, Look]]] = deque(maxlen=HEARD_KEPT)
        self._model: list[dict[str, Any]] = []
        self._model_bin = -1

    @property
    def version(self) -> str:
        """Of the trees that forecast, as `demand-0003`; empty when none do."""
        return self._trees.version if self._trees is not None else ""

    def watch(self, tick: Tick, served: Sequence[ServedInstance]) -> None:
        """What a tick knows of served models and GPUs; from the thread that scores."""
        self._heard.append((tick.now_ms, served, gpu_looks(tick)))

    async def forecast_forever(self, state: FleetState) -> None:
        while True:
            began = time.monotonic()
            await self.forecast(state)
            took_s = time.monotonic() - began
            rest_s = self._clock.wall_s(PERIOD_S) - took_s
            if self._desk.is_behind:
                rest_s = min(rest_s, BEHIND_REST * took_s)
            await asyncio.sleep(max(SHORTEST_PAUSE_WALL_S, rest_s))

    async def forecast(self, state: FleetState) -> None:
        """Forecast all demand anew."""
        now_ms, demand = self._clock.now_ms(), state.demand
        while self._heard:
            heard_ms, served, looks = self._heard.popleft()
            demand.requests.note(heard_ms, request_rates(served))
            demand.residency.note(heard_ms, looks)
        demand.rank_groups(now_ms)
        histories = await read_histories(demand, state.topology, now_ms)
        rates = {key: demand.requests.served(*key) for key in demand.requests.models()}
        records, residency = demand.records.rows(), demand.residency.shares()
        async with self.free:
            await in_thread(lambda: self._forecast(histories, now_ms, records, residency, rates))

    def _forecast(
        self,
        histories: list[Histories],
        now_ms: int,
        records: list[JobRecord],
        residency: Mapping[Key, tuple[float, float]],
        rates: Mapping[Key, Served],
    ) -> None:
        for trees in (self._trees, self._shadow):
            if trees is not None and trees.refresh():
                self._desk.use(trees.name, trees.version)
        rows = self._desk.update(histories, now_ms)
        cold = cold_starts(records)
        for row in rows:
            if row["target"] == "request_rate" and (row["pool"], row["group"]) in rates:
                seen = rates[row["pool"], row["group"]]
                starts = nearest(cold, (row["pool"], row["class"]))
                row["prescale"] = prescale(row, seen.instances, seen.peak_per_instance, starts)
        if now_ms // BIN_MS != self._model_bin:
            self._model = demand_model(running_by_class(histories), records, residency)
            self._model_bin = now_ms // BIN_MS
        self.rows = rows
        if self._trees is not None and self._shadow is not None:
            self.shadow = shadow_of(self._desk.losses(), self._shadow, self._trees)
        self.sections = demand_sections(rows, self._desk.record(), self._model, now_ms)
        self.page = demand_page(rows) + parts_page(rows) + trees_page(self._trees)


def running_by_class(histories: Sequence[Histories]) -> dict[Key, Running]:
    """(pool, class) -> GPUs in use; of pools first, then of their classes."""
    (told,) = (one for one in histories if one.target == "running")
    return {
        (whose.pool, whose.class_): Running(minutes, tens)
        for whose, minutes, tens in zip(told.whose, told.minutes, told.tens, strict=True)
        if not whose.is_part
    }
