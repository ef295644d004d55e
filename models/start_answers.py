"""AnsweredRequests: the start times that were issued for requests, and how often they proved right.

A request's start time is recorded when the placer first issues it, and again at the ages LOOKS_S.
Each level of a recorded answer counts once its own issued time has passed, whether or not the
request has started by then. If an early start counted at once and a late one only after its p90,
the record of a queue would always have too many early starts. A withdrawn request counts at the
levels whose time had passed before.

For the same reason, only its issued times decide when a request leaves the record, never its start. Once the
record is full, a new request replaces the one whose first p90 passed longest ago. If no p90 has passed yet, the
new request is not recorded.

Later answers are easier, because more is known then. So each age is evaluated separately. Users plan by
the first answer.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVELS = (0.1, 0.5, 0.9)
LOOKS_S = (0.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0)
MAX_REQUESTS = 1000  # requests

Array = NDArray[np.float64]
Times = tuple[int, int, int]  # Unix ms at LEVELS


class StartShares(NamedTuple):
    """The share of requests that had started by the issued time of each level.

    requests: (level,) how many were evaluated. shares: (level,), NaN where `requests` is 0. unanswered:
    the number of requests that started although no start time was known.
    """

    requests: NDArray[np.int64]
    shares: Array
    unanswered: int


class StartAccuracy(NamedTuple):
    """The accuracy of issued start times: over all ages of an answer, and at each age of LOOKS_S.

    In the figures over all ages, the answers of a request together count as one. Age 0 is the first answer.
    since_ms: when the first evaluated answer was issued, None without any.
    """

    all_ages: StartShares
    by_age: tuple[StartShares, ...]
    since_ms: int | None


@dataclass(slots=True)
class AnsweredRequest:
    """A request and its answers. first_ms: when its first answer was issued, in Unix ms.

    notes: the start time issued at each age, in the order of LOOKS_S, None if it was unknown. until_ms:
    when its wait ended, None while it waits.
    """

    first_ms: int
    notes: list[Times | None] = field(default_factory=list)
    until_ms: int | None = None
    has_started: bool = False

    def record_answer(self, issued_ms: Times | None, now_ms: int) -> None:
        """Record the start time issued now, if the request has reached the next age of LOOKS_S.

        issued_ms: None if no start time is known.
        """
        if len(self.notes) < len(LOOKS_S) and now_ms - self.first_ms >= 1000 * LOOKS_S[len(self.notes)]:
            self.notes.append(issued_ms)

    def record_end(self, time_ms: int, has_started: bool) -> None:
        """Record that the wait ended at `time_ms`, with or without a start."""
        self.until_ms, self.has_started = time_ms, has_started

    @property
    def expires_ms(self) -> int:
        """The p90 of the start time in the first answer, or `first_ms` if that answer had no start time."""
        return self.notes[0][-1] if self.notes and self.notes[0] is not None else self.first_ms


class AnsweredRequests:
    """The recorded requests and their answers: at most MAX_REQUESTS, including ones that no longer wait."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, AnsweredRequest]] = []  # (`expires_ms`, number, request), soonest first
        self._added = 0

    def add_request(self, issued_ms: Times | None, now_ms: int) -> AnsweredRequest | None:
        """Add a request with its first answer. Returns None if there is no room for it."""
        if len(self._heap) < MAX_REQUESTS:
            return self._push_request(AnsweredRequest(now_ms, [issued_ms]))
        if self._heap[0][0] >= now_ms:
            return None
        heapq.heappop(self._heap)
        return self._push_request(AnsweredRequest(now_ms, [issued_ms]))

    def _push_request(self, one: AnsweredRequest) -> AnsweredRequest:
        self._added += 1
        heapq.heappush(self._heap, (one.expires_ms, self._added, one))
        return one

    @property
    def _requests(self) -> list[AnsweredRequest]:
        return [one for _, _, one in self._heap]

    def evaluate_answers(self, now_ms: int) -> StartAccuracy:
        """Evaluate the answers whose issued times have passed."""
        requests = self._requests
        issued_ms = _make_issued_table(requests)
        started_ms = np.array([one.until_ms if one.has_started else np.inf for one in requests], np.float64)
        # A wait tells nothing of later times.
        until_ms = np.array([_find_last_known_ms(one, now_ms) for one in requests], np.float64)
        judged: NDArray[np.bool_] = np.asarray(issued_ms < until_ms[:, None, None])
        hits: NDArray[np.bool_] = np.asarray(judged & (started_ms[:, None, None] <= issued_ms))
        ages = [
            _compute_shares(judged[:, age], hits[:, age], self._count_unanswered_requests(age))
            for age in range(len(LOOKS_S))
        ]
        mean = hits.sum(axis=1) / np.maximum(judged.sum(axis=1), 1)
        counts = np.flatnonzero(judged.any(axis=(1, 2)))
        since_ms = min((requests[at].first_ms for at in counts), default=None)
        return StartAccuracy(_compute_shares(np.asarray(judged.any(axis=1)), mean, 0), tuple(ages), since_ms)

    def _count_unanswered_requests(self, age: int) -> int:
        """Count the requests that started and had no known start time at this age."""
        return sum(one.has_started and one.notes[age : age + 1] == [None] for one in self._requests)

    def map_ids_to_places(self) -> dict[int, int]:
        """Return a map from the `id` of each request object to the index of the request in a dump."""
        return {id(one): at for at, one in enumerate(self._requests)}

    def find_by_place(self, place: int) -> AnsweredRequest:
        """Return the request at an index of a dump. Raises IndexError if there is none."""
        return self._heap[place][2]

    def dump(self) -> list[Any]:
        """Return a copy of the requests that can be written as JSON."""
        return [[one.first_ms, one.notes, one.until_ms, one.has_started] for one in self._requests]

    def load(self, rows: Any) -> None:
        """Restore the requests that `dump` returned. Raises ValueError or TypeError if `rows` is not a dump."""
        for first_ms, notes, until_ms, has_started in rows:
            until_ms = None if until_ms is None else int(until_ms)
            one = AnsweredRequest(
                int(first_ms), [_parse_times(issued_ms) for issued_ms in notes], until_ms, bool(has_started)
            )
            self._push_request(one)


def _find_last_known_ms(one: AnsweredRequest, now_ms: int) -> int:
    """Return the last time at which it is known whether the request had started, in Unix ms."""
    return now_ms if one.until_ms is None or one.has_started else one.until_ms


def _make_issued_table(requests: Sequence[AnsweredRequest]) -> Array:
    """Return (request, age, level) the issued start times in Unix ms, NaN where there is none."""
    found = np.full((len(requests), len(LOOKS_S), len(LEVELS)), np.nan)
    notes = [(at, age, times) for at, one in enumerate(requests) for age, times in enumerate(one.notes) if times]
    if notes:
        at, age, times = zip(*notes, strict=True)
        found[list(at), list(age)] = times
    return found


def _compute_shares(judged: NDArray[np.bool_], hits: NDArray[Any], unanswered: int) -> StartShares:
    """Return the share of these requests that started by the issued time, at each level.

    judged: (request, level) whether the request counts. hits: (request, level) the share of its answers that
    proved right.
    """
    requests = judged.sum(axis=0).astype(np.int64)
    with np.errstate(invalid="ignore"):
        return StartShares(requests, np.where(judged, hits, 0.0).sum(axis=0) / requests, unanswered)


def _parse_times(issued_ms: Any) -> Times | None:
    if issued_ms is None:
        return None
    low, middle, high = map(int, issued_ms)
    return low, middle, high
