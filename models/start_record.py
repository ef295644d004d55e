"""StartRecord: whether start times shown to users proved right, and how the next ones are corrected.

`models/start_answers.py` explains how the record evaluates start times.

    issued = exp(log(wait + ROUND_S) + offset) - ROUND_S          at each level

A residual is log(waited + ROUND_S) - log(wait + ROUND_S), for the first answer to a request, before any
correction. The offset of a level is that quantile of the residuals, times n^2 / (n^2 + PRIOR^2), with n
the number of requests that started. A request that still waits is right-censored (Kaplan-Meier), because
the requests that started first are the ones with short waits. If many requests arrive while one waits, the
newest of those that started have short waits too. If the curve of the newest ones does not come down to
the level, more of the older ones are included.

An offset could instead follow how often corrected answers proved right. Such an offset would go on moving
until the first corrected requests start, hours later, and swing from too late to too early.

If a request was to start at once and did not, its wait has a Pareto tail: it may well wait as long again.
"""

import bisect
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.start_answers import (
    LEVELS,
    LOOKS_S,
    AnsweredRequest,
    AnsweredRequests,
    StartAccuracy,
    StartShares,
    Times,
)

__all__ = ["LEVELS", "LOOKS_S", "StartAccuracy", "StartRecord", "StartShares", "Times"]

ROUND_S = 60.0  # what is less is no wait
MOST_OPEN = 5000  # requests that wait and are followed
WINDOWS = (100, 200, 400, 800)  # residuals that an offset is learnt from: the first whose curve reaches the level
PRIOR = 20.0  # residuals that correct half-way
FARTHEST = 3.0  # of a logarithm
ALPHA = 2.0  # of the Pareto tail of a request that was to start at once
TAIL = np.array([(1 - level) ** (-1 / ALPHA) - 1 for level in LEVELS])
VERSION = 3  # of a dump

Array = NDArray[np.float64]


@dataclass(slots=True)
class FollowedRequest:
    """A request that waits, and the start times that were issued for it.

    first_ms: when its first answer was issued. answers: the answers that the record evaluates, None if it
    evaluates none. since_ms: from when on it was due to start at once, None if it is not due. sampled_s: the
    waits in its first answer at LEVELS, before any correction, None if that answer had no start time.
    """

    first_ms: int
    answers: AnsweredRequest | None = None
    since_ms: int | None = None
    sampled_s: tuple[float, ...] | None = None


class StartRecord:
    """The record of issued start times. Only one task may change it.

    `issue_starts` corrects and records start times. `record_start` and `record_withdrawal` end a wait, and
    `advance_to` sets the time.
    """

    def __init__(self) -> None:
        self.offset = np.zeros(len(LEVELS))
        self.cursor = 0  # of the ledger's decisions: those up to it are known here
        self._now_ms = 0
        self._open: dict[str, FollowedRequest] = {}
        self._answers = AnsweredRequests()
        self._residuals: list[tuple[int, Array]] = []  # (when first issued, (level,)), in this order

    @property
    def waiting(self) -> Iterable[str]:
        """The ids of the requests that wait."""
        return self._open.keys()

    def issue_starts(
        self, starts_ms: Mapping[str, Times], now_ms: int, unknown: Collection[str] = ()
    ) -> dict[str, Times]:
        """Return the corrected start times of waiting requests, and record the answers that are due.

        starts_ms: request id -> sampled start times. unknown: ids of waiting requests without a known start
        time. Their answer is recorded as missing.
        """
        self.offset = self._compute_offsets(now_ms)
        for name in unknown:
            self._record_answer(name, None, now_ms, None)
        if not starts_ms:
            return {}
        ids = list(starts_ms)
        wait_s = np.maximum(0.0, (np.array([starts_ms[name] for name in ids], np.float64) - now_ms) / 1000)
        issued_s = np.maximum(self._correct_wait_s(wait_s), self._update_overdue_s(ids, wait_s, now_ms)[:, None] * TAIL)
        rows = now_ms + np.round(1000 * np.sort(issued_s, axis=1)).astype(np.int64)
        found = {name: (low, middle, high) for name, (low, middle, high) in zip(ids, rows.tolist(), strict=True)}
        for (name, issued_ms), sampled_s in zip(found.items(), wait_s.tolist(), strict=True):
            self._record_answer(name, issued_ms, now_ms, tuple(sampled_s))
        return found

    def correct_start(self, start_ms: Times, now_ms: int) -> Times:
        """Return the corrected start times of a request that does not wait yet, without recording them."""
        wait_s = np.maximum(0.0, (np.array(start_ms, np.float64) - now_ms) / 1000)
        low, middle, high = (now_ms + np.round(1000 * np.sort(self._correct_wait_s(wait_s))).astype(np.int64)).tolist()
        return low, middle, high

    def _correct_wait_s(self, wait_s: Array) -> Array:
        return np.asarray(np.maximum((wait_s + ROUND_S) * np.exp(self.offset) - ROUND_S, 0.0))

    def _update_overdue_s(self, ids: list[str], wait_s: Array, now_ms: int) -> Array:
        """Update since when each request has been predicted to start at once.

        Returns (request,) the seconds since then, 0 if a request is not predicted to start at once. ids: the
        requests. wait_s: (request, level) the sampled waits of these requests.
        """
        found = np.zeros(len(ids))
        for at, (name, soon) in enumerate(zip(ids, (wait_s[:, 1] < ROUND_S).tolist(), strict=True)):
            one = self._open.get(name)
            if one is None:
                continue
            if not soon:
                one.since_ms = None
            elif one.since_ms is None:
                one.since_ms = now_ms
            else:
                found[at] = max(0, now_ms - one.since_ms) / 1000
        return found

    def _record_answer(
        self, name: str, issued_ms: Times | None, now_ms: int, sampled_s: tuple[float, ...] | None
    ) -> None:
        one = self._open.get(name)
        if one is None:
            if len(self._open) < MOST_OPEN:
                answers = self._answers.add_request(issued_ms, now_ms)
                self._open[name] = FollowedRequest(now_ms, answers, sampled_s=sampled_s)
        elif one.answers is not None:
            one.answers.record_answer(issued_ms, now_ms)

    def record_start(self, name: str, time_ms: int) -> None:
        """Record that a request has started."""
        one = self._open.pop(name, None)
        if one is not None:
            if one.sampled_s is not None:
                row = _compute_residuals([one.first_ms], [one.sampled_s], time_ms)[0].round(4)
                bisect.insort(self._residuals, (one.first_ms, row), key=lambda known: known[0])
                del self._residuals[: -WINDOWS[-1]]
            self._end_wait(one, time_ms, has_started=True)

    def record_withdrawal(self, name: str, time_ms: int) -> None:
        """Record that a request was withdrawn before it started. time_ms: when it was last known to wait."""
        one = self._open.pop(name, None)
        if one is not None:
            self._end_wait(one, time_ms, has_started=False)

    @staticmethod
    def _end_wait(one: FollowedRequest, time_ms: int, has_started: bool) -> None:
        if one.answers is not None:
            one.answers.record_end(time_ms, has_started)

    def advance_to(self, now_ms: int) -> None:
        """Set the time up to which `evaluate_answers` evaluates answers."""
        self._now_ms = now_ms

    def _compute_offsets(self, now_ms: int) -> Array:
        """Return (level,) the offsets, computed from the residuals of requests that started or wait."""
        n = len(self._residuals)
        if n == 0:
            return np.zeros(len(LEVELS))
        waiting = [(one.first_ms, one.sampled_s) for one in self._open.values() if one.sampled_s is not None]
        rows = np.stack([row for _, row in self._residuals])
        first_ms = np.array([*(first_ms for first_ms, _ in self._residuals), *(row[0] for row in waiting)], np.int64)
        if waiting:
            since_ms, sampled_s = zip(*waiting, strict=True)
            rows = np.vstack([rows, _compute_residuals(since_ms, sampled_s, now_ms)])
        found = [_compute_offset(rows[:, at], first_ms, n, level) for at, level in enumerate(LEVELS)]
        return np.array(found).clip(-FARTHEST, FARTHEST)

    def evaluate_answers(self) -> StartAccuracy:
        """Evaluate the answers whose issued times had passed at the last call of `advance_to`."""
        return self._answers.evaluate_answers(self._now_ms)

    def dump(self) -> dict[str, Any]:
        """Return a copy of the record that can be written as JSON."""
        places = self._answers.map_ids_to_places()
        return {
            "version": VERSION,
            "offset": self.offset.tolist(),
            "cursor": self.cursor,
            "now_ms": self._now_ms,
            "open": [
                [name, one.first_ms, places.get(id(one.answers)), one.since_ms, one.sampled_s]
                for name, one in self._open.items()
            ],
            "answers": self._answers.dump(),
            "residuals": [[first_ms, row.tolist()] for first_ms, row in self._residuals],
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore the state that `dump` returned, in a new record.

        Raises ValueError, KeyError, IndexError or TypeError if `saved` is not a dump. Dumps of older versions restore
        only a part. A dump of version 2 evaluated early starts before late ones, so requests that waited then are
        not evaluated, and only its offsets are used. A dump of version 1 mixes the ages of answers, so only its
        cursor is used.
        """
        offset, self.cursor = _parse_levels(saved["offset"]), int(saved["cursor"])
        version = saved.get("version")
        if version not in (2, VERSION):
            return
        self.offset = offset
        residuals = [(int(first_ms), _parse_levels(row)) for first_ms, row in saved["residuals"]]
        self._residuals = sorted(residuals, key=lambda known: known[0])
        if version == VERSION:
            self._now_ms = int(saved["now_ms"])
            self._answers.load(saved["answers"])
        for name, first_ms, place, since_ms, sampled_s in saved["open"]:  # version 2 has notes instead of a place
            answers = self._answers.find_by_place(place) if version == VERSION and place is not None else None
            waits_s = None if sampled_s is None else tuple(_parse_levels(sampled_s).tolist())
            self._open[name] = FollowedRequest(int(first_ms), answers, since_ms, waits_s)


def _compute_residuals(first_ms: Sequence[int], sampled_s: Sequence[tuple[float, ...]], time_ms: int) -> Array:
    """Return (request, level) the log of the wait until `time_ms`, less the log of the predicted wait.

    first_ms: (request,) when the prediction was issued, in Unix ms. sampled_s: (request, level) the predicted
    waits before any correction.
    """
    waited_s = np.maximum(0.0, (time_ms - np.array(first_ms, np.float64)) / 1000)
    return np.asarray(np.log(waited_s + ROUND_S)[:, None] - np.log(np.array(sampled_s, np.float64) + ROUND_S))


def _compute_offset(values: Array, first_ms: NDArray[np.int64], n: int, level: float) -> float:
    """Return the quantile of the residuals at a level, shrunk towards 0 if few requests have started.

    values: (request,) residuals. The first n are those of requests that started, in the order of
    first_ms.
    """
    value, count = 0.0, 0
    for size in WINDOWS:
        since_ms = first_ms[n - size] if size <= n else -1
        rows = first_ms >= since_ms
        count = int(rows[:n].sum())
        value, is_reached = _compute_censored_quantile(values[rows], count, level)
        if is_reached or size >= n:
            break
    return value * count**2 / (count**2 + PRIOR**2)


def _compute_censored_quantile(values: Array, n: int, level: float) -> tuple[float, bool]:
    """Return the quantile by Kaplan-Meier, and whether the curve comes down to the level.

    If it does not, the quantile is the largest value. values: (request,) the first n are those of
    requests that started, the rest those of requests that wait.
    """
    has_started = np.arange(len(values)) < n
    order = np.lexsort((~has_started, values))
    alive = np.cumprod(1 - has_started[order] / np.arange(len(values), 0, -1))
    reached = np.flatnonzero(alive <= 1 - level + 1e-9)
    return float(values[order][reached[0] if len(reached) else -1]), len(reached) > 0


def _parse_levels(values: Any) -> Array:
    found = np.array(values, np.float64)
    if found.shape != (len(LEVELS),):
        raise ValueError(f"{found.shape} values, expected {len(LEVELS)}")
    return found
