"""DayLevels: the strength of each rule's recent evidence against each node. A strength halves every HALF_MS.

A link that flapped in the morning no longer shows in the present evidence. So the models of the next day
and week use this fading maximum instead. Serving and training update it in the same way
(models/risk/score.py, training/sites).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.risk.rules import RULES

Array = NDArray[np.float64]

HALF_MS = 12 * 3_600_000
LEAST = 1e-3  # what has faded so far is gone


class DayLevels:
    """The strength of each rule's recent evidence against each node, from 0 to 1.

    A strength halves every HALF_MS. Only one task may record levels. Nodes are matched by name.
    """

    def __init__(self) -> None:
        self.names: tuple[str, ...] = ()
        self.values = np.zeros((0, len(RULES)), np.float32)
        self.time_ms = 0

    def record_levels(self, levels: Array, names: Sequence[str], now_ms: int) -> None:
        """Record the strength of the present evidence. A faded strength that is greater stays.

        levels: (node, rule) from 0 to 1. names: the names of the nodes.
        """
        self.values = np.maximum(self.compute_levels(names, now_ms), levels).astype(np.float32)
        self.names, self.time_ms = tuple(names), max(now_ms, self.time_ms)

    def compute_levels(self, names: Sequence[str], now_ms: int) -> Array:
        """Return (node, rule) the strengths of these nodes, faded to `now_ms`. Unknown nodes have 0."""
        age_ms = max(0, now_ms - self.time_ms) if self.time_ms else 0
        faded = self.values * 0.5 ** (age_ms / HALF_MS)
        faded[faded < LEAST] = 0.0
        if tuple(names) == self.names:
            return np.asarray(faded, np.float64)
        found = np.zeros((len(names), len(RULES)))
        rows = {name: row for row, name in enumerate(self.names)}
        known = [(at, rows[name]) for at, name in enumerate(names) if name in rows]
        if known:
            to, of = np.array(known).T
            found[to] = faded[of]
        return found

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the strengths for a snapshot. Rules are stored by name."""
        rules = [rule.name for rule in RULES]
        return {"names": list(self.names), "time_ms": self.time_ms, "rules": rules}, {"values": self.values.copy()}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty object with the state that `dump` returned. Leaves out rules that no longer exist."""
        self.names, self.time_ms = tuple(about["names"]), about["time_ms"]
        self.values = np.zeros((len(self.names), len(RULES)), np.float32)
        column = {name: at for at, name in enumerate(about["rules"])}
        for row, rule in enumerate(RULES):
            if rule.name in column:
                self.values[:, row] = arrays["values"][:, column[rule.name]]

    def shift_times(self, by_ms: int) -> None:
        """Shift all times by `by_ms`. A time of 0 is unset and stays 0."""
        self.time_ms = self.time_ms and self.time_ms + by_ms
