"""Trimaran's request for the load of every node, which Trimaran sends twice a minute.

`body`: making the answer for a new board. The peer builds the same body from dictionaries with
`json`. Over HTTP one client sends requests to a real api process in a closed loop, and the board
changes every second. So the slowest answers include making the body for a new board. `cpu_s` is the
server's CPU time per request.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import Peer, make_record, measure
from fleetcast.benchmarks.kit.load import LoadRequest, make_get, run_closed_loop
from fleetcast.benchmarks.kit.service import BoardProcess, ServerProcess, pin_beside_server
from fleetcast.schedulers.trimaran import TrimaranAdapter
from fleetcast.schedulers.weather import Load, Weather
from fleetcast.service.board.board import BoardReader

SIZES = (10_000, 40_000)  # the latter are 5,000 nodes
GPUS_A_NODE = 8
SECONDS, REPEATS = 3.0, 3
PATH = "/v1/adapters/trimaran/watcher"
FRESH_S = 86_400.0
NOW_MS = 1_760_000_000_000


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield two records for each fleet size in GPUs, with eight on each node."""
    for gpus in sizes:
        yield _measure_first_answer(max(1, gpus // GPUS_A_NODE))
        with tempfile.TemporaryDirectory() as name, BoardProcess(Path(name), gpus) as board, pin_beside_server():
            yield _measure_over_http(Path(name), board)


def _measure_first_answer(nodes: int) -> dict[str, Any]:
    """Measure the time to make the answer to the first request on a new board."""
    rng = np.random.default_rng(1)
    rows = {f"n{node:05d}": node for node in range(nodes)}
    load = Load(rows, *(np.sort(rng.random((2, nodes)), axis=0) for _ in range(3)))
    names = "\n".join(rows).encode()
    verb = TrimaranAdapter().verbs["watcher"]
    metrics = json.loads(verb.answer(Weather(1, NOW_MS, NOW_MS, load=load), names))["data"]["NodeMetricsMap"]
    assert list(metrics) == list(rows)

    def answer_once() -> int:
        verb.answer(Weather(1, NOW_MS, NOW_MS, load=load), names)
        return nodes

    def encode_with_dictionaries() -> int:
        columns = (load.gpu[0], load.gpu[1] - load.gpu[0], load.memory[0], load.memory[0])
        shares = [column.tolist() for column in columns]  # a loop over an array would be several times slower
        kinds = (("CPU", "AVG"), ("CPU", "STD"), ("Memory", "AVG"), ("Memory", "STD"))
        made = {}
        for name, row in rows.items():
            numbers = zip(kinds, (round(100 * share[row], 1) for share in shares), strict=True)
            made[name] = {
                "metrics": [{"type": kind[0], "operator": kind[1], "value": value} for kind, value in numbers]
            }
        json.dumps({"data": {"NodeMetricsMap": made}}).encode()
        return nodes

    size = {"gpus": nodes * GPUS_A_NODE, "nodes": nodes}
    return measure(
        "watcher",
        "body of a new board",
        size,
        answer_once,
        "ms",
        peer=Peer("dictionaries and json", encode_with_dictionaries),
    )


def _measure_over_http(folder: Path, board: BoardProcess) -> dict[str, Any]:
    newest = BoardReader(folder / "board").latest()
    assert newest is not None
    names = set(newest.names("names.node"))

    def check_answer(head: bytes, body: bytes) -> None:
        rows = json.loads(body)["data"]["NodeMetricsMap"]
        assert set(rows) == names, f"{len(rows)} of {len(names)} nodes"
        assert {row["metrics"][0]["value"] for row in rows.values()} != {50.0}, "it answered without a forecast"

    clock = {"epoch_ms": newest.as_of_ms, "wall_ms": time.time_ns() // 1_000_000}
    tails, cpu_s = [], []
    with ServerProcess.start_role("api", folder, clock=clock, api={"stale_after_s": FRESH_S}) as server:
        server.wait_for_answer("/healthz")
        checked = run_closed_loop(
            server.port, lambda: LoadRequest(make_get(PATH).wire, check=check_answer), connections=1, seconds=0.2
        )
        assert checked.checked, "no answer was checked"
        board.set_mode("swap")
        for _ in range(REPEATS):
            before = server.measure_cpu_s()
            load = run_closed_loop(server.port, lambda: make_get(PATH), connections=1, seconds=SECONDS)
            cpu_s.append((server.measure_cpu_s() - before) / len(load.latency_s))
            tails.append(max(load.latency_s) * 1000)
        board.set_mode("rest")
    size = {"gpus": board.nodes * GPUS_A_NODE, "nodes": board.nodes}
    return make_record("watcher", "slowest answer of one client, boards change", size, tails, "ms", cpu_s=min(cpu_s))
