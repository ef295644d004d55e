"""A replay of a queue through time: a scheduler makes a pass after each arrival and each end of a job.

A scheduler never sees a run time before the job's end. A refused start releases its GPUs after a
while, and the job waits again with its old arrival. A scheduler with a `JobProgress` may stop running
jobs. They wait again, too, and the replay drops the ends that they would have had. The same input
gives the same starts, because there is no randomness and no other clock.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.play.backfill import B_contra, Machine, run_backfill_pass
from fleetcast.placement.play.progress import JobProgress
from fleetcast.placement.play.rows import NEVER, A, RowEntry, Rows

Floats = NDArray[np.float64]
REFUSED_S = 300.0  # what the placer calls intent_expires_s
_End = tuple[float, int, bool, int]  # when, which job, whether its start was refused, its number of changes before
Refuses = Callable[[int, int], bool]  # whether the start of a job, its n-th, is refused outside


@dataclass(frozen=True, slots=True)
class Trace:
    """Jobs in order of submission, as lists.

    limit_s: time limits, None if unknown. queue: the queue of each job, by which shares are counted.
    """

    name: Sequence[str]
    submit_s: Sequence[float]
    run_s: Sequence[float]
    gpus: Sequence[int]
    limit_s: Sequence[float | None]
    user: Sequence[str] = ()
    queue: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.submit_s)


class PlayedScheduler(Protocol):
    """A scheduler that can be played through a trace. It ignores jobs that it can never start.

    Jobs are given by their row in the trace.
    """

    def add_waiting_job(self, job: int, now_s: float) -> None:
        """Add a job that waits from now on, or again after a refused start."""

    def end_job(self, job: int, now_s: float, refused: bool) -> None:
        """Release the GPUs of a job that ends now. refused: the cluster refused its start."""

    def start_jobs(self, now_s: float) -> Sequence[int] | None:
        """Make a pass, and return the jobs that start now. Returns None if no pass was needed."""


@dataclass(slots=True)
class Replay:
    """A replay of a trace with one scheduler, and its state so far.

    progress: where the scheduler records the jobs that it stops. None if jobs always run to their end.
    start_s: (job,) the first start, NaN until the job starts. end_s: (job,) NaN until the job ends. passes: the
    number of passes that the scheduler has made.
    """

    trace: Trace
    scheduler: PlayedScheduler
    refuses: Refuses | None = None
    progress: JobProgress | None = None
    passes: int = 0
    start_s: Floats = field(init=False)
    end_s: Floats = field(init=False)
    _ends: list[_End] = field(default_factory=list)
    _tries: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.start_s = np.full(len(self.trace), np.nan)
        self.end_s = np.full(len(self.trace), np.nan)

    def play(self) -> Floats:
        """Play to the end of the last job. Returns (job,) start times in seconds."""
        for _ in self.play_steps():
            pass
        return self.start_s

    def play_steps(self) -> Iterator[float]:
        """Play step by step. Yields the time in seconds of each step, after the scheduler's pass."""
        submit_s, job, now_s = self.trace.submit_s, 0, -NEVER
        while self._has_next_end() or job < len(submit_s) or self._has_later_pass(now_s):
            asked_s = NEVER if self.progress is None else self.progress.find_next_pass_s(now_s)
            now_s = min(
                submit_s[job] if job < len(submit_s) else NEVER, self._ends[0][0] if self._ends else NEVER, asked_s
            )
            while self._has_next_end() and self._ends[0][0] <= now_s:
                self._end_job(*heapq.heappop(self._ends)[:3])
            while job < len(submit_s) and submit_s[job] <= now_s:
                self.scheduler.add_waiting_job(job, now_s)
                job += 1
            self._run_pass(now_s)
            yield now_s

    def _has_next_end(self) -> bool:
        """Return whether a job is going to end. Ends that have changed since are dropped."""
        while self._ends and self._ends[0][3] != self._count_changes(self._ends[0][1]):
            heapq.heappop(self._ends)
        return bool(self._ends)

    def _has_later_pass(self, now_s: float) -> bool:
        """Return whether the scheduler asked for another pass, as after the repair of a node that waiting jobs need."""
        return self.progress is not None and self.progress.has_later_pass(now_s)

    def _count_changes(self, job: int) -> int:
        return 0 if self.progress is None else self.progress.count_changes(job)

    def _end_job(self, now_s: float, job: int, refused: bool) -> None:
        self.scheduler.end_job(job, now_s, refused)
        if refused:
            self.scheduler.add_waiting_job(job, now_s)
            return
        self.end_s[job] = now_s
        if self.progress is not None:
            self.progress.end_attempt(job, now_s)

    def _run_pass(self, now_s: float) -> None:
        started = self.scheduler.start_jobs(now_s)
        self.passes += started is not None
        for job in started or ():
            tried = self._tries.get(job, 0)
            refused = self.refuses is not None and self.refuses(job, tried)
            end_s = now_s + REFUSED_S
            if refused:
                self._tries[job] = tried + 1
            else:
                self.start_s[job] = now_s if np.isnan(self.start_s[job]) else self.start_s[job]
                run_s = self.trace.run_s[job]
                end_s = now_s + run_s if self.progress is None else self.progress.begin_attempt(job, now_s)
            heapq.heappush(self._ends, (end_s, job, refused, self._count_changes(job)))
        for job, end_s in () if self.progress is None else self.progress.pop_new_ends():
            heapq.heappush(self._ends, (end_s, job, False, self._count_changes(job)))


class PlayedMachine(Machine[B_contra], Protocol[B_contra]):
    """A machine whose clock the player sets.

    started: the entries that the present pass has started.
    """

    started: list[RowEntry]

    def set_clock(self, now_s: float) -> None: ...

    def end_job(self, number: int) -> None: ...


class QueuePolicy(Protocol):
    """A rule for the order of waiting jobs. It uses only what is known at that time.

    Jobs are given by their row in the trace.
    """

    def compute_key(self, job: int, now_s: float) -> float: ...

    def record_start(self, job: int, now_s: float) -> None: ...

    def record_end(self, job: int, now_s: float) -> None: ...


@dataclass(slots=True)
class RowScheduler(Generic[A]):
    """A scheduler of one queue that is ordered by a policy, with EASY backfill.

    ask: function that returns the ask of a job, None if the job can never start.
    """

    submit_s: Sequence[float]
    machine: PlayedMachine[A]
    policy: QueuePolicy
    ask: Callable[[int], A | None]
    bound_s: float = NEVER
    _rows: Rows[A] = field(default_factory=Rows)
    _tries: dict[int, int] = field(default_factory=dict)

    def add_waiting_job(self, job: int, now_s: float) -> None:
        ask = self.ask(job)
        if ask is not None:
            name = f"{job:09}.{self._tries.get(job, 0)}"
            item = RowEntry(name, self.policy.compute_key(job, now_s), self.submit_s[job], job)
            self._rows.add(ask, item, bound_s=self.bound_s)

    def end_job(self, job: int, now_s: float, refused: bool) -> None:
        self.machine.end_job(job)
        if refused:
            self._tries[job] = self._tries.get(job, 0) + 1
        else:
            self.policy.record_end(job, now_s)

    def start_jobs(self, now_s: float) -> Sequence[int] | None:
        self.machine.set_clock(now_s)
        if not any(self.machine.fits(row.ask) for row in self._rows):
            return None
        run_backfill_pass(self._rows, self.machine, now_s)
        jobs = [item.number for item in self.machine.started]
        for job in jobs:
            self.policy.record_start(job, now_s)
        return jobs
