"""Placements over HTTP: each is decided, written into the ledger and fsynced before the answer.

A real placer gets requests for one GPU from one client and from eight. The ledger must contain all answered
requests. The peer is the same placer with dry runs, which write nothing. `cpu_s` is the placer's CPU time.
"""

import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleetcast.benchmarks.answers.decide import GPUS_PER_NODE, make_synthetic_view
from fleetcast.benchmarks.answers.queue import NOW_MS, make_board_sections
from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.load import LoadRequest, LoadResult, make_post, run_closed_loop
from fleetcast.benchmarks.kit.service import ServerProcess, pin_beside_server
from fleetcast.service.board.board import BoardWriter, Section

SIZES = (10_000,)
CONNECTIONS = (1, 8)
REPEATS = 4
ASKED = 300  # placements of a run


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield one record for each fleet size in GPUs and number of clients."""
    for gpus in sizes:
        for connections in CONNECTIONS:
            with tempfile.TemporaryDirectory() as folder, pin_beside_server():
                yield _measure_case(Path(folder), gpus, connections)


def _measure_case(folder: Path, gpus: int, connections: int) -> dict[str, Any]:
    view = make_synthetic_view(gpus // GPUS_PER_NODE)
    holders = np.where(view.free, -1, np.arange(len(view))[:, None]).astype(np.int32)
    BoardWriter(folder / "board").publish([*make_board_sections(view), Section("gpu.job", holders, NOW_MS)], NOW_MS)
    clock = {"epoch_ms": NOW_MS, "wall_ms": time.time_ns() // 1_000_000, "speed": 1.0}
    rates, cpu_s, dry = [], [], []
    with ServerProcess.start_role("placer", folder, clock=clock, api={"stale_after_s": 3600.0}) as server:
        server.wait_for_answer("/healthz", b'"warming":false')
        _send_requests(server.port, connections, "warm", dry_run=True)
        for repeat in range(REPEATS):
            before = server.measure_cpu_s()
            rates.append(_compute_rate(_send_requests(server.port, connections, f"p{repeat}-", dry_run=False)))
            cpu_s.append(server.measure_cpu_s() - before)
            dry.append(_compute_rate(_send_requests(server.port, connections, f"d{repeat}-", dry_run=True)))
    assert _count_decisions(folder) == REPEATS * ASKED
    size = {"gpus": gpus, "nodes": len(view), "connections": connections}
    best = rates.index(max(rates))
    peer = ("dry runs, without a ledger", max(dry))
    return make_record("placements", "one GPU", size, rates, "placements/s", cpu_s=cpu_s[best], peer=peer)


def _send_requests(port: int, connections: int, name: str, *, dry_run: bool) -> LoadResult:
    bodies = ({"request_id": f"{name}{number}", "dry_run": dry_run} for number in range(ASKED))
    asks = (
        LoadRequest(make_post("/placements", msgspec.json.encode(body)).wire, check=_check_placed) for body in bodies
    )
    ask: Callable[[], LoadRequest | None] = lambda: next(asks, None)  # noqa: E731
    load = run_closed_loop(port, ask, connections=connections, seconds=120)
    assert len(load.latency_s) == ASKED
    return load


def _compute_rate(load: LoadResult) -> float:
    return ASKED / load.seconds


def _check_placed(head: bytes, body: bytes) -> None:
    assert msgspec.json.decode(body)["outcome"] == "placed", body


def _count_decisions(folder: Path) -> int:
    database = sqlite3.connect(folder / "ledger.sqlite")
    try:
        (count,) = database.execute("SELECT count(*) FROM decisions").fetchone()
    finally:
        database.close()
    return int(count)
