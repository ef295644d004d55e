"""Requests for node risk over HTTP: the ranking of all nodes, and the risk of a gang of most of them.

One api process serves the board of a fleet at work. During the requests the board changes every
second. `p99` is the latency of single requests, one after the other. `cpu_s` is the server's CPU time per
request. The size includes the bytes of an answer.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.load import LoadRequest, make_get, make_post, run_closed_loop
from fleetcast.benchmarks.kit.service import ServerProcess, pin_beside_server
from fleetcast.benchmarks.ticks.working_tick import Size, WorkingFleet

SIZES = (10_000,)
GANG_SHARE = 0.8  # of the nodes
SECONDS, REPEATS = 2.0, 3
SWAP_S = 1.0
HORIZON_S = 86_400


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield two records for each fleet size in GPUs."""
    for gpus in sizes:
        with tempfile.TemporaryDirectory() as name, pin_beside_server():
            fleet = WorkingFleet(Size(gpus, scrapes=4), Path(name))
            fleet.run_tick()
            with ServerProcess.start_role("api", Path(name)) as server:
                server.wait_for_answer("/v1/risk/nodes?limit=1")
                for case, ask in make_cases(fleet.nodes).items():
                    yield _measure_case(server, fleet, case, ask)


def make_cases(nodes: int) -> dict[str, LoadRequest]:
    """Return the name of each case -> its request, which checks the answer."""
    names = [f"n{node:05d}" for node in range(round(GANG_SHARE * nodes))]
    gang = make_post("/v1/risk/gang", json.dumps({"nodes": names, "duration_s": HORIZON_S}).encode())
    checks = {
        "GET risk/nodes": (
            make_get(f"/v1/risk/nodes?horizon_s={HORIZON_S}"),
            lambda answer: len(answer["rows"]) == nodes,
        ),
        "POST risk/gang": (gang, lambda answer: answer["nodes"] == len(names) and bool(answer["domains"])),
    }
    return {name: LoadRequest(ask.wire, check=_make_answer_check(is_right)) for name, (ask, is_right) in checks.items()}


def _make_answer_check(is_right: Callable[[Any], bool]) -> Callable[[bytes, bytes], None]:
    def check_answer(head: bytes, body: bytes) -> None:
        assert is_right(json.loads(body)), body[:200]

    return check_answer


def _measure_case(server: ServerProcess, fleet: WorkingFleet, case: str, ask: LoadRequest) -> dict[str, Any]:
    tails, cpu_s, size = [], [], [0]
    swapped = time.monotonic()

    def swap_and_ask() -> LoadRequest:
        nonlocal swapped
        if time.monotonic() - swapped > SWAP_S:
            swapped = time.monotonic()
            fleet.clock.advance(1)
            fleet.pipeline.board.publish([], fleet.clock.now_ms())
        return ask

    def record_size(head: bytes, body: bytes) -> None:
        size[0] = len(body)

    run_closed_loop(server.port, lambda: LoadRequest(ask.wire, check=record_size), connections=1, seconds=0.2)
    for _ in range(REPEATS):
        before = server.measure_cpu_s()
        load = run_closed_loop(server.port, swap_and_ask, connections=1, seconds=SECONDS)
        cpu_s.append((server.measure_cpu_s() - before) / len(load.latency_s))
        tails.append(float(np.quantile(load.latency_s, 0.99)) * 1000)
    about = {"nodes": fleet.nodes, "bytes": size[0]}
    return make_record("risk_routes", f"{case}, p99", about, tails, "ms", cpu_s=min(cpu_s))
