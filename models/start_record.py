"""StartRecord: what became of start times that were told, and how the next ones are corrected by that.

A request's start is noted when it is first told, and again at the ages LOOKS_S. A note matures when the request starts,
or when its p90 passes first, which is a miss at once: else requests that start early would count before all others. A
request weighs one, however often it was noted; one that is cancelled counts only as far as it was late already.

    told = exp(log(wait + ROUND_S) + offset) - ROUND_S          at each level

The offsets follow coverage (conformal quantile tracking: Angelopoulos et al. 2023): once in PERIOD_S in which notes
matured each moves by `step * mean(level - 1[started by then])`. The queue's jobs start in bursts, and a burst is one
step. A request that was to start at once and did not is told as a Pareto tail tells: it may well wait as long again.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVELS = (0.1, 0.5, 0.9)
LOOKS_S = (0.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0)
ROUND_S = 60.0  # what is less is no wait
KEPT = 1000  # requests that the shares are of
MOST_OPEN = 5000  # requests that wait and are followed
STEP, PERIOD_S = 0.25, 600.0
POWER, MOST = 0.5, 4.0  # a period of n notes counts n ** POWER, at most MOST
FARTHEST = 3.0  # of a logarithm
ALPHA = 2.0  # of the Pareto tail of who was to start at once
TAIL = np.array([(1 - level) ** (-1 / ALPHA) - 1 for level in LEVELS])

Array = NDArray[np.float64]
Times = tuple[int, int, int]  # Unix ms at LEVELS


class StartNote(NamedTuple):
    """Of one request at one age: what was told."""

    told_ms: Times
    is_over: bool = False


@dataclass(slots=True)
class FollowedRequest:
    """first_ms: when its start was first told; since_ms: since when it should start at once, None while it should not.

    hits: by level, of its matured notes.
    """

    first_ms: int
    notes: list[StartNote] = field(default_factory=list)
    since_ms: int | None = None
    matured: int = 0
    hits: Array = field(default_factory=lambda: np.zeros(len(LEVELS)))


class StartRecord:
    """One writer. `tell` corrects and notes; `started`, `left` and `look` mature."""

    def __init__(self) -> None:
        self.offset = np.zeros(len(LEVELS))
        self.cursor = 0  # of the ledger's decisions: those up to it are known here
        self._open: dict[str, FollowedRequest] = {}
        self._outcomes: deque[tuple[float, float, float]] = deque(maxlen=KEPT)  # hits by request, newest last
        self._since_ms: deque[int] = deque(maxlen=KEPT)  # when each was first told
        self._push, self._notes = np.zeros(len(LEVELS)), 0
        self._moved_ms: int | None = None

    @property
    def waiting(self) -> Iterable[str]:
        """The requests that are followed."""
        return self._open.keys()

    def tell(self, starts_ms: Mapping[str, Times], now_ms: int) -> dict[str, Times]:
        """Corrected start times of what waits, as of `now_ms`; they are noted where it is time for that."""
        if not starts_ms:
            return {}
        ids = list(starts_ms)
        wait_s = np.maximum(0.0, (np.array([starts_ms[name] for name in ids], np.float64) - now_ms) / 1000)
        told_s = np.maximum((wait_s + ROUND_S) * np.exp(self.offset) - ROUND_S, 0.0)
        told_s = np.maximum(told_s, self._overdue(ids, wait_s, now_ms)[:, None] * TAIL)
        rows = now_ms + np.round(1000 * np.sort(told_s, axis=1)).astype(np.int64)
        found = {name: (low, middle, high) for name, (low, middle, high) in zip(ids, rows.tolist(), strict=True)}
        for name, told_ms in found.items():
            self._note(name, told_ms, now_ms)
        return found

    def corrected(self, start_ms: Times, now_ms: int) -> Times:
        """Start times of one that does not wait yet."""
        wait_s = np.maximum(0.0, (np.array(start_ms, np.float64) - now_ms) / 1000)
        told_s = np.maximum((wait_s + ROUND_S) * np.exp(self.offset) - ROUND_S, 0.0)
        low, middle, high = (now_ms + np.round(1000 * np.sort(told_s)).astype(np.int64)).tolist()
        return low, middle, high

    def _overdue(self, ids: list[str], wait_s: Array, now_ms: int) -> Array:
        """(request,) seconds for which each has been about to start."""
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

    def _note(self, name: str, told_ms: Times, now_ms: int) -> None:
        one = self._open.get(name)
        if one is None:
            if len(self._open) >= MOST_OPEN:
                return
            one = self._open[name] = FollowedRequest(now_ms)
        if len(one.notes) < len(LOOKS_S) and now_ms - one.first_ms >= 1000 * LOOKS_S[len(one.notes)]:
            one.notes.append(StartNote(told_ms))

    def started(self, name: str, time_ms: int) -> None:
        """A request has started; all its notes mature."""
        one = self._open.pop(name, None)
        if one is not None:
            for note in one.notes:
                if not note.is_over:
                    self._mature(one, [time_ms <= told_ms for told_ms in note.told_ms])
            self._close(one)

    def left(self, name: str) -> None:
        """A request has gone without a start."""
        one = self._open.pop(name, None)
        if one is not None:
            self._close(one)

    def look(self, now_ms: int) -> None:
        """Let what is late mature, and the offsets move."""
        for one in self._open.values():
            for at, note in enumerate(one.notes):
                if not note.is_over and now_ms > note.told_ms[-1]:
                    one.notes[at] = note._replace(is_over=True)
                    self._mature(one, [False] * len(LEVELS))
        if self._moved_ms is None or now_ms < self._moved_ms:
            self._moved_ms = now_ms
        if self._notes and now_ms - self._moved_ms >= 1000 * PERIOD_S:
            busy = min(MOST, self._notes**POWER)
            self.offset = (self.offset + STEP * busy * self._push / self._notes).clip(-FARTHEST, FARTHEST)
            self._push, self._notes, self._moved_ms = np.zeros(len(LEVELS)), 0, now_ms

    def _mature(self, one: FollowedRequest, hits: list[bool]) -> None:
        one.matured += 1
        one.hits += hits
        self._push += np.array(LEVELS) - hits
        self._notes += 1

    def _close(self, one: FollowedRequest) -> None:
        if one.matured:
            low, middle, high = (one.hits / one.matured).tolist()
            self._outcomes.append((low, middle, high))
            self._since_ms.append(one.first_ms)

    def shares(self) -> tuple[int, Array, int | None]:
        """(requests with an outcome, share of them that had started by each level, when the first of them was told)."""
        late = [one for one in self._open.values() if one.matured]
        rows = [*map(np.array, self._outcomes), *(one.hits / one.matured for one in late)]
        since_ms = [*self._since_ms, *(one.first_ms for one in late)]
        if not rows:
            return 0, np.full(len(LEVELS), np.nan), None
        return len(rows), np.mean(rows, axis=0), min(since_ms)

    def dump(self) -> dict[str, Any]:
        """JSON-able and copied."""
        return {
            "offset": self.offset.tolist(),
            "cursor": self.cursor,
            "open": [
                [name, one.first_ms, [[*note] for note in one.notes], one.since_ms, one.matured, one.hits.tolist()]
                for name, one in self._open.items()
            ],
            "outcomes": [[*row] for row in self._outcomes],
            "since_ms": [*self._since_ms],
            "pushed": [self._push.tolist(), self._notes, self._moved_ms],
        }

    def load(self, kept: Mapping[str, Any]) -> None:
        """The inverse of `dump`, into a new one. Raises ValueError, KeyError or TypeError for anything else."""
        for name, first_ms, notes, since_ms, matured, hits in kept["open"]:
            told = [StartNote((low, middle, high), bool(is_over)) for (low, middle, high), is_over in notes]
            self._open[name] = FollowedRequest(first_ms, told, since_ms, matured, _levels(hits))
        self._outcomes.extend((low, middle, high) for low, middle, high in kept["outcomes"])
        self._since_ms.extend(kept["since_ms"])
        push, self._notes, self._moved_ms = kept["pushed"]
        self._push, self.offset, self.cursor = _levels(push), _levels(kept["offset"]), int(kept["cursor"])


def _levels(values: Any) -> Array:
    found = np.array(values, np.float64)
    if found.shape != (len(LEVELS),):
        raise ValueError(f"{found.shape} values, expected {len(LEVELS)}")
    return found
