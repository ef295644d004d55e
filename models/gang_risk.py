"""Gang risk: the probability that a set of nodes gets through a time, from the risk of each.

    hazard of a node    what its probabilities say of the time: between two horizons in proportion, beyond the last
                        at the rate of the last piece
    of the gang         the sum over its nodes, plus a shared part of each domain (rack, power, rail) that holds two
                        or more of them: one cooling loop, breaker or leaf switch stops all that it serves
    thermal carry-over  a node that is hot now starts its next job hot: its slow hazard begins higher and decays

    p = 1 - exp(-hazard)

Every term is at least 0 and grows with the set and with the time, so p does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.shared_domains import shared_hazard
from models.scores import RISK_HORIZONS_S

Array = NDArray[np.float64]

HIGHEST_P = 1 - 1e-9
TINY = 1e-12
HOT_C, HOTTEST_C = 75.0, 90.0  # of a GPU: no carry-over below, all of it above
CARRY_OVER = 0.05  # slow hazard that a node at HOTTEST_C brings into its next job
COOLS_S = 600.0
FAIL, DRAIN, SLOW = range(3)  # rows of RISK_KINDS


@dataclass(frozen=True, slots=True)
class GangRisk:
    """p_interrupted, p_slow: of the gang; node: (n,) the chance that each member interrupts it; domains: as found.

    weakest: index of the member that interrupts it most likely.
    """

    p_interrupted: float
    p_slow: float
    node: Array
    weakest: int
    domains: tuple["SharedDomain", ...]


@dataclass(frozen=True, slots=True)
class SharedDomain:
    """A domain of two or more members; share: its part of the hazard of an interruption."""

    level: str
    name: str
    nodes: int
    share: float


def hazard_of(p: Array) -> Array:
    """The hazard that a probability stands for."""
    return np.asarray(-np.log1p(-np.clip(p, 0.0, HIGHEST_P)))


def hazard_within(p: Array, duration_s: float) -> Array:
    """(..., n) hazard of (..., horizon, n) probabilities within a time; never falls as the time grows.

    >>> p = 1 - np.exp(-np.array([[0.1], [0.2], [0.3], [0.3]]))
    >>> hazard_within(p, 1800).round(3).tolist(), hazard_within(p, 10_800).round(3).tolist()
    ([0.05], [0.15])
    """
    hazard = np.maximum.accumulate(hazard_of(p), axis=-2)
    times = np.array((0, *RISK_HORIZONS_S), np.float64)
    hazard = np.concatenate((np.zeros_like(hazard[..., :1, :]), hazard), axis=-2)
    at = int(np.clip(np.searchsorted(times, duration_s), 1, len(RISK_HORIZONS_S)))
    slope = (hazard[..., at, :] - hazard[..., at - 1, :]) / (times[at] - times[at - 1])
    return np.asarray(hazard[..., at - 1, :] + slope * (duration_s - times[at - 1]))


def carried_heat(gpu_temp_c: Array, duration_s: float) -> Array:
    """(n,) slow hazard from the job before, of the hottest GPU of each node; NaN, unknown, carries nothing.

    >>> carried_heat(np.array([60.0, 90.0, np.nan]), 1e6).tolist()
    [0.0, 0.05, 0.0]
    """
    hot = np.clip((np.nan_to_num(gpu_temp_c) - HOT_C) / (HOTTEST_C - HOT_C), 0.0, 1.0)
    return np.asarray(CARRY_OVER * hot * (1 - np.exp(-duration_s / COOLS_S)))


def gang_risk(
    risk: Array,
    domains: Sequence[tuple[str, Sequence[str]]],
    duration_s: float,
    prior: Array,
    gpu_temp_c: Array | None = None,
) -> GangRisk:
    """Risk of a gang of n >= 1 members.

    risk: (kind, horizon, n) probabilities, NaN where nothing is known: `prior`, (kind, horizon), then. domains:
    (level, (n,) name of each member's domain, "" unknown), levels of FAULTS_PER_DAY; gpu_temp_c: (n,).
    """
    known = np.where(np.isfinite(risk), risk, prior[:, :, None])
    hazard = hazard_within(known, duration_s)
    usual = hazard_within(prior[:, :, None], duration_s)
    interrupts, slows = hazard[FAIL], hazard[SLOW]
    if gpu_temp_c is not None:
        slows = slows + carried_heat(gpu_temp_c, duration_s)
    excess = np.maximum(interrupts - usual[FAIL], 0.0)
    found = [
        (level, name, len(inside), float(shared_hazard(level, excess[inside].max(), duration_s)))
        for level, names in domains
        for name, inside in sorted(_members(names).items())
        if len(inside) > 1
    ]
    total = float(interrupts.sum()) + sum(common for *_, common in found)
    rows = [SharedDomain(level, name, nodes, common / max(total, TINY)) for level, name, nodes, common in found]
    p = 1 - np.exp(-interrupts)
    return GangRisk(
        p_interrupted=float(1 - np.exp(-total)),
        p_slow=float(1 - np.exp(-slows.sum())),
        node=p,
        weakest=int(interrupts.argmax()),
        domains=tuple(sorted(rows, key=lambda row: -row.share)),
    )


def _members(names: Sequence[str]) -> dict[str, list[int]]:
    """Domain -> its members, in one pass: a gang of thousands has hundreds of racks."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        if name:
            found.setdefault(name, []).append(row)
    return found
