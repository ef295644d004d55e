"""The speed of start-time estimates for 1,000 busy nodes of 8 GPUs, with 10,000 waiting requests.

`estimate`: p99 of estimating one request on sampled futures of the fleet (paths). The time includes further
estimates that leave out one of the request's constraints each. `refresh`: the time to sample the paths again,
which the service does in the background. `answer`: p99 of `POST /v1/jobs/estimate` with a real api and placer,
in an open loop, counted from when each request was due. The `cpu_s` of `answer` is the placer's CPU time.
"""

import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleetcast.benchmarks.answers.decide import GPUS_PER_NODE, make_synthetic_view
from fleetcast.benchmarks.answers.queue import make_board_sections
from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.load import LoadRequest, make_post, run_open_loop
from fleetcast.benchmarks.kit.service import ServerProcess, pin_beside_server
from fleetcast.fleet.requests import LevelName, PlacementRequest, TopologyConstraint
from fleetcast.placement.ahead.paths import Timelines, sample_timelines
from fleetcast.placement.ahead.start_time import estimate_start
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import make_running_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.service.board.board import BoardWriter, Section

SIZES = (8_000,)
QUEUED = 10_000
ESTIMATES = 100
RATE, SECONDS, CONNECTIONS = 5.0, 20.0, 4
PATIENCE_S = 180.0
NOW_MS = 1_760_000_000_000
SHAPES: tuple[tuple[int, int, LevelName | None], ...] = (
    (1, 1, None),
    (1, 8, "node"),
    (2, 8, "rack"),
    (4, 4, None),
    (8, 8, "rack"),
    (16, 8, "rail_group"),
    (4, 2, "node"),
)


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield three records for each fleet size in GPUs."""
    for gpus in sizes:
        view = make_busy_view(gpus // GPUS_PER_NODE)
        size = {"gpus": gpus, "nodes": len(view), "queued": QUEUED}
        began, cpu = time.perf_counter(), time.process_time()
        paths = sample_paths(view, QUEUED)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        cpu = time.process_time()
        values = [_measure_estimate_ms(paths, number) for number in range(ESTIMATES)]
        each_s = (time.process_time() - cpu) / ESTIMATES
        yield make_record("start_time", "estimate, p99", size, [float(np.quantile(values, 0.99))], "ms", cpu_s=each_s)
        yield make_record("start_time", "refresh", size, [took_s], "s", cpu_s=cpu_s)
        with tempfile.TemporaryDirectory() as folder, pin_beside_server():
            yield _measure_answers(Path(folder), view, size)


def make_busy_view(nodes: int) -> ClusterView:
    """Make a view of a full fleet, in which each node is held by its own job."""
    view = make_synthetic_view(nodes)
    holders = np.repeat(np.arange(nodes, dtype=np.int32)[:, None], view.free.shape[1], axis=1)
    jobs = tuple(f"job{row}" for row in range(nodes))
    return replace(view, milli=np.zeros_like(view.milli), holders=holders, jobs=jobs)


def sample_paths(view: ClusterView, queued: int) -> Timelines:
    started_ms = NOW_MS - 60_000 * np.arange(len(view.jobs))
    running = make_running_jobs(view.jobs, started_ms=started_ms, gpus=GPUS_PER_NODE)
    queue = [WaitingEntry(make_request(number), NOW_MS - queued + number) for number in range(queued)]
    return sample_timelines(queue, view, running, RunTimeQuantiles({0: (1800.0, 36_000.0)}), Options(now_ms=NOW_MS))


def make_request(number: int, name: str = "waiting") -> PlacementRequest:
    gang, each, level = SHAPES[number % len(SHAPES)]
    topology = TopologyConstraint(required=level)
    return PlacementRequest(request_id=f"{name}{number}", gang=gang, gpus_per_node=each, topology=topology)


def _measure_estimate_ms(paths: Timelines, number: int) -> float:
    wanted = make_request(number, "asked")
    began = time.perf_counter()
    estimate = estimate_start(wanted, paths)
    took_ms = (time.perf_counter() - began) * 1000
    assert estimate.start_ms is not None, estimate.sentence
    assert estimate.start_ms["p90"] > NOW_MS
    return took_ms


def _measure_answers(folder: Path, view: ClusterView, size: dict[str, int]) -> dict[str, Any]:
    BoardWriter(folder / "board").publish(_make_sections(view), NOW_MS)
    about: dict[str, Any] = {
        "clock": {"epoch_ms": NOW_MS, "wall_ms": time.time_ns() // 1_000_000, "speed": 1.0},
        "api": {"stale_after_s": 3600.0},
    }
    with ServerProcess.start_role("placer", folder, **about) as placer:
        placer.wait_for_answer("/healthz", b'"warming":false')
        with ServerProcess.start_role("api", folder, **about, placer={"port": placer.port}) as api:
            api.wait_for_answer("/healthz")
            _wait_for_start_time(api.port)
            numbers, before = iter(range(10**9)), placer.measure_cpu_s()
            load = run_open_loop(
                api.port,
                lambda: _make_estimate_request(next(numbers)),
                connections=CONNECTIONS,
                seconds=SECONDS,
                rate=RATE,
            )
            cpu_s = placer.measure_cpu_s() - before
    assert load.checked == len(load.latency_s) == RATE * SECONDS
    return make_record("start_time", "answer, p99", size, [load.compute_quantile_ms(0.99)], "ms", cpu_s=cpu_s)


def _make_sections(view: ClusterView) -> list[Section]:
    """Return the board sections of a full fleet with waiting jobs."""
    rows = [
        {"submitted_ms": NOW_MS - QUEUED + number, "request": msgspec.to_builtins(make_request(number))}
        for number in range(QUEUED)
    ]
    changed: dict[str, Any] = {"gpu.job": view.holders, "jobs.queued": msgspec.json.encode(rows)}
    unchanged = [section for section in make_board_sections(view) if section.name not in changed]
    return [*unchanged, *(Section(name, data, NOW_MS) for name, data in changed.items())]


def _make_estimate_request(number: int) -> LoadRequest:
    return LoadRequest(
        make_post("/v1/jobs/estimate", msgspec.json.encode(make_request(number, "asked"))).wire, check=_check_start
    )


def _check_start(head: bytes, body: bytes) -> None:
    start_ms = msgspec.json.decode(body)["start_ms"]
    assert start_ms is not None, body
    assert start_ms["p90"] > NOW_MS + 3_600_000, "there is no queue"


def _wait_for_start_time(port: int) -> None:
    """Wait until an estimate has a start time. The first request makes the placer sample the first paths."""
    body = msgspec.json.encode(make_request(0, "first"))
    url = f"http://127.0.0.1:{port}/v1/jobs/estimate"
    asked = urllib.request.Request(url, body, {"content-type": "application/json"})
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
            if msgspec.json.decode(response.read())["start_ms"] is not None:
                return
        time.sleep(0.5)
    raise AssertionError(f"no start time within {PATIENCE_S:.0f} s")
