"""`GET /v1/nodes/{node}` of a real api process: highest rate, and tail latency at 2,000 a second.

One body in a hundred is checked. During the closed loop a new board appears every second. During
the open loop a pipeline ticks. The load generator has its own core. With two cores, the pipeline
shares the server's core. The peer is a FastAPI handler that returns the same document. `cpu_s` is
the server's CPU time in the best run.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.load import Check, LoadRequest, LoadResult, make_get, run_closed_loop, run_open_loop
from fleetcast.benchmarks.kit.service import BoardProcess, ServerProcess, find_free_port, pin_beside_server
from fleetcast.service.board.board import Board, BoardReader

SIZES = (1_000, 10_000, 80_000)
GPUS_PER_NODE = 8
CONNECTIONS = 32
CHECK_EVERY = 100
CLOSED_S, OPEN_S = 3.0, 5.0
RATE = 2_000.0
REPEATS, MOST_REPEATS = 3, 12


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield three records for each fleet size in GPUs. 80,000 GPUs are 10,000 nodes."""
    for gpus in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with BoardProcess(folder, gpus) as board, pin_beside_server():
                yield from _measure_cases(folder, board, {"gpus": gpus, "nodes": board.nodes})


def _measure_cases(folder: Path, board: BoardProcess, size: dict[str, int]) -> Iterator[dict[str, Any]]:
    names = _read_latest_board(folder).names("names.node")
    draw = NodeRequests(names)
    board.set_mode("swap")
    with _start_peer(folder) as server:
        server.wait_for_answer(f"/v1/nodes/{names[0]}")
        peer, _ = _measure_closed_loop(server, draw)
    with ServerProcess.start_role("api", folder) as server:
        server.wait_for_answer(f"/v1/nodes/{names[0]}")
        rates, cpu_s = _measure_closed_loop(server, draw)
        assert len(draw.boards) > CLOSED_S, f"only {len(draw.boards)} boards were seen"
        beside = ("FastAPI handler that returns a dict", max(peer))
        yield make_record("http", "node, closed loop", size, rates, "requests/s", cpu_s=cpu_s[0], peer=beside)
        yield make_record("http", "node, server CPU", size, cpu_s[1], "us/request", cpu_s=cpu_s[0])
        swapped = _read_latest_board(folder).sequence
        board.set_mode("tick")
        yield _measure_open_loop(
            server, draw, size | {"rate": round(RATE)}, lambda: _read_latest_board(folder).sequence > swapped
        )
        board.set_mode("rest")


def _read_latest_board(folder: Path) -> Board:
    board = BoardReader(folder / "board").latest()
    assert board is not None
    return board


class NodeRequests:
    """A source of requests for nodes that are drawn uniformly.

    `boards`: the boards from which the checked answers came.
    """

    def __init__(self, names: Sequence[str]) -> None:
        rng = np.random.default_rng(1)
        self._asks = [make_get(f"/v1/nodes/{name}") for name in names]
        self._checked = [make_get(f"/v1/nodes/{name}", self._make_answer_check(name)) for name in names]
        self._rows: list[int] = rng.integers(0, len(names), 100_000).tolist()
        self._next = 0
        self.boards: set[bytes] = set()

    def __call__(self) -> LoadRequest:
        self._next += 1
        row = self._rows[self._next % len(self._rows)]
        return self._asks[row] if self._next % CHECK_EVERY else self._checked[row]

    def _make_answer_check(self, name: str) -> Check:
        def check_node(head: bytes, body: bytes) -> None:
            document = json.loads(body)
            assert document["node"] == name, document
            assert len(document["gpus"]) == GPUS_PER_NODE, document
            self.boards.add(head.partition(b"x-fleetcast-board: ")[2].partition(b"\r")[0])

        return check_node


def _measure_closed_loop(
    server: ServerProcess, draw: Callable[[], LoadRequest]
) -> tuple[list[float], tuple[float, list[float]]]:
    """Measure a closed loop. Returns the requests/s of each run, and the server's CPU time.

    The CPU time is a pair: the seconds of the fastest run, and the microseconds per request of each run.
    """
    rates, cpu_s, each_us = [], [], []
    for _ in range(REPEATS):
        before = server.measure_cpu_s()
        load = run_closed_loop(server.port, draw, connections=CONNECTIONS, seconds=CLOSED_S)
        _require_checked_answers(load)
        rates.append(load.rate)
        cpu_s.append(server.measure_cpu_s() - before)
        each_us.append(cpu_s[-1] / len(load.latency_s) * 1e6)
    return rates, (cpu_s[rates.index(max(rates))], each_us)


def _measure_open_loop(
    server: ServerProcess, draw: NodeRequests, size: dict[str, int], has_ticked: Callable[[], bool]
) -> dict[str, Any]:
    """Measure the tail latency of an open loop, until the pipeline has ticked at least once."""
    tails: list[float] = []
    cpu_s: list[float] = []
    while len(tails) < REPEATS or not has_ticked():
        assert len(tails) < MOST_REPEATS, "the pipeline did not tick"
        before = server.measure_cpu_s()
        load = run_open_loop(server.port, draw, connections=CONNECTIONS, seconds=OPEN_S, rate=RATE)
        _require_checked_answers(load)
        tails.append(load.compute_quantile_ms(0.99))
        cpu_s.append(server.measure_cpu_s() - before)
    return make_record("http", "node, p99 of an open loop", size, tails, "ms", cpu_s=cpu_s[tails.index(min(tails))])


def _require_checked_answers(load: LoadResult) -> None:
    assert load.checked >= len(load.latency_s) // CHECK_EVERY > 0, f"{load.checked} bodies were checked"


def _start_peer(folder: Path) -> ServerProcess:
    port = find_free_port()
    return ServerProcess(port, [sys.executable, "-m", "fleetcast.benchmarks.answers.http", str(folder), str(port)])


def _serve_peer(folder: Path, port: int) -> None:
    """Serve the peer: a simple FastAPI handler that returns the document, and finds nodes by a dictionary."""
    import uvicorn
    from fastapi import FastAPI

    app, reader = FastAPI(), BoardReader(folder / "board")
    known: tuple[tuple[str, ...], dict[str, int]] = (), {}

    @app.get("/v1/nodes/{node}")
    async def get_node(node: str) -> dict[str, Any]:
        board = reader.latest()
        assert board is not None
        nonlocal known
        names = board.names("names.node")
        if names is not known[0]:
            known = names, {name: row for row, name in enumerate(names)}
        row = known[1][node]
        offsets = board.array("answers.node.offsets")
        document: dict[str, Any] = json.loads(bytes(board.raw("answers.node")[offsets[row] : offsets[row + 1]]))
        return document

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    _serve_peer(Path(sys.argv[1]), int(sys.argv[2]))
