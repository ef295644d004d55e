"""Requests of kube-scheduler to a real api process: their rate, and their tail latency during ticks.

A request names up to 5,000 nodes, drawn at random. One answer in fifty is decoded and checked.
Tail latency is measured with one client, because the scheduler sends one request at a time. While the
pipeline ticks, 100 requests a second are due. The load generator has its own core. With two cores, the
pipeline ticks on the server's core. The peer is a Starlette handler that decodes JSON, scores every
name in Python and encodes. `cpu_s` is the server's CPU time.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.load import Check, LoadRequest, LoadResult, make_post, run_closed_loop, run_open_loop
from fleetcast.benchmarks.kit.service import BoardProcess, ServerProcess, find_free_port, pin_beside_server
from fleetcast.schedulers.ratings import NEUTRAL
from fleetcast.service.board.board import BoardReader

SIZES = (10_000, 40_000)  # the latter are 5,000 nodes
MOST_NAMES = 5_000
PODS = 16
CONNECTIONS = 4
CHECK_EVERY = 50
SECONDS = 3.0
RATE = 100.0
REPEATS = 3
PATH = "/v1/adapters/kube/"
FRESH_S = 86_400.0


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield five records for each fleet size. A size is a number of GPUs, with eight on each node."""
    for gpus in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with BoardProcess(folder, gpus) as board, pin_beside_server():
                yield from _measure_cases(folder, board, gpus)


def _measure_cases(folder: Path, board: BoardProcess, gpus: int) -> Iterator[dict[str, Any]]:
    names = BoardReader(folder / "board").latest().names("names.node")  # type: ignore[union-attr]
    size = {"gpus": gpus, "nodes": board.nodes, "names": min(MOST_NAMES, len(names))}
    prioritize, filter_ = (
        FilterRequests("prioritize", names, size["names"]),
        FilterRequests("filter", names, size["names"]),
    )
    board.set_mode("swap")
    with _start_peer() as server:
        server.wait_for_answer("/healthz")
        peer = FilterRequests("prioritize", names, size["names"], scored=False)
        theirs = max(_measure_rates(server, peer)[0])
        their_tail = min(_measure_tails(server, partial(_run_one_client, server, peer))[0])
    with _start_api(folder) as server:
        server.wait_for_answer("/healthz")
        for draw in (prioritize, filter_):
            rates, cpu_s = _measure_rates(server, draw)
            beside = ("Starlette and json", theirs) if draw is prioritize else None
            yield make_record(
                "extender", f"{draw.verb}, closed loop", size, rates, "requests/s", cpu_s=cpu_s, peer=beside
            )
        tails, cpu_s = _measure_tails(server, partial(_run_one_client, server, prioritize))
        beside = ("Starlette and json", their_tail)
        yield make_record("extender", "prioritize, p99 of one client", size, tails, "ms", cpu_s=cpu_s, peer=beside)
        board.set_mode("tick")
        for draw in (prioritize, filter_):
            tails, cpu_s = _measure_tails(server, partial(_run_at_rate, server, draw))
            case = f"{draw.verb}, p99 beside ticks"
            yield make_record("extender", case, size | {"rate": round(RATE)}, tails, "ms", cpu_s=cpu_s)
        board.set_mode("rest")


def _run_one_client(server: ServerProcess, draw: "FilterRequests") -> LoadResult:
    return run_closed_loop(server.port, draw, connections=1, seconds=SECONDS)


def _run_at_rate(server: ServerProcess, draw: "FilterRequests") -> LoadResult:
    return run_open_loop(server.port, draw, connections=CONNECTIONS, seconds=SECONDS, rate=RATE)


class FilterRequests:
    """A source of requests about `count` node names, for pods of different sizes.

    scored: whether some scores in the answers must differ from the neutral one.
    """

    def __init__(self, verb: str, names: Sequence[str], count: int, *, scored: bool = True) -> None:
        rng = np.random.default_rng(1)
        self.verb, self.scored = verb, scored
        self._asks, self._checked = [], []
        for number in range(PODS):
            asked = [names[row] for row in rng.permutation(len(names))[:count]]
            wire = make_post(PATH + verb, _encode_question(asked, gpus=2 ** (number % 4))).wire
            self._asks.append(LoadRequest(wire))
            self._checked.append(LoadRequest(wire, check=self._make_answer_check(asked)))
        self._next = 0

    def __call__(self) -> LoadRequest:
        self._next += 1
        asks = self._asks if self._next % CHECK_EVERY else self._checked
        return asks[self._next % PODS]

    def _make_answer_check(self, asked: list[str]) -> Check:
        def check_filter(head: bytes, body: bytes) -> None:
            answer = json.loads(body)
            assert answer["NodeNames"] == asked, body[:300]
            assert not answer["Error"], answer["Error"]

        def check_prioritize(head: bytes, body: bytes) -> None:
            rows = json.loads(body)
            assert [row["Host"] for row in rows] == asked, body[:300]
            scores = {row["Score"] for row in rows}
            assert scores <= set(range(11)), scores
            assert NEUTRAL not in scores or not self.scored, "it answered without knowing the nodes"

        return check_filter if self.verb == "filter" else check_prioritize


def _encode_question(names: list[str], gpus: int) -> bytes:
    """Return a request as kube-scheduler sends it with nodeCacheCapable.

    The pod has only the fields that the server reads.
    """
    resources = {"cpu": "8", "memory": "64Gi", "nvidia.com/gpu": str(gpus)}
    container = {"name": "c", "image": "i", "resources": {"limits": resources, "requests": resources}}
    pod = {"metadata": {"name": "train-0", "namespace": "default", "uid": "6f1c"}, "spec": {"containers": [container]}}
    return json.dumps({"Pod": pod, "Nodes": None, "NodeNames": names}, separators=(",", ":")).encode()


def _measure_rates(server: ServerProcess, draw: FilterRequests) -> tuple[list[float], float]:
    """Return the requests per second of each run, and the server's CPU seconds in the fastest one."""
    rates, cpu_s = [], []
    for _ in range(REPEATS):
        before = server.measure_cpu_s()
        load = run_closed_loop(server.port, draw, connections=CONNECTIONS, seconds=SECONDS)
        assert load.checked, "no answer was checked"
        rates.append(load.rate)
        cpu_s.append(server.measure_cpu_s() - before)
    return rates, cpu_s[rates.index(max(rates))]


def _measure_tails(server: ServerProcess, load: Callable[[], LoadResult]) -> tuple[list[float], float]:
    """Return the 99th percentile latency of each run in ms, and the server's CPU seconds in the best run."""
    tails, cpu_s = [], []
    for _ in range(REPEATS):
        before = server.measure_cpu_s()
        came = load()
        assert came.checked, "no answer was checked"
        tails.append(came.compute_quantile_ms(0.99))
        cpu_s.append(server.measure_cpu_s() - before)
    return tails, cpu_s[tails.index(min(tails))]


def _start_api(folder: Path) -> ServerProcess:
    """Start an api whose clock agrees with the board, because a stale board gives no answers."""
    board = BoardReader(folder / "board").latest()
    assert board is not None
    clock = {"epoch_ms": board.as_of_ms, "wall_ms": time.time_ns() // 1_000_000}
    return ServerProcess.start_role("api", folder, clock=clock, api={"stale_after_s": FRESH_S})


def _start_peer() -> ServerProcess:
    port = find_free_port()
    return ServerProcess(port, [sys.executable, "-m", "fleetcast.benchmarks.answers.extender", str(port)])


def _serve_peer(port: int) -> None:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    async def prioritize(request: Request) -> JSONResponse:
        asked = json.loads(await request.body())
        return JSONResponse([{"Host": name, "Score": hash(name) % 11} for name in asked["NodeNames"]])

    async def get_health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    routes = [Route(PATH + "prioritize", prioritize, methods=["POST"]), Route("/healthz", get_health)]
    uvicorn.run(Starlette(routes=routes), host="127.0.0.1", port=port, log_level="warning", access_log=False)


if __name__ == "__main__":
    _serve_peer(int(sys.argv[1]))
