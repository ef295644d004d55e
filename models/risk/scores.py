"""RiskScores: the probabilities that nodes fail, need a drain or are slow, and the reasons for them."""

from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

RISK_KINDS = ("fail", "drain", "slow")
RISK_HORIZONS_S = (3600, 18000, 86400, 604800)


class Reason(msgspec.Struct, frozen=True):
    """One piece of evidence behind a node's risk.

    `share` is its part of the node's hazard. The shares of a node sum to at most 1.
    """

    feature: str
    entity: str
    value: float
    usual: float | None
    unit: str
    share: float
    since_ms: int | None
    sentence: str


class HardReason(Reason, frozen=True):
    """A reason from a hard rule. Answers contain it in the same form as any other reason."""


class Action(msgspec.Struct, frozen=True):
    """The action that is recommended for a node, and a sentence with the reason for it.

    The action is one of `none`, `watch`, `avoid` (place no large job there), `drain_at_job_end`, `drain_now`,
    `replace_part`.
    """

    code: str
    sentence: str


class PartRisk(msgspec.Struct, frozen=True):
    """The risk of a GPU, link, port or rail of a node that has evidence against this part.

    `p`: the probability of a fault of the part within each of RISK_HORIZONS_S.
    """

    entity: str
    part: str
    p: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RiskScores:
    """The risk scores of all nodes.

    values: (kind, horizon, node) probability in [0, 1], NaN for unknown nodes. reasons, actions, parts:
    node row -> the reasons, the action and the parts of that node, if it has any. hard: (node,) whether the node
    has a hard signal, such as an XID or a loss.
    """

    values: NDArray[np.float64]
    reasons: dict[int, tuple[Reason, ...]]
    actions: dict[int, Action]
    hard: NDArray[np.bool_]
    model: str
    parts: dict[int, tuple[PartRisk, ...]] = field(default_factory=dict)
