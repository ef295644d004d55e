"""The parts of GPUs that running jobs hold, sorted by the names of the jobs."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.columns import sort_rows_by_keys
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.view import ClusterView

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class JobParts:
    """The p parts of GPUs that the j jobs of a view hold.

    Jobs are numbered by name here, so that no result depends on the order of a view's jobs. names: (j,).
    order: (j,) the index of each job in the view. job, gpu, row, milli: (p,) sorted by job, then by GPU. gpu:
    flat index into (n, g). row: the GPU's node. first: (j + 1,) the index at which the parts of each job
    begin. total: (j,) thousandths of GPUs that a job holds. usable: (n * g,) thousandths of each GPU that are
    free once all jobs have stopped.
    """

    names: tuple[str, ...]
    order: Ints
    job: Ints
    gpu: Ints
    row: Ints
    milli: Ints
    first: Ints
    total: Floats
    usable: Ints

    @classmethod
    def of(cls, view: ClusterView) -> "JobParts":
        """Return the parts of a view. Views with the same occupancy share one result."""

        def make() -> JobParts:
            return cls._make(view)

        parts = (view.jobs, view.holders, view.parts, view.milli, view.usable)
        found: JobParts = view.memo.get_or_compute("parts of jobs by name", parts, make)
        return found

    @classmethod
    def _make(cls, view: ClusterView) -> "JobParts":
        flat, shared, j = view.holders.ravel(), view.parts, len(view.jobs)
        by_name = np.array(sorted(range(j), key=view.jobs.__getitem__), np.int64)
        number = np.empty(j, np.int64)
        number[by_name] = np.arange(j)
        gpu = np.flatnonzero(flat >= 0)
        gpu = gpu[~np.isin(gpu, shared.gpu)] if len(shared.gpu) else gpu
        job, milli = number[flat[gpu]], np.full(len(gpu), WHOLE, np.int64)
        if len(shared.gpu):
            job = np.append(job, number[shared.job])
            gpu, milli = np.append(gpu, shared.gpu), np.append(milli, shared.milli)
        order = sort_rows_by_keys(gpu, job)
        job, gpu, milli = job[order], gpu[order], milli[order] if len(shared.gpu) else milli
        usable = view.milli.ravel().astype(np.int64)
        usable[gpu] = np.where(view.usable.ravel()[gpu], WHOLE, 0)
        return cls(
            names=tuple(view.jobs[at] for at in by_name.tolist()),
            order=by_name,
            job=job,
            gpu=gpu,
            row=gpu // view.milli.shape[1],
            milli=milli,
            first=np.searchsorted(job, np.arange(j + 1)),
            total=np.bincount(job, milli, j).astype(np.float64),
            usable=usable,
        )

    def list_parts(self, jobs: Ints) -> Ints:
        """Return the indices of the parts of some jobs, one job after another."""
        first, count = self.first[jobs], self.first[jobs + 1] - self.first[jobs]
        begins = np.cumsum(count) - count
        return np.asarray(np.arange(int(count.sum())) + np.repeat(first - begins, count))
