"""The queue: the CPU time of a pass, and how much a pass delays other requests.

`pass`: one pass over 10,000 requests. The first needs more than is free, and requests of many shapes wait behind it.
`pass with queues`: the same with six teams that have a guarantee each. One queue of each team is shared among its
users. Both values are for repeated passes over the same requests, as in a placer. `placing beside it`: the p99
latency of requests for one GPU, at 20 requests a second, while a real placer runs pass after pass over 1,000
requests. The peer is the same placer with an empty queue.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fleetcast.benchmarks.answers.decide import GPUS_PER_NODE, make_synthetic_view
from fleetcast.benchmarks.kit.case import make_record, measure
from fleetcast.benchmarks.kit.load import LoadRequest, LoadResult, make_post, run_closed_loop, run_open_loop
from fleetcast.benchmarks.kit.service import ServerProcess, pin_beside_server
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.queue import WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import TreeTurns
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.service.answers.jobs import RunningJobRow
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.pipeline.publish import make_topology_sections

SIZES = (1_000, 10_000, 80_000)
WAITING = 10_000
QUEUED = 1_000
TEAMS, USERS = 6, 11
SHAPES = 37
RATE, SECONDS = 20.0, 6.0
CONNECTIONS = 8
NOW_MS = 1_760_000_000_000

encode = msgspec.json.encode


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield three records for each fleet size in GPUs."""
    for gpus in sizes:
        view = make_synthetic_view(gpus // GPUS_PER_NODE)
        long = {"gpus": gpus, "nodes": len(view), "queued": WAITING}
        yield measure("queue", "pass", long, _make_pass(view, None), "ms", repeats=5)
        yield measure("queue", "pass with queues", long, _make_pass(view, make_queue_tree(view)), "ms", repeats=5)
        size = long | {"queued": QUEUED}
        with tempfile.TemporaryDirectory() as folder, pin_beside_server():
            yield _measure_beside_passes(Path(folder), view, size)


def _make_pass(view: ClusterView, tree: QueueTree | None) -> Callable[[], int]:
    """Return a function that runs one pass over the queue.

    The first request has a higher priority class, so that it is first with and without queues.
    """
    options, unknown = Options(now_ms=NOW_MS), RunTimeQuantiles({})
    head = PlacementRequest(request_id="head", gang=len(view) * 19 // 20, gpus_per_node=8, priority=9, queue="urgent")
    queue = [
        WaitingEntry(request, NOW_MS - 1000 * at)
        for at, request in enumerate((head, *map(make_request, range(WAITING - 1))))
    ]

    def run_pass() -> int:
        turns = TreeTurns(tree, {}, view, unknown, NOW_MS) if tree is not None else None
        result = plan(queue, view, NO_RUNNING_JOBS, unknown, options, turns)
        assert result.waiting[0].entry.request is head
        assert result.waiting[0].start_ms is not None
        return len(queue)

    return run_pass


def make_request(number: int) -> PlacementRequest:
    queue = f"team{number % TEAMS}/{'shared' if number // TEAMS % 2 else 'own'}"
    return PlacementRequest(
        request_id=f"j{number}", gang=1 + number % SHAPES, gpus_per_node=8, queue=queue, user=f"u{number % USERS}"
    )


def make_queue_tree(view: ClusterView, more: str = "") -> QueueTree:
    """Make queues for teams. Each team has a guarantee of a fortieth of the fleet.

    A team has two queues. One of them is shared among its users. more: further lines of the file.
    """
    each = len(view) * GPUS_PER_NODE // 40
    teams = "".join(
        f"[queue.team{team}]\nweight = {10 + team}\nguaranteed = {{gpu = {each}}}\n"
        f'[queue."team{team}/own"]\n[queue."team{team}/shared"]\nper_user = true\n'
        for team in range(TEAMS)
    )
    return read_queues(f"[class.urgent]\npriority = 1\n[queue.urgent]\n{teams}{more}")


def _measure_beside_passes(folder: Path, view: ClusterView, size: dict[str, int]) -> dict[str, Any]:
    BoardWriter(folder / "board").publish(make_board_sections(view), NOW_MS)
    clock = {"epoch_ms": NOW_MS, "wall_ms": time.time_ns() // 1_000_000, "speed": 1.0}
    patient = {"stale_after_s": 3600.0}
    with ServerProcess.start_role("placer", folder, clock=clock, api=patient, placer={"queue_period_s": 0.1}) as server:
        server.wait_for_answer("/healthz", b'"warming":false')
        calm = _measure_placing(server.port)
        _fill_queue(server.port, len(view))
        before = server.measure_cpu_s()
        busy = _measure_placing(server.port)
        cpu_s = server.measure_cpu_s() - before
    alone = ("the same without a queue", calm.compute_quantile_ms(0.99))
    return make_record(
        "queue", "placing beside it, p99", size, [busy.compute_quantile_ms(0.99)], "ms", cpu_s=cpu_s, peer=alone
    )


def _measure_placing(port: int) -> LoadResult:
    number = iter(range(10**9))

    def make_next_request() -> LoadRequest:
        body = encode({"request_id": f"probe{next(number)}", "dry_run": True})
        return LoadRequest(make_post("/placements", body).wire, check=_check_placed)

    return run_open_loop(port, make_next_request, connections=CONNECTIONS, seconds=SECONDS, rate=RATE)


def _check_placed(head: bytes, body: bytes) -> None:
    assert msgspec.json.decode(body)["outcome"] == "placed", body


def _fill_queue(port: int, nodes: int) -> None:
    """Fill the queue with requests for whole nodes.

    The first request needs all nodes of the fleet, so no node is free for the requests behind it.
    """
    gangs = [nodes, *(1 + number % SHAPES for number in range(QUEUED - 1))]
    bodies = [
        encode({"request_id": f"w{number}", "gang": gang, "gpus_per_node": GPUS_PER_NODE, "priority": int(number == 0)})
        for number, gang in enumerate(gangs)
    ]
    asks = iter([make_post("/queue", body, b"202") for body in bodies])
    load = run_closed_loop(port, lambda: next(asks, None), connections=CONNECTIONS, seconds=120)
    assert len(load.latency_s) == QUEUED


def make_board_sections(view: ClusterView) -> list[Section]:
    """Return the sections of a board on which no node is completely free.

    A job of one node holds every GPU, except the free GPUs of nodes that are partly in use in `view`.
    """
    nodes = len(view)
    whole = np.all(view.free, axis=1, keepdims=True)
    holders = np.where(view.free & ~whole, -1, np.arange(nodes)[:, None]).astype(np.int32)
    jobs = [f"job{row}" for row in range(nodes)]
    data: dict[str, Any] = {
        "node.state": view.state,
        "node.risk": np.full((3, 4, nodes), 0.001),
        "risk.reason": b"{}",
        "gpu.usable": view.usable,
        "gpu.job": holders,
        "names.job": "\n".join(jobs).encode(),
        "node.free_cpus": view.free_cpus.astype(np.float32),
        "node.free_host_memory_gib": view.free_host_memory_gib.astype(np.float32),
        "occupancy": encode({"position": 0, "running": [(job, 1) for job in jobs], "ended": []}),
        "durations": encode({"by_gpus": {}, "all": {"p50": 1800, "p90": 86_400, "n": 50}}),
        "jobs.running": encode(
            [RunningJobRow(job, 1, GPUS_PER_NODE, NOW_MS - 1000 * row) for row, job in enumerate(jobs)]
        ),
        "meta": encode({"generation": view.generation, "models": {}}),
    }
    return [
        *make_topology_sections(view.topology, NOW_MS),
        *(Section(name, part, NOW_MS) for name, part in data.items()),
    ]
