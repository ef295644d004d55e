"""RunHistory: what is known, when a job is submitted, of how long jobs like it ran. One path for live and for training.

Jobs are alike by five keys and by none: user; user and name stem; user, GPUs and limit; group; group and GPUs; all.
Under each key the newest ended runs are kept in order of their end, twice sorted (the last 20 and the last 200), so
that an ended job costs a few bisections a key and a look at the features costs no sorting. What still runs counts as
well: how many, and for how long already, since jobs that have ended say little of those that are about to be long.

All times in features are natural logarithms of seconds. NaN: nothing known under that key.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.run_past import LEVELS, PAST_NAMES, Past, Run

KEYS = ("user", "user_name", "user_size", "group", "group_gpus", "all")
EMPIRICAL = tuple(f"empirical_{level:g}" for level in LEVELS)
SHAPE_NAMES = ("log_gpus", "log_cpus", "log_limit", "hour", "weekday", "backed_by")
FEATURES = (*SHAPE_NAMES, *EMPIRICAL, *(f"{key}_{name}" for key in KEYS for name in PAST_NAMES))
COLUMN = {name: row for row, name in enumerate(FEATURES)}
BACK_OFF = ("user_size", "group_gpus", "group", "all")  # the first with FEWEST_RUNS gives the empirical quantiles
FEWEST_RUNS = 10
KEYS_KEPT = 10_000
ENDED_KEPT = 20_000
LIVE_KEPT = 100_000
DIGITS_KEPT = 4  # of a logarithm, so that snapshots stay short
TRUNCATED = frozenset({"preempted"})  # how long these ran says when they were stopped, not how long they take

_BACK_OFF_ROWS = tuple(KEYS.index(key) for key in BACK_OFF)
_UNKNOWN = (math.nan,) * len(PAST_NAMES)
_NO_LEVELS = (math.nan,) * len(LEVELS)
_DIGITS = re.compile(r"[\d._-]+")
Identity = tuple[str, int]  # job, attempt


@dataclass(frozen=True, slots=True)
class JobShape:
    """What a job says of itself at submission. Strings are "" and numbers None where it does not say."""

    user: str = ""
    group: str = ""
    name: str = ""
    queue: str = ""
    class_: str = ""
    gpus: float = 1
    cpus: float | None = None
    limit_s: float | None = None
    submitted_ms: int = 0

    @property
    def stem(self) -> str:
        """The name without its numbers: `train-17.2` and `train-18.0` are alike."""
        return _DIGITS.sub("#", self.name)

    @property
    def kin(self) -> str:
        """The group, or where there is none the queue."""
        return self.group or self.queue


@dataclass(slots=True)
class _Live:
    """A job of which not all is known yet: shape None before its submission arrived."""

    shape: JobShape | None = None
    pasts: tuple[Past | None, ...] = ()
    begin_ms: int | None = None
    end_ms: int | None = None
    outcome: str = ""
    run: Run = field(default_factory=Run)


class RunHistory:
    """Streams job events into features. Repeated events count once, by (job, attempt), in whatever order they come."""

    def __init__(self) -> None:
        self._pasts: dict[tuple[Any, ...], Past] = {}
        self._live: dict[Identity, _Live] = {}
        self._ended: dict[Identity, None] = {}

    def __len__(self) -> int:
        """Jobs that wait or run."""
        return len(self._live)

    def submitted(self, job: str, attempt: int, shape: JobShape) -> None:
        """A job came."""
        live = self._entry((job, attempt))
        if live is None or live.shape is not None:
            return
        live.shape = shape
        live.pasts = tuple(self._past(key) for key in _keys(shape))
        for past in live.pasts:
            if past is not None:
                past.submit(shape.submitted_ms, live.run)
        if live.begin_ms is not None:
            self._begin((job, attempt), live, live.begin_ms)
            if live.end_ms is not None:
                self._close((job, attempt), live)

    def started(self, job: str, attempt: int, at_ms: int) -> None:
        """A job began to run."""
        live = self._entry((job, attempt))
        if live is None or live.begin_ms is not None:
            return
        live.begin_ms = at_ms
        if live.shape is not None:
            self._begin((job, attempt), live, at_ms)
            if live.end_ms is not None:
                self._close((job, attempt), live)

    def ended(self, job: str, attempt: int, at_ms: int, outcome: str = "finished") -> None:
        """A job is over: finished, failed, cancelled or preempted. Its run counts once its start is known, too."""
        live = self._entry((job, attempt))
        if live is None or live.end_ms is not None:
            return
        live.end_ms, live.outcome = at_ms, outcome
        if live.shape is not None and live.begin_ms is not None:
            self._close((job, attempt), live)

    def features(self, job: JobShape, now_ms: int) -> NDArray[np.float32]:
        """(feature,) in order of FEATURES, from what has been told so far."""
        pasts = [None if key is None else self._pasts.get(key) for key in _keys(job)]
        hours = now_ms / 3_600_000
        backed_by, past = _backed(pasts, _BACK_OFF_ROWS)
        empirical = past.levels() if past is not None else _NO_LEVELS
        values = [
            math.log(max(job.gpus, 1e-3)),
            math.log1p(job.cpus) if job.cpus is not None else math.nan,
            math.log(max(job.limit_s, 1.0)) if job.limit_s is not None else math.nan,
            hours % 24,
            float(hours // 24 % 7),
            float(backed_by),
            *empirical,
        ]
        for past in pasts:
            values += _UNKNOWN if past is None else past.features(now_ms)
        return np.array(values, np.float32)

    def group_runs(self, job: JobShape) -> Past | None:
        """The runs of the job's group with as many GPUs; where these are few, of its group, then of all."""
        pasts = [None if key is None else self._pasts.get(key) for key in _keys(job)]
        return _backed(pasts, _BACK_OFF_ROWS[1:])[1]

    def _entry(self, identity: Identity) -> _Live | None:
        """The open record of a job, None once all of it was counted."""
        live = self._live.get(identity)
        if live is None and identity not in self._ended:
            live = self._live[identity] = _Live()
            if len(self._live) > LIVE_KEPT:
                oldest = next(iter(self._live))
                self._leave(oldest, self._live.pop(oldest))
        return live

    def _past(self, key: tuple[Any, ...] | None) -> Past | None:
        """The runs under a key, most recently used last; the least recently used is forgotten."""
        if key is None:
            return None
        past = self._pasts.pop(key, None) or Past()
        self._pasts[key] = past
        if len(self._pasts) > KEYS_KEPT:
            self._pasts.pop(next(iter(self._pasts)))
        return past

    def _begin(self, identity: Identity, live: _Live, at_ms: int) -> None:
        live.run.begin_ms = at_ms
        for past in live.pasts:
            if past is not None:
                past.begin(identity, at_ms)

    def _leave(self, identity: Identity, live: _Live) -> None:
        for past in live.pasts:
            if past is not None:
                past.leave(identity)

    def _close(self, identity: Identity, live: _Live) -> None:
        """All is known: count the run under every key, and remember that it was counted."""
        self._leave(identity, live)
        if live.begin_ms is not None and live.end_ms is not None and live.outcome not in TRUNCATED:
            log_run = live.run.log_run = round(math.log(max(1.0, (live.end_ms - live.begin_ms) / 1000)), DIGITS_KEPT)
            for past in live.pasts:
                if past is not None:
                    past.add(log_run, live.outcome != "finished")
        del self._live[identity]
        self._ended[identity] = None
        if len(self._ended) > ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def dump(self) -> dict[str, Any]:
        """JSON-able and copied."""
        live = [
            [*identity, astuple(one.shape) if one.shape else None, one.begin_ms, one.end_ms, one.outcome]
            for identity, one in self._live.items()
        ]
        pasts = [[list(key), past.dump()] for key, past in self._pasts.items()]
        return {"pasts": pasts, "live": live, "ended": [list(identity) for identity in self._ended]}

    def load(self, kept: dict[str, Any]) -> None:
        """The inverse of `dump`, into an empty one."""
        for key, row in kept["pasts"]:
            self._pasts[tuple(key)] = Past.loaded(row)
        self._ended = {(str(job), int(attempt)): None for job, attempt in kept["ended"]}
        for job, attempt, shape, begin_ms, end_ms, outcome in kept["live"]:
            live = self._live[job, attempt] = _Live(None, (), begin_ms, end_ms, outcome)
            if shape is not None:
                live.shape = JobShape(*shape)
                live.pasts = tuple(None if key is None else self._pasts.get(key) for key in _keys(live.shape))
                for past in live.pasts:
                    if past is not None:
                        past.adopt(live.shape.submitted_ms, live.run)
                if begin_ms is not None:
                    self._begin((job, attempt), live, begin_ms)


def _backed(pasts: Sequence[Past | None], rows: Sequence[int]) -> tuple[int, Past | None]:
    """The first of these rows with enough runs, at last all jobs; -1 where nothing has ended."""
    for row in rows:
        past = pasts[row]
        if past is not None and len(past.runs) >= (FEWEST_RUNS if row < len(KEYS) - 1 else 1):
            return row, past
    return -1, None


def _keys(job: JobShape) -> tuple[tuple[Any, ...] | None, ...]:
    """A key for each of KEYS; None where the job does not say enough."""
    user, kin, gpus = job.user, job.kin, job.gpus
    return (
        (0, user) if user else None,
        (1, user, job.stem) if job.name else None,
        (2, user, gpus, job.limit_s, job.class_) if user else None,
        (3, kin),
        (4, kin, gpus, job.class_),
        (5,),
    )
