"""Risk bands with hysteresis and a maximum share of each pool.

Other systems act on each change of a band, so bands change rarely.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LOW, ELEVATED, HIGH = "low", "elevated", "high"
LEVELS = (LOW, ELEVATED, HIGH)
Levels = NDArray[np.int8]  # rows of LEVELS


@dataclass(frozen=True, slots=True)
class BandRule:
    """The rule that assigns nodes to risk bands by their score.

    A node enters a band when its score reaches `elevated` or `high`. It leaves the band downwards only below
    `leave_ratio` times that value. At most `max_share` of a pool's nodes are high at once, but one node always
    may be.
    """

    elevated: float = 0.05
    high: float = 0.3
    leave_ratio: float = 0.7
    max_share: float = 1.0


class Bands:
    """The bands of a fleet's nodes, carried from one board to the next.

    `held`: node → band from an earlier process.

    >>> bands = Bands(BandRule(elevated=0.1, high=0.5))
    >>> bands.update({"a": 0, "b": 1}, np.array([0.6, 0.01])).tolist()
    [2, 0]
    >>> bands.update({"a": 0, "b": 1}, np.array([0.4, 0.01])).tolist()  # 0.4 is above 0.5 * 0.7: stays high
    [2, 0]
    """

    def __init__(self, rule: BandRule | None = None, held: Mapping[str, str] | None = None) -> None:
        self.rule = rule or BandRule()
        known = {name: LEVELS.index(band) for name, band in (held or {}).items() if band in LEVELS}
        self._rows: Mapping[str, int] = {name: row for row, name in enumerate(known)}
        self._levels: Levels = np.array([*known.values()], np.int8)
        self.capped = 0  # nodes that are high but for the share

    @property
    def bands_above_low(self) -> dict[str, str]:
        """Node → band, for the nodes whose band is not low."""
        return {name: LEVELS[self._levels[row]] for name, row in self._rows.items() if self._levels[row]}

    def update(
        self, rows: Mapping[str, int], scores: NDArray[np.float64], pool: NDArray[np.integer] | None = None
    ) -> Levels:
        """Return (n,) the bands for the newest scores, as rows of LEVELS. A NaN score changes nothing.

        pool: (n,) the number of each node's pool.
        """
        if rows is not self._rows:
            held = [self._levels[self._rows[name]] if name in self._rows else 0 for name in rows]
            self._rows, self._levels = rows, np.array(held, np.int8)
        wanted = compute_next_levels(self._levels, scores, self.rule)
        pools = np.zeros(len(scores), np.int64) if pool is None else pool
        self._levels = limit_high_share(wanted, self._levels, scores, pools, self.rule.max_share)
        self.capped = int(np.count_nonzero(self._levels != wanted))
        return self._levels


def compute_next_levels(held: Levels, scores: NDArray[np.float64], rule: BandRule) -> Levels:
    """Return (n,) the next rows of LEVELS for nodes whose present rows are `held`.

    A NaN score changes nothing.

    >>> compute_next_levels(np.array([2, 0], np.int8), np.array([0.25, 0.25]), BandRule()).tolist()
    [2, 1]
    """
    high = np.where(held == 2, rule.high * rule.leave_ratio, rule.high)
    elevated = np.where(held >= 1, rule.elevated * rule.leave_ratio, rule.elevated)
    levels = (scores >= elevated).astype(np.int8)
    levels[scores >= high] = 2
    return np.where(np.isnan(scores), held, levels)


def limit_high_share(
    levels: Levels, held: Levels, scores: NDArray[np.float64], pool: NDArray[np.integer], share: float
) -> Levels:
    """Return (n,) the levels after limiting the nodes that are high to `share` of each pool.

    Nodes that were high before stay high first, then the riskiest ones. All others become elevated.

    >>> four = np.zeros(4, np.int64)
    >>> level, before, risk = np.array([2, 2, 2, 0]), np.array([2, 0, 0, 0]), np.array([0.4, 0.5, 0.9, 0.0])
    >>> limit_high_share(level, before, risk, four, 0.5).tolist()
    [2, 1, 2, 0]
    """
    order = np.lexsort((-np.nan_to_num(scores), -(held == 2).astype(np.int8)))
    allowed = levels.copy()
    for number in set(pool[levels == 2].tolist()):  # np.unique would import numpy.ma first, while a scheduler waits
        high = [row for row in order.tolist() if levels[row] == 2 and pool[row] == number]
        most = max(1, int(share * np.count_nonzero(pool == number)))
        allowed[high[most:]] = 1
    return allowed
