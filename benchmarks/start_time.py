"""Start times at 1,000 nodes of 8 GPUs that are all busy, with 10,000 requests that wait.

`estimate`: one request inserts itself into paths that are there; p99 over requests of many shapes and levels, and what
bounds it is asked without each of its constraints, too. `refresh`: sampling those paths anew, in the background.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.case import record
from benchmarks.decide import GPUS_PER_NODE, synthetic_view
from fleet.requests import LevelName, PlacementRequest, TopologyConstraint
from placement.options import Options
from placement.paths import Timelines, timelines
from placement.queue import Waiting
from placement.start_time import estimate_start
from placement.timeline import Running, RunTimes
from placement.view import ClusterView

SIZES = (8_000,)
QUEUED = 10_000
ESTIMATES = 100
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
    """Two records a size in GPUs."""
    for gpus in sizes:
        view = busy_view(gpus // GPUS_PER_NODE)
        size = {"gpus": gpus, "nodes": len(view), "queued": QUEUED}
        began, cpu = time.perf_counter(), time.process_time()
        paths = sampled(view, QUEUED)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        cpu = time.process_time()
        values = [_estimate_ms(paths, number) for number in range(ESTIMATES)]
        each_s = (time.process_time() - cpu) / ESTIMATES
        yield record("start_time", "estimate, p99", size, [float(np.quantile(values, 0.99))], "ms", cpu_s=each_s)
        yield record("start_time", "refresh", size, [took_s], "s", cpu_s=cpu_s)


def busy_view(nodes: int) -> ClusterView:
    """Every node held by a job of its own."""
    view = synthetic_view(nodes)
    holders = np.repeat(np.arange(nodes, dtype=np.int32)[:, None], view.free.shape[1], axis=1)
    jobs = tuple(f"job{row}" for row in range(nodes))
    return replace(view, free=np.zeros_like(view.free), holders=holders, jobs=jobs)


def sampled(view: ClusterView, queued: int) -> Timelines:
    running = {job: Running(NOW_MS - row * 60_000, GPUS_PER_NODE) for row, job in enumerate(view.jobs)}
    queue = [Waiting(request(number), NOW_MS - queued + number) for number in range(queued)]
    return timelines(queue, view, running, RunTimes({0: (1800.0, 36_000.0)}), Options(now_ms=NOW_MS))


def request(number: int, name: str = "waiting") -> PlacementRequest:
    gang, each, level = SHAPES[number % len(SHAPES)]
    topology = TopologyConstraint(required=level)
    return PlacementRequest(request_id=f"{name}{number}", gang=gang, gpus_per_node=each, topology=topology)


def _estimate_ms(paths: Timelines, number: int) -> float:
    wanted = request(number, "asked")
    began = time.perf_counter()
    estimate = estimate_start(wanted, paths)
    took_ms = (time.perf_counter() - began) * 1000
    assert estimate.start_ms is not None, estimate.sentence
    assert estimate.start_ms["p90"] > NOW_MS
    return took_ms
