"""Placement decisions for one GPU, and for gangs in a level, anywhere, or without enough room.

70 % of the fleet is free, in racks of 128 nodes. The peer is a filter-and-score loop in plain Python: best
fit, which stays in one rack only if a request requires it. It returns nodes, but neither GPUs nor reasons.
It reads lists that are made before the measurement, because a loop over arrays or enum members would be
several times slower.
"""

import heapq
from collections.abc import Sequence
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import Peer, measure
from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.placement.engine import decide
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.view import ClusterView

SIZES = (1_000, 10_000, 80_000, 100_000)
GPUS_PER_NODE = 8
RACK = 128  # nodes
MAX_RISK = 0.5


def make_synthetic_view(nodes: int, seed: int = 1) -> ClusterView:
    """Make a fleet of 8-GPU nodes: 20 % busy, 10 % with two free GPUs, the rest free, with small risks."""
    rng = np.random.default_rng(seed)
    specs = [_make_node(index) for index in range(nodes)]
    free_gpus = rng.choice([0, 2, GPUS_PER_NODE], nodes, p=[0.2, 0.1, 0.7])
    free = np.arange(GPUS_PER_NODE)[None, :] < free_gpus[:, None]
    return ClusterView(
        topology=Topology.build(specs),
        milli=convert_to_milli(free),
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


def _make_node(index: int) -> NodeSpec:
    domains = {
        Level.NVLINK_DOMAIN: f"n{index}",
        Level.RACK: f"r{index // RACK}",
        Level.RAIL_GROUP: f"g{index // 512}",
        Level.BLOCK: f"b{index // 2048}",
        Level.CLUSTER: "c",
    }
    return NodeSpec(f"n{index:06d}", GPUS_PER_NODE, "H100", 80, 128, 2048, domains=domains)


class BestFit:
    """The peer, a Python loop that filters all nodes, scores them by their free GPUs, and chooses the best one."""

    def __init__(self, view: ClusterView) -> None:
        columns = (view.free.sum(axis=1), view.state, view.p_fail, view.p_slow, view.topology.domain[Level.RACK])
        self._nodes = list(zip(*(column.tolist() for column in columns), strict=True))
        self._names = view.topology.names

    def place_gang(self, members: int, gpus: int, *, in_one_rack: bool = False) -> list[str]:
        """Return the names of the best nodes for a gang, one node for each member.

        The list is empty if the gang does not fit. gpus: the GPUs of each member.
        """
        in_service = int(NodeState.IN_SERVICE)
        scored: list[tuple[int, float, int]] = []
        racks: dict[int, list[tuple[int, float, int]]] = {}
        for row, (free, state, p_fail, p_slow, rack) in enumerate(self._nodes):
            risk = p_fail if p_fail > p_slow else p_slow
            if free >= gpus and state == in_service and risk <= MAX_RISK:
                if not in_one_rack:
                    scored.append((free - gpus, risk, row))
                elif rack in racks:
                    racks[rack].append((free - gpus, risk, row))
                else:
                    racks[rack] = [(free - gpus, risk, row)]
        if in_one_rack:  # best fit of racks, too: the fullest one that holds the gang
            scored = min((rack for rack in racks.values() if len(rack) >= members), key=len, default=[])
        if len(scored) < members:
            return []
        best = heapq.nsmallest(members, scored) if members < len(scored) // 8 else sorted(scored)[:members]
        return [self._names[row] for _, _, row in best]


def run(sizes: Sequence[int] = SIZES) -> list[dict[str, Any]]:
    """Return one record for each case and fleet size in GPUs. Asserts the outcome of every request."""
    return [record for gpus in sizes for record in _measure_cases(gpus // GPUS_PER_NODE)]


def _measure_cases(nodes: int) -> list[dict[str, Any]]:
    view = make_synthetic_view(nodes)
    size = {"gpus": nodes * GPUS_PER_NODE, "nodes": nodes}
    gang = min(64, nodes // 4)
    rack = TopologyConstraint(required="rack")
    placed = {
        "one_gpu": PlacementRequest(request_id="a"),
        "gang_in_one_rack": PlacementRequest(request_id="a", gang=gang, gpus_per_node=8, topology=rack),
        "gang_anywhere": PlacementRequest(request_id="a", gang=gang, gpus_per_node=8),
    }
    too_large = PlacementRequest(request_id="a", gang=min(RACK, nodes), gpus_per_node=8, topology=rack)
    records = [_measure_decision(name, view, request, size, "placed") for name, request in placed.items()]
    return [*records, _measure_decision("cannot_fit_one_rack", view, too_large, size, "refused")]


def _measure_decision(
    name: str, view: ClusterView, request: PlacementRequest, size: dict[str, int], outcome: str
) -> dict[str, Any]:
    members, each = request.members.min, request.gpus_per_node
    best_fit = BestFit(view)

    def decide_once() -> int:
        decision = decide(request, view)
        assert decision.outcome == outcome, decision.sentence
        assert len(decision.ranks) == (members if outcome == "placed" else 0)
        assert decision.nodes == decision.candidates + sum(decision.rejected.values()) == len(view)
        return 1

    def run_peer_once() -> int:
        nodes = best_fit.place_gang(members, each, in_one_rack=request.required is Level.RACK)
        assert len(nodes) == (members if outcome == "placed" else 0)
        return 1

    whole = size | {"gang": members, "gpus_per_node": each}
    return measure(
        "decide",
        name,
        whole,
        decide_once,
        "ms/decision",
        peer=Peer("best fit in a Python loop", run_peer_once),
        repeats=9,
    )
