"""Risk bands with hysteresis and a rate limit, since others act on each change: labels reschedule, backfill replans."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

LOW, ELEVATED, HIGH = "low", "elevated", "high"
LEVELS = (LOW, ELEVATED, HIGH)


@dataclass(frozen=True, slots=True)
class BandRule:
    """A score enters a band above `enter`, and leaves it downwards only below `enter * leave_ratio`."""

    elevated: float = 0.05
    high: float = 0.3
    leave_ratio: float = 0.7
    writes_per_minute: int = 30


@dataclass(slots=True)
class Bands:
    """The bands of many nodes; the riskiest changes go first.

    >>> bands = Bands(BandRule(elevated=0.1, high=0.5))
    >>> bands.update(["a", "b"], [0.6, 0.01], now_ms=0)
    {'a': 'high', 'b': 'low'}
    >>> bands.update(["a", "b"], [0.4, 0.01], now_ms=1000)  # 0.4 is above 0.5 * 0.7: stays high
    {}
    """

    rule: BandRule = field(default_factory=BandRule)
    current: dict[str, str] = field(default_factory=dict)
    _writes_ms: list[int] = field(default_factory=list)

    def update(self, nodes: Sequence[str], scores: Sequence[float], now_ms: int) -> dict[str, str]:
        """The bands to write now. A score that is NaN (unknown) changes nothing. The first pass is not limited."""
        wanted = {
            node: band
            for node, score in sorted(zip(nodes, scores, strict=True), key=lambda pair: -pair[1])
            if not math.isnan(score) and (band := self._band(node, score)) != self.current.get(node)
        }
        first = {node: band for node, band in wanted.items() if node not in self.current}
        self._writes_ms = [time_ms for time_ms in self._writes_ms if time_ms > now_ms - 60_000]
        room = max(0, self.rule.writes_per_minute - len(self._writes_ms))
        changed = dict([pair for pair in wanted.items() if pair[0] not in first][:room])
        self._writes_ms += [now_ms] * len(changed)
        self.current |= first | changed
        return first | changed

    def _band(self, node: str, score: float) -> str:
        held = self.current.get(node)
        rule = self.rule
        if score >= rule.high or (held == HIGH and score >= rule.high * rule.leave_ratio):
            return HIGH
        if score >= rule.elevated or (held in (HIGH, ELEVATED) and score >= rule.elevated * rule.leave_ratio):
            return ELEVATED
        return LOW


def step_levels(held: NDArray[np.int8], scores: NDArray[np.float64], rule: BandRule) -> NDArray[np.int8]:
    """(n,) the next rows of LEVELS of nodes at those of `held`; a NaN score changes nothing.

    >>> step_levels(np.array([2, 0], np.int8), np.array([0.25, 0.25]), BandRule()).tolist()
    [2, 1]
    """
    high = np.where(held == 2, rule.high * rule.leave_ratio, rule.high)
    elevated = np.where(held >= 1, rule.elevated * rule.leave_ratio, rule.elevated)
    levels = (scores >= elevated).astype(np.int8)
    levels[scores >= high] = 2
    return np.where(np.isnan(scores), held, levels)
