"""The GPUs that actions free for one request: they are promised to it alone.

In the view of a pass such GPUs are held under the name `make_hold_name`. Only the pass's try of that request
removes this hold.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.actions.breaker import BreakerCapacity, BreakerLimits, CircuitBreaker
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.machines.words import format_count
from fleetcast.placement.plan.timeline import Hold, add_placements
from fleetcast.placement.queues.queues_ahead import QueueHold
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import ReclaimPolicy, join_some


def make_hold_name(request_id: str) -> str:
    """Return the name under which a view holds the GPUs that are promised to a request."""
    return f"promised to {request_id}"


def make_gang_hold_name(job: str) -> str:
    """Return the name under which a view holds the GPUs that an action promises to its own job."""
    return f"held for {job}"


@dataclass(frozen=True, slots=True)
class PromisedGpus:
    """The GPUs that are promised to a request.

    holds: the names of their holds in a view. stopping: the jobs that are asked to stop for it. shrinking: those that
    are asked to give up members. is_short: whether some job did not do so, and another set of jobs may be asked.
    """

    request: PlacementRequest
    holds: frozenset[str]
    stopping: frozenset[str] = frozenset()
    shrinking: frozenset[str] = frozenset()
    is_short: bool = False

    def release(self, view: ClusterView) -> ClusterView:
        """Return the view in which these GPUs are free."""
        return remove_jobs(view, self.holds)

    def release_all(self, view: ClusterView) -> ClusterView:
        """Return the view in which these GPUs, and those of the jobs that stop, are free."""
        return remove_jobs(view, self.holds | self.stopping)

    @property
    def sentence(self) -> str:
        jobs = sorted(self.stopping | self.shrinking)
        if not jobs:
            return "waits until the GPUs that are held for it are enough"
        verb = "makes" if len(jobs) == 1 else "make"
        return f"waits until {format_count(len(jobs), 'job')} {verb} room for it ({join_some(jobs)})"


Promises = Mapping[str, PromisedGpus]  # request_id → the GPUs that are promised to it


def hold_placement(view: ClusterView, request: PlacementRequest, ranks: Sequence[RankPlacement]) -> ClusterView:
    """Return the view in which the free GPUs of a future placement are held for its request."""
    return add_placements(view, [Hold(make_hold_name(request.request_id), ranks)])


def count_promises(
    standing: QueueStanding,
    holds: Mapping[str, QueueHold],
    leaving: Mapping[str, float],
    promises: Promises,
    placed: Collection[str] = (),
) -> QueueStanding:
    """Return the queues as they will be when all sent stops have happened and the requests with promises run.

    leaving: job → the share of its GPUs that it is asked to give up, also for a request that no longer waits. placed:
    ids of requests that the standing counts already.
    """
    if not leaving and not promises:
        return standing
    final = standing.copy()
    for job in leaving.keys() & holds.keys():
        final.add_held(holds[job].leaf, holds[job].amounts, -leaving[job])
    for request_id, promised in promises.items():
        if request_id in placed:
            continue
        leaf = final.find_or_add_leaf(final.tree.find_request_leaf(promised.request)).name
        final.add_held(leaf, final.compute_amounts(promised.request, promised.request.members.min))
    return final


@dataclass(frozen=True, slots=True)
class SendingBounds:
    """The bounds within which a pass lets executors stop jobs. stopped: why nothing is sent now, or ""."""

    policy: ReclaimPolicy
    capacity: BreakerCapacity
    limits: BreakerLimits
    stopped: str = ""

    def explain_bound(self, gpus_by_leaf: Mapping[str, float], now_ms: int) -> str:
        """Return the hourly limit that a set exceeds even if nothing else was taken, or ""."""
        return CircuitBreaker().explain_excess_of_set(gpus_by_leaf, now_ms, self.capacity, self.limits)

    def explain_advice(self, leaf_of: Mapping[str, str]) -> str:
        """Return why a set is only named and not sent, or "". leaf_of: job → its leaf."""
        if self.stopped:
            return self.stopped
        outside = sorted(job for job, leaf in leaf_of.items() if not self.policy.may_act_in(leaf))
        return f"act_in does not name the queue of {outside[0]}" if outside else ""
