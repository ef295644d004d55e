"""The demand of a whole fleet: a refresh of its forecasts, and the tail latency of `GET /v1/demand`.

A quarter of the pools have two classes, half have two user groups. All have arriving, running, queued and
wanted GPUs over 28 days in bins of ten minutes. The groups have demand a third of the time.

`refresh`: the CPU seconds of the work that a pipeline does every minute in a thread. Here the gates still learn
the history, which is the most work. Answers are for random pools from a real api process, in an open loop,
while the board is replaced twice a second. `body`: the CPU time to make an answer's body from a board that
was not read yet. `dump`: the longest pause of the event loop while a thread copies the gates for a
snapshot. The peer of `dump` copies them in the loop.
"""

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.load import LoadRequest, make_get, run_open_loop
from fleetcast.benchmarks.kit.service import ServerProcess, pin_beside_server
from fleetcast.models.demand.forecaster import BIN_MS, DemandForecaster, Histories, SeriesKey
from fleetcast.models.demand.sparse import SparseForecaster
from fleetcast.service.api.routes.demand import encode_demand
from fleetcast.service.board.board import BoardWriter, Section, encode_board
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from fleetcast.service.thread_work import run_in_thread

SIZES = (20, 200)
BINS, MINUTES = 28 * 144, 1440
TARGETS = ("arriving", "running", "queued", "wanted")
NOW_MS = 2_916_000 * BIN_MS
REFRESHES, REPEATS, BODIES = 3, 3, 200
RATE, OPEN_S, SWAP_S, CONNECTIONS = 200.0, 4.0, 0.5, 8
CHECK_EVERY = 20


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield four records for each number of pools."""
    for pools in sizes:
        histories = make_histories(pools)
        forecaster, cpu_s = DemandForecaster([SparseForecaster()], [SparseForecaster()]), []
        sections: list[Section] = []
        for minute in range(REFRESHES + 1):
            began = time.thread_time()
            rows = forecaster.forecast_all(histories, NOW_MS + minute * 60_000)
            sections = make_demand_sections(rows, forecaster.make_chart_record(), [], NOW_MS)
            cpu_s.append(time.thread_time() - began)
        assert len(rows) == sum(len(history.keys) for history in histories), f"{len(rows)} rows"
        size = {"pools": pools, "series": len(rows)}
        yield make_record("served_demand", "refresh, behind", size, cpu_s[1:], "s", cpu_s=min(cpu_s[1:]))
        yield _measure_dump(forecaster, size)
        yield _measure_bodies(sections, pools, size)
        yield _measure_answers(sections, pools, size)


def make_histories(pools: int) -> list[Histories]:
    """Make the demand histories of pools with classes and groups: random walks around a daily wave.

    The demand of classes and groups is zero most of the time.
    """
    rng = np.random.default_rng(0)
    names = [f"pool{n}" for n in range(pools)]
    keys = (
        *map(SeriesKey, names),
        *(SeriesKey(name, class_) for name in names[: pools // 4] for class_ in ("training", "inference")),
        *(SeriesKey(name, group=group) for name in names[: pools // 2] for group in ("g", "other")),
    )
    day = 20 * np.sin(np.arange(BINS) * 2 * np.pi / 144)
    made = []
    for target in TARGETS:
        ten_minute = np.maximum(200 + day + np.cumsum(rng.normal(0, 3, (len(keys), BINS)), axis=1), 0.0)
        ten_minute[[one.is_part for one in keys]] *= draw_on_off_demand(2 * (pools // 2), rng)
        minutes = np.repeat(ten_minute[:, -MINUTES // 10 :], 10, axis=1)
        made.append(Histories(target, keys, minutes, ten_minute, np.full(len(keys), np.nan)))
    return made


def draw_on_off_demand(series: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw a demand that is on or off: (series, bin) float64, 0 or 1.

    It keeps a value for eight hours on average. A third of the values are 1.
    """
    turns = np.cumsum(rng.random((series, BINS)) < 1 / 48, axis=1)
    return np.asarray(turns % 3 == 0, np.float64)


def _measure_dump(forecaster: DemandForecaster, size: dict[str, int]) -> dict[str, Any]:
    """Measure the longest gap between two turns of a loop while a thread dumps the forecaster."""

    async def measure_longest_gap() -> float:
        work, gap_s = asyncio.ensure_future(run_in_thread(forecaster.dump)), 0.0
        while not work.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            gap_s = max(gap_s, time.perf_counter() - began - 0.001)
        assert len((await work)[1]) > 1, "nothing was stored"
        return 1000 * gap_s

    began, cpu = time.perf_counter(), time.thread_time()
    forecaster.dump()
    alone_ms, cpu_s = (time.perf_counter() - began) * 1000, time.thread_time() - cpu
    gaps_ms = [asyncio.run(measure_longest_gap()) for _ in range(REPEATS)]
    return make_record("served_demand", "dump", size, gaps_ms, "ms", cpu_s=cpu_s, peer=("in the loop", alone_ms))


def _measure_bodies(sections: Sequence[Section], pools: int, size: dict[str, int]) -> dict[str, Any]:
    """Measure the 99th percentile of the time to make an answer's body. Each body is made from a new board."""
    query = {"class": "all", "group": "all", "target": "running", "horizon_s": None}
    with TemporaryDirectory() as name:
        writer, cache = BoardWriter(Path(name)), BoardCache(Path(name), hold_s=0.0)
        took_ms = []
        for n in range(BODIES):
            writer.publish(sections, NOW_MS)
            began = time.thread_time()
            body = encode_demand(cache, cache.get_board(), query | {"queue": f"pool{n % pools}"}, NOW_MS)
            took_ms.append((time.thread_time() - began) * 1000)
            assert body.count(b'"running"') == 1, "not one row was found"
    return make_record(
        "served_demand", "body, p99", size, [float(np.quantile(took_ms, 0.99))], "ms", cpu_s=sum(took_ms) / 1000
    )


def _measure_answers(sections: Sequence[Section], pools: int, size: dict[str, int]) -> dict[str, Any]:
    tails, cpu_s = [], []
    with TemporaryDirectory() as name, pin_beside_server():
        folder = Path(name)
        BoardWriter(folder / "board").publish(sections, NOW_MS)
        with ServerProcess.start_role("api", folder) as server:
            server.wait_for_answer("/v1/demand?queue=pool0&target=running")
            for _ in range(REPEATS):
                draw, before = PoolRequests(folder / "board", sections, pools), server.measure_cpu_s()
                load = run_open_loop(server.port, draw, connections=CONNECTIONS, seconds=OPEN_S, rate=RATE)
                assert load.checked >= len(load.latency_s) // CHECK_EVERY > 0, f"{load.checked} bodies were checked"
                assert draw.boards > OPEN_S, f"only {draw.boards} boards were put there"
                tails.append(load.compute_quantile_ms(0.99))
                cpu_s.append(server.measure_cpu_s() - before)
    at = tails.index(min(tails))
    return make_record("served_demand", "answer, p99", size | {"rate": round(RATE)}, tails, "ms", cpu_s=cpu_s[at])


class PoolRequests:
    """A source of requests for pools drawn uniformly. It also publishes a prepared board every SWAP_S."""

    def __init__(self, folder: Path, sections: Sequence[Section], pools: int) -> None:
        self.boards = 0
        self._folder = folder
        self._rng = np.random.default_rng(1)
        self._pools = pools
        self._due = time.perf_counter()
        first = time.time_ns() // 1_000_000
        self._ready = [folder / f"ready{n}" for n in range(round(2 * OPEN_S / SWAP_S))]
        for n, path in enumerate(self._ready):
            path.write_bytes(encode_board(sections, first + n, NOW_MS))

    def __call__(self) -> LoadRequest:
        if time.perf_counter() >= self._due and self._ready:
            os.replace(self._ready.pop(0), self._folder / "board")
            self.boards += 1
            self._due += SWAP_S
        pool = f"pool{int(self._rng.integers(self._pools))}"
        checked = self._rng.random() < 2 / CHECK_EVERY
        path = f"/v1/demand?queue={pool}&target=running&class=all&group=all"
        return make_get(path, _make_answer_check(pool) if checked else None)


def _make_answer_check(pool: str) -> Any:
    def check_answer(head: bytes, body: bytes) -> None:
        (row,) = msgspec.json.decode(body)["series"]
        assert row["queue"] == pool, f"{row['queue']} was served for {pool}"
        assert len(row["values"]) == len(row["quantiles"])

    return check_answer
