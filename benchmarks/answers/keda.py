"""KEDA's requests to a real api process by gRPC, and the gain of a forecast for an autoscaler.

`kept` and `new` measure GetMetrics in a closed loop, while a board is published each second. `kept` uses
one connection, `new` a new one for each call. The value is the 99th percentile latency of each round.

`cold starts` and `replica hours` simulate days of a served model by the minute, with the autoscaler's rule
(benchmarks/kit/autoscale.py). Each minute the pipeline makes its forecast from the data until then, and
the adapter for KEDA reads it. One peer is the reactive trigger alone. The other peer also has a lower target,
so that both cost the same number of replica hours. `lacking`: the share of requests above the capacity of warm
replicas. The trace `ramp` is drawn from a seed. The trace `week` is serving/servegen, if present.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.autoscale import (
    COLD_S,
    DAY,
    AutoscaleResult,
    Rates,
    draw_office_ramp,
    match_replica_hours,
    read_served_week,
    simulate_autoscaler,
)
from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.service import ServerProcess, find_free_port, pin_beside_server
from fleetcast.features.request_series import RequestSeries
from fleetcast.models.demand.forecaster import DemandForecaster
from fleetcast.models.demand.rows import DemandRow
from fleetcast.models.demand.sparse import SparseForecaster
from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.keda import compute_wanted_demand, read_trigger
from fleetcast.schedulers.weather import DemandKey, Weather
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.pipeline.demand.histories import read_request_rates
from fleetcast.service.pipeline.demand.sections import make_demand_sections

SIZES = (200,)  # series on the board
ROUNDS, CALLS, NEW_CALLS = 5, 1000, 200
BOARD_S = 1.0
QUANTILES = (0.5, 0.75, 0.9)
SEED = 7
PLAYED_DAYS = 2
RAMP_DAYS = 16
REPLICAS_AT_PEAK = 40
FIRST_MS = 1_760_313_600_000  # a Monday
MINUTE_MS = 60_000
KEY = ("serve", "llm")
METHOD = "/externalscaler.ExternalScaler/GetMetrics"


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield two records for each number of series, then four for each trace and quantile."""
    for series in sizes:
        yield from _measure_answers(series)
    yield from _play_trace("ramp", draw_office_ramp(RAMP_DAYS, SEED))
    week = read_served_week(SEED)
    if week is not None:
        yield from _play_trace("week", week)


def _measure_answers(series: int) -> Iterator[dict[str, Any]]:
    import grpc

    port = find_free_port()
    with TemporaryDirectory() as name, pin_beside_server():
        writer = BoardWriter(Path(name) / "board")
        writer.publish(*_make_board(series))
        with ServerProcess.start_role("api", Path(name), api={"grpc_port": port}) as server:
            server.wait_for_answer("/v1/demand?queue=pool0&target=running")
            address = f"127.0.0.1:{port}"
            with grpc.insecure_channel(address) as channel:
                kept = _PoolClient(writer, series, lambda body: _call_get_metrics(channel, body))
                yield _measure_tail("kept", kept, server, CALLS)

            def ask_over_new_channel(body: bytes) -> bytes:
                with grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]) as own:
                    return _call_get_metrics(own, body)

            yield _measure_tail("new", _PoolClient(writer, series, ask_over_new_channel), server, NEW_CALLS)


def _call_get_metrics(channel: Any, body: bytes) -> bytes:
    answer: bytes = channel.unary_unary(METHOD)(body, timeout=10)
    return answer


class _PoolClient:
    """A client that requests pools in turn, and publishes a board every BOARD_S between two calls."""

    def __init__(self, writer: BoardWriter, series: int, ask: Any) -> None:
        self.series = series
        self._writer, self._ask = writer, ask
        self._published_s = time.monotonic()

    def measure_rounds_ms(self, calls: int) -> list[float]:
        from fleetcast.clients.grpc_stubs.externalscaler_pb2 import (
            GetMetricsRequest,
            GetMetricsResponse,
            ScaledObjectRef,
        )

        took_ms = []
        for n in range(calls):
            if time.monotonic() - self._published_s > BOARD_S:
                self._writer.publish(*_make_board(self.series))
                self._published_s = time.monotonic()
            metadata = {"queue": f"pool{n % self.series}", "target": "running", "targetPerReplica": "8"}
            ref = ScaledObjectRef(name="web", scalerMetadata=metadata | {"horizonSeconds": "300"})
            body = GetMetricsRequest(scaledObjectRef=ref).SerializeToString()
            began = time.perf_counter()
            answer = GetMetricsResponse.FromString(self._ask(body))
            took_ms.append(1000 * (time.perf_counter() - began))
            assert answer.metricValues[0].metricValueFloat == 100.0 + n % self.series, "another pool was served"
        return took_ms


def _measure_tail(case: str, asker: _PoolClient, server: ServerProcess, calls: int) -> dict[str, Any]:
    asker.measure_rounds_ms(calls // 10)
    before = server.measure_cpu_s()
    rounds = [asker.measure_rounds_ms(calls) for _ in range(ROUNDS)]
    tails = [float(np.quantile(took_ms, 0.99)) for took_ms in rounds]
    size = {"series": asker.series, "calls": calls}
    cpu_s = (server.measure_cpu_s() - before) / ROUNDS
    return make_record("keda", f"GetMetrics {case}, p99", size, tails, "ms", cpu_s=cpu_s)


def _make_board(series: int) -> tuple[list[Section], int]:
    now_ms = time.time_ns() // 1_000_000
    rows = [_make_row(f"pool{n}", 100.0 + n, now_ms) for n in range(series)]
    return make_demand_sections(rows, {}, [], now_ms), now_ms


def _make_row(pool: str, value: float, now_ms: int) -> DemandRow:
    return DemandRow(
        queue=pool,
        class_="all",
        group="all",
        target="running",
        now=value,
        model="persistence",
        issued_ms=now_ms,
        horizons_s=[60, 300, 600, 3600],
        quantiles=[0.5, 0.9],
        values=[[value / 2] * 4, [value] * 4],
        record=None,
    )


def _play_trace(trace: str, rates: Rates) -> Iterator[dict[str, Any]]:
    """Yield four records for each quantile, over the last days of a trace."""
    first = len(rates) - PLAYED_DAYS * DAY
    cpu = time.process_time()
    forecasts = make_served_forecasts(rates, first)
    cpu_s = time.process_time() - cpu
    shown = rates[first:]
    per_replica = float(shown.max()) / REPLICAS_AT_PEAK
    alone = simulate_autoscaler(shown, None, per_replica)
    assert alone.cold_s > 0, "no ramp was too steep for the reactive rule"
    for quantile, served in forecasts.items():
        both = simulate_autoscaler(shown, served, per_replica)
        yield from _make_records(trace, quantile, both, alone, cpu_s)
        headroom = match_replica_hours(shown, per_replica, both.replica_hours)
        size = {"quantile": round(100 * quantile), "days": PLAYED_DAYS}
        peer = ("more headroom, as many hours", headroom.cold_s)
        yield make_record("keda", f"{trace}: cold starts", size, [both.cold_s], "s", cpu_s=cpu_s, peer=peer)


def _make_records(
    trace: str, quantile: float, both: AutoscaleResult, alone: AutoscaleResult, cpu_s: float
) -> Iterator[dict[str, Any]]:
    size = {"quantile": round(100 * quantile), "days": PLAYED_DAYS}
    for case, unit, value, peer in (
        ("cold starts", "s", both.cold_s, alone.cold_s),
        ("replica hours", "h", both.replica_hours, alone.replica_hours),
        ("lacking", "%", 100 * both.short, 100 * alone.short),
    ):
        yield make_record("keda", f"{trace}: {case}", size, [value], unit, cpu_s=cpu_s, peer=("reactive alone", peer))


def make_served_forecasts(rates: Rates, first: int) -> dict[float, Rates]:
    """Return quantile -> (minute,) requests/s that KEDA receives at each minute's end, NaN if unknown.

    The minutes begin at `first`. Each forecast is for the time COLD_S later.
    """
    requests, forecaster = RequestSeries(), DemandForecaster([SparseForecaster()], [SparseForecaster()])
    served: dict[float, list[float]] = {quantile: [] for quantile in QUANTILES}
    for minute in range(len(rates)):
        now_ms = FIRST_MS + minute * MINUTE_MS
        requests.record(now_ms, {KEY: (float(rates[minute]), 1)})
        if minute >= first - DAY // 24:  # an hour for the gates to learn the history, as a pipeline does after a start
            rows = forecaster.forecast_all([read_request_rates(requests, now_ms)], now_ms)
            for quantile, values in served.items() if minute >= first else ():
                values.append(_read_served_value(rows, now_ms, quantile))
    return {quantile: np.array(values) for quantile, values in served.items()}


def _read_served_value(rows: Sequence[DemandRow], now_ms: int, quantile: float) -> float:
    trigger = read_trigger(
        {
            **{"queue": KEY[0], "group": KEY[1], "target": "request_rate", "targetPerReplica": "1"},
            **{"quantile": str(quantile), "horizonSeconds": str(COLD_S)},
        }
    )
    demand = {DemandKey(row.queue, row.class_, row.group, row.target): row for row in rows}
    try:
        return compute_wanted_demand(Weather(0, now_ms, now_ms, demand=demand), trigger)
    except NotKnown:
        return float("nan")
