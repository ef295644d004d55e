"""Idle node-hours and cold starts with a forecast buffer, a static buffer, and none.

A run has two weeks of history, then SIZES days in bins of ten minutes. A machine has eight GPUs, and is
ready one bin after it was ordered. A machine that is no longer wanted is removed at the end of a bin. A
cold start is a node that is wanted in a bin for which it is not ready. The forecast buffer is the adapter
`buffers` with the product's own forecasts. The static buffers have 0, 1, 2, … spare machines ready. There
are two demands. One is a simulated pool of served models. The other is demand/earth below FLEETCAST_DATA
(GPUs that run and wait, of all its clusters).

    cold starts           cold starts of the forecast buffer. The peer has no buffer
    cold starts, as dear  the same. The peer is the largest static buffer that has at most as many idle node-hours
    idle, as good         idle node-hours. The peer is the smallest static buffer with at most as many cold starts
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.models.demand.forecaster import BIN_MS, DemandForecaster, Histories, SeriesKey
from fleetcast.schedulers.buffers import GPUS, POOL, REPLICAS, CapacityBuffers
from fleetcast.schedulers.weather import DemandKey, Weather

SIZES = (7,)  # days that are played
DAY, WINDOW, MINUTES = 144, 28 * 144, 1440
HISTORY_DAYS = 14
NODE_GPUS, BIN_H = 8, 1 / 6
FIRST_BIN = 2_916_000
EARTH = "demand/earth"
MOST_STATIC = 200
Array = NDArray[np.float64]


class BufferResult(NamedTuple):
    """The result of a simulated run.

    cold: the number of cold starts: nodes that were wanted before they were ready. idle_h: idle
    node-hours.
    """

    cold: int
    idle_h: float


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield three records for each demand and each number of days."""
    for name, wanted in make_demands():
        for days in sizes:
            yield from _compare_buffers(name, wanted[: (HISTORY_DAYS + days) * DAY], days)


def _compare_buffers(name: str, wanted: Array, days: int) -> Iterator[dict[str, Any]]:
    cpu_s = time.process_time()
    ahead = simulate_buffer(wanted, days, ForecastBuffer(wanted))
    cpu_s = time.process_time() - cpu_s
    static = [simulate_buffer(wanted, days, make_static_buffer(nodes)) for nodes in range(MOST_STATIC)]
    none = static[0]
    assert ahead.cold < none.cold, f"{ahead} avoids nothing of {none}"
    as_dear = max((one for one in enumerate(static) if one[1].idle_h <= ahead.idle_h), default=(0, none))
    as_good = next((one for one in enumerate(static) if one[1].cold <= ahead.cold), (MOST_STATIC - 1, static[-1]))
    size = {"days": days, "none_idle_h": round(none.idle_h), "static_idle_h": round(as_dear[1].idle_h)}
    for case, peer in (
        ("cold starts", ("no buffer", float(none.cold))),
        ("cold starts, as dear", (f"{as_dear[0]} nodes always", float(as_dear[1].cold))),
    ):
        yield make_record("buffers", f"{name}: {case}", size, [float(ahead.cold)], "nodes", cpu_s=cpu_s, peer=peer)
    peer = (f"{as_good[0]} nodes always", as_good[1].idle_h)
    yield make_record("buffers", f"{name}: idle, as good", size, [ahead.idle_h], "node-h", cpu_s=cpu_s, peer=peer)


def simulate_buffer(wanted: Array, days: int, buffer: Callable[[int], int]) -> BufferResult:
    """Simulate the last `days` of a demand with a buffer. wanted: (bin,) GPUs.

    buffer: a function that returns, at the end of a bin, how many spare machines should be ready.
    """
    nodes = np.ceil(wanted / NODE_GPUS).astype(int)
    first = len(wanted) - days * DAY
    there, cold, idle = int(nodes[first - 1]) + buffer(first - 1), 0, 0
    for at in range(first, len(wanted)):
        cold += max(0, int(nodes[at]) - there)
        idle += max(0, there - int(nodes[at]))
        there = int(nodes[at]) + buffer(at)
    return BufferResult(cold, idle * BIN_H)


def make_static_buffer(nodes: int) -> Callable[[int], int]:
    """Return a static buffer, which has the same number of spare nodes in every bin."""
    return lambda _bin: nodes


class ForecastBuffer:
    """A buffer whose replicas the adapter computes from a pipeline's forecasts."""

    def __init__(self, wanted: Array) -> None:
        self._wanted = wanted
        self._forecaster = DemandForecaster()
        self._adapter, self._seen = CapacityBuffers(), {"serve/ahead": {POOL: "serve", GPUS: str(NODE_GPUS)}}

    def __call__(self, bin: int) -> int:
        now_ms = (FIRST_BIN + bin + 1) * BIN_MS - 1
        histories = [self._make_histories(bin)]
        rows = self._forecaster.forecast_all(histories, now_ms)
        while self._forecaster.is_behind:  # the first call of all finds a history to learn
            rows = self._forecaster.forecast_all(histories, now_ms)
        demand = {DemandKey(row.queue, row.class_, row.group, row.target): row for row in rows}
        values = self._seen["serve/ahead"]
        for write in self._adapter.wishes(Weather(bin, now_ms, now_ms, None, demand), self._seen):
            values.pop(REPLICAS, None)
            values |= {} if write.value is None else {REPLICAS: write.value}
        return int(values.get(REPLICAS, 0))

    def _make_histories(self, bin: int) -> Histories:
        known = self._wanted[max(0, bin + 1 - WINDOW) : bin + 1]
        ten_minute = np.full((1, WINDOW), np.nan)
        ten_minute[0, WINDOW - len(known) :] = known
        minutes = np.repeat(ten_minute[:, -MINUTES // 10 :], 10, axis=1)
        covariates = {name: np.full_like(ten_minute, np.nan) for name in ("running", "queued", "arriving")}
        return Histories("wanted", (SeriesKey("serve"),), minutes, ten_minute, np.full(1, np.nan), covariates)


def make_demands() -> Iterator[tuple[str, Array]]:
    """Yield (name, wanted) of each demand. wanted: (bin,) GPUs at the end of each bin of ten minutes."""
    yield "made up", make_synthetic_demand(HISTORY_DAYS + max(SIZES), seed=1)
    folder = Path(os.environ.get("FLEETCAST_DATA", "../shared/data")) / EARTH
    if folder.is_dir():
        yield EARTH, read_earth_demand(folder)


def make_synthetic_demand(days: int, seed: int) -> Array:
    """Return (bin,) GPUs wanted by simulated served models.

    The demand has a daily wave, quiet weekends, more load from nine o'clock on, and bursts.
    """
    rng = np.random.default_rng(seed)
    hour = np.arange(days * DAY) * BIN_H
    wave = 1 + 0.5 * np.sin(2 * np.pi * (hour % 24 - 8) / 24)
    week = np.where(hour // 24 % 7 >= 5, 0.7, 1.0)
    office = np.where((hour % 24 >= 9) & (hour % 24 < 18), 1.25, 1.0)
    bursts = np.zeros(len(hour))
    for at in rng.choice(len(hour), len(hour) // 48, replace=False).tolist():
        bursts[at : at + rng.integers(2, 9)] += 64
    level = 256 * wave * week * office * np.exp(rng.normal(0, 0.02, len(hour)))
    return np.round(level + bursts)


def read_earth_demand(folder: Path) -> Array:
    from fleetcast.training.sets.data_folders import is_table, read_table

    (table,) = [read_table(path) for path in sorted(folder.iterdir()) if is_table(path)]
    summed = table.groupby("time")[["running_gpu_num", "pending_gpu_num"]].sum().sum(axis=1)
    by_bin = np.asarray(summed.sort_index(), np.float64)[9::10]
    assert len(by_bin) > HISTORY_DAYS * DAY, f"{EARTH} has only {len(by_bin)} bins"
    return by_bin
