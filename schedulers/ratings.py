"""Ratings of nodes for an outside scheduler: why a node cannot be used, or a score from 0 to 10.

    0       unusable
    0, 1    its risk within an hour is high
    2..4    elevated
    5       unknown risk: neither worst nor best
    6..10   low

The risk bands have hysteresis, so noise at the edge of a band changes no rating. Within a band the score
rises with the share of the node's GPUs that would be in use. So small pods fill up partly used nodes. Pods
without GPUs go to full nodes.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.schedulers.weather import Outlook

NEUTRAL = 5
FLOOR, SPAN = np.array([6, 2, 0]), np.array([4, 2, 1])  # by band: low, elevated, high


@dataclass(frozen=True, slots=True)
class Refusals:
    """The nodes that cannot be used.

    why: node → reason, including nodes without a row. mask: (n,) True for each row that cannot be used.
    """

    why: Mapping[str, str]
    mask: NDArray[np.bool_]


class Ratings:
    """The ratings of nodes for the newest outlook. There are none before the first outlook."""

    def __init__(self) -> None:
        self.outlook = Outlook.make_empty()
        self.names: tuple[str, ...] = ()
        self._refusals: dict[int, Refusals] = {}
        self._scores: dict[int, NDArray[np.int64]] = {}

    def use_outlook(self, outlook: Outlook) -> None:
        if outlook.rows is not self.outlook.rows:
            self.names = tuple(outlook.rows)
        self.outlook = outlook
        self._refusals, self._scores = {}, {}

    def find_unusable_nodes(self, limit_s: float | None = None) -> Refusals:
        """Return the nodes that a pod which runs for `limit_s` cannot use. Callers must not change the result.

        limit_s: seconds. If it is None, the run time is unknown and the risk within an hour counts.
        """
        horizon = next((row for row, most_s in enumerate(RISK_HORIZONS_S) if (limit_s or 0) <= most_s), -1)
        if horizon not in self._refusals:
            why = self._explain_refusals(horizon)
            mask = np.zeros(len(self.names), bool)
            mask[[self.outlook.rows[name] for name in why if name in self.outlook.rows]] = True
            self._refusals[horizon] = Refusals(why, mask)
        return self._refusals[horizon]

    def _explain_refusals(self, horizon: int) -> dict[str, str]:
        outlook, names = self.outlook, self.names
        risk = outlook.risk[horizon]
        refused = {names[row]: _describe_risk(float(risk[row]), horizon) for row in _list_rows(risk > outlook.max_risk)}
        out = _list_rows(outlook.state != NodeState.IN_SERVICE)
        refused |= {names[row]: NodeState(outlook.state[row]).name.lower() for row in out}
        refused |= {name: words for name, words in outlook.in_window.items() if name in outlook.rows}
        for name, what in refused.items():
            reason = outlook.reasons.get(name, "")
            refused[name] = reason if what in reason else f"{what}; {reason}" if reason else what
        return refused | dict(outlook.urgent)

    def normalise_gpus(self, gpus: int) -> int:
        """Return the smallest number of GPUs with the same score as `gpus`.

        All numbers that fit on no node have the same score.
        """
        return min(gpus, int(self.outlook.gpus.max(initial=0)) + 1)

    def compute_scores(self, gpus: int) -> NDArray[np.int64]:
        """Return (n,) int64 scores from 0 to 10 for a pod with `gpus` GPUs. Callers must not change the array.

        It is the same array until the next outlook.
        """
        if gpus not in self._scores:
            self._scores[gpus] = self._compute_new_scores(gpus)
        return self._scores[gpus]

    def _compute_new_scores(self, gpus: int) -> NDArray[np.int64]:
        outlook = self.outlook
        left = outlook.free - gpus
        fit = np.where(left < 0, 0.0, 1 - left / np.maximum(outlook.gpus, 1))
        scores: NDArray[np.int64] = FLOOR[outlook.level] + np.rint(fit * SPAN[outlook.level]).astype(np.int64)
        scores[np.isnan(outlook.risk[0])] = NEUTRAL
        scores[self.find_unusable_nodes().mask] = 0
        return scores


def _list_rows(mask: NDArray[np.bool_]) -> list[int]:
    return [int(row) for row in np.flatnonzero(mask)]


def _describe_risk(p: float, horizon: int) -> str:
    """Describe a risk with its horizon. horizon: an index of RISK_HORIZONS_S.

    >>> _describe_risk(0.934, 2)
    'risk 93 % within 1 d'
    """
    hours = RISK_HORIZONS_S[horizon] // 3600
    return f"risk {p * 100:.0f} % within {f'{hours // 24} d' if hours >= 24 else f'{hours} h'}"
