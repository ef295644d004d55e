"""Placement decisions for one GPU, and for gangs in a level, anywhere, or without enough room.

70 % of the fleet is free, in racks of 128 nodes. The peers are filter-and-score loops in plain Python. They read
lists that are made before the measurement, because a loop over arrays or enum members would be several times
slower.

`BestFit` stays in one rack only if a request requires it. It names nodes, but neither GPUs nor reasons.
`BestGang` does the work of `decide`: it prefers one rack, and among racks the one whose gang has the best chance.
It names the GPUs of each member and two more racks, and counts why other nodes are rejected.

A view remembers what depends on its risks alone. So three cases repeat with new risks for each decision, as the first
decision after a tick has them. The peers keep their lists.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
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
NEW_RISKS = "_new_risks"  # of cases in which the view remembers nothing of the risks
REPEATS = 60  # short runs, of which the fastest counts


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


@dataclass(frozen=True)
class FoundGang:
    """The answer of `BestGang`.

    ranks: the node and the GPUs of each member. runners_up: the score and the nodes of the next best gangs.
    """

    sentence: str
    rejected: dict[str, int]
    ranks: list[tuple[str, tuple[int, ...]]]
    score: float = 0.0
    runners_up: list[tuple[float, list[str]]] = field(default_factory=list)


class BestGang:
    """The peer that answers as much as `decide`, a Python loop over nodes and over the racks that hold the gang."""

    def __init__(self, view: ClusterView) -> None:
        fails, slows = (np.log1p(-p).tolist() for p in (view.p_fail, view.p_slow))
        columns = (view.state, view.p_fail, view.p_slow, view.topology.domain[Level.RACK])
        free = [tuple(np.flatnonzero(gpus).tolist()) for gpus in view.free]
        self._nodes = list(zip(free, *(column.tolist() for column in columns), fails, slows, strict=True))
        self._names = view.topology.names

    def place_gang(self, members: int, gpus: int, *, in_one_rack: bool = False) -> FoundGang:
        """Return the best gang and two more, or why there is none. gpus: the GPUs of each member."""
        in_service = int(NodeState.IN_SERVICE)
        closed = risky = busy = 0
        racks: dict[int, list[tuple[int, float, int]]] = {}
        for row, (free, state, p_fail, p_slow, rack, _, _) in enumerate(self._nodes):
            risk = p_fail if p_fail > p_slow else p_slow
            if state != in_service:
                closed += 1
            elif risk > MAX_RISK:
                risky += 1
            elif len(free) < gpus:
                busy += 1
            elif rack in racks:
                racks[rack].append((len(free) - gpus, risk, row))
            else:
                racks[rack] = [(len(free) - gpus, risk, row)]
        rejected = {"state": closed, "risk": risky, "busy": busy}
        gangs = [self._choose_nodes(nodes, members) for nodes in racks.values() if len(nodes) >= members]
        if not gangs and not in_one_rack:
            together = [node for nodes in racks.values() for node in nodes]
            gangs = [self._choose_nodes(together, members)] if len(together) >= members else []
        if not gangs:
            most = max(map(len, racks.values()), default=0)
            counts = ", ".join(f"{count} {reason}" for reason, count in rejected.items() if count)
            sentence = f"refused: needs {members} x {gpus} GPUs; the best rack has room for {most}; {counts}"
            return FoundGang(sentence, rejected, [])
        best, *others = heapq.nlargest(3, gangs)
        ranks = [(self._names[row], self._nodes[row][0][:gpus]) for row in sorted(best[1])]
        runners_up = [(score, [self._names[row] for row in rows]) for score, rows in others]
        sentence = f"placed {members} x {gpus} GPUs on {len(ranks)} nodes"
        return FoundGang(sentence, rejected, ranks, best[0], runners_up)

    def _choose_nodes(self, nodes: list[tuple[int, float, int]], members: int) -> tuple[float, list[int]]:
        """Return the score and the rows of the best gang of some nodes. The score is the chance of the gang."""
        best = heapq.nsmallest(members, nodes) if members < len(nodes) // 8 else sorted(nodes)[:members]
        rows = [row for _, _, row in best]
        fails, slows = sum(self._nodes[row][5] for row in rows), sum(self._nodes[row][6] for row in rows)
        share = members / len(nodes)  # best fit of racks, too
        return 3 * math.exp(fails) + 2 * math.exp(slows) + share, rows


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
    cases = [(name, request, "placed") for name, request in placed.items()]
    cases += [(f"{name}{NEW_RISKS}", request, "placed") for name, request in placed.items()]
    cases.append(("cannot_fit_one_rack", too_large, "refused"))
    return [record for case in cases for record in _measure_decision(view, *case, size)]


def _measure_decision(
    view: ClusterView, name: str, request: PlacementRequest, outcome: str, size: dict[str, int]
) -> list[dict[str, Any]]:
    """Return the record of a case beside each of the two peers."""
    members, each = request.members.min, request.gpus_per_node
    ranks, in_one_rack = members if outcome == "placed" else 0, request.required is Level.RACK
    best_fit, best_gang = BestFit(view), BestGang(view)
    has_new_risks = name.endswith(NEW_RISKS)
    views = cycle([view, replace(view, p_fail=view.p_fail.copy())] if has_new_risks else [view])

    def decide_once() -> int:
        decision = decide(request, next(views))
        assert decision.outcome == outcome, decision.sentence
        assert len(decision.ranks) == ranks
        assert decision.nodes == decision.candidates + sum(decision.rejected.values()) == len(view)
        return 1

    def run_best_fit() -> int:
        assert len(best_fit.place_gang(members, each, in_one_rack=in_one_rack)) == ranks
        return 1

    def run_best_gang() -> int:
        answer = best_gang.place_gang(members, each, in_one_rack=in_one_rack)
        assert len(answer.ranks) == ranks, answer.sentence
        return 1

    whole = size | {"gang": members, "gpus_per_node": each}
    peers = (
        Peer("names nodes: best fit in a Python loop", run_best_fit, repeats=REPEATS),
        Peer("as much as Fleetcast: a Python loop", run_best_gang, repeats=REPEATS),
    )
    return [measure("decide", name, whole, decide_once, "ms/decision", peer=peer, repeats=REPEATS) for peer in peers]
