"""The room for a gang's members on each node while running jobs are stopped and restored."""

from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from fleetcast.fleet.requests import LEAST_AMOUNT, PlacementRequest
from fleetcast.fleet.topology import Level
from fleetcast.placement.columns import find_run_begins
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.reclaim.held import Floats, Ints, JobParts, Mask

DECIMALS = 6  # of CPUs and GiB: the parts of one job must not add up to less than the whole by rounding
TINY = 1e-7


@dataclass(frozen=True, slots=True)
class HostAmounts:
    """The CPUs, and the host memory in GiB, that each job of a view holds on all its nodes.

    cpus, memory_gib: (j,) NaN if unknown. A job gives them back on each node in proportion to its GPUs
    there. Unknown amounts are not given back.
    """

    cpus: Floats
    memory_gib: Floats


@dataclass(frozen=True, slots=True)
class GangDomains:
    """The domains that can hold a gang: those of its required level, or the whole fleet.

    domain: (n,) the domain of each node, -1 for none. names: the names of the domains.
    """

    domain: Ints
    names: tuple[str, ...]

    @classmethod
    def of(cls, request: PlacementRequest, view: ClusterView) -> "GangDomains":
        level, topology = request.required, view.topology
        if level is None:
            return cls(np.zeros(len(view), np.int64), ("",))
        if level is Level.NODE:
            return cls(np.arange(len(view)), topology.names)
        return cls(topology.domain[level].astype(np.int64), topology.domain_names[level])

    def sum_by_domain(self, room: Ints) -> Ints:
        """Return (domains,) the sum of a number per node (n,) over the nodes of each domain."""
        return np.bincount(self.domain + 1, room, len(self.names) + 1)[1:].astype(np.int64)


class VacatedRoom:
    """The members that fit on each node once some jobs have stopped.

    candidates: (n,) bool, the nodes that count. stopped: (j,) bool, by the numbers of `parts`. room: (n,)
    members that fit. domain_room: (domains,) the sums of `room`. Only the nodes that change are counted again.
    """

    def __init__(
        self,
        request: PlacementRequest,
        view: ClusterView,
        parts: JobParts,
        domains: GangDomains,
        host: HostAmounts | None = None,
    ) -> None:
        self.request, self.view, self.parts, self.domains = request, view, parts, domains
        shape = view.milli.shape
        self.candidates: Mask = np.ones(len(view), bool)
        self.stopped: Mask = np.zeros(len(view.jobs), bool)
        self._usable: Ints = parts.usable.reshape(shape)
        self._held: Ints = np.bincount(parts.gpu, parts.milli, parts.usable.size).astype(np.int64).reshape(shape)
        self._host: Floats = np.stack([view.free_cpus, view.free_host_memory_gib])  # (2, n) free now
        self._given_back: Floats = np.zeros((2, len(view)))
        self._host_per_milli: Floats | None = None  # (2, j) of a thousandth of a GPU of each job
        if host is not None:
            amounts = np.nan_to_num(np.stack([host.cpus, host.memory_gib])[:, parts.order], nan=0.0)
            self._host_per_milli = amounts / np.maximum(parts.total, 1) if amounts.any() else None
        self._needs_host = request.cpus is not None or request.host_memory_gib is not None
        self.room = self._count_members(np.arange(len(view)), self._held, self._given_back)
        self.domain_room = domains.sum_by_domain(self.room)

    def copy(self) -> "VacatedRoom":
        """Return a copy in which jobs can be stopped independently."""
        other = copy(self)
        other._held, other._given_back, other.room = self._held.copy(), self._given_back.copy(), self.room.copy()
        return other

    def keep_candidates(self, candidates: Mask) -> None:
        """Count room only on these nodes from now on. candidates: (n,) bool, a part of the present candidates."""
        self.candidates = candidates
        self.room = self.room * candidates
        self.domain_room = self.domains.sum_by_domain(self.room)

    def stop_only(self, stopped: Mask) -> None:
        """Stop exactly the jobs `stopped`, (j,) bool. All other jobs run again."""
        changed = np.flatnonzero(stopped != self.stopped)
        self._commit(changed, *self._try_change(changed))

    def _try_change(self, jobs: Ints) -> tuple[Ints, Ints, Floats, Ints]:
        """Return the affected nodes if these jobs are switched: running ones stop, and stopped ones run again.

        Also returns, for these nodes, the held thousandths, the CPUs and memory given back, and the members that fit.
        """
        parts = self.parts
        if 2 * len(jobs) > len(self.stopped) and not self.stopped.any():
            return self._stop_most(jobs)
        at = parts.list_parts(jobs)
        touched = np.zeros(len(self.view), bool)
        touched[parts.row[at]] = True
        rows = np.flatnonzero(touched)
        own = (np.cumsum(touched) - 1)[parts.row[at]]
        sign = np.where(self.stopped[parts.job[at]], 1, -1)
        g = self._held.shape[1]
        more = np.bincount(parts.gpu[at] + (own - parts.row[at]) * g, sign * parts.milli[at], len(rows) * g)
        held = self._held[rows] + more.astype(np.int64).reshape(-1, g)
        back = self._given_back[:, rows]
        if self._needs_host:
            back = back - self._sum_host(at, own, len(rows), sign)
        return rows, held, back, self._count_members(rows, held, back)

    def _stop_most(self, jobs: Ints) -> tuple[Ints, Ints, Floats, Ints]:
        """Return the same as `_try_change` if most jobs stop and all of them run: only the others are added up."""
        parts, rows = self.parts, np.arange(len(self.view))
        runs = np.ones(len(self.stopped), bool)
        runs[jobs] = False
        left = runs[parts.job]
        held = np.bincount(parts.gpu[left], parts.milli[left], self._held.size).astype(np.int64)
        back = self._given_back
        if self._needs_host:
            back = back + self._sum_host(np.flatnonzero(~left), parts.row[~left], len(rows))
        held = held.reshape(self._held.shape)
        return rows, held, back, self._count_members(rows, held, back)

    def _sum_host(self, at: Ints, rows: Ints, size: int, sign: int | Ints = 1) -> Floats:
        """Return (2, size) the CPUs and the memory of some parts, added up by row.

        at: (k,) indices of parts. rows: (k,) the row of each. sign: (k,) 1, or -1 for parts that are subtracted.
        """
        if self._host_per_milli is None:
            return np.zeros((2, size))
        job, milli = self.parts.job[at], self.parts.milli[at]
        return np.stack([np.bincount(rows, sign * (each[job] * milli), size) for each in self._host_per_milli])

    def _commit(self, jobs: Ints, rows: Ints, held: Ints, back: Floats, room: Ints) -> None:
        self.domain_room = self._sum_with(rows, room)
        self.stopped = self.stopped.copy()
        self.stopped[jobs] ^= True
        self._held[rows], self._given_back[:, rows], self.room[rows] = held, back, room

    def _sum_with(self, rows: Ints, room: Ints) -> Ints:
        """Return (domains,) the members that fit if the nodes `rows` have the new room `room`."""
        domain = self.domains.domain[rows]
        known = domain >= 0
        change = np.bincount(domain[known], (room - self.room[rows])[known], len(self.domain_room))
        return self.domain_room + change.astype(np.int64)

    def _count_members(self, rows: Ints, held: Ints, back: Floats) -> Ints:
        """Return (rows,) the members that fit on some nodes.

        held: (rows, g) thousandths that are held. back: (2, rows) CPUs and memory that stopped jobs give back.
        """
        request, free = self.request, self._usable[rows] - held
        if request.milli < WHOLE:
            room = (np.maximum(free, 0) // request.milli).sum(axis=1)
        else:
            room = np.count_nonzero(free >= WHOLE, axis=1) // request.gpus_per_node
        for at, each in enumerate((request.cpus, request.host_memory_gib)):
            if each is not None:
                left = np.nan_to_num(_add_amounts(self._host[at, rows], back[at]), nan=0.0)
                room = np.minimum(room, np.maximum(left // max(each, LEAST_AMOUNT), 0.0))
        if request.spread:
            room = np.minimum(room, 1)
        return np.asarray(room * self.candidates[rows], np.int64)

    def restore_spare_jobs(self, dearest_first: Ints, members: int) -> None:
        """Let stopped jobs run again as long as one domain still has room for the gang.

        dearest_first: numbers of the stopped jobs, in the order in which they are restored.
        """
        for job in dearest_first[self._mask_possibly_spare(dearest_first, members)]:
            change = self._try_change(job[None])
            if self._sum_with(change[0], change[3]).max() >= members:
                self._commit(job[None], *change)

    def _mask_possibly_spare(self, jobs: Ints, members: int) -> Mask:
        """Return (jobs,) whether the gang might still fit if only this one of the jobs were restored.

        Each restored job uses room. So a job that is needed now is also needed later.
        """
        fits = np.flatnonzero(self.domain_room >= members)
        if len(fits) != 1 or self.request.milli < WHOLE:
            return np.ones(len(jobs), bool)
        parts, g = self.parts, self._held.shape[1]
        at = parts.list_parts(np.sort(jobs))
        rows = parts.row[at]
        counts = (self.domains.domain[rows] == fits[0]) & self.candidates[rows]
        counts &= self._usable[rows, parts.gpu[at] % g] - self._held[rows, parts.gpu[at] % g] >= WHOLE
        job, row = parts.job[at[counts]], rows[counts]
        if not len(job):
            return np.ones(len(jobs), bool)
        first = np.flatnonzero(find_run_begins(job, row))
        job, row, count = job[first], row[first], np.diff(first, append=len(job))
        free = np.count_nonzero(self._usable[row] - self._held[row] >= WHOLE, axis=1)
        lost = np.maximum(self.room[row] - (free - count) // self.request.gpus_per_node, 0)
        need = np.bincount(job, lost, len(self.stopped))
        found: Mask = self.domain_room[fits[0]] - need[jobs] >= members
        return found

    def make_filter_view(self) -> ClusterView:
        """Return a view for filters. It has the resources that the stopped jobs free, and still lists all jobs."""
        milli = np.maximum(self._usable - self._held, 0).astype(np.int16)
        return self._give_back_host(replace(self.view, milli=milli))

    def make_view(self) -> ClusterView:
        """Return the view without the stopped jobs, once they have released everything that they hold."""
        names = {self.parts.names[job] for job in np.flatnonzero(self.stopped).tolist()}
        return self._give_back_host(remove_jobs(self.view, names))

    def _give_back_host(self, view: ClusterView) -> ClusterView:
        back = self._given_back
        if not self._needs_host:  # no room depended on them, so they are only added up here
            at = self.parts.list_parts(np.flatnonzero(self.stopped))
            back = self._sum_host(at, self.parts.row[at], len(self.view))
        cpus, memory_gib = (_add_amounts(*both) for both in zip(self._host, back, strict=True))
        return replace(view, free_cpus=cpus, free_host_memory_gib=memory_gib)


def _add_amounts(free: Floats, back: Floats) -> Floats:
    """Add the CPUs or GiB that are given back. Nodes that get nothing back keep their numbers exactly."""
    return np.where(np.abs(back) > TINY, np.round(free + back, DECIMALS), free)
