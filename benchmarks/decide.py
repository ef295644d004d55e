"""Deciding: one GPU, a gang inside a required level, a gang anywhere, and a pass over a long queue.

The peer is a scheduler's filter-and-score loop in plain Python over the same nodes: best fit, no topology, no reasons.
The fleet is 70 % free, in racks of 128 nodes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.case import Peer, measure
from fleet.requests import PlacementRequest, TopologyConstraint
from fleet.topology import Level, NodeSpec, Topology
from placement.engine import decide
from placement.options import Options
from placement.queue import Waiting, plan
from placement.timeline import RunTimes
from placement.view import ClusterView

SIZES = (1_000, 10_000, 100_000)
GPUS_PER_NODE = 8
QUEUED = 1_000


def synthetic_view(nodes: int, seed: int = 1) -> ClusterView:
    """A fleet of 8-GPU nodes: 20 % busy, 10 % with two GPUs left, the rest free, small risks everywhere."""
    rng = np.random.default_rng(seed)
    specs = [_node(index) for index in range(nodes)]
    free_gpus = rng.choice([0, 2, GPUS_PER_NODE], nodes, p=[0.2, 0.1, 0.7])
    free = np.arange(GPUS_PER_NODE)[None, :] < free_gpus[:, None]
    return ClusterView(
        topology=Topology.build(specs),
        free=free,
        usable=np.ones((nodes, GPUS_PER_NODE), bool),
        state=np.zeros(nodes, np.int8),
        p_fail=rng.random(nodes) * 0.01,
        p_slow=rng.random(nodes) * 0.01,
        reason={},
        holders=np.where(free, -1, np.arange(nodes)[:, None] % 200).astype(np.int32),
        jobs=tuple(f"job{index}" for index in range(200)),
        free_cpus=np.full(nodes, 128.0),
        free_host_memory_gib=np.full(nodes, 2048.0),
    )


def _node(index: int) -> NodeSpec:
    domains = {
        Level.NVLINK_DOMAIN: f"n{index}",
        Level.RACK: f"r{index // 128}",
        Level.RAIL_GROUP: f"g{index // 512}",
        Level.BLOCK: f"b{index // 2048}",
        Level.CLUSTER: "c",
    }
    return NodeSpec(f"n{index:06d}", GPUS_PER_NODE, "H100", 80, 128, 2048, domains=domains)


def best_fit(view: ClusterView, members: int, gpus: int) -> list[int]:
    """The peer: filter every node, score it by what would be left free, take the best, all in a Python loop."""
    scored = []
    for row, free in enumerate(view.free.sum(axis=1).tolist()):
        risk = max(view.p_fail[row], view.p_slow[row])
        if view.state[row] == 0 and risk <= 0.5 and free >= gpus:
            scored.append((free - gpus, risk, row))
    return [row for _, _, row in sorted(scored)[:members]]


def run(sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """One record a case; sizes are GPUs of the fleet. Asserts that every decision placed its gang."""
    return [record for gpus in sizes for record in _cases(gpus // GPUS_PER_NODE)]


def _cases(nodes: int) -> list[dict[str, Any]]:
    view = synthetic_view(nodes)
    size = {"gpus": nodes * GPUS_PER_NODE, "nodes": nodes}
    gang = min(64, nodes // 4)
    required = TopologyConstraint(required="rack")
    requests = {
        "one_gpu": PlacementRequest(request_id="a"),
        "gang_in_one_rack": PlacementRequest(request_id="a", gang=gang, gpus_per_node=8, topology=required),
        "gang_anywhere": PlacementRequest(request_id="a", gang=gang, gpus_per_node=8),
    }
    records = [_decide_case(name, view, request, size) for name, request in requests.items()]
    if nodes <= 10_000:
        records.append(measure("decide", "queue_pass", size | {"queued": QUEUED}, _pass(view), "ms", repeats=3))
    return records


def _decide_case(name: str, view: ClusterView, request: PlacementRequest, size: dict[str, int]) -> dict[str, Any]:
    members, each = request.members.min, request.gpus_per_node

    def ours() -> int:
        decision = decide(request, view)
        assert decision.outcome == "placed", decision.sentence
        assert len(decision.ranks) == members
        return 1

    def theirs() -> int:
        assert len(best_fit(view, members, each)) == members
        return 1

    whole = size | {"gang": members, "gpus_per_node": each}
    return measure(
        "decide", name, whole, ours, "ms/decision", peer=Peer("best fit in a Python loop", theirs), repeats=9
    )


def _pass(view: ClusterView) -> Any:
    """A queue whose head needs more than is free, and many shapes behind it."""
    options = Options(now_ms=1_000_000)
    head = PlacementRequest(request_id="head", gang=len(view), gpus_per_node=8, priority=9)
    rest = [PlacementRequest(request_id=f"j{i}", gang=1 + i % 37, gpus_per_node=8) for i in range(QUEUED - 1)]
    queue = [Waiting(request, 0) for request in (head, *rest)]

    def one() -> int:
        result = plan(queue, view, {}, RunTimes({}), options)
        assert result.waiting[0].entry.request is head
        assert result.waiting[0].start_ms is not None
        return len(queue)

    return one
