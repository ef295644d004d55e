"""The growth of running elastic gangs onto GPUs that nobody waits for.

A gang grows by whole steps while the run time that it saves is worth more than the pause in which its size changes.
Its speed at n members is n ** exponent. It grows only within its required domain, on nodes of the GPU models and pools
that it uses already and without advice against them. It never takes GPUs on which a waiting request would fit: it takes
the next best nodes instead.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import cast

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import JobClass
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.fleet.topology import Level
from fleetcast.placement.elastic.members import Ints, Mask, RunningMembers, assign_gpus, round_to_size
from fleetcast.placement.elastic.shrink import compute_pause_s
from fleetcast.placement.elastic.speed import SPEED_EXPONENT, compute_speed
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.filters import screen
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NOT_SAID, PROTECTED, RunningJobs
from fleetcast.placement.machines.view import Advice, ClusterView
from fleetcast.placement.queues.asks import make_fit_key

DWELL_MS = 600_000  # from a change of a gang's size until it may grow, if the queues' policy does not say
MOST_LEFT_OUT = 8  # places of one growth, each of which would let a waiting request fit

Floats = NDArray[np.float64]
Place = tuple[int, Ints]  # of a member: the row of its node, and its GPUs there


@dataclass(frozen=True, slots=True)
class GangGrowth:
    """The growth of one gang. places: its new members, numbered after those that run. size: all its members then.

    gain_gpu_s: GPU-seconds of run time that it saves. cost_gpu_s: GPU-seconds of the pause.
    """

    job: str
    places: tuple[RankPlacement, ...]
    size: int
    gpus: int
    gain_gpu_s: float
    cost_gpu_s: float


MayHold = Callable[[Sequence[GangGrowth]], bool]
"""Return whether the queues of some gangs may hold the GPUs of all these growths."""
CloseNodes = Callable[[PlacementRequest], PlacementRequest | str]
"""Return a request that avoids the nodes which are closed to its queue, or why it may start on none."""


def propose_growth(
    view: ClusterView,
    jobs: RunningJobs,
    remaining_s: Floats,
    waiting: Sequence[PlacementRequest],
    options: Options,
    may_hold: MayHold = lambda growths: True,
    close_nodes: CloseNodes = lambda request: request,
    dwell_ms: int = DWELL_MS,
) -> tuple[GangGrowth, ...]:
    """Return which gangs grow now, in the order of their gains, and how much the whole step is worth.

    view: the fleet after a pass, without what the pass has reserved. remaining_s: (rows,) run time left at the present
    size, NaN if unknown. waiting: requests that wait after the pass. New members are only on nodes on which a request
    of their gang could be placed. Each growth is a step, or the fewest steps that
    are worth a pause. The next growth is the one with the largest gain among those that are left.
    """
    if not (jobs.gang_desired > jobs.gang_min).any():
        return ()
    rested = jobs.resized_ms <= options.now_ms - dwell_ms
    wanted = rested & (remaining_s > 0) & (jobs.members < jobs.gang_desired)
    members = RunningMembers.of(view, jobs, wanted)
    facts = view, jobs, remaining_s, close_nodes, options
    gangs = [_GrowingGang.of(job, members, *facts) for job in np.unique(members.job).tolist()]
    blockers = find_fitting(view, waiting, options)
    state = _GrowthState(view, view, blockers, options, may_hold, np.zeros(view.milli.shape, bool))
    while gangs:
        gang = max(gangs, key=lambda one: (one.find_next_size()[1], one.name))
        size, gain_gpu_s = gang.find_next_size()
        if gain_gpu_s <= 0:
            break
        if size == gang.size or not state.add_members(gang, size):
            gangs.remove(gang)
    return tuple(state.growths[name] for name in sorted(state.growths))


def find_fitting(view: ClusterView, waiting: Sequence[PlacementRequest], options: Options) -> list[PlacementRequest]:
    """Return the waiting requests that fit on a view, one for each fit key."""
    different = {make_fit_key(request, bool(options.filters)): request for request in waiting}.values()
    return [request for request in different if fits_now(request, view, options)]


def fits_on_gpus(requests: Sequence[PlacementRequest], view: ClusterView, gpus: Mask, options: Options) -> bool:
    """Return whether one of these requests would fit on some GPUs of a view alone. gpus: (n, g) bool."""
    if not requests:
        return False
    alone = replace(view, milli=np.where(gpus, view.milli, np.int16(0)))
    return any(fits_now(request, alone, options) for request in requests)


@dataclass(slots=True)
class _GrowingGang:
    """A gang that may grow.

    begun: its size before. size: its size with the growth so far. nodes: (n,) bool, where new members may be.
    """

    name: str
    begun: int
    size: int
    least: int
    most: int
    step: int
    each: int
    pause_s: float
    exponent: float
    remaining_s: float
    cpus: float
    memory_gib: float
    nodes: Mask

    @classmethod
    def of(
        cls,
        job: int,
        members: RunningMembers,
        view: ClusterView,
        jobs: RunningJobs,
        remaining_s: Floats,
        close_nodes: CloseNodes,
        options: Options,
    ) -> "_GrowingGang":
        row, own = int(members.table_row[job]), members.job == job
        size, exponent = int(own.sum()), float(jobs.speed_exponent[row])
        held = np.unique(members.node[own])
        return cls(
            name=view.jobs[job],
            begun=size,
            size=size,
            least=int(jobs.gang_min[row]),
            most=int(jobs.gang_desired[row]),
            step=max(1, int(jobs.gang_step[row])),
            each=int(jobs.gpus_per_member[row]),
            pause_s=float(compute_pause_s(jobs)[row]),
            exponent=SPEED_EXPONENT if math.isnan(exponent) else exponent,
            remaining_s=float(remaining_s[row]),
            cpus=float(np.nan_to_num(jobs.cpus_per_member[row])),
            memory_gib=float(np.nan_to_num(jobs.host_memory_gib_per_member[row])),
            nodes=_mask_alike_nodes(view, held, jobs.required_level[row])
            & _mask_passing_nodes(close_nodes(make_member_request(jobs, row)), view, options),
        )

    def compute_gain(self, size: int) -> float:
        """Return the GPU-seconds by which growth from the first size to `size` is worth more than its pause."""
        if size == self.begun:
            return 0.0
        ratio = compute_speed(self.begun, self.exponent) / compute_speed(size, self.exponent)
        return (self.remaining_s * (1 - ratio) - self.pause_s) * self.begun * self.each

    def find_next_size(self) -> tuple[int, float]:
        """Return the next size that is worth more than the present one, and the gain.

        Returns the present size if no other is.
        """
        size = round_to_size(self.size, self.least, self.step) + self.step
        while size <= self.most:
            gain = self.compute_gain(size) - self.compute_gain(self.size)
            if gain > 0:
                return size, gain
            size += self.step
        return self.size, 0.0


def _mask_alike_nodes(view: ClusterView, held: Ints, level: str) -> Mask:
    """Return (n,) whether a gang on the nodes `held` may have further members on a node."""
    topology = view.topology
    found = view.is_open & (view.advice == Advice.NONE)
    for kind in (view.inventory.gpu_model, view.inventory.pool):
        found &= np.isin(kind, np.unique(kind[held]))
    if level == Level.NODE:
        found &= np.isin(np.arange(len(view)), held)
    elif level:
        domain = topology.domain[Level(level)]
        found &= (domain >= 0) & np.isin(domain, domain[held])
    return np.asarray(found)


def _mask_passing_nodes(request: PlacementRequest | str, view: ClusterView, options: Options) -> Mask:
    """Return (n,) whether a node passes all filters of a request. request: a reason if it may be nowhere."""
    return np.zeros(len(view), bool) if isinstance(request, str) else screen(request, view, options).passes


def make_member_request(jobs: RunningJobs, row: int) -> PlacementRequest:
    """Return a request for one more member of a running gang."""
    cpus, memory_gib, limit_s = (
        None if math.isnan(column[row]) else float(column[row])
        for column in (jobs.cpus_per_member, jobs.host_memory_gib_per_member, jobs.limit_s)
    )
    return PlacementRequest(
        request_id=jobs.names[row],
        job=jobs.names[row],
        attempt=int(jobs.attempt[row]),
        queue=jobs.leaf[row],
        user=jobs.user[row],
        class_=cast(JobClass, jobs.job_class[row]),
        gang=1,
        gpus_per_node=int(jobs.gpus_per_member[row]),
        cpus=None if cpus is None else math.ceil(cpus),
        host_memory_gib=memory_gib,
        limit_s=limit_s,
        preemptible={NOT_SAID: None, PROTECTED: False}.get(int(jobs.preemptible[row]), True),
    )


@dataclass(slots=True)
class _GrowthState:
    """The free GPUs while gangs grow one after another.

    before: the view without any growth. blockers: waiting requests that fit there. taken: (n, g) bool, GPUs of
    the growths so far. wanted_nodes: GPUs of a member → (n,) whether a waiting request would fit on so many
    GPUs of a node.
    """

    before: ClusterView
    view: ClusterView
    blockers: list[PlacementRequest]
    options: Options
    may_hold: MayHold
    taken: Mask
    growths: dict[str, GangGrowth] = field(default_factory=dict)
    wanted_nodes: dict[int, Mask] = field(default_factory=dict)

    def add_members(self, gang: _GrowingGang, size: int) -> bool:
        """Grow a gang to `size`. Returns False if there is no room, or if the queue or a waiting request forbids it."""
        number = size - gang.size
        places = self._choose_places(gang, number)
        if places is None:
            return False
        names = self.view.topology.names
        ranks = [
            RankPlacement(gang.size + at, names[row], tuple(gpus.tolist())) for at, (row, gpus) in enumerate(places)
        ]
        before = self.growths.get(gang.name)
        grown = GangGrowth(
            gang.name,
            (*(before.places if before else ()), *ranks),
            size,
            (size - gang.begun) * gang.each,
            gang.compute_gain(size) + gang.pause_s * gang.begun * gang.each,
            gang.pause_s * gang.begun * gang.each,
        )
        growths = {**self.growths, gang.name: grown}
        if not self.may_hold(tuple(growths.values())):
            return False
        rows = np.repeat([row for row, _ in places], gang.each)
        gpu = rows * self.view.milli.shape[1] + np.concatenate([gpus for _, gpus in places])
        gang.size, self.taken, self.growths = size, self._add_to_taken(places), growths
        self.view = assign_gpus(self.view, gang.name, gpu, gang.cpus / gang.each, gang.memory_gib / gang.each)
        return True

    def _choose_places(self, gang: _GrowingGang, number: int) -> list[Place] | None:
        """Return the node and the GPUs of each new member, on the fullest nodes that no waiting request needs.

        Returns None without room. Some places may let a request fit only together. Then the last of them is left out.
        """
        places = list(islice(self._list_places(gang, gang.nodes), number))
        if len(places) < number or not self._is_wanted(places):
            return places if len(places) == number else None
        found: list[Place] = []
        left = self._list_places(gang, gang.nodes & ~self._mask_wanted_nodes(gang.each))
        for _ in range(MOST_LEFT_OUT):
            more = list(islice(left, number - len(found)))
            if len(found) + len(more) < number:
                return None
            tries = [[*found, *more[: count + 1]] for count in range(len(more))]
            unwanted = bisect_left(tries, True, key=self._is_wanted)
            if unwanted == len(more):
                return tries[-1]
            found += more[:unwanted]
            left = chain(more[unwanted + 1 :], left)
        return None

    def _add_to_taken(self, places: Sequence[Place]) -> Mask:
        """Return (n, g) bool, the GPUs of the growths so far and of these places."""
        taken = self.taken.copy()
        for row, gpus in places:
            taken[row, gpus] = True
        return taken

    def _is_wanted(self, places: Sequence[Place]) -> bool:
        """Return whether a waiting request would fit on these places and the growths so far."""
        return fits_on_gpus(self.blockers, self.before, self._add_to_taken(places), self.options)

    def _mask_wanted_nodes(self, each: int) -> Mask:
        """Return (n,) whether a waiting request would fit on `each` GPUs of a node alone."""
        if each not in self.wanted_nodes:
            first = self.before.free & (np.cumsum(self.before.free, axis=1) <= each)
            alone = replace(self.before, milli=np.where(first, self.before.milli, np.int16(0)))
            found = np.zeros(len(self.before), bool)
            for request in self.blockers:
                found |= screen(request, alone, self.options).room >= request.members.min
            self.wanted_nodes[each] = found
        return self.wanted_nodes[each]

    def _list_places(self, gang: _GrowingGang, nodes: Mask) -> Iterator[Place]:
        """Yield the node and the GPUs of each member that fits on `nodes`, the fullest nodes first."""
        room = np.where(nodes, self.view.free_gpus // gang.each, 0)
        for free, each in (
            (self.view.free_cpus, gang.cpus),
            (self.view.free_host_memory_gib, gang.memory_gib),
        ):
            if each > 0:
                room = np.minimum(room, np.maximum(np.nan_to_num(free, nan=0.0) // each, 0)).astype(np.int64)
        rows = np.flatnonzero(room)
        for row in rows[np.argsort(self.view.free_gpus[rows], kind="stable")].tolist():
            idle = np.flatnonzero(self.view.free[row])
            for at in range(int(room[row])):
                yield row, idle[at * gang.each : (at + 1) * gang.each]
