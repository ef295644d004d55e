"""Elastic gangs in a play: their sizes, the work that they do at each size, and the facts for their growth.

A gang of d members at full size has done its work after its run time. At m members its speed is (m / d) ** exponent.
While its size changes it stands still for `PAUSE_S` and still holds its GPUs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.elastic.shrink import PAUSE_S
from fleetcast.placement.play.progress import JobProgress

Floats = NDArray[np.float64]


@dataclass(slots=True)
class _Pace:
    """The present pace of a running attempt. since_s: when it began, after the pause. done_s: work done before."""

    since_s: float
    speed: float
    done_s: float


class ElasticProgress(JobProgress):
    """The work of jobs, some of which are elastic gangs. No job is stopped.

    desired: elastic job → its members at full size. exponent: of the speed of a gang. size: elastic job → its members
    now. resized_s: elastic job → when its size last changed. shrinks, grows: number of changes. work: of each past
    pace the beginning, the end, and the GPUs at full size × speed.
    """

    def __init__(
        self, run_s: Sequence[float], gpus: Sequence[int], desired: Mapping[int, int], exponent: float
    ) -> None:
        super().__init__(run_s, np.full(len(run_s), np.inf))
        self.desired, self.exponent = desired, exponent
        self.size: dict[int, int] = {}
        self.resized_s: dict[int, float] = {}
        self.shrinks = self.grows = 0
        self.work: list[tuple[float, float, float]] = []
        self._gpus = gpus
        self._pace: dict[int, _Pace] = {}
        self._changes: dict[int, int] = {}
        self._new_ends: dict[int, float] = {}

    def begin_attempt(self, job: int, now_s: float) -> float:
        self._pace[job] = _Pace(now_s, self._compute_speed(job), 0.0)
        return self._find_end_s(job)

    def end_attempt(self, job: int, now_s: float) -> None:
        self._close_pace(job, now_s)
        del self._pace[job]

    def resize(self, job: int, size: int, now_s: float) -> None:
        """Change the size of a gang now. A gang that starts in this pass simply starts with it."""
        grows = size > self.size[job]
        self.grows, self.shrinks = self.grows + grows, self.shrinks + (not grows)
        self.size[job], self.resized_s[job] = size, now_s
        if job in self._pace:
            done_s = self._close_pace(job, now_s)
            self._pace[job] = _Pace(now_s + PAUSE_S, self._compute_speed(job), done_s)
            self._changes[job] = self._changes.get(job, 0) + 1
            self._new_ends[job] = self._find_end_s(job)

    def _close_pace(self, job: int, now_s: float) -> float:
        """Record the work since the last change. Returns all work of the job in seconds at full size."""
        pace = self._pace[job]
        self.work.append((pace.since_s, max(now_s, pace.since_s), pace.speed * self._gpus[job]))
        return pace.done_s + max(0.0, now_s - pace.since_s) * pace.speed

    def _compute_speed(self, job: int) -> float:
        if job not in self.desired:
            return 1.0
        return float((self.size[job] / self.desired[job]) ** self.exponent)

    def _find_end_s(self, job: int) -> float:
        pace = self._pace[job]
        return float(pace.since_s + (self.run_s[job] - pace.done_s) / pace.speed)

    def count_changes(self, job: int) -> int:
        return self._changes.get(job, 0)

    def pop_new_ends(self) -> Sequence[tuple[int, float]]:
        found, self._new_ends = sorted(self._new_ends.items()), {}
        return found

    def sum_work_gpu_s(self, until_s: float) -> float:
        """Return the GPU-seconds of work at full size that ended paces did before a time."""
        begin_s, end_s, rate = np.array(self.work, np.float64).reshape(-1, 3).T
        return float((np.maximum(np.minimum(end_s, until_s) - begin_s, 0) * rate).sum())
