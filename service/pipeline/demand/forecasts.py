"""Forecasts of demand in a running pipeline.

They are made about once a minute, in a thread that works on copied series.

    ticks ── watch ──> facts about served models and GPUs ──────────────┐ recorded in the loop
    events ── fold ──> DemandSeries ── read in slices ──────────────────┴─> histories ── thread ──> rows, fans, sections

The demand model is made once in ten minutes, when a new bin begins. While gates still have past demand to
learn from, forecasts run more often, for at most a third of the time. Until the first forecast, the board
shows the last forecast of the previous process.
"""

import asyncio
import contextlib
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.contribution import OTHER, DemandScope, sum_over_quota
from fleetcast.features.gpu_residency import ObservedGpus
from fleetcast.features.job_records import JobRecord
from fleetcast.features.pool_inventory import EVERYTHING, UNASSIGNED, PoolInventory
from fleetcast.features.request_series import ServingCapacity, sum_request_rates
from fleetcast.features.serving import ServedInstance
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.demand.demand_model import Key, RunningGpus, list_cold_starts, make_demand_model
from fleetcast.models.demand.forecaster import BIN_MS, DemandForecaster, Histories, SeriesKey
from fleetcast.models.demand.prescale import compute_prescale
from fleetcast.models.demand.rows import DemandRow, WaitsFor
from fleetcast.service.answers.fitted_models import ShadowModel
from fleetcast.service.board.board import Board, Section
from fleetcast.service.board.gpu_use import Occupant
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.demand.histories import read_histories
from fleetcast.service.pipeline.demand.metrics import make_demand_page, make_parts_page, make_trees_page
from fleetcast.service.pipeline.demand.sections import copy_demand_sections, make_demand_sections
from fleetcast.service.pipeline.demand.served_trees import ServedTrees, ShadowTrees, make_shadow_model
from fleetcast.service.pipeline.state import PAST_MS, FleetState
from fleetcast.service.pipeline.tick import Tick
from fleetcast.service.thread_work import run_in_thread

PERIOD_S = 60.0
SHORTEST_PAUSE_WALL_S = 0.2
BEHIND_REST = 2.0  # times what a forecast took, at most, while there is a history to test
AGAIN_MS = 3_600_000  # a forecast that is older is not told again
LOADED_SHARE = 0.05  # of a GPU's memory: more than a bare context takes
ACTIVE_SHARE = 0.05  # of the time
ACTIVITY = ("sm_active", "gpu_util")  # the first that is known
QUIET_WALL_S, MOST_PAUSES = 5.0, 12  # while somebody tells the past
GPU_TARGETS = ("running", "queued", "wanted")
MAX_UNREAD_TICKS = 60  # ticks between two forecasts, with room to spare


@dataclass(frozen=True, slots=True)
class TickStamp:
    """The facts of one tick from which the demand series learn.

    unknown_use: number of GPUs in use without a known job, or None until every source of jobs has answered
    once. held_milli: attempt → thousandths of GPUs that it holds, if its events state another amount.
    displaced: running attempts that hold fewer GPUs than they state.
    """

    time_ms: int
    served: Sequence[ServedInstance]
    gpus: Mapping[Key, ObservedGpus]
    unknown_use: int | None
    requests: Sequence[JobAttempt]
    promised: Mapping[tuple[str, int], int]
    held_milli: Mapping[tuple[str, int], int] = field(default_factory=dict)
    unknown_by_pool: Mapping[str, int] = field(default_factory=dict)
    displaced: Set[tuple[str, int]] = frozenset()


class DemandForecasts(Capability):
    """The demand forecasts of a pipeline: `latest` for the board, `metrics` for Prometheus.

    A thread writes the forecaster. Readers of the forecaster must hold the lock `free`.
    """

    def __init__(
        self,
        forecaster: DemandForecaster,
        clock: Clock,
        board: Board | None = None,
        caught_up: asyncio.Event | None = None,
    ) -> None:
        """Make the forecasts of a pipeline.

        board: the last board of the previous process.
        caught_up: an event that is set once all events from before the start are applied.
        """
        self.free = asyncio.Lock()
        self.latest = copy_demand_sections(board) if board and clock.now_ms() - board.as_of_ms < AGAIN_MS else []
        self.rows: list[DemandRow] = []  # of `/v1/demand`
        self.metrics = b""
        self.dumped: tuple[Any, Any] | None = None  # the forecaster's state, as of `freeze_state`
        self._forecaster = forecaster
        self._caught_up = caught_up
        self._clock = clock
        fitted = [one for one in forecaster.forecasters if isinstance(one, ServedTrees)]
        self._trees = next((one for one in fitted if not isinstance(one, ShadowTrees)), None)
        self._shadow = next((one for one in fitted if isinstance(one, ShadowTrees)), None)
        self.shadow: ShadowModel | None = None  # how the challenger did
        self._unread: deque[TickStamp] = deque(maxlen=MAX_UNREAD_TICKS)
        self._model: list[dict[str, Any]] = []
        self._model_bin = -1
        self._has_forecast = False
        self._on_disk = 0  # events of long ago among those from before the start

    @property
    def version(self) -> str:
        """The version of the trees that forecast, such as `demand-0003`. Empty if no trees are used."""
        return self._trees.version if self._trees is not None else ""

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        unknown = count_unattributed_by_pool(tick) if tick.are_jobs_known else None
        in_use = None if unknown is None else sum(unknown.values())
        promised = {row.attempt: row.since_ms for row in tick.open.requests}
        self._unread.append(
            TickStamp(
                tick.now_ms,
                tick.served,
                observe_held_gpus(tick),
                in_use,
                tick.open.requested,
                promised,
                tick.held_milli,
                unknown or {},
                tick.displaced,
            )
        )
        return self.latest

    def make_page(self, tick: Tick) -> bytes:
        return self.metrics

    @contextlib.asynccontextmanager
    async def freeze_state(self) -> AsyncIterator[None]:
        """Dump the forecaster in a thread, because its state is large.

        The forecaster does not change while the context is open.
        """
        async with self.free:
            self.dumped = await run_in_thread(self._forecaster.dump)
            yield

    async def work(self, state: FleetState) -> None:
        """Forecast about once a minute, after the inbox backlog is applied.

        A forecast from before that would be scored against an incomplete outcome, and it is scored only once.
        """
        if self._caught_up is not None:
            await self._caught_up.wait()
        self._on_disk = state.counts.past_events
        while True:
            await self._wait_for_past_events(state)
            began = time.monotonic()
            await self.forecast(state)
            took_s = time.monotonic() - began
            rest_s = self._clock.convert_to_wall_s(PERIOD_S) - took_s
            if self._forecaster.is_behind:
                rest_s = min(rest_s, BEHIND_REST * took_s)
            await asyncio.sleep(max(SHORTEST_PAUSE_WALL_S, rest_s))

    async def _wait_for_past_events(self, state: FleetState) -> None:
        """Wait once, for at most a minute, if a fleet's past events are still arriving.

        With half of the events, the levels of demand would be wrong. The past is complete once no more old events
        arrive and the newest event is recent.
        """
        counts = state.counts
        if self._has_forecast or counts.past_events <= self._on_disk:
            return
        for _ in range(MOST_PAUSES):
            before = counts.past_events
            await asyncio.sleep(QUIET_WALL_S)
            if counts.past_events == before and counts.newest_event_ms >= self._clock.now_ms() - PAST_MS:
                break
        self._has_forecast = True
        self._model_bin = -1  # one before was of less

    async def forecast(self, state: FleetState) -> None:
        """Forecast all demand, and publish the result in `latest` and `metrics`."""
        now_ms, demand = self._clock.now_ms(), state.demand
        demand.apply_inventory(PoolInventory.from_topology(state.topology), state.jobs.attempts.values(), now_ms)
        self.record_ticks(state)
        demand.replace_small_groups(now_ms)
        histories = await read_histories(demand, now_ms)
        rates = {key: demand.requests.find_capacity(*key) for key in demand.requests.list_models()}
        records, residency, quota = (
            demand.records.list_records(),
            demand.residency.compute_shares(),
            sum_over_quota(demand.list_contributions()),
        )
        async with self.free:
            await run_in_thread(lambda: self._make_forecasts(histories, now_ms, records, residency, rates, quota))

    def record_ticks(self, state: FleetState) -> None:
        """Add the facts of the ticks since the last call to the demand series."""
        demand = state.demand
        while self._unread:
            stamp = self._unread.popleft()
            demand.requests.record(stamp.time_ms, sum_request_rates(stamp.served))
            demand.residency.record(stamp.time_ms, stamp.gpus)
            demand.set_sizes(stamp.held_milli, state.jobs.get, stamp.displaced)
            still_open = [row for row in stamp.requests if is_request_open(row, state.jobs.get(row.job, row.attempt))]
            demand.count_requests(still_open, stamp.promised, stamp.time_ms)
            if stamp.unknown_use is not None:
                demand.count_unknown_use(stamp.time_ms, stamp.unknown_use, stamp.unknown_by_pool)

    def _make_forecasts(
        self,
        histories: list[Histories],
        now_ms: int,
        records: list[JobRecord],
        residency: Mapping[Key, tuple[float, float]],
        rates: Mapping[Key, ServingCapacity],
        quota: Mapping[DemandScope, float],
    ) -> None:
        for trees in (self._trees, self._shadow):
            if trees is not None and trees.refresh():
                self._forecaster.switch_version(trees.name, trees.version)
        rows = self._forecaster.forecast_all(histories, now_ms)
        add_gpu_bounds(rows, histories, quota)
        cold = list_cold_starts(records)
        for row in rows:
            if row.target == "request_rate" and (row.queue, row.group) in rates:
                seen = rates[row.queue, row.group]
                starts = cold.get((row.queue, row.class_))
                row.prescale = compute_prescale(row, seen.instances, seen.peak_per_instance, starts)
        if now_ms // BIN_MS != self._model_bin:
            self._model = make_demand_model(count_running_gpus(histories), records, residency)
            self._model_bin = now_ms // BIN_MS
        self.rows = rows
        if self._trees is not None and self._shadow is not None:
            self.shadow = make_shadow_model(self._forecaster.compute_mean_losses(), self._shadow, self._trees)
        self.latest = make_demand_sections(rows, self._forecaster.make_chart_record(), self._model, now_ms)
        self.metrics = make_demand_page(rows) + make_parts_page(rows) + make_trees_page(self._trees)


def is_request_open(request: JobAttempt, by_events: JobAttempt | None) -> bool:
    """Return whether a request of an earlier tick is still open.

    It is open if no event says that its job runs or has ended. An end from before the request belongs to an
    earlier run with the same name.
    """
    if by_events is None or request.submitted_ms is None:
        return True
    over_ms = by_events.over_ms
    return by_events.started_ms is None if over_ms is None else over_ms < request.submitted_ms


def count_running_gpus(histories: Sequence[Histories]) -> dict[Key, RunningGpus]:
    """Return (queue, class) → GPUs in use, for whole queues and for their classes."""
    (running,) = (one for one in histories if one.target == "running")
    return {
        (key.queue, key.class_): RunningGpus(minutes, ten_minute)
        for key, minutes, ten_minute in zip(running.keys, running.minutes, running.ten_minute, strict=True)
        if not key.is_part and key.pool == EVERYTHING
    }


def add_gpu_bounds(
    rows: Sequence[DemandRow], histories: Sequence[Histories], quota: Mapping[DemandScope, float]
) -> None:
    """Add the number of usable GPUs to each row that counts GPUs.

    Rows of queued demand also get the number of GPUs that wait for a quota. Rows of unlisted queues and
    groups do not. quota: scope → GPUs that wait for a quota.
    """
    capacity = {
        key: gpus if math.isfinite(gpus) else None
        for one in histories
        if one.target == "running"
        for key, gpus in zip(one.keys, one.capacity.tolist(), strict=True)
    }
    for row in rows:
        key = SeriesKey(row.queue, row.class_, row.group, row.pool)
        if row.target in GPU_TARGETS:
            row.capacity = capacity.get(key)
        if row.target == "queued" and OTHER not in (row.queue, row.group):
            held_up = min(float(quota.get(DemandScope(*key), 0.0)), row.now)
            row.waits_for = WaitsFor(held_up, round(row.now - held_up, 3))


def count_unattributed_by_pool(tick: Tick) -> Counter[str]:
    """Return pool of machines → number of busy GPUs that no job holds."""
    at_work = np.count_nonzero(tick.gpu_use == Occupant.UNKNOWN, axis=1)
    counts = np.maximum(at_work - tick.bound_gpus, 0).tolist()  # jobs whose pods are bound count by what they ask for
    found: Counter[str] = Counter()
    for node, gpus in zip(tick.topology.nodes, counts, strict=False):
        if gpus:
            found[node.pool if node.pool != EVERYTHING else UNASSIGNED] += gpus
    return found


def observe_held_gpus(tick: Tick) -> dict[Key, ObservedGpus]:
    """Count, by (queue, class), the held GPUs whose memory and activity are known.

    Returns (queue, class) → the number of these GPUs, how many of them have their memory loaded, and how many
    are active.
    """
    used, free = _read_feature(tick, "fb_used_bytes"), _read_feature(tick, "fb_free_bytes")
    total = _read_feature(tick, "fb_total_bytes")
    total = np.where(np.isfinite(total), total, used + free)
    active = _read_feature(tick, ACTIVITY[0])
    active = np.where(np.isfinite(active), active, _read_feature(tick, ACTIVITY[1]))
    holder = tick.occupancy.holder
    known = (holder >= 0) & np.isfinite(used) & (total > 0) & np.isfinite(active)
    loaded, busy = known & (used > LOADED_SHARE * total), known & (active > ACTIVE_SHARE)
    columns = tick.running_columns
    group, groups = columns.group[np.where(known, holder, 0)] if len(columns.group) else holder, columns.groups
    counts = [
        np.bincount(group[mask], minlength=len(groups)).astype(np.float64).tolist() for mask in (known, loaded, busy)
    ]
    return {key: (seen, full, active) for key, seen, full, active in zip(groups, *counts, strict=True) if seen}


def _read_feature(tick: Tick, feature: str) -> NDArray[np.float64]:
    """Return the last fresh value of a feature of each GPU: (n, g) float64, NaN if unknown."""
    if feature not in tick.frames.gpu.names:
        return np.full(tick.gpu_rows.shape, np.nan)
    return tick.read_gpu_feature(feature)
