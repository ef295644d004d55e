"""The members of running elastic gangs, and views in which each member can leave alone.

A member holds `gpus_per_member` whole GPUs of one node. The size of a gang is `min`, or more by whole steps, and at
most `desired`.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.columns import find_run_begins
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.view import ClusterView

Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
SEPARATOR = "\0"  # between the name of a job and the number of its member; no job name has it


@dataclass(frozen=True, slots=True)
class RunningMembers:
    """The m members of some running jobs of a view, sorted by job, then by node.

    job: (m,) row in the view's jobs. number: (m,) number within the job, from 0. node: (m,). gpus: (m,) how many GPUs
    the member holds. first: (m + 1,) the index in `gpu` at which the GPUs of each member begin. gpu: flat indices
    into (n, g). table_row: (j,) row of each job of the view in the table of running jobs, -1 without one.
    """

    job: Ints
    number: Ints
    node: Ints
    gpus: Ints
    first: Ints
    gpu: Ints
    table_row: Ints

    @classmethod
    def of(cls, view: ClusterView, jobs: RunningJobs, wanted: Mask) -> "RunningMembers":
        """Return the members of the elastic jobs among `wanted`, a mask over the rows of the table.

        A job that shares GPUs, or whose GPUs on a node are no whole number of members, has no members here.
        """
        table_row = jobs.find_rows(view.jobs)
        elastic = wanted & (jobs.gang_desired > jobs.gang_min) & (jobs.gang_min > 0) & (jobs.gpus_per_member > 0)
        may = np.append(elastic, False)[table_row]
        may[view.parts.job] = False
        flat = view.holders.ravel()
        gpu = np.flatnonzero(np.append(may, False)[flat])
        gpu = gpu[np.argsort(flat[gpu], kind="stable")]
        job, node = flat[gpu].astype(np.int64), gpu // view.holders.shape[1]
        each = np.append(jobs.gpus_per_member, 1)[table_row[job]]
        begins = np.flatnonzero(find_run_begins(job, node)) if len(gpu) else np.zeros(0, np.int64)
        length = np.diff(begins, append=len(gpu))
        uneven = np.zeros(len(view.jobs), bool)
        uneven[job[begins[length % each[begins] != 0]]] = True
        place = np.arange(len(gpu)) - np.repeat(begins, length)
        stays = ~uneven[job]
        gpu, job, node, each, place = gpu[stays], job[stays], node[stays], each[stays], place[stays]
        first = np.flatnonzero(place % each == 0)
        owner = job[first]
        own = np.flatnonzero(find_run_begins(owner)) if len(owner) else np.zeros(0, np.int64)
        number = np.arange(len(owner)) - np.repeat(own, np.diff(own, append=len(owner)))
        return cls(owner, number, node[first], each[first], np.append(first, len(gpu)), gpu, table_row)

    def __len__(self) -> int:
        return len(self.job)

    def list_gpus(self, chosen: Mask) -> Ints:
        """Return the flat indices of the GPUs of some members. chosen: (m,) bool."""
        return np.asarray(self.gpu[np.repeat(chosen, np.diff(self.first))])

    def make_ranks(self, view: ClusterView, chosen: Mask) -> tuple[RankPlacement, ...]:
        """Return the present places of some members. chosen: (m,) bool."""
        g, found = view.holders.shape[1], []
        for member in np.flatnonzero(chosen).tolist():
            gpus = self.gpu[self.first[member] : self.first[member + 1]]
            node = view.topology.names[int(self.node[member])]
            found.append(RankPlacement(int(self.number[member]), node, tuple((gpus % g).tolist())))
        return tuple(found)

    def split_view(self, view: ClusterView, alone: Mask) -> ClusterView:
        """Return the view in which each of some members is a job of its own. These jobs come last.

        alone: (m,) bool. The other members stay with their job.
        """
        holders = view.holders.copy()
        number = len(view.jobs) + np.cumsum(alone) - 1
        own = np.repeat(alone, np.diff(self.first))
        holders.ravel()[self.gpu[own]] = np.repeat(number, np.diff(self.first))[own]
        return replace(view, holders=holders, jobs=(*view.jobs, *self.name_members(view, alone)))

    def name_members(self, view: ClusterView, chosen: Mask) -> list[str]:
        """Return the names of some members as jobs of their own."""
        rows = zip(self.job[chosen].tolist(), self.number[chosen].tolist(), strict=True)
        return [f"{view.jobs[job]}{SEPARATOR}{number:06}" for job, number in rows]


def release_gpus(view: ClusterView, gpu: Ints) -> ClusterView:
    """Return the view after the holders of some whole GPUs have released them. gpu: flat indices into (n, g)."""
    holders, milli = view.holders.copy(), view.milli.copy()
    holders.ravel()[gpu] = -1
    milli.ravel()[gpu] = np.where(view.usable.ravel()[gpu], WHOLE, 0)
    return replace(view, holders=holders, milli=milli)


def round_to_size(size: int, least: int, step: int) -> int:
    """Return the largest size of a gang that is not above `size`: `least` plus whole steps.

    >>> round_to_size(9, 2, 4), round_to_size(6, 2, 4)
    (6, 6)
    """
    return least + (size - least) // step * step


def assign_gpus(
    view: ClusterView, job: str, gpu: Ints, cpus_per_gpu: float = 0.0, memory_gib_per_gpu: float = 0.0
) -> ClusterView:
    """Return the view after a job of it has got some free whole GPUs. gpu: flat indices into (n, g)."""
    holders, milli = view.holders.copy(), view.milli.copy()
    holders.ravel()[gpu] = view.jobs.index(job)
    milli.ravel()[gpu] = 0
    count = np.bincount(gpu // view.milli.shape[1], minlength=len(view))
    return replace(
        view,
        holders=holders,
        milli=milli,
        free_cpus=view.free_cpus - count * cpus_per_gpu,
        free_host_memory_gib=view.free_host_memory_gib - count * memory_gib_per_gpu,
    )
