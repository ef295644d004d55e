"""The probability that a gang is interrupted, computed from the risks of its nodes and domains.

    hazard of a node    from its probabilities. It is linear between two horizons. Beyond the last one it
                        grows at the rate of the last piece
    of the gang         the sum over its nodes, plus a shared part of each domain (rack, power, rail) that
                        holds two or more of them: one cooling loop, breaker or leaf switch stops all that
                        it serves
    thermal carry-over  a node that is hot now starts its next job hot: its slow hazard starts higher and
                        decays

p = 1 - exp(-hazard). Every term is at least 0 and grows with the number of nodes and with the time. So p
grows with both, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.shared_domains import compute_carried_heat, compute_shared_hazard, interpolate_hazard
from fleetcast.models.risk.scores import RISK_HORIZONS_S

Array = NDArray[np.float64]

TINY = 1e-12
FAIL, DRAIN, SLOW = range(3)  # rows of RISK_KINDS


@dataclass(frozen=True, slots=True)
class GangRisk:
    """The risk that a gang is interrupted or slowed down.

    p_interrupted, p_slow: the probabilities for the whole gang. node: (n,) the probability that each member
    interrupts the gang. slow: (n,) the probability that each member slows it down. hazard: expected interruptions.
    weakest, slowest: the members with the highest `node` and the highest `slow`. domains: those that several
    members share.
    """

    hazard: float
    p_interrupted: float
    p_slow: float
    node: Array
    slow: Array
    weakest: int
    slowest: int
    domains: tuple["SharedDomain", ...]


@dataclass(frozen=True, slots=True)
class SharedDomain:
    """A domain that contains two or more members of a gang, such as a rack.

    share: the part of the gang's hazard of an interruption that comes from the domain.
    """

    level: str
    name: str
    nodes: int
    share: float


def compute_gang_risk(
    risk: Array,
    domains: Sequence[tuple[str, Sequence[str]]],
    duration_s: float,
    prior: Array,
    gpu_temp_c: Array | None = None,
) -> GangRisk:
    """Return the risk of a gang of n >= 1 members over `duration_s`.

    risk: (kind, horizon, n) probabilities. Where it is NaN, `prior` (kind, horizon) is used. domains: pairs
    of a level of FAULTS_PER_DAY and the domains of the n members at this level, "" if unknown. gpu_temp_c:
    (n,) °C.
    """
    known = np.where(np.isfinite(risk), risk, prior[:, :, None])
    hazard = interpolate_hazard(known, RISK_HORIZONS_S, duration_s)
    usual = interpolate_hazard(prior[:, :, None], RISK_HORIZONS_S, duration_s)
    interrupts, slows = hazard[FAIL], hazard[SLOW]
    if gpu_temp_c is not None:
        slows = slows + compute_carried_heat(gpu_temp_c, duration_s)
    excess = np.maximum(interrupts - usual[FAIL], 0.0)
    found = [
        (level, name, len(inside), float(compute_shared_hazard(level, excess[inside].max(), duration_s)))
        for level, names in domains
        for name, inside in sorted(_group_members(names).items())
        if len(inside) > 1
    ]
    total = float(interrupts.sum()) + sum(common for *_, common in found)
    rows = [SharedDomain(level, name, nodes, common / max(total, TINY)) for level, name, nodes, common in found]
    return GangRisk(
        hazard=total,
        p_interrupted=float(1 - np.exp(-total)),
        p_slow=float(1 - np.exp(-slows.sum())),
        node=1 - np.exp(-interrupts),
        slow=1 - np.exp(-slows),
        weakest=int(interrupts.argmax()),
        slowest=int(slows.argmax()),
        domains=tuple(sorted(rows, key=lambda row: -row.share)),
    )


def _group_members(names: Sequence[str]) -> dict[str, list[int]]:
    """Return domain -> the indices of its members, in one pass over all members.

    A gang of thousands of nodes has hundreds of racks, so a pass for each rack would be slow.
    """
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name:
            found.setdefault(name, []).append(row)
    return found
