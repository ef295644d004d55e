"""The search for members of elastic gangs that leave, so that a waiting request fits and no job stops.

Each member is a job of its own in the search for victims (`fleetcast.placement.reclaim.victims`). Its cost is that
of the pause in which its gang shrinks by one step. A gang that would go below its minimum gives only the members
that it may give, and the search runs again. Members that stay were in one domain before, so they still are.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.elastic.members import Ints, Mask, RunningMembers, release_gpus, round_to_size
from fleetcast.placement.elastic.speed import SPEED_EXPONENT, compute_speed
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.slots import WHOLE
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.reclaim.eligibility import Eligibility
from fleetcast.placement.reclaim.fairness import FairnessVerdict, LeafJob, Queues, find_fair_victims
from fleetcast.placement.reclaim.room import GangDomains, HostAmounts
from fleetcast.placement.reclaim.victims import ChosenVictims, VictimSet

PAUSE_S = 120.0  # in which a gang changes its size, until one was observed
MOST_SEARCHES = 3
MAY_SHRINK = (
    *(Eligibility.RECLAIM, Eligibility.PREEMPT, Eligibility.OWN_QUEUE),
    *(Eligibility.STOPPED_OFTEN, Eligibility.YOUNG),
)
"""A gang also gives members to the next request of its own queue. Bounds on stops are no bounds on shrinking."""
OUTRANKED = (Eligibility.PREEMPT, Eligibility.OWN_QUEUE)


@dataclass(frozen=True, slots=True)
class GangShrink:
    """The members that one gang gives up.

    ranks: their present places. size: members that stay. gpus: how many GPUs leave. cost_gpu_s: GPU-seconds in which
    the whole gang stands still. kind: why the gang may be shrunk.
    """

    job: str
    ranks: tuple[RankPlacement, ...]
    size: int
    gpus: int
    cost_gpu_s: float
    kind: Eligibility


@dataclass(frozen=True, slots=True)
class ShrunkGangs:
    """The gangs that shrink for one request. placed: its placement then, without any job that stops."""

    shrinks: tuple[GangShrink, ...]
    placed: ChosenVictims


def find_shrinks(
    request: PlacementRequest,
    view: ClusterView,
    jobs: RunningJobs,
    eligibility: NDArray[np.int8],
    queues: Queues,
    options: Options,
) -> ShrunkGangs | None:
    """Return the gangs that shrink so that a request fits. Returns None if shrinking alone does not make room.

    jobs: the table of running jobs, with eligibility (rows,) for this request.
    """
    members = RunningMembers.of(view, jobs, np.isin(eligibility, MAY_SHRINK))
    surplus = count_surplus(members, jobs)
    if not _may_be_enough(request, view, members, surplus):
        return None
    alone = (surplus > 0)[members.job]
    for _ in range(MOST_SEARCHES):
        if not alone.any():
            return None
        found = _search(request, view, jobs, eligibility, queues, options, members, alone)
        if found is None:
            return None
        gone = np.zeros(len(members), bool)
        gone[alone] = np.isin(members.name_members(view, alone), found.chosen.jobs)
        taken = np.bincount(members.job[gone], minlength=len(view.jobs))
        if (taken <= surplus).all():
            gone = _round_up(gone, members, jobs, taken)
            leaf = _find_unfair_leaf(request, view, jobs, eligibility, queues, members, gone)
            if leaf is None:
                return _make_result(view, jobs, eligibility, members, gone, found)
            alone &= np.array([name != leaf for name in jobs.leaf], bool)[members.table_row[members.job]]
            continue
        alone &= _limit_to_surplus(gone, members, surplus) | (taken <= surplus)[members.job]
    return None


def count_surplus(members: RunningMembers, jobs: RunningJobs) -> Ints:
    """Return, for each job of the view, how many members it may give up: those above its minimum."""
    held = np.bincount(members.job, minlength=len(members.table_row))
    return np.asarray(np.maximum(held - np.append(jobs.gang_min, 0)[members.table_row], 0))


def _may_be_enough(request: PlacementRequest, view: ClusterView, members: RunningMembers, surplus: Ints) -> bool:
    """Return whether one domain has enough GPUs for a request, of those that are free or that gangs may give up.

    If it returns False, no search for shrinks finds anything. The search costs far more than these sums.
    """
    domains = GangDomains.of(request, view)
    milli = domains.sum_by_domain(view.milli.sum(axis=1))
    inside = np.flatnonzero((surplus[members.job] > 0) & (domains.domain[members.node] >= 0))
    job, domain = members.job[inside], domains.domain[members.node[inside]]
    _, first, count = np.unique(job * len(milli) + domain, return_index=True, return_counts=True)
    leaving = np.minimum(count, surplus[job[first]]) * members.gpus[inside[first]]
    np.add.at(milli, domain[first], WHOLE * leaving)
    return bool(milli.max(initial=0) >= request.members.min * request.gpus_per_node * request.milli)


def compute_pause_s(jobs: RunningJobs) -> NDArray[np.float64]:
    """Return (rows,) the seconds in which a gang stands still while its size changes."""
    return np.where(np.isnan(jobs.resize_pause_s), PAUSE_S, jobs.resize_pause_s)


def saves_time(request: PlacementRequest, shrunk: ShrunkGangs, jobs: RunningJobs, wait_s: float, run_s: float) -> bool:
    """Return whether a request ends earlier by more seconds than the gangs that shrink for it end later in sum.

    wait_s: seconds until the request should fit if no gang shrinks, and then start at full size. run_s: its run time
    at full size. The gangs are slower until it ends. Each of them pauses when it shrinks, and when it grows back.
    """
    members, pause_s = request.members, compute_pause_s(jobs)
    ratio = compute_speed(len(shrunk.placed.decision.ranks) / members.desired, SPEED_EXPONENT)
    later_s = 0.0
    for one in shrunk.shrinks:
        row = jobs.row[one.job]
        exponent = float(jobs.speed_exponent[row])
        share = one.size / (one.size + len(one.ranks))  # the table may not know how many members run
        left = compute_speed(share, SPEED_EXPONENT if np.isnan(exponent) else exponent)
        later_s += run_s / ratio * (1 - left) + 2 * float(pause_s[row])
    return wait_s + run_s - run_s / ratio > later_s


def _search(
    request: PlacementRequest,
    view: ClusterView,
    jobs: RunningJobs,
    eligibility: NDArray[np.int8],
    queues: Queues,
    options: Options,
    members: RunningMembers,
    alone: Mask,
) -> ChosenVictims | None:
    """Search among the members `alone`, (m,) bool. Jobs never stop as a whole."""
    split = members.split_view(view, alone)
    row = members.table_row[members.job[alone]]
    pause_gpu_s = compute_pause_s(jobs)[row] * jobs.gpus[row] / np.maximum(jobs.gang_step[row], 1)
    cost = np.append(np.full(len(view.jobs), np.inf), pause_gpu_s)
    rows = np.append(np.full(len(view.jobs), -1), row)
    share = members.gpus[alone] / np.maximum(jobs.gpus[row], 1)
    host = HostAmounts(
        *(
            np.append(np.full(len(view.jobs), np.nan), each[row])
            for each in (jobs.cpus_per_member, jobs.host_memory_gib_per_member)
        )
    )
    names = members.name_members(view, alone)
    kinds = np.append(eligibility, 0)[rows[len(view.jobs) :]]
    outranked = frozenset(name for name, kind in zip(names, kinds.tolist(), strict=True) if kind in OUTRANKED)
    owners = members.job[alone].tolist()
    holds = _make_member_holds(queues.holds, [view.jobs[at] for at in owners], names, share.tolist())
    split_queues = replace(queues, holds=holds, outranked=outranked, restarts=False)
    found = find_fair_victims(request, split, cost, options, split_queues, host)
    return found if isinstance(found, ChosenVictims) else None


def _make_member_holds(
    holds: Mapping[str, QueueHold], owners: list[str], names: list[str], share: list[float]
) -> dict[str, QueueHold]:
    """Return the hold of each member. All members of a job hold alike. A member without a hold of its job has none."""
    part_of = dict(zip(owners, share, strict=True))
    each = {owner: split_hold(holds[owner], part) for owner, part in part_of.items() if owner in holds}
    return {name: each[owner] for owner, name in zip(owners, names, strict=True) if owner in each}


def split_hold(hold: QueueHold, share: float) -> QueueHold:
    """Return this share of a hold."""
    return QueueHold(hold.leaf, {resource: amount * share for resource, amount in hold.amounts.items()})


def _limit_to_surplus(gone: Mask, members: RunningMembers, surplus: Ints) -> Mask:
    """Return (m,) the first of the chosen members of each job, as many as it may give up.

    The nodes on which most of its chosen members are come first.
    """
    at = np.flatnonzero(gone)
    pair = np.unique(np.stack([members.job[at], members.node[at]]), axis=1, return_inverse=True, return_counts=True)
    there = pair[2][pair[1].ravel()]
    order = at[np.lexsort((members.number[at], members.node[at], -there, members.job[at]))]
    job = members.job[order]
    first = np.searchsorted(job, job)
    found = np.zeros(len(gone), bool)
    found[order[np.arange(len(order)) - first < surplus[job]]] = True
    return found


def _round_up(gone: Mask, members: RunningMembers, jobs: RunningJobs, taken: Ints) -> Mask:
    """Return (m,) the members that leave, so that each gang loses whole steps. The last members join first."""
    gone = gone.copy()
    for job in np.flatnonzero(taken).tolist():
        row, own = members.table_row[job], members.job == job
        size = round_to_size(
            int(own.sum()) - int(taken[job]), int(jobs.gang_min[row]), max(1, int(jobs.gang_step[row]))
        )
        more = np.flatnonzero(own & ~gone)[::-1][: int(own.sum()) - int(taken[job]) - size]
        gone[more] = True
    return gone


def _find_unfair_leaf(
    request: PlacementRequest,
    view: ClusterView,
    jobs: RunningJobs,
    eligibility: NDArray[np.int8],
    queues: Queues,
    members: RunningMembers,
    gone: Mask,
) -> str | None:
    """Return a leaf that unfairly gives members, because its gangs give whole steps. Returns None if there is none."""
    taken, leaving = np.bincount(members.job[gone], members.gpus[gone], len(view.jobs)), []
    for job in np.flatnonzero(taken).tolist():
        row, name = int(members.table_row[job]), view.jobs[job]
        if name in queues.holds:
            hold = split_hold(queues.holds[name], float(taken[job]) / max(1, int(jobs.gpus[row])))
            leaving.append(LeafJob(name, hold, 0.0, int(eligibility[row]) in OUTRANKED))
    return FairnessVerdict(request, replace(queues, restarts=False)).find_unfair_giver(leaving)


def _make_result(
    view: ClusterView,
    jobs: RunningJobs,
    eligibility: NDArray[np.int8],
    members: RunningMembers,
    gone: Mask,
    found: ChosenVictims,
) -> ShrunkGangs:
    pause_s, shrinks = compute_pause_s(jobs), []
    for job in np.unique(members.job[gone]).tolist():
        row, own = int(members.table_row[job]), members.job == job
        shrinks.append(
            GangShrink(
                view.jobs[job],
                members.make_ranks(view, own & gone),
                int((own & ~gone).sum()),
                int(members.gpus[own & gone].sum()),
                float(pause_s[row] * jobs.gpus[row]),
                Eligibility(int(eligibility[row])),
            )
        )
    left = release_gpus(view, members.list_gpus(gone))
    left = replace(left, free_cpus=found.view.free_cpus, free_host_memory_gib=found.view.free_host_memory_gib)
    cost = sum(shrink.cost_gpu_s for shrink in shrinks)
    none = VictimSet(found.chosen.domain, (), cost)
    return ShrunkGangs(tuple(shrinks), ChosenVictims(none, (), found.bound_gpu_s, (), found.decision, left))
