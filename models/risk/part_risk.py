"""Computation of the risk of a node's parts: its GPUs, links (PCIe and NVLink), ports and rails.

A part's hazard is that of the signals that name it, for the node's likeliest kind of risk. The usual
hazard of such a part is added: its share of the published node faults. In InfiniteHBD's faults, 22 % were
of GPUs, 9 % of network cables and 4 % of NICs. A node has eight of each. A rail has the hazard of a leaf
switch (FAULTS_PER_DAY), plus that of the node's ports that lead to it.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.shared_domains import FAULTS_PER_DAY
from fleetcast.fleet.topology import Topology
from fleetcast.models.risk.hazard import FAULTS_PER_NODE_DAY
from fleetcast.models.risk.rules import LINK, PORT, RULES, Rule
from fleetcast.models.risk.scores import RISK_HORIZONS_S, PartRisk
from fleetcast.models.risk.signals import Signals

Array = NDArray[np.float64]

PARTS_OF_NODE = 8
USUAL_A_DAY = {
    "gpu": 0.22 * FAULTS_PER_NODE_DAY / PARTS_OF_NODE,
    "link": 0.09 * FAULTS_PER_NODE_DAY / PARTS_OF_NODE,
    "port": 0.04 * FAULTS_PER_NODE_DAY / PARTS_OF_NODE,
    "rail": FAULTS_PER_DAY["rail"],
}


class UsualPart(msgspec.Struct):
    """The usual risk of a kind of part without evidence against it.

    `p`: its probability within each horizon.
    """

    part: str
    p: list[float]


def list_usual_parts() -> list[UsualPart]:
    """Return the usual risk of each kind of part, by published rates."""
    return [UsualPart(part, list(_compute_horizon_risks(part, 0.0))) for part in USUAL_A_DAY]


def compute_part_risks(signals: Signals, hazard: Array, topology: Topology) -> dict[int, tuple[PartRisk, ...]]:
    """Return node row -> the risks of the parts that signals name, riskiest first.

    hazard: (signal,) the hazard that each signal adds.
    """
    found: dict[int, dict[tuple[str, str], float]] = {}
    names = topology.names
    for at in np.flatnonzero(hazard > 0).tolist():
        row, entity, rule = int(signals.node[at]), signals.entity[at], RULES[signals.rule[at]]
        own = found.setdefault(row, {})
        for key in _list_parts(entity, rule, topology, row):
            if row < len(names):
                own[key] = own.get(key, 0.0) + float(hazard[at])
    return {
        row: tuple(
            PartRisk(entity, part, _compute_horizon_risks(part, total))
            for (part, entity), total in sorted(own.items(), key=lambda item: -item[1])
        )
        for row, own in found.items()
        if own
    }


def _list_parts(entity: str, rule: Rule, topology: Topology, row: int) -> Sequence[tuple[str, str]]:
    """Return (kind of part, name) of each part that a signal of this entity concerns, [] if it is a node.

    GPUs are named like `n1/3`, ports like `n1/mlx5_0/1`.
    """
    node, _, rest = entity.partition("/")
    if rest.isdecimal():
        return [("link" if rule.blames is LINK else "gpu", entity)]
    if rule.kind is not PORT and rest.count("/") != 1:
        return []
    device = rest.partition("/")[0]
    rail = next((known.rail for known in topology.find_devices(row) if known.name == device), -1)
    return [("port", entity), *([("rail", f"{node}/rail{rail}")] if rail >= 0 else [])]


def _compute_horizon_risks(part: str, hazard: float) -> tuple[float, ...]:
    days = np.array(RISK_HORIZONS_S) / 86_400
    return tuple(round(float(p), 7) for p in 1 - np.exp(-(hazard + USUAL_A_DAY[part] * days)))
