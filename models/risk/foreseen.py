"""The past accuracy of foreseen failures: advice to replace nodes under a gang before they fail.

    advice ──► waits for its horizon ──► one of its nodes was lost within it, or none was ──► sums

An advice counts once, however often it is repeated. If one of its nodes leaves service otherwise, such as for a
repair, nobody knows whether it would have failed. Then the advice does not count, and neither does one for which
we were down for over a tenth of its time.
"""

from collections.abc import Collection
from typing import Self

import msgspec
import numpy as np

from fleetcast.models.risk.record import BINS, EDGES, UNWATCHED_SHARE, WATCHED_MS, Calibration, make_calibration

MOST_WAITING = 1000  # pieces of advice that are followed at once
A_DAY_S = 86_400.0


class ForeseenFailure(msgspec.Struct):
    """An advice that waits for its outcome. p: the probability that one of the nodes fails within `horizon_s`."""

    job: str
    attempt: int
    nodes: tuple[str, ...]
    p: float
    horizon_s: float
    issued_ms: int
    missed_ms: int = 0

    @property
    def key(self) -> tuple[str, int, tuple[str, ...]]:
        return self.job, self.attempt, self.nodes


class ForeseenRecord(msgspec.Struct):
    """The advice that waits, and sums of the matured advice by bin of probability, as in `RiskRecord`."""

    waiting: list[ForeseenFailure] = []
    count: list[int] = msgspec.field(default_factory=lambda: [0] * BINS)
    predicted: list[float] = msgspec.field(default_factory=lambda: [0.0] * BINS)
    seen: list[int] = msgspec.field(default_factory=lambda: [0] * BINS)
    squares: float = 0.0
    since_ms: int = 0
    now_ms: int = 0
    horizon_s: float = A_DAY_S  # of the newest advice

    @classmethod
    def load(cls, stored: object) -> Self:
        """Return the record that `msgspec.to_builtins` made, or a new one. None: nothing is stored."""
        return cls() if stored is None else msgspec.convert(stored, cls)

    def record_advice(self, advice: ForeseenFailure) -> bool:
        """Follow an advice from now on. Returns False if it is followed already."""
        is_new = all(one.key != advice.key for one in self.waiting) and len(self.waiting) < MOST_WAITING
        if is_new:
            self.since_ms = self.since_ms or advice.issued_ms
            self.now_ms = self.now_ms if self.waiting else advice.issued_ms
            self.waiting.append(advice)
            self.horizon_s = advice.horizon_s
        return is_new

    def score_due(self, lost: Collection[str], away: Collection[str], now_ms: int) -> bool:
        """Score the advice whose outcome is known. Returns whether the record should be stored.

        lost, away: nodes that are lost now, or out of service for another reason.
        """
        gap_ms = now_ms - self.now_ms
        if not self.waiting or (gap_ms < WATCHED_MS // 2 and not self._is_any_known(lost, away, now_ms)):
            return False
        if gap_ms > WATCHED_MS:
            for one in self.waiting:
                one.missed_ms += gap_ms
        left = []
        for one in self.waiting:
            is_lost = any(node in lost for node in one.nodes)
            if now_ms >= one.issued_ms + 1000 * one.horizon_s or is_lost:
                if one.missed_ms <= UNWATCHED_SHARE * 1000 * one.horizon_s:
                    self._add(one.p, is_lost)
            elif not any(node in away for node in one.nodes):
                left.append(one)
        self.waiting, self.now_ms = left, now_ms
        return True

    def _is_any_known(self, lost: Collection[str], away: Collection[str], now_ms: int) -> bool:
        return any(
            now_ms >= one.issued_ms + 1000 * one.horizon_s or any(node in lost or node in away for node in one.nodes)
            for one in self.waiting
        )

    def _add(self, p: float, is_lost: bool) -> None:
        place = int(np.searchsorted(EDGES, p, side="right"))
        self.count[place] += 1
        self.predicted[place] += p
        self.seen[place] += is_lost
        self.squares += (p - is_lost) ** 2

    def make_calibration(self) -> Calibration:
        """Return the calibration of the matured advice."""
        sums = self.count, self.predicted, self.seen, self.squares
        return make_calibration(int(self.horizon_s), *sums, self.since_ms)
