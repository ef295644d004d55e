"""Accuracy of the first start time that each request gets, compared with the mean of the last waits."""

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.start_record import LEVELS, Times

AVERAGED = 20  # waits
MINUTE_MS = 60_000

Array = NDArray[np.float64]


class FirstAnswerTally:
    """The first answer to each waiting request, and when the request started. Times are in Unix ms."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, Times | None, float | None]] = {}  # when, issued, average wait in ms then
        self._started: dict[str, int] = {}
        self._waits_ms: deque[float] = deque(maxlen=AVERAGED)

    def record_answers(self, submitted_ms: Mapping[str, int], starts_ms: Mapping[str, Times], now_ms: int) -> None:
        """Record the first answer to each waiting request that has none yet.

        submitted_ms: request_id → when it was submitted. starts_ms: request_id → its start time at LEVELS.
        """
        average_ms = float(np.mean(self._waits_ms)) if self._waits_ms else None
        for name, since_ms in submitted_ms.items():
            if name not in self._asked:
                left_ms = None if average_ms is None else max(0.0, average_ms - (now_ms - since_ms))
                self._asked[name] = now_ms, starts_ms.get(name), left_ms

    def record_start(self, name: str, submitted_ms: int, now_ms: int) -> None:
        """Record that a request has started. Ignores a request that started before it had any answer."""
        if name in self._asked:
            self._started[name] = now_ms
            self._waits_ms.append(now_ms - submitted_ms)

    def make_summary(self) -> dict[str, Any]:
        """Return the share of first answers with a start time, and mean pinball losses in minutes over LEVELS.

        The losses cover requests that started and had both an answer and a mean of the last waits.
        """
        given = [issued is not None for _, issued, _ in self._asked.values()]
        rows = [
            (self._started[name] - at_ms, np.array(issued) - at_ms, average_ms)
            for name, (at_ms, issued, average_ms) in self._asked.items()
            if name in self._started and issued is not None and average_ms is not None
        ]
        return {
            "asked": len(given),
            "given": round(float(np.mean(given)), 4) if given else None,
            "scored": len(rows),
            "pinball_min": _compute_mean_loss((wait_ms, ours) for wait_ms, ours, _ in rows),
            "pinball_min_average": _compute_mean_loss(
                (wait_ms, np.full(len(LEVELS), mean_ms)) for wait_ms, _, mean_ms in rows
            ),
        }


def _compute_mean_loss(rows: Iterable[tuple[float, Array]]) -> float | None:
    """Return the mean pinball loss in minutes, or None without rows.

    rows: (wait, quantiles of the wait at LEVELS), both in ms.
    """
    levels = np.array(LEVELS)
    losses = []
    for wait_ms, quantiles_ms in rows:
        left = (wait_ms - quantiles_ms) / MINUTE_MS
        losses.append(float(np.maximum(levels * left, (levels - 1) * left).mean()))
    return round(float(np.mean(losses)), 2) if losses else None
