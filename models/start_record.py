"""StartRecord: what became of the start times that users were shown, and how the next ones are corrected.

A request's start time is noted when it is first issued, and again at the ages LOOKS_S. A note matures when the request
starts, or when its p90 passes first, which is a miss at once. Otherwise requests that start early would count before
all others. A request that is cancelled counts only as far as it was late already.

Later answers are easier, because they know more. So the record keeps each age apart: the first answer is what a user
plans by. `shares` is the mean over all ages, in which a request weighs one.

    issued = exp(log(wait + ROUND_S) + offset) - ROUND_S          at each level

The offset of a level is that level's quantile of the residuals of first answers, times n^2 / (n^2 + PRIOR^2) for n that
started. A residual is log(waited + ROUND_S) - log(wait + ROUND_S), before any correction. A request that still waits is
right-censored (Kaplan-Meier): those that started first are the ones with short waits. An offset that follows how often
corrected answers held would go on moving until the first corrected ones start, hours later, and swing from too late to
too early.

A request that was to start at once and did not has a Pareto tail: it may well wait as long again.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

LEVELS = (0.1, 0.5, 0.9)
LOOKS_S = (0.0, 60.0, 300.0, 900.0, 3600.0, 14_400.0, 43_200.0)
ROUND_S = 60.0  # what is less is no wait
KEPT = 1000  # requests that the shares are of
MOST_OPEN = 5000  # requests that wait and are followed
WINDOW, PRIOR = 100, 20.0  # residuals that the offsets are made of; PRIOR of them correct half-way
FARTHEST = 3.0  # of a logarithm
ALPHA = 2.0  # of the Pareto tail of a request that was to start at once
TAIL = np.array([(1 - level) ** (-1 / ALPHA) - 1 for level in LEVELS])
OPEN, UNANSWERED = -1, -2  # of a note without an outcome: it may still have one, or no start time was issued
VERSION = 2  # of a dump

Array = NDArray[np.float64]
Times = tuple[int, int, int]  # Unix ms at LEVELS
Outcome = tuple[int, ...]  # by age: how many of LEVELS the start came by, OPEN or UNANSWERED


class StartNote(NamedTuple):
    """The start time issued for one request at one age. issued_ms: None where none was issued."""

    issued_ms: Times | None
    outcome: int


class StartShares(NamedTuple):
    """Requests with an outcome, the share of them that started by each level, and those that had no answer.

    shares: (level,), NaN where `requests` is 0.
    """

    requests: int
    shares: Array
    unanswered: int


@dataclass(slots=True)
class FollowedRequest:
    """A request that waits. first_ms: when its first answer was issued. since_ms: since when it should start at once,
    None while it should not. notes: one an age, in the order of LOOKS_S. sampled_s: the waits of its first answer at
    LEVELS, before any correction, None where it had no answer."""

    first_ms: int
    notes: list[StartNote] = field(default_factory=list)
    since_ms: int | None = None
    sampled_s: tuple[float, ...] | None = None

    def residual(self, time_ms: int) -> Array:
        """(level,) logarithm of the wait until `time_ms`, above that of the first answer before its correction."""
        waited_s = max(0.0, (time_ms - self.first_ms) / 1000)
        return np.asarray(np.log(waited_s + ROUND_S) - np.log(np.array(self.sampled_s, np.float64) + ROUND_S))

    @property
    def outcome(self) -> Outcome:
        """The outcomes of its notes so far."""
        return tuple(note.outcome for note in self.notes)


class StartRecord:
    """One writer. `issue` corrects and notes; `started`, `withdrawn` and `advance` mature."""

    def __init__(self) -> None:
        self.offset = np.zeros(len(LEVELS))
        self.cursor = 0  # of the ledger's decisions: those up to it are known here
        self._open: dict[str, FollowedRequest] = {}
        self._outcomes: deque[tuple[int, Outcome]] = deque(maxlen=KEPT)  # (when first issued, outcome), newest last
        self._residuals: deque[tuple[int, Array]] = deque(
            maxlen=2 * WINDOW
        )  # (when first issued, (level,)), newest last

    @property
    def waiting(self) -> Iterable[str]:
        """The requests that are followed."""
        return self._open.keys()

    def issue(self, starts_ms: Mapping[str, Times], now_ms: int, unknown: Collection[str] = ()) -> dict[str, Times]:
        """Correct the start times of requests that wait, as of `now_ms`, and note them where an age is due.

        unknown: requests that wait and whose start time is not known. Their answer is noted as missing.
        """
        for name in unknown:
            self._note(name, None, now_ms, None)
        if not starts_ms:
            return {}
        ids = list(starts_ms)
        wait_s = np.maximum(0.0, (np.array([starts_ms[name] for name in ids], np.float64) - now_ms) / 1000)
        issued_s = np.maximum(self._corrected_s(wait_s), self._overdue(ids, wait_s, now_ms)[:, None] * TAIL)
        rows = now_ms + np.round(1000 * np.sort(issued_s, axis=1)).astype(np.int64)
        found = {name: (low, middle, high) for name, (low, middle, high) in zip(ids, rows.tolist(), strict=True)}
        for (name, issued_ms), sampled_s in zip(found.items(), wait_s.tolist(), strict=True):
            self._note(name, issued_ms, now_ms, tuple(sampled_s))
        return found

    def corrected(self, start_ms: Times, now_ms: int) -> Times:
        """Correct the start times of a request that does not wait yet."""
        wait_s = np.maximum(0.0, (np.array(start_ms, np.float64) - now_ms) / 1000)
        low, middle, high = (now_ms + np.round(1000 * np.sort(self._corrected_s(wait_s))).astype(np.int64)).tolist()
        return low, middle, high

    def _corrected_s(self, wait_s: Array) -> Array:
        return np.asarray(np.maximum((wait_s + ROUND_S) * np.exp(self.offset) - ROUND_S, 0.0))

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

    def _note(self, name: str, issued_ms: Times | None, now_ms: int, sampled_s: tuple[float, ...] | None) -> None:
        one = self._open.get(name)
        if one is None:
            if len(self._open) >= MOST_OPEN:
                return
            one = self._open[name] = FollowedRequest(now_ms, sampled_s=sampled_s)
        if len(one.notes) < len(LOOKS_S) and now_ms - one.first_ms >= 1000 * LOOKS_S[len(one.notes)]:
            one.notes.append(StartNote(issued_ms, UNANSWERED if issued_ms is None else OPEN))

    def started(self, name: str, time_ms: int) -> None:
        """Mature all notes of a request that has started."""
        one = self._open.pop(name, None)
        if one is not None:
            for at, note in enumerate(one.notes):
                if note.outcome == OPEN and note.issued_ms is not None:
                    one.notes[at] = note._replace(outcome=sum(time_ms <= issued_ms for issued_ms in note.issued_ms))
            if one.sampled_s is not None:
                self._residuals.append((one.first_ms, one.residual(time_ms).round(4)))
            self._close(one, has_started=True)

    def withdrawn(self, name: str) -> None:
        """Close a request that has gone without a start."""
        one = self._open.pop(name, None)
        if one is not None:
            self._close(one, has_started=False)

    def advance(self, now_ms: int) -> None:
        """Mature the notes that are late, and move the offsets."""
        for one in self._open.values():
            for at, note in enumerate(one.notes):
                if note.outcome == OPEN and note.issued_ms is not None and now_ms > note.issued_ms[-1]:
                    one.notes[at] = note._replace(outcome=0)
        self.offset = self._learnt(now_ms)

    def _learnt(self, now_ms: int) -> Array:
        """(level,) offsets, by requests first answered since the oldest of the last WINDOW that started."""
        started = sorted(self._residuals, key=lambda row: row[0])[-WINDOW:]
        if not started:
            return np.zeros(len(LEVELS))
        since_ms = started[0][0] if len(started) == WINDOW else -np.inf
        waiting = [one for one in self._open.values() if one.sampled_s is not None and one.first_ms >= since_ms]
        share = max(1, -(-len(waiting) // WINDOW))  # of many, every n-th stands for n
        return _offset([row for _, row in started], [one.residual(now_ms) for one in waiting[::share]], share)

    def _close(self, one: FollowedRequest, has_started: bool) -> None:
        if has_started or max(one.outcome, default=OPEN) >= 0:
            self._outcomes.append((one.first_ms, one.outcome))

    def shares(self) -> StartShares:
        """The mean over the answers at all ages. Each request weighs one."""
        matured, hits = self._matured()
        rows = matured.any(axis=1)
        each = hits[rows].sum(axis=1) / matured[rows].sum(axis=1)[:, None]
        return StartShares(int(rows.sum()), _mean(each), 0)

    def shares_at(self, age: int) -> StartShares:
        """The answers at one age, an index into LOOKS_S. Age 0 is the first answer."""
        matured, hits = self._matured()
        return StartShares(int(matured[:, age].sum()), _mean(hits[matured[:, age], age]), self._unanswered(age))

    def since_ms(self) -> int | None:
        """When the first answer with an outcome was issued. Returns None while there is none."""
        found = [first_ms for first_ms, outcome in self._closed_and_late() if max(outcome, default=OPEN) >= 0]
        return min(found, default=None)

    def _unanswered(self, age: int) -> int:
        """Requests that started and had no start time at this age."""
        return sum(len(outcome) > age and outcome[age] == UNANSWERED for _, outcome in self._outcomes)

    def _closed_and_late(self) -> list[tuple[int, Outcome]]:
        """(when first issued, outcome) of requests that are over, and of those that wait and are late."""
        late = [(one.first_ms, one.outcome) for one in self._open.values() if max(one.outcome, default=OPEN) >= 0]
        return [*self._outcomes, *late]

    def _matured(self) -> tuple[NDArray[np.bool_], Array]:
        """(request, age) whether that answer has an outcome; (request, age, level) 1 where it started by then."""
        found = self._closed_and_late()
        outcomes = np.full((len(found), len(LOOKS_S)), OPEN)
        for at, (_, outcome) in enumerate(found):
            outcomes[at, : len(outcome)] = outcome
        return outcomes >= 0, _hits(outcomes)

    def dump(self) -> dict[str, Any]:
        """Return a JSON-able copy."""
        return {
            "version": VERSION,
            "offset": self.offset.tolist(),
            "cursor": self.cursor,
            "open": [
                [name, one.first_ms, [[*note] for note in one.notes], one.since_ms, one.sampled_s]
                for name, one in self._open.items()
            ],
            "outcomes": [[first_ms, [*outcome]] for first_ms, outcome in self._outcomes],
            "residuals": [[first_ms, row.tolist()] for first_ms, row in self._residuals],
        }

    def load(self, kept: Mapping[str, Any]) -> None:
        """Load a dump into a new record. Raises ValueError, KeyError or TypeError for anything else.

        A dump of an earlier version mixes the ages: only its cursor goes on.
        """
        offset, self.cursor = _levels(kept["offset"]), int(kept["cursor"])
        if kept.get("version") != VERSION:
            return
        self.offset = offset
        for name, first_ms, notes, since_ms, sampled_s in kept["open"]:
            rows = [StartNote(_times(issued_ms), int(outcome)) for issued_ms, outcome in notes]
            waits_s = None if sampled_s is None else tuple(_levels(sampled_s).tolist())
            self._open[name] = FollowedRequest(first_ms, rows, since_ms, waits_s)
        for first_ms, outcome in kept["outcomes"]:
            self._outcomes.append((int(first_ms), tuple(map(int, outcome))))
        self._residuals.extend((int(first_ms), _levels(row)) for first_ms, row in kept["residuals"])


def _hits(outcomes: NDArray[np.int64]) -> Array:
    """(..., level) 1 where the start came by that level. A start by one level came by all later ones."""
    return np.asarray(outcomes[..., None] >= np.arange(len(LEVELS), 0, -1), np.float64)


def _offset(started: Collection[Array], waiting: Collection[Array], weight: int) -> Array:
    """(level,) the level's quantile of the residuals, drawn to no correction where few have started.

    started, waiting: (level,) residuals of first answers. weight: how many requests each of `waiting` stands for.
    """
    n = len(started)
    rows = np.stack([*started, *waiting])
    weights = np.concatenate([np.ones(n), np.full(len(waiting), float(weight))])
    has_started = np.arange(len(rows)) < n
    found = [_quantile(rows[:, at], has_started, weights, level) for at, level in enumerate(LEVELS)]
    return np.asarray((np.array(found) * n**2 / (n**2 + PRIOR**2)).clip(-FARTHEST, FARTHEST))


def _quantile(values: Array, has_started: NDArray[np.bool_], weights: Array, level: float) -> float:
    """The quantile by Kaplan-Meier; the largest value where the curve does not come so far down."""
    order = np.lexsort((~has_started, values))
    at_risk = np.cumsum(weights[order][::-1])[::-1]
    alive = np.cumprod(1 - np.where(has_started[order], weights[order] / at_risk, 0.0))
    reached = np.flatnonzero(alive <= 1 - level + 1e-9)
    return float(values[order][reached[0] if len(reached) else -1])


def _mean(rows: Array) -> Array:
    """(level,) mean of (row, level); NaN of no rows."""
    return rows.mean(axis=0) if len(rows) else np.full(len(LEVELS), np.nan)


def _times(issued_ms: Any) -> Times | None:
    if issued_ms is None:
        return None
    low, middle, high = issued_ms
    return low, middle, high


def _levels(values: Any) -> Array:
    found = np.array(values, np.float64)
    if found.shape != (len(LEVELS),):
        raise ValueError(f"{found.shape} values, expected {len(LEVELS)}")
    return found
