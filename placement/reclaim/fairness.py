"""Fairness in the final state: a stop is judged by the GPUs that all queues hold once everything has settled.

The final state has the placed request in it, and the stopped jobs that start again on what is left. A share
that was only lowered by one's own stops therefore proves nothing. Nobody stops a job and loses the GPUs to
its queue in the next pass.

A stop is fair if the request's class may stop the job, or if the giving queue keeps its guarantee and either
holds no smaller share than the taking queue, or the taking queue stays within its guarantee. The two
queues are compared where their paths leave each other.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

import numpy as np

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.standing import QueueStanding, QueueTotals
from fleetcast.placement.queues.tree import ANY, Amounts
from fleetcast.placement.reclaim.held import Floats, Mask
from fleetcast.placement.reclaim.room import HostAmounts
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims, find_victims

MOST_SEARCHES = 4  # the first one, and three in which unfair givers give less
ROUNDING = 1e-9  # of shares and GPUs

VictimSearcher = Callable[
    [PlacementRequest, ClusterView, Floats, Options, HostAmounts | None], ChosenVictims | NoVictims
]


class LeafJob(NamedTuple):
    """A running job that may be stopped. outranked: the request's class may stop it, whoever holds more."""

    name: str
    hold: QueueHold
    cost_gpu_s: float
    outranked: bool


@dataclass(frozen=True, slots=True)
class Queues:
    """The queues of one pass, and the jobs that count against them.

    standing: with all that this pass has placed. holds: job → the GPUs that it holds, and its queue. A job
    without an entry belongs to no queue and is never stopped. outranked: names of the jobs that the class of
    the request may stop. outranking: those whose class may stop the request. They are never stopped for it,
    because both could then stop each other in turn. restarts: whether stopped jobs start again on what is left.
    Members of a gang that shrinks do not. closed: resource → free GPUs on nodes where no job starts.
    """

    standing: QueueStanding
    holds: Mapping[str, QueueHold]
    outranked: frozenset[str] = frozenset()
    outranking: frozenset[str] = frozenset()
    restarts: bool = True
    closed: Amounts = field(default_factory=dict)


def find_fair_victims(
    request: PlacementRequest,
    view: ClusterView,
    cost_gpu_s: Floats,
    options: Options,
    queues: Queues,
    host: HostAmounts | None = None,
    find: VictimSearcher = find_victims,
) -> ChosenVictims | NoVictims:
    """Return the cheapest set of victims that is fair in the final state.

    Jobs whose stop alone would be unfair never join. If a set takes too much from a queue, the search runs
    again without the victims that are too many, at most three times. The last time the queue gives no other
    jobs either. No search runs if the queue of the request may not hold its GPUs, whichever jobs stop. find: another
    search, for comparisons. The other arguments are those of `find_victims`.
    """
    verdict = FairnessVerdict(request, queues)
    if verdict.exceeds_quota_anyway(view, np.isfinite(cost_gpu_s)):
        return NoVictims("quota")
    cost = np.where(verdict.mask_givers(view.jobs, np.isfinite(cost_gpu_s)), cost_gpu_s, np.inf)
    protects = bool((np.isfinite(cost_gpu_s) & np.isinf(cost)).any())
    for number in range(1, MOST_SEARCHES + 1):
        found = find(request, view, cost, options, host)
        if isinstance(found, NoVictims):
            return replace(found, code="unfair") if found.code == "no_room" and protects else found
        jobs = [verdict.make_job(name, gpu_s) for name, gpu_s in zip(found.chosen.jobs, found.costs_gpu_s, strict=True)]
        giver = verdict.find_unfair_giver(jobs)
        if giver is None:
            return found if verdict.is_within_quota(jobs) else NoVictims("quota")
        excess = verdict.mask_excess(view.jobs, cost, giver, jobs, gives_others=number < MOST_SEARCHES - 1)
        cost[excess] = np.inf
        protects = True
    return NoVictims("unfair")


class FairnessVerdict:
    """The rule of fairness for one request. leaf: its queue. members, amounts: its smallest gang, and its GPUs."""

    def __init__(self, request: PlacementRequest, queues: Queues) -> None:
        self.queues, standing = queues, queues.standing
        self.leaf = standing.find_or_add_leaf(standing.tree.find_request_leaf(request)).name
        self.members = request.members.min
        self.amounts: Amounts = standing.compute_amounts(request, self.members)

    def make_job(self, name: str, cost_gpu_s: float) -> LeafJob:
        return LeafJob(name, self.queues.holds[name], cost_gpu_s, name in self.queues.outranked)

    def mask_givers(self, names: Sequence[str], wanted: Mask) -> Mask:
        """Return (j,) whether the stop of a job alone could be fair. Jobs of one leaf and size are alike.

        wanted: (j,) bool, the jobs that matter. The others get False.
        """
        known: dict[Hashable, bool] = {}
        alone = self._stop(self._list_own_outranked())
        alone.add_held(self.leaf, self.amounts)
        holds, outranking, outranked = self.queues.holds, self.queues.outranking, self.queues.outranked
        found = np.zeros(len(names), bool)
        for at in np.flatnonzero(wanted).tolist():
            name = names[at]
            hold = holds.get(name)
            if hold is None or name in outranking:
                continue
            alike = hold.leaf, *hold.amounts.items()  # far cheaper than the hold's own key
            is_fair = True if name in outranked else known.get(alike)
            if is_fair is None:
                alone.add_held(hold.leaf, hold.amounts, -1.0)
                is_fair = known[alike] = self._is_fair(alone, hold.leaf, hold.amounts)
                alone.add_held(hold.leaf, hold.amounts)
            found[at] = is_fair
        return found

    def _list_own_outranked(self) -> list[LeafJob]:
        """Return the jobs of the request's leaf that its class may stop. Their stop lowers its share."""
        holds = self.queues.holds
        return [self.make_job(name, 0.0) for name in sorted(self.queues.outranked) if name in holds
                and holds[name].leaf == self.leaf]  # fmt: skip

    def find_unfair_giver(self, victims: Sequence[LeafJob]) -> str | None:
        """Return the leaf from which a set of victims unfairly takes, the one that gives most of the cost.

        Returns None if the set is fair.
        """
        final = self._make_final(victims)
        lost: dict[str, float] = {}
        given: dict[str, set[str]] = {}
        for job in victims:
            if not job.outranked:
                lost[job.hold.leaf] = lost.get(job.hold.leaf, 0.0) + job.cost_gpu_s
                given.setdefault(job.hold.leaf, set()).update(job.hold.amounts)
        unfair = [leaf for leaf in lost if not self._is_fair(final, leaf, given[leaf])]
        return min(unfair, key=lambda leaf: (-lost[leaf], leaf), default=None)

    def mask_excess(
        self, names: Sequence[str], cost: Floats, giver: str, victims: Sequence[LeafJob], gives_others: bool = False
    ) -> Mask:
        """Return (j,) the jobs of a giver that may not be stopped, so that it gives no more than is fair.

        Its victims stay while they are fair together, the cheapest by GPU first. gives_others: whether its other
        jobs stay as well.
        """
        mine = [job for job in victims if job.hold.leaf == giver and not job.outranked]
        final = self._stop([job for job in victims if job.hold.leaf != giver or job.outranked])
        final.add_held(self.leaf, self.amounts)
        fair: list[LeafJob] = []
        given: set[str] = set()
        for job in sorted(mine, key=lambda job: (job.cost_gpu_s / max(job.hold.amounts.get(ANY, 0.0), ROUNDING), job)):
            final.add_held(giver, job.hold.amounts, -1.0)
            if self._is_fair(final, giver, given | job.hold.amounts.keys()):
                fair.append(job)
                given |= job.hold.amounts.keys()
            else:
                final.add_held(giver, job.hold.amounts)
        stay = set() if len(fair) == len(mine) else {job.name for job in fair}  # what comes back made it unfair
        if gives_others:
            stay |= set(names) - {job.name for job in mine}
        holds, outranked = self.queues.holds, self.queues.outranked
        protected = [
            np.isfinite(gpu_s) and holds[name].leaf == giver and name not in stay and name not in outranked
            for name, gpu_s in zip(names, cost, strict=True)
        ]
        return np.array(protected, bool)

    def _stop(self, victims: Sequence[LeafJob]) -> QueueStanding:
        """Return the standing without the victims."""
        left = self.queues.standing.copy()
        for job in victims:
            left.add_held(job.hold.leaf, job.hold.amounts, -1.0)
        return left

    def _make_final(self, victims: Sequence[LeafJob]) -> QueueStanding:
        """Return the standing once the request runs, and stopped jobs have started again on what is left.

        Of the jobs that still fit, the queue with the least share comes first.
        """
        final = self._stop(victims)
        final.add_held(self.leaf, self.amounts)
        waiting: dict[Hashable, list[LeafJob]] = {}
        for job in victims:
            waiting.setdefault(job.hold.key, []).append(job)
        while self.queues.restarts:
            fits = [
                jobs for jobs in waiting.values() if jobs and _has_capacity(final, jobs[0].hold, self.queues.closed)
            ]
            if not fits:
                break
            back = min(fits, key=lambda jobs: (_list_shares(final, jobs[0].hold.leaf), jobs[0].name)).pop(0)
            final.add_held(back.hold.leaf, back.hold.amounts)
        return final

    def is_within_quota(self, victims: Sequence[LeafJob]) -> bool:
        """Return whether the queue of the request may hold its GPUs once the victims have stopped."""
        return self._stop(victims).find_refusing_queue(self.leaf, self.amounts) is None

    def exceeds_quota_anyway(self, view: ClusterView, may_stop: Mask) -> bool:
        """Return whether the queue of the request may not hold its GPUs, whatever set of these jobs a search finds.

        A search stops no job that it does not need. So each victim holds GPUs of a node with a member, and there are
        no more victims than these nodes have GPUs. may_stop: (j,) bool. Returns False where jobs share GPUs.
        """
        standing = self.queues.standing
        if len(view.parts.gpu) or standing.find_refusing_queue(self.leaf, self.amounts) is None:
            return False
        holds = (self.queues.holds.get(name) for name in compress(view.jobs, may_stop))
        largest = max((hold.largest_amount for hold in holds if hold is not None), default=0.0)
        most = self.members * view.milli.shape[1] * largest
        return most > 0 and standing.is_refused_beyond(self.leaf, self.amounts, most)

    def _is_fair(self, final: QueueStanding, giver: str, resources: Iterable[str]) -> bool:
        """Return whether a leaf may give GPUs to the leaf of the request, given what both hold in the final state.

        giver: the leaf that gives. resources: the resources that it gives.
        """
        taking, giving = _find_branches(final, self.leaf, giver)
        if not giving:
            return False  # its own leaf, and its class may not stop the job
        if any(not _keeps_guarantee(stand, resources) for stand in giving):
            return False
        taker, top = taking[-1], giving[-1]
        within = taker.is_within_guarantee(dict.fromkeys(self.amounts, 0.0))
        return within or final.compute_share(taker) <= final.compute_share(top) + ROUNDING


def _find_branches(standing: QueueStanding, taker: str, giver: str) -> tuple[list[QueueTotals], list[QueueTotals]]:
    """Return both paths from the leaves up to where they leave each other. Both are empty for one leaf."""
    paths = [list(standing.find_or_add_leaf(leaf).path) for leaf in (taker, giver)]
    common = {stand.name for stand in paths[0]} & {stand.name for stand in paths[1]}
    taking, giving = ([stand for stand in path if stand.name not in common] for path in paths)
    return taking, giving


def _keeps_guarantee(stand: QueueTotals, resources: Iterable[str]) -> bool:
    """Return whether a queue still holds what it is guaranteed of the resources that it gives."""
    return all(stand.held.get(name, 0.0) >= stand.guaranteed.get(name, 0.0) - ROUNDING for name in resources)


def _has_capacity(standing: QueueStanding, hold: QueueHold, closed: Amounts) -> bool:
    """Return whether a stopped job could start again, by the number of free GPUs and the limits of its queues."""
    held, capacity = standing.stands[""].held, standing.capacity
    free = all(
        held.get(name, 0.0) + closed.get(name, 0.0) + gpus <= capacity.get(name, 0.0)
        for name, gpus in hold.amounts.items()
    )
    return free and standing.find_refusing_queue(hold.leaf, hold.amounts) is None


def _list_shares(standing: QueueStanding, leaf: str) -> list[float]:
    """Return the shares of the queues above a leaf and of itself, from the root's child down."""
    path = list(standing.find_or_add_leaf(leaf).path)[-2::-1]
    return [standing.compute_share(stand) for stand in path]
