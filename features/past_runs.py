"""PastRuns: how long similar jobs ran, as known when a job is submitted. Serving and training use it.

Jobs are similar if they share one of KEYS: user; user, words of the name, GPUs; user, GPUs, limit;
group; group, GPUs; and finally all. Each key stores its newest runs, also sorted (the last 20, the
last 200). So an end costs a few bisections, and a read needs no sort. Running jobs count as well (their
number, and how long they have run), because ended jobs say little about long ones. The features of
a job are computed when it arrives, before the job itself counts. Times are natural logarithms of
seconds, NaN if unknown.
"""

import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.run_past import LEVELS, PAST_NAMES, RunPast, RunProgress
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.stateful import Dump, Stateful

KEYS = ("user", "user_name", "user_size", "group", "group_gpus", "all")
EMPIRICAL = tuple(f"empirical_{level:g}" for level in LEVELS)
SHAPE_NAMES = ("log_gpus", "log_cpus", "log_limit", "hour", "weekday", "backed_by")
FEATURES = (*SHAPE_NAMES, *EMPIRICAL, *(f"{key}_{name}" for key in KEYS for name in PAST_NAMES))
COLUMN = {name: row for row, name in enumerate(FEATURES)}
# The first with FEWEST_RUNS gives the empirical quantiles.
BACK_OFF = ("user_name", "user_size", "group_gpus", "group", "all")
GROUP_ROWS = (KEYS.index("group_gpus"), KEYS.index("group"), KEYS.index("all"))
FEWEST_RUNS = 10
MAX_KEYS = 10_000
MAX_ENDED = 20_000
MAX_LIVE = 100_000
MAX_UNSTARTED = 1000  # over, and no start was told: it may yet be
MAX_CLOSED = 2000  # until somebody takes them
LOG_DIGITS = 4  # of a logarithm, so that snapshots stay short
TRUNCATED = frozenset({"preempted"})  # how long these ran says when they were stopped, not how long they take

_BACK_OFF_ROWS = tuple(KEYS.index(key) for key in BACK_OFF)
_UNKNOWN = (math.nan,) * len(PAST_NAMES)
_NO_LEVELS = (math.nan,) * len(LEVELS)
_DIGITS = re.compile(r"[\d._-]+")
Identity = tuple[str, int]  # job, attempt
Features = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class JobShape:
    """The facts that a job states at submission. An unstated string is "", and an unstated number is None."""

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
        """The name without its numbers, so that `train-17.2` and `train-18.0` are equal."""
        return _DIGITS.sub("#", self.name)

    @property
    def words(self) -> str:
        """The words of the name without numbers, or "" for a name without words such as `4711`."""
        return self.stem.strip("#")

    @property
    def group_or_queue(self) -> str:
        """The job's group, or its queue if it has no group."""
        return self.group or self.queue


def make_request_shape(request: PlacementRequest) -> JobShape:
    """Return the facts of the job that a request asks for, at its full size."""
    return JobShape(
        user=request.user,
        name=request.job_name,
        queue=request.queue,
        class_=request.class_,
        gpus=request.members.desired * request.gpus_per_node,
        cpus=request.cpus,
        limit_s=request.limit_s,
    )


_columns = attrgetter(*(row.name for row in fields(JobShape)))


class ClosedRun(NamedTuple):
    """A run that has ended and whose times are known.

    features: the features at its submission, None if `pop_features` has already returned them.
    """

    job: str
    attempt: int
    shape: JobShape
    run_s: float
    ended_ms: int
    features: Features | None


@dataclass(slots=True)
class _OpenRecord:
    """A job whose submission, start or end is still missing.

    shape: None before its submission arrives. features: the features at its submission, None once `pop_features`
    has returned them.
    """

    shape: JobShape | None = None
    pasts: tuple[RunPast | None, ...] = ()
    begin_ms: int | None = None
    end_ms: int | None = None
    outcome: str = ""
    run: RunProgress = field(default_factory=RunProgress)
    features: Features | None = None


class PastRuns(Stateful):
    """The run times of past jobs by KEYS, and the features that they give to a new job.

    A repeated event counts once, by (job, attempt). The order of events does not matter. Only one task may
    change it.
    """

    def __init__(self) -> None:
        self._pasts: dict[tuple[Any, ...], RunPast] = {}
        self._live: dict[Identity, _OpenRecord] = {}
        self._unstarted: dict[Identity, _OpenRecord] = {}
        self._ended: dict[Identity, None] = {}
        self._closed: deque[ClosedRun] = deque(maxlen=MAX_CLOSED)

    def __len__(self) -> int:
        """Return the number of jobs that wait or run."""
        return len(self._live)

    def record_submission(self, job: str, attempt: int, shape: JobShape, wanted: bool = True) -> Features | None:
        """Record that a job was submitted, and return its features at that time.

        `pop_features` can return them again. Returns None if the job is not new or its features are not wanted.
        """
        live = self._find_or_open_record((job, attempt))
        if live is None or live.shape is not None:
            return None
        live.shape = shape
        if wanted:
            live.features = self.compute_features(shape, shape.submitted_ms)
        live.pasts = tuple(self._find_or_add_past(key) for key in _make_keys(shape))
        for past in live.pasts:
            if past is not None:
                past.record_submission(shape.submitted_ms, live.run)
        if live.begin_ms is not None:
            self._record_start_in_pasts((job, attempt), live, live.begin_ms)
        features = live.features
        self._close_if_known((job, attempt), live)
        return features

    def record_start(self, job: str, attempt: int, at_ms: int) -> None:
        """Record that a job started at `at_ms`."""
        live = self._find_or_open_record((job, attempt))
        if live is None:
            return
        if live.begin_ms is None:
            live.begin_ms = at_ms
            if live.shape is not None:
                self._record_start_in_pasts((job, attempt), live, at_ms)
        self._close_if_known((job, attempt), live)

    def record_end(self, job: str, attempt: int, at_ms: int, outcome: str = "finished") -> None:
        """Record that a job finished, failed, was cancelled or was preempted.

        Its run time counts once its start is also known.
        """
        live = self._find_or_open_record((job, attempt))
        if live is None:
            return
        if live.end_ms is None:
            live.end_ms, live.outcome = at_ms, outcome
        self._close_if_known((job, attempt), live)

    def pop_features(self, job: str, attempt: int) -> Features | None:
        """Return (feature,) the features at submission of a job that waits or runs, and drop them.

        Returns None if they are unknown or were returned before.
        """
        live = self._live.get((job, attempt))
        if live is None:
            return None
        features, live.features = live.features, None
        return features

    def pop_closed_runs(self) -> list[ClosedRun]:
        """Return the newest MAX_CLOSED runs that ended since the last call, and drop them."""
        rows = list(self._closed)
        self._closed.clear()
        return rows

    def compute_features(self, job: JobShape, now_ms: int) -> Features:
        """Return (feature,) float32 in the order of FEATURES, computed from the events so far."""
        return _make_feature_vector(
            job, [None if key is None else self._pasts.get(key) for key in _make_keys(job)], now_ms
        )

    def compute_open_job_features(self, job: str, attempt: int, now_ms: int) -> Features | None:
        """Return (feature,) the current features of a job that waits or runs.

        The job itself counts among its similar jobs. Returns None if its submission is unknown.
        """
        live = self._live.get((job, attempt))
        return None if live is None or live.shape is None else _make_feature_vector(live.shape, live.pasts, now_ms)

    def find_group_runs(self, job: JobShape) -> RunPast | None:
        """Return the past runs of the job's group with the same number of GPUs.

        If they are too few, returns the runs of the whole group, and otherwise those of all jobs. Returns None if no
        run has ended.
        """
        pasts = [None if key is None else self._pasts.get(key) for key in _make_keys(job)]
        return _find_row_with_runs(pasts, GROUP_ROWS)[1]

    def _find_or_open_record(self, identity: Identity) -> _OpenRecord | None:
        """Return the record of a job, and add it if it is new. Returns None if the job has already been counted."""
        live = self._live.get(identity)
        if live is None and identity not in self._ended:
            live = self._unstarted.pop(identity) if identity in self._unstarted else _OpenRecord()
            self._live[identity] = live
            if len(self._live) > MAX_LIVE:
                oldest = next(iter(self._live))
                self._remove_from_pasts(oldest, self._live.pop(oldest))
        return live

    def _find_or_add_past(self, key: tuple[Any, ...] | None) -> RunPast | None:
        """Return the runs of a key, and add the key if it is new. Returns None without a key.

        Drops the least recently used key if there are too many.
        """
        if key is None:
            return None
        past = self._pasts.pop(key, None) or RunPast()
        self._pasts[key] = past
        if len(self._pasts) > MAX_KEYS:
            self._pasts.pop(next(iter(self._pasts)))
        return past

    def _record_start_in_pasts(self, identity: Identity, live: _OpenRecord, at_ms: int) -> None:
        live.run.begin_ms = at_ms
        for past in live.pasts:
            if past is not None:
                past.record_start(identity, at_ms)

    def _remove_from_pasts(self, identity: Identity, live: _OpenRecord) -> None:
        for past in live.pasts:
            if past is not None:
                past.remove_running(identity)

    def _close_if_known(self, identity: Identity, live: _OpenRecord) -> None:
        """Count a run whose submission, start and end are known.

        A job that ended without a known start no longer waits. It is counted later if an event reports its start.
        """
        if live.shape is None or live.end_ms is None:
            return
        if live.begin_ms is not None:
            self._count_run(identity, live, live.shape, live.end_ms - live.begin_ms, live.end_ms)
            return
        self._unstarted[identity] = self._live.pop(identity)
        if len(self._unstarted) > MAX_UNSTARTED:
            del self._unstarted[next(iter(self._unstarted))]

    def _count_run(self, identity: Identity, live: _OpenRecord, shape: JobShape, run_ms: int, end_ms: int) -> None:
        """Add the run time of a job to each of its keys.

        A run that ended before it began, because of a wrong clock, does not count.
        """
        self._remove_from_pasts(identity, live)
        if live.outcome not in TRUNCATED and run_ms >= 0:
            run_s = max(1.0, run_ms / 1000)
            log_run = live.run.log_run = round(math.log(run_s), LOG_DIGITS)
            for past in live.pasts:
                if past is not None:
                    past.add_ended_run(log_run, live.outcome != "finished")
            self._closed.append(ClosedRun(*identity, shape, run_s, end_ms, live.features))
        del self._live[identity]
        self._ended[identity] = None
        if len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def dump(self) -> Dump:
        """Return a JSON-able copy."""
        live = [
            [
                *identity,
                one.shape and _columns(one.shape),
                one.begin_ms,
                one.end_ms,
                one.outcome,
                _convert_to_list(one.features),
            ]
            for identity, one in (*self._live.items(), *self._unstarted.items())
        ]
        pasts = [[list(key), past.dump()] for key, past in self._pasts.items()]
        closed = [
            [one.job, one.attempt, _columns(one.shape), one.run_s, one.ended_ms, _convert_to_list(one.features)]
            for one in self._closed
        ]
        ended = [list(identity) for identity in self._ended]
        return {"pasts": pasts, "live": live, "ended": ended, "closed": closed}, {}

    def load(self, saved: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object."""
        for key, row in saved["pasts"]:
            self._pasts[tuple(key)] = RunPast.from_dump(row)
        self._ended = {(str(job), int(attempt)): None for job, attempt in saved["ended"]}
        for job, attempt, shape, begin_ms, end_ms, outcome, features in saved["live"]:
            live = self._live[job, attempt] = _OpenRecord(None, (), begin_ms, end_ms, outcome)
            if shape is not None:
                live.shape = JobShape(*shape)
                live.features = _convert_to_array(features)
                live.pasts = tuple(None if key is None else self._pasts.get(key) for key in _make_keys(live.shape))
                for past in live.pasts:
                    if past is not None:
                        past.adopt_newest(live.shape.submitted_ms, live.run)
                if begin_ms is not None:
                    self._record_start_in_pasts((job, attempt), live, begin_ms)
            self._close_if_known((job, attempt), live)
        for job, attempt, shape, run_s, ended_ms, features in saved["closed"]:
            self._closed.append(ClosedRun(job, attempt, JobShape(*shape), run_s, ended_ms, _convert_to_array(features)))


def _make_feature_vector(job: JobShape, pasts: Sequence[RunPast | None], now_ms: int) -> Features:
    """Return (feature,) float32 the features of a job. pasts: the past runs of its keys."""
    hours = now_ms / 3_600_000
    backed_by, backing = _find_row_with_runs(pasts, _BACK_OFF_ROWS)
    values = [
        math.log(max(job.gpus, 1e-3)),
        math.log1p(job.cpus) if job.cpus is not None else math.nan,
        math.log(max(job.limit_s, 1.0)) if job.limit_s is not None else math.nan,
        hours % 24,
        float(hours // 24 % 7),
        float(backed_by),
        *(backing.compute_quantiles() if backing is not None else _NO_LEVELS),
    ]
    for past in pasts:
        values += _UNKNOWN if past is None else past.read_features(now_ms)
    return np.array(values, np.float32)


def _convert_to_list(features: Features | None) -> list[float] | None:
    return None if features is None else features.tolist()


def _convert_to_array(features: Sequence[float] | None) -> Features | None:
    return None if features is None else np.array(features, np.float32)


def _find_row_with_runs(pasts: Sequence[RunPast | None], rows: Sequence[int]) -> tuple[int, RunPast | None]:
    """Return (row, runs) for the first of `rows` that has enough runs in `pasts`.

    The key of all jobs needs only one run. Returns (-1, None) if no row has enough.
    """
    for row in rows:
        past = pasts[row]
        if past is not None and len(past.runs) >= (FEWEST_RUNS if row < len(KEYS) - 1 else 1):
            return row, past
    return -1, None


def _make_keys(job: JobShape) -> tuple[tuple[Any, ...] | None, ...]:
    """Return the job's key for each of KEYS, or None for a key that needs facts the job does not state."""
    user, kin, gpus = job.user, job.group_or_queue, job.gpus
    return (
        (0, user) if user else None,
        (1, user, job.words, gpus) if job.words else None,
        (2, user, gpus, job.limit_s, job.class_) if user else None,
        (3, kin),
        (4, kin, gpus, job.class_),
        (5,),
    )
