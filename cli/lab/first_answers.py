"""Accuracy of the first start time that each request gets, compared with the mean of the last waits."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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

    def summarize_kinds(self, kinds: Mapping[str, str], end_ms: int) -> dict[str, dict[str, Any]]:
        """Return kind → the accuracy of the first answers to its requests, and "all" → that of all first answers.

        kinds: request_id → its kind, "other" if missing. A level counts once its issued time has passed, whether or
        not the request has started. The pinball loss, in minutes, covers all requests: a wait and a quantile that
        reach beyond `end_ms` both count as if they ended then, so that requests that still wait are not left out.
        """
        found: dict[str, list[tuple[float, Array, float]]] = {"all": []}
        for name, (at_ms, issued, _) in self._asked.items():
            if issued is not None:
                row = self._started.get(name, np.inf) - at_ms, np.array(issued, np.float64) - at_ms, end_ms - at_ms
                found["all"].append(row)
                found.setdefault(kinds.get(name, "other"), []).append(row)
        return {kind: _summarize_rows(rows) for kind, rows in found.items()}


def _summarize_rows(rows: Sequence[tuple[float, Array, float]]) -> dict[str, Any]:
    """Return the share of requests that started by each level, how many counted, and the pinball loss.

    rows: (wait, quantiles of the wait at LEVELS, time from the answer to the end), all in ms.
    """
    summary: dict[str, Any] = {"n": len(rows)}
    for at, level in enumerate(LEVELS):
        starts = [wait_ms <= issued_ms[at] for wait_ms, issued_ms, left_ms in rows if issued_ms[at] < left_ms]
        summary[f"n_p{100 * level:.0f}"] = len(starts)
        summary[f"by_p{100 * level:.0f}"] = round(float(np.mean(starts)), 4) if starts else None
    summary["pinball_min"] = _compute_mean_loss(
        (min(wait_ms, left_ms), np.minimum(issued_ms, left_ms)) for wait_ms, issued_ms, left_ms in rows
    )
    return summary


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
