"""A simulation of a batch queue: which job starts when, by the number of cores alone.

The order is first come, first served, with backfill. Every pass makes a new plan, as Slurm's
backfill does. Running jobs hold their cores until their limits, and each waiting job in order gets
the earliest gap that is left. A job whose gap begins now starts. If `reserved` is None, every
waiting job has its place in the plan (conservative backfill). If it is 1, only the first job that
must wait has one (EASY), and later jobs may start if they do not delay it. (Mu'alem and Feitelson,
TPDS 2001.)

Jobs really end after their run time, at the latest at their limit. The plan never sees a run time.
A pass ends once no waiting job can start, and it places neighbouring jobs of one shape together. So
months of a busy cluster take a minute.
"""

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

PASS_S = 60  # the least time between two passes
STEPS = 20  # in which jobs of one row are planned, as many as Slurm plans of an array (bf_max_job_array_resv)
COARSER = 0.05
NEVER_S = 2**62

Ints = NDArray[np.int64]
_minimum = np.minimum.reduce


@dataclass(frozen=True, slots=True)
class QueuedJobs:
    """Jobs in the order of their submission.

    submit_s, cores, limit_s: (job,) whole numbers. Limits are above zero.
    """

    submit_s: Ints
    cores: Ints
    limit_s: Ints

    def __len__(self) -> int:
        return len(self.submit_s)


class Profile:
    """The number of free cores over time, from now on, as a step function.

    `free[i]` cores are free from `times[i]` until the next time. The last step has no end.
    """

    __slots__ = ("_free", "_size", "_times")

    def __init__(self, now_s: int, free: int, end_s: Ints, cores: Ints) -> None:
        """Make the profile of the cores that running jobs hold until their expected ends.

        free: cores that are free now. end_s: (k,) when each of `cores` becomes free, ascending. An overdue
        job is expected to end in a second.
        """
        size = len(end_s) + 1
        self._times = np.empty(2 * size + 16, np.int64)
        self._free = np.empty(2 * size + 16, np.int64)
        self._size = size
        self._times[0], self._free[0] = now_s, free
        np.maximum(end_s, now_s + 1, out=self._times[1:size])
        np.cumsum(cores, out=self._free[1:size])
        self._free[1:size] += free

    @property
    def free_now(self) -> int:
        return int(self._free[0])

    def get_time(self, step: int) -> int:
        return int(self._times[step])

    def reserve_cores(self, cores: int, length_s: int, wanted: int, step: int = 0) -> tuple[int, int]:
        """Reserve cores for equal jobs at the earliest time at which any can start.

        Returns (step, jobs placed).

        cores: cores of one job. wanted: the largest number of jobs to place. step: where the search begins. The last
        step must have enough cores.
        """
        times, free, size = self._times, self._free, self._size
        low = (free[step:size] < cores).nonzero()[0]
        if len(low):
            low += step
            if not (low[0] > step and times[low[0]] - times[step] >= length_s):
                step = _find_first_gap(times, low, length_s)
        end_s = times[step] + length_s
        end = int(times[step:size].searchsorted(end_s)) + step
        lowest = int(_minimum(free[step:end]))
        count = min(wanted, lowest // cores)
        if end == size or times[end] != end_s:
            self._insert_step(end, end_s)
        self._free[step:end] -= count * cores
        return step, count

    def count_free_cores(self, length_s: int) -> int:
        """Return the cores that stay free for `length_s` from now on."""
        end = max(1, int(self._times[: self._size].searchsorted(self._times[0] + length_s)))
        return int(_minimum(self._free[:end]))

    def _insert_step(self, at: int, time_s: np.int64) -> None:
        size = self._size
        if size == len(self._times):
            self._times = np.concatenate([self._times, np.empty_like(self._times)])
            self._free = np.concatenate([self._free, np.empty_like(self._free)])
        self._times[at + 1 : size + 1] = self._times[at:size]
        self._free[at + 1 : size + 1] = self._free[at:size]
        self._times[at] = time_s
        self._free[at] = self._free[at - 1]
        self._size = size + 1


def _find_first_gap(times: Ints, low: Ints, length_s: int) -> int:
    """Return the first step with `length_s` seconds of enough free cores after it.

    low: the steps that have too few free cores. The gap lies between two of them. If no such gap is long enough,
    the result is the step after the last low one.
    """
    after = low + 1
    gaps = times[low[1:]] - times[after[:-1]] >= length_s
    first = int(gaps.argmax()) if len(gaps) else 0
    return int(after[first if len(gaps) and gaps[first] else -1])


class _Row:
    """Consecutive waiting jobs of the same size and limit."""

    __slots__ = ("cores", "jobs", "limit_s")

    def __init__(self, cores: int, limit_s: int, jobs: list[int]) -> None:
        self.cores, self.limit_s, self.jobs = cores, limit_s, jobs


class QueueSimulation:
    """A simulated cluster of `capacity` cores with its batch queue.

    `submit` and `advance` change its state. `fork` makes a copy that continues with other run times.
    """

    def __init__(
        self, jobs: QueuedJobs, run_s: Sequence[int] | Mapping[int, int], capacity: int, reserved: int | None = None
    ) -> None:
        """Create an empty cluster.

        run_s: (job,) how long each job really runs. It is read only for jobs that have started. reserved:
        the number of waiting jobs with a place in the plan. None for all.
        """
        self.capacity = capacity
        self.reserved = reserved
        self.now_s = 0
        self.start_s: dict[int, int] = {}
        self._cores: list[int] = jobs.cores.tolist()
        self._limit_s: list[int] = jobs.limit_s.tolist()
        self.run_s = run_s
        self._free = capacity
        self._running: list[tuple[int, int]] = []  # (end_s, job), a heap
        self._ends: list[int] = []  # the limits of running jobs, ascending, and the cores that come back then
        self._back: list[int] = []
        self._queue: list[_Row] = []
        self._waiting: Counter[int] = Counter()  # cores -> jobs that wait for so many
        self._passed_s = -PASS_S
        self._changed = False
        self._forked_s: int | None = None

    # -- what is known

    def list_running(self) -> list[int]:
        return [job for _, job in self._running]

    def list_waiting(self) -> list[int]:
        """Return the waiting jobs, in order."""
        return [job for row in self._queue for job in row.jobs]

    def plan_starts(self) -> dict[int, int]:
        """Return job → planned start for all waiting jobs, as a scheduler would print it.

        This does not change the simulation.
        """
        profile = self._make_profile()
        starts = {}
        for row in self._queue:
            step, left = 0, row.jobs
            while left:
                step, count = profile.reserve_cores(row.cores, row.limit_s, len(left), step)
                starts.update(dict.fromkeys(left[:count], profile.get_time(step)))
                left = left[count:]
        return starts

    def fork(self, run_s: Sequence[int] | Mapping[int, int], reserved: int | None = None) -> "QueueSimulation":
        """Return a copy of the simulation at this moment that continues with other run times.

        Running jobs end by the new run times too, but not before now. reserved: the number of waiting jobs
        with a place in the plan. A small number is faster. The time between passes grows by `COARSER` of
        the time played.
        """
        other = object.__new__(QueueSimulation)
        other.capacity, other.now_s = self.capacity, self.now_s
        other.reserved = self.reserved if reserved is None else reserved
        other.start_s = {job: self.start_s[job] for _, job in self._running}
        other._cores, other._limit_s, other.run_s = self._cores, self._limit_s, run_s
        other._free = self._free
        other._running = [(max(self.start_s[job] + run_s[job], self.now_s + 1), job) for _, job in self._running]
        heapq.heapify(other._running)
        other._ends, other._back = self._ends.copy(), self._back.copy()
        other._queue = [_Row(row.cores, row.limit_s, row.jobs.copy()) for row in self._queue]
        other._waiting = self._waiting.copy()
        other._passed_s, other._changed, other._forked_s = self._passed_s, self._changed, self.now_s
        return other

    def play_until_start(self, job: int, until_s: int = NEVER_S) -> int:
        """Advance without further submissions until `job` starts, and return its start time.

        Returns `until_s` if the job has not started by then.
        """
        while job not in self.start_s:
            next_s = self.find_next_event_s()
            if next_s >= until_s:
                return until_s
            self.process_events_at(next_s)
        return self.start_s[job]

    # -- what happens

    def submit(self, job: int) -> None:
        """Submit a job now.

        A job that needs no cores, or more than exist, is ignored, because it could never start.
        """
        cores, limit_s = self._cores[job], self._limit_s[job]
        if not 0 < cores <= self.capacity:
            return
        last = self._queue[-1] if self._queue else None
        if last is not None and last.cores == cores and last.limit_s == limit_s:
            last.jobs.append(job)
        else:
            self._queue.append(_Row(cores, limit_s, [job]))
        self._waiting[cores] += 1
        self._changed = True

    def find_next_event_s(self) -> int:
        """Return the time of the next event, assuming that no job is submitted before it."""
        end_s = self._running[0][0] if self._running else NEVER_S
        if self._changed and self._queue:
            return min(end_s, max(self.now_s, self._compute_next_pass_s()))
        return end_s

    def _compute_next_pass_s(self) -> int:
        """Return the earliest time of the next pass."""
        if self._forked_s is None:
            return self._passed_s + PASS_S
        return self._passed_s + max(PASS_S, int((self._passed_s - self._forked_s) * COARSER))

    def advance(self, until_s: int) -> None:
        """Process all events before `until_s`, then set the clock to `until_s`."""
        while (next_s := self.find_next_event_s()) < until_s:
            self.process_events_at(next_s)
        self.now_s = max(self.now_s, until_s)

    def process_events_at(self, next_s: int) -> None:
        """Set the clock to the next event and process it: jobs end, and a pass runs if one is due.

        next_s: the time of the next event.
        """
        self.now_s = next_s
        while self._running and self._running[0][0] <= next_s:
            self._end_job(heapq.heappop(self._running)[1])
        if self._changed and next_s >= self._compute_next_pass_s():
            self._passed_s = next_s
            self._changed = False
            if self._queue and self._free >= min(self._waiting):
                self._run_pass()

    def _end_job(self, job: int) -> None:
        cores = self._cores[job]
        at = bisect_left(self._ends, self.start_s[job] + self._limit_s[job])
        self._back[at] -= cores
        if not self._back[at]:
            del self._ends[at], self._back[at]
        self._free += cores
        self._changed = True

    def _start_job(self, job: int) -> None:
        cores, limit_s = self._cores[job], self._limit_s[job]
        self.start_s[job] = self.now_s
        heapq.heappush(self._running, (self.now_s + max(1, min(self.run_s[job], limit_s)), job))
        end_s = self.now_s + limit_s
        at = bisect_left(self._ends, end_s)
        if at < len(self._ends) and self._ends[at] == end_s:
            self._back[at] += cores
        else:
            self._ends.insert(at, end_s)
            self._back.insert(at, cores)
        self._free -= cores
        self._waiting[cores] -= 1
        if not self._waiting[cores]:
            del self._waiting[cores]

    def _make_profile(self) -> Profile:
        return Profile(self.now_s, self._free, np.array(self._ends, np.int64), np.array(self._back, np.int64))

    def _run_pass(self) -> None:
        profile = self._make_profile()
        left = NEVER_S if self.reserved is None else self.reserved
        refused: set[tuple[int, int]] = set()
        emptied = False
        fewest_on = list(accumulate((row.cores for row in reversed(self._queue)), min))
        for row in self._queue:
            fewest = fewest_on.pop()
            if profile.free_now < fewest:
                break
            if left <= 0:
                self._backfill_row(profile, row, refused)
            else:
                left -= self._place_row(profile, row, fewest)
            emptied |= not row.jobs
        if emptied:
            self._queue = [row for row in self._queue if row.jobs]

    def _place_row(self, profile: Profile, row: _Row, fewest: int) -> int:
        """Start the jobs of a row that fit now, and reserve cores for the others.

        Returns the number of jobs with a reservation.
        """
        step = reserved = 0
        waiting = len(row.jobs)
        started = 0
        for _ in range(STEPS):
            if not waiting or profile.free_now < fewest:
                break
            step, count = profile.reserve_cores(row.cores, row.limit_s, waiting, step)
            waiting -= count
            if step == 0:
                started += count
            else:
                reserved += count
        for job in row.jobs[:started]:
            self._start_job(job)
        del row.jobs[:started]
        return reserved

    def _backfill_row(self, profile: Profile, row: _Row, refused: set[tuple[int, int]]) -> None:
        """Start the jobs of a row that fit now without touching a reservation."""
        shape = (row.cores, row.limit_s)
        if row.cores > profile.free_now or shape in refused:
            return
        count = min(len(row.jobs), profile.count_free_cores(row.limit_s) // row.cores)
        if count <= 0:
            refused.add(shape)
            return
        profile.reserve_cores(row.cores, row.limit_s, count)
        for job in row.jobs[:count]:
            self._start_job(job)
        del row.jobs[:count]
