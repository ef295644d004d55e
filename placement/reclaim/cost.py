"""The cost of stopping running jobs, in GPU-seconds, with each term named.

A stopped job repeats its work since the last whole checkpoint, restarts, and waits for its next place.
The cost is the sum of these terms, and no term is negative. NaN means unknown in every input.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

RESTART_S = 300.0  # where nobody has measured the restart of a job

Floats = NDArray[np.float64]


class LostBasis(IntEnum):
    """The evidence for the amount of work that a stopped job would lose."""

    CHECKPOINT = 0  # since its last whole checkpoint
    START = 1  # since its start: no checkpoint is known
    YOUNG = 2  # one checkpoint interval by Young's rule: no checkpoint is known, but the cost of one is
    ON_DEMAND = 3  # the executor makes a checkpoint first, and the job loses only the time for it


@dataclass(frozen=True, slots=True)
class StoppableJobs:
    """The j running jobs that may be stopped, as columns (j,).

    gpus: held GPUs, including parts of GPUs. checkpoint_ms: time of the last whole checkpoint. checkpoint_cost_s:
    seconds that the job stands still for one checkpoint. failures_s: mean seconds between failures of the
    job. restart_s: seconds from the job's next start to its first new step. wait_s: seconds by which the stop
    lengthens its waits. on_demand: bool, whether the executor can make a checkpoint before it stops the job.
    """

    gpus: Floats
    started_ms: Floats
    checkpoint_ms: Floats
    checkpoint_cost_s: Floats
    failures_s: Floats
    restart_s: Floats
    wait_s: Floats
    on_demand: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StopCosts:
    """The terms of the cost of stopping each of j jobs: (j,) GPU-seconds, 0 or more.

    basis: (j,) LostBasis of `lost`.
    """

    lost: Floats
    restart: Floats
    wait: Floats
    basis: NDArray[np.int8]

    @property
    def total(self) -> Floats:
        """(j,) the sum of the terms in GPU-seconds."""
        return np.asarray(self.lost + self.restart + self.wait)

    def make_reason(self, job: int) -> dict[str, float]:
        """Return code → GPU-seconds for one job. The code of the lost work names its basis."""
        lost = f"lost_{LostBasis(int(self.basis[job])).name.lower()}"
        return {lost: float(self.lost[job]), "restart": float(self.restart[job]), "wait": float(self.wait[job])}


def compute_stop_costs(jobs: StoppableJobs, now_ms: float) -> StopCosts:
    """Return the cost of stopping each job at `now_ms`.

    Without a known checkpoint the lost work reaches back to the start. This span has a limit if the cost of a
    checkpoint and the time between failures are known. The limit is Young's interval
    √(2 · cost · time between failures), because a job that writes checkpoints writes them about that often.
    """
    since_start_s = _compute_age_s(jobs.started_ms, now_ms)
    since_checkpoint_s = np.minimum(_compute_age_s(jobs.checkpoint_ms, now_ms), since_start_s)
    young_s = np.sqrt(2 * jobs.checkpoint_cost_s * jobs.failures_s)
    has_checkpoint = ~np.isnan(jobs.checkpoint_ms)
    lost_s = np.where(has_checkpoint, since_checkpoint_s, np.fmin(since_start_s, young_s))
    basis = np.where(
        has_checkpoint, LostBasis.CHECKPOINT, np.where(young_s < since_start_s, LostBasis.YOUNG, LostBasis.START)
    )
    asked = jobs.on_demand & (jobs.checkpoint_cost_s < lost_s)
    return StopCosts(
        lost=jobs.gpus * np.where(asked, jobs.checkpoint_cost_s, lost_s),
        restart=jobs.gpus * np.where(np.isnan(jobs.restart_s), RESTART_S, jobs.restart_s),
        wait=jobs.gpus * np.nan_to_num(jobs.wait_s, nan=0.0),
        basis=np.where(asked, LostBasis.ON_DEMAND, basis).astype(np.int8),
    )


def _compute_age_s(since_ms: Floats, now_ms: float) -> Floats:
    """Return (j,) the seconds since each time, at least 0. Unknown times stay NaN."""
    return np.asarray(np.maximum((now_ms - since_ms) / 1000, 0.0))


_SENTENCES = {
    "lost_checkpoint": "{:.2f} GPU-hours of work since the last checkpoint",
    "lost_start": "{:.2f} GPU-hours of work since the start, as no checkpoint is known",
    "lost_young": "{:.2f} GPU-hours of work, a usual time between checkpoints",
    "lost_on_demand": "{:.2f} GPU-hours for a checkpoint before the stop",
    "restart": "{:.2f} GPU-hours to restart",
    "wait": "{:.2f} GPU-hours of waiting",
}


def describe_stop_cost(reason: dict[str, float]) -> str:
    """Return the sentence for a reason of `StopCosts.make_reason`. Terms of 0 are left out.

    >>> describe_stop_cost({"lost_checkpoint": 7200.0, "restart": 2400.0, "wait": 0.0})
    'stopping it costs 2.00 GPU-hours of work since the last checkpoint, 0.67 GPU-hours to restart'
    """
    terms = [_SENTENCES[code].format(gpu_s / 3600) for code, gpu_s in reason.items() if gpu_s > 0]
    return f"stopping it costs {', '.join(terms)}" if terms else "stopping it costs nothing"
