"""The progress of jobs in a play that may stop them: useful work, checkpoints, stops and what they cost.

A stopped job loses its work since its last checkpoint. It waits again with its old arrival. When it starts
again, it first needs `RESTART_S`, and then does its remaining work. So a job has run once the work of its
attempts adds up to its run time.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.reclaim.cost import RESTART_S

SHORTEST_S, LONGEST_S = 600.0, 4 * 3600.0  # between two checkpoints
FAULT = -1  # the payer of a stop that a fault of a node caused

Floats = NDArray[np.float64]


def draw_checkpoint_intervals(jobs: int, seed: int, never: float) -> Floats:
    """Return (j,) seconds of work between two checkpoints of each job, inf for jobs that write none.

    The intervals are log-uniform from 10 minutes to 4 hours. never: the share of jobs that write no checkpoint.
    The same seed draws the same intervals.
    """
    rng = np.random.default_rng(seed)
    interval_s = np.exp(rng.uniform(np.log(SHORTEST_S), np.log(LONGEST_S), jobs))
    return np.where(rng.random(jobs) < never, np.inf, interval_s)


class Stop(NamedTuple):
    """A stop of a running job for the request of another job, the payer. A node's fault has the payer `FAULT`.

    lost_s: seconds of work that the job must repeat. restart_s: seconds of its attempt that were spent on a restart.
    """

    job: int
    payer: int
    at_s: float
    lost_s: float
    restart_s: float


@dataclass(slots=True)
class Attempt:
    """One run of a job. end_s: NaN while it runs."""

    job: int
    start_s: float
    restart_s: float
    end_s: float = np.nan


class JobProgress:
    """The attempts and stops of all jobs of a play.

    run_s: (j,) useful work of each job in seconds. interval_s: (j,) seconds of work between two checkpoints.
    restart_s: seconds that each restart takes. saved_s: (j,) work that the job need not repeat, all of it once the
    job has ended. stops: in order of time.
    """

    def __init__(self, run_s: Sequence[float], interval_s: Floats, restart_s: float = RESTART_S) -> None:
        self.run_s, self.interval_s = np.asarray(run_s, np.float64), interval_s
        self.saved_s = np.zeros(len(interval_s))
        self.stops: list[Stop] = []
        self.attempts: list[Attempt] = []
        self.restart_s = restart_s
        self._by_job: dict[int, list[Stop]] = {}
        self._passes_s: list[float] = []
        self._running: dict[int, Attempt] = {}

    def request_pass(self, at_s: float) -> None:
        """Ask for a pass at a time in the future, even if no job arrives or ends then."""
        heapq.heappush(self._passes_s, at_s)

    def find_next_pass_s(self, now_s: float) -> float:
        """Return the time of the next pass that was asked for after `now_s`, inf if there is none."""
        while self._passes_s and self._passes_s[0] <= now_s:
            heapq.heappop(self._passes_s)
        return self._passes_s[0] if self._passes_s else float(np.inf)

    def has_later_pass(self, now_s: float) -> bool:
        """Return whether a pass was asked for after `now_s`."""
        return self.find_next_pass_s(now_s) < np.inf

    def count_changes(self, job: int) -> int:
        """Return how often the end of a job has changed: at each of its stops."""
        return len(self.list_stops(job))

    def pop_new_ends(self) -> Sequence[tuple[int, float]]:
        """Return the jobs whose end has moved since the last call, each with its new end in seconds."""
        return ()

    def list_stops(self, job: int) -> Sequence[Stop]:
        """Return the stops of a job in order of time."""
        return self._by_job.get(job, ())

    def begin_attempt(self, job: int, now_s: float) -> float:
        """Record that a job starts. Returns the time in seconds at which it ends if nothing stops it."""
        restart_s = self.restart_s if self.list_stops(job) else 0.0
        self._running[job] = Attempt(job, now_s, restart_s)
        self.attempts.append(self._running[job])
        return float(now_s + restart_s + self.run_s[job] - self.saved_s[job])

    def end_attempt(self, job: int, now_s: float) -> None:
        """Record that a job has done all its work."""
        self._running.pop(job).end_s = now_s
        self.saved_s[job] = self.run_s[job]

    def stop_attempt(self, job: int, now_s: float, payer: int) -> None:
        """Stop a job. It keeps its work up to its last checkpoint. A start that was refused has done no work."""
        work_s = saved_s = restart_s = 0.0
        attempt = self._running.pop(job, None)
        if attempt is not None:
            attempt.end_s = now_s
            restart_s = min(attempt.restart_s, now_s - attempt.start_s)
            work_s = now_s - attempt.start_s - restart_s
            saved_s = self._compute_saved_s(job, work_s)
        self.saved_s[job] += saved_s
        stop = Stop(job, payer, now_s, work_s - saved_s, restart_s)
        self.stops.append(stop)
        self._by_job.setdefault(job, []).append(stop)

    def find_checkpoint_s(self, job: int, now_s: float) -> float:
        """Return when a running job wrote its last checkpoint in this attempt. Returns NaN if it wrote none."""
        attempt = self._running.get(job)
        if attempt is None:
            return float(np.nan)
        begin_s = attempt.start_s + attempt.restart_s
        saved_s = self._compute_saved_s(job, max(0.0, now_s - begin_s))
        return begin_s + saved_s if saved_s > 0 else float(np.nan)

    def _compute_saved_s(self, job: int, work_s: float) -> float:
        """Return the part of an attempt's work, in seconds, that its checkpoints hold."""
        interval_s = float(self.interval_s[job])
        return work_s // interval_s * interval_s if interval_s < np.inf else 0.0
