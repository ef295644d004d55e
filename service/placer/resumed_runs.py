"""ResumedRuns: the run times of jobs that actions stopped, in sampled futures.

A stopped job writes a checkpoint, waits, and continues its work in its next attempt. Its run times are therefore
those of a job that has already run for as long as its earlier attempts, not those of a new job. Long jobs are stopped
more often than short ones, so the difference is large.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.ahead.paths import count_gpus
from fleetcast.placement.machines.running_jobs import RUN_LEVELS, RunningJobs
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.service.answers.jobs import EndedJobRow
from fleetcast.service.board.board import Board

RunTimeFinder = Callable[[PlacementRequest], tuple[float, ...] | None]
_ended_rows = msgspec.json.Decoder(list[EndedJobRow]).decode
_LEVELS = np.array(RUN_LEVELS)


@dataclass(frozen=True, slots=True)
class ResumedRuns:
    """The jobs that were stopped. ran_s: job → seconds that its stopped attempts ran."""

    ran_s: Mapping[str, float] = field(default_factory=dict)

    def add_earlier_runs(self, running: RunningJobs) -> RunningJobs:
        """Return the table in which each resumed job also counts the time of its stopped attempts."""
        rows = [row for job, row in running.row.items() if job in self.ran_s and running.started_ms[row] >= 0]
        if not rows:
            return running
        started_ms, remaining_s = running.started_ms.copy(), running.remaining_s.copy()
        started_ms[rows] -= np.array([round(1000 * self.ran_s[running.names[row]]) for row in rows], np.int64)
        remaining_s[rows] = np.nan  # the pipeline forecasts it from the newest start alone
        return replace(running, started_ms=started_ms, remaining_s=remaining_s)

    def wrap_finder(self, find_run_times: RunTimeFinder, run_times: RunTimeQuantiles) -> RunTimeFinder:
        """Return a function that finds run times, and for a resumed job the remaining ones."""

        def find_remaining_times(request: PlacementRequest) -> tuple[float, ...] | None:
            ran_s = self.ran_s.get(request.job_name)
            gpus = count_gpus(request)
            if ran_s is None or run_times.find_basis(gpus, request.limit_s, ran_s) == "prior":
                return find_run_times(request)
            run_s = run_times.compute_run_times(gpus, _LEVELS, ran_s, request.limit_s)
            return tuple((run_s - ran_s).tolist())

        return find_remaining_times if self.ran_s else find_run_times


def read_resumed_runs(board: Board) -> ResumedRuns:
    """Read the attempts that were stopped from a board."""
    ran_s: dict[str, float] = {}
    for row in _ended_rows(board.raw("jobs.ended")) if "jobs.ended" in board else ():
        if row.outcome == "preempted" and row.started_ms is not None:
            ran_s[row.job] = ran_s.get(row.job, 0.0) + max(0, row.ended_ms - row.started_ms) / 1000
    return ResumedRuns(ran_s)
