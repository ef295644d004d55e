"""Weather: what an adapter may know of the fleet, made once a board (`service.weather`). Nobody changes it.

A part that is missing or too old is None, so no adapter ever sees a stale part. Further parts (load, demand, jobs,
start times) become fields beside `nodes`, each with the first adapter that asks for it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from models.risk.scores import RISK_HORIZONS_S


@dataclass(frozen=True, slots=True)
class Outlook:
    """The nodes of a fleet at one moment, n of them."""

    rows: Mapping[str, int]  # by name; the same object while the names stay the same
    risk: NDArray[np.float64]  # (horizon, n) probability that a pod fails or slows down, NaN unknown
    level: NDArray[np.int8]  # (n,) row of bands.LEVELS of the risk at the first horizon, with hysteresis
    state: NDArray[np.int8]  # (n,) NodeState
    gpus: NDArray[np.int64]  # (n,) that answer
    free: NDArray[np.int64]  # (n,) that no job holds
    reasons: Mapping[str, str] = field(default_factory=dict)  # first reason by name
    causes: Mapping[str, str] = field(default_factory=dict)  # what speaks most for the risk of nodes that are high
    urgent: Mapping[str, str] = field(default_factory=dict)  # why not, of nodes that a hard signal struck since
    max_risk: float = 0.5

    @classmethod
    def nothing(cls) -> "Outlook":
        none = np.zeros(0, np.int64)
        risk = np.zeros((len(RISK_HORIZONS_S), 0))
        return cls({}, risk, none.astype(np.int8), none.astype(np.int8), none, none)


@dataclass(frozen=True, slots=True)
class Weather:
    """One board for adapters. `now_ms`: when it was made of the board of `as_of_ms`."""

    sequence: int
    as_of_ms: int
    now_ms: int
    nodes: Outlook | None = None
