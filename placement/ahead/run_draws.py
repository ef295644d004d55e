"""Random run times of jobs: one for each job on each path. A path is one possible future of all jobs.

A job without any estimate of its run time never ends here. So a request has a start time only if it
can start without the GPUs of such jobs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.machines.running_jobs import RUN_LEVELS, JobRun
from fleetcast.placement.plan.timeline import Basis, RunTimeQuantiles, find_remaining_basis

PATHS = 20
SHARED = 0.4  # of the variance of how misjudged jobs are is common to a path

Array = NDArray[np.float32]
Levels = NDArray[np.float64]
NORMAL = NormalDist()


class RunTimeSource(NamedTuple):
    """The facts from which the run time of a job that has not started is drawn.

    quantiles_s: the quantiles of its run time at `RUN_LEVELS`, None if unknown.
    """

    gpus: int
    limit_s: float | None
    quantiles_s: tuple[float, ...] | None

    def find_basis(self, run_times: RunTimeQuantiles) -> Basis:
        """Return the basis of the run time: "runs" if its quantiles are known, otherwise that of `run_times`."""
        return "runs" if self.quantiles_s is not None else run_times.find_basis(self.gpus, self.limit_s)


@dataclass(slots=True)
class RunTimeSample:
    """A generator of random run times, one on each path. The run times on one path are correlated."""

    rng: np.random.Generator
    run_times: RunTimeQuantiles
    shared: NDArray[np.float64] = field(default_factory=lambda: compute_normal_quantiles(PATHS))

    def draw_levels(self, jobs: int) -> Levels:
        """Draw (job, path) quantile levels in (0, 1), correlated within each path."""
        own = self.rng.standard_normal((jobs, PATHS))
        mixed = np.sqrt(SHARED) * self.shared + np.sqrt(1 - SHARED) * own
        errors = np.array([*map(math.erf, (mixed / math.sqrt(2.0)).ravel().tolist())])
        return np.asarray(0.5 * (1.0 + errors)).reshape(mixed.shape)

    def draw_run_times(self, jobs: Sequence[RunTimeSource]) -> Array:
        """Draw (job, path) run times in seconds of jobs that have not started, inf if unknown.

        Jobs with equal sources are computed together.
        """
        levels = self.draw_levels(len(jobs))
        runs_s = np.full(levels.shape, np.inf, np.float32)
        alike: dict[RunTimeSource, list[int]] = {}
        for at, job in enumerate(jobs):
            alike.setdefault(job, []).append(at)
        for job, rows in alike.items():
            if job.find_basis(self.run_times) != "prior":
                drawn = self.run_times.compute_run_times(
                    job.gpus, levels[rows].ravel(), 0.0, job.limit_s, job.quantiles_s
                )
                runs_s[rows] = drawn.reshape(-1, PATHS)
        return runs_s

    def draw_remaining_times(self, row: JobRun, now_ms: int) -> Array:
        """Draw (path,) remaining seconds of a running job, inf if unknown."""
        age_s = row.compute_age_s(now_ms)
        levels = self.draw_levels(1)[0]
        if find_remaining_basis(row, self.run_times, now_ms) == "prior":
            return np.full(PATHS, np.inf, np.float32)
        if row.left_s is not None:
            return interpolate_remaining_s(row.left_s, levels).astype(np.float32)
        run_s = self.run_times.compute_run_times(row.gpus, levels, age_s, row.limit_s, None)
        return np.maximum(run_s - age_s, 1.0).astype(np.float32)


def interpolate_remaining_s(quantiles_s: Sequence[float], levels: Levels) -> Levels:
    """Return (path,) remaining seconds, at least 1, at the given levels of a distribution.

    quantiles_s: the distribution's quantiles at `RUN_LEVELS`. levels: (path,). Outside the known levels
    the curve continues with the same slope (a Pareto tail). So few jobs end at the same time.
    """
    known = np.log(np.maximum.accumulate(np.maximum(np.asarray(quantiles_s, np.float64), 1.0)))
    below = np.log(np.minimum(levels / RUN_LEVELS[0], 1.0)) / np.log(RUN_LEVELS[1] / RUN_LEVELS[0])
    rare, rarest = 1 - RUN_LEVELS[-2], 1 - RUN_LEVELS[-1]
    above = np.log(np.maximum(rarest / (1 - levels), 1.0)) / np.log(rare / rarest)
    log_s = np.interp(levels, RUN_LEVELS, known) + below * (known[1] - known[0]) + above * (known[-1] - known[-2])
    return np.asarray(np.maximum(np.exp(log_s), 1.0))


def compute_normal_quantiles(paths: int) -> NDArray[np.float64]:
    return np.array([NORMAL.inv_cdf((path + 0.5) / paths) for path in range(paths)])
