"""The cost of stopping running jobs, in GPU-seconds, with each term named.

A stopped job repeats its work since the last whole checkpoint, and it restarts. The cost is the sum of these terms,
and no term is negative. NaN means unknown in every input. The wait for the next place is not part of it: other jobs
use the GPUs meanwhile, and choices that counted it lost more work and let jobs wait longer (training/RESULTS.md).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESTART_S = 300.0  # of a job whose restarts were never measured

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StoppableJobs:
    """The j running jobs that may be stopped, as columns (j,).

    gpus: held GPUs, including parts of GPUs. checkpoint_ms: time of the last whole checkpoint. checkpoint_cost_s:
    seconds that the job stands still for one checkpoint. failures_s: mean seconds between failures of the
    job. restart_s: seconds from the job's next start to its first new step. on_demand: bool, whether the executor can
    make a checkpoint before it stops the job.
    """

    gpus: Floats
    started_ms: Floats
    checkpoint_ms: Floats
    checkpoint_cost_s: Floats
    failures_s: Floats
    restart_s: Floats
    on_demand: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StopCosts:
    """The terms of the cost of stopping each of j jobs: (j,) GPU-seconds, 0 or more."""

    lost: Floats
    restart: Floats

    @property
    def total(self) -> Floats:
        """(j,) the sum of the terms in GPU-seconds."""
        return np.asarray(self.lost + self.restart)


def compute_stop_costs(jobs: StoppableJobs, now_ms: float) -> StopCosts:
    """Return the cost of stopping each job at `now_ms`.

    Without a known checkpoint the lost work reaches back to the start. This span has a limit if the cost of a
    checkpoint and the time between failures are known. The limit is Young's interval
    √(2 · cost · time between failures), because a job that writes checkpoints writes them about that often. No interval
    is shorter than one checkpoint. A cost of 0 gives no limit: it does not tell how often the job writes.
    """
    since_start_s = _compute_age_s(jobs.started_ms, now_ms)
    since_checkpoint_s = np.minimum(_compute_age_s(jobs.checkpoint_ms, now_ms), since_start_s)
    cost_s = np.where(jobs.checkpoint_cost_s > 0, jobs.checkpoint_cost_s, np.nan)
    young_s = np.maximum(np.sqrt(2 * cost_s * jobs.failures_s), cost_s)
    has_checkpoint = ~np.isnan(jobs.checkpoint_ms)
    lost_s = np.where(has_checkpoint, since_checkpoint_s, np.fmin(since_start_s, young_s))
    asked = jobs.on_demand & (jobs.checkpoint_cost_s < lost_s)
    return StopCosts(
        lost=jobs.gpus * np.where(asked, jobs.checkpoint_cost_s, lost_s),
        restart=jobs.gpus * np.where(np.isnan(jobs.restart_s), RESTART_S, jobs.restart_s),
    )


def _compute_age_s(since_ms: Floats, now_ms: float) -> Floats:
    """Return (j,) the seconds since each time, at least 0. Unknown times stay NaN."""
    return np.asarray(np.maximum((now_ms - since_ms) / 1000, 0.0))
