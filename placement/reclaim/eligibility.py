"""The running jobs that may be stopped for a request, and why the others may not.

A request takes back from queues that hold more than their guarantee. A class may also stop the jobs of the
classes and queues that it `preempts`. Nothing is taken from a job whose owner forbids it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.machines.running_jobs import PREEMPTIBLE, PROTECTED, RunningJobs
from fleetcast.placement.queues.standing import QueueStanding, QueueTotals
from fleetcast.placement.queues.tree import ANY, QueueTree, ReclaimPolicy, is_at_or_below


class Eligibility(IntEnum):
    """The permission to stop a running job for a request. Negative values are reasons why it may not be stopped."""

    RECLAIM = 1  # its queue holds more than its guarantee
    PREEMPT = 2  # the class of the request preempts it
    OTHER_SCHEDULER = -1  # it belongs to no queue of the file
    OPTED_OUT = -2  # its owner, or the setting of its queue, forbids it
    WITHIN_GUARANTEE = -3  # its queue holds no more than its guarantee
    OWN_QUEUE = -4  # it runs in the queue of the request
    YOUNG = -5  # it has not run for `min_run_s`, or its start is unknown
    STOPPED_OFTEN = -6  # it was stopped `stops_a_day` times already
    OUTRANKS = -7  # its class preempts the request, so that both could stop each other in turn
    NO_EXECUTOR = -8  # no executor can stop it
    IN_ACTION = -9  # an executor carries out an action on it
    FAILED = -10  # an executor did not stop it for this request
    UNSIZED = -11  # the number of its GPUs is unknown, so that its stop would seem to cost nothing


_SENTENCES = {
    Eligibility.OTHER_SCHEDULER: "in no queue of the file",
    Eligibility.OPTED_OUT: "protected by owner or queue",
    Eligibility.WITHIN_GUARANTEE: "within the guarantee of the queue",
    Eligibility.OWN_QUEUE: "of the same queue",
    Eligibility.YOUNG: "with too short a run yet",
    Eligibility.STOPPED_OFTEN: "stopped often enough today",
    Eligibility.OUTRANKS: "of a class that goes before it",
    Eligibility.NO_EXECUTOR: "that no executor can stop",
    Eligibility.IN_ACTION: "on which another action is open",
    Eligibility.FAILED: "that did not stop when asked",
    Eligibility.UNSIZED: "of unknown size",
}


@dataclass(frozen=True, slots=True)
class Taker:
    """A request for which jobs may be stopped.

    leaf: the leaf queue in which it waits. classes: its own class and that of its queue, as far as the file has
    them. preempts: the classes and queues whose jobs the first of these classes may stop.
    """

    request: PlacementRequest
    leaf: str
    classes: tuple[str, ...] = ()
    preempts: tuple[str, ...] = ()


def make_taker(request: PlacementRequest, tree: QueueTree) -> Taker:
    """Return the taker of a request of the tree, with what its class preempts.

    Its class is the one that it names, or else that of its queue.
    """
    leaf = tree.find_request_leaf(request)
    named = (request.class_, tree.list_path(leaf)[0].class_name)
    classes = tuple(name for name in named if name in tree.classes)
    return Taker(request, leaf, classes, tree.classes[classes[0]].preempts if classes else ())


def compute_eligibility(
    jobs: RunningJobs,
    taker: Taker,
    standing: QueueStanding,
    policy: ReclaimPolicy,
    now_ms: int,
    barred: Mapping[str, Eligibility] | None = None,
) -> NDArray[np.int8]:
    """Return (j,) Eligibility of each running job.

    Where several reasons forbid a stop, the first of this order counts: no queue, the owner's will, the rules of
    the queues, an unknown size, the bounds of time, and `barred`: job → why nobody can stop it now.
    """
    by_kind: dict[tuple[str, str, int], int] = {}
    found = np.empty(len(jobs), np.int8)
    for row, kind in enumerate(zip(jobs.leaf, jobs.job_class, jobs.preemptible.tolist(), strict=True)):
        code = by_kind.get(kind)
        if code is None:
            code = by_kind[kind] = _find_rule(*kind, taker, standing)
        found[row] = code
    may = found > 0
    for name, code in (barred or {}).items():
        if (at := jobs.row.get(name)) is not None and may[at]:
            found[at] = code
    age_s = np.where(jobs.started_ms >= 0, (now_ms - jobs.started_ms) / 1000, -np.inf)
    found[may & (jobs.stops >= policy.stops_a_day)] = Eligibility.STOPPED_OFTEN
    found[may & (age_s < policy.min_run_s)] = Eligibility.YOUNG
    found[may & (jobs.gpus <= 0)] = Eligibility.UNSIZED
    return found


def _find_rule(leaf: str, job_class: str, preemptible: int, taker: Taker, standing: QueueStanding) -> Eligibility:
    """Return what the rules of the queues say about the jobs of one leaf and class."""
    tree = standing.tree
    queue = leaf if leaf in tree.row else leaf.rpartition("/")[0]  # a user's leaf is below its queue
    if not queue or queue not in tree.row:
        return Eligibility.OTHER_SCHEDULER
    node = tree.find_node(queue)
    if preemptible == PROTECTED or (node.preemptible == "none" and preemptible != PREEMPTIBLE):
        return Eligibility.OPTED_OUT
    theirs = [tree.classes[name].preempts for name in (job_class, node.class_name) if name in tree.classes]
    if any(name in taker.classes or is_at_or_below(taker.leaf, name) for names in theirs for name in names):
        return Eligibility.OUTRANKS
    giver = list_giving_queues(leaf, taker.leaf, standing)
    borrows = bool(giver) and all(compute_borrowed_gpus(stand) > 0 for stand in giver)
    preempted = any(name in (job_class, node.class_name) or is_at_or_below(leaf, name) for name in taker.preempts)
    if preempted and (borrows or node.preemptible == "all" or preemptible == PREEMPTIBLE):
        return Eligibility.PREEMPT
    if not giver:
        return Eligibility.OWN_QUEUE
    return Eligibility.RECLAIM if borrows else Eligibility.WITHIN_GUARANTEE


def list_giving_queues(leaf: str, taker_leaf: str, standing: QueueStanding) -> list[QueueTotals]:
    """Return the queues that lose GPUs to a taker if a job of `leaf` stops: those that the taker's leaf is not below.

    The leaf comes first. The list is empty if both are the same leaf.
    """
    shared = {stand.name for stand in standing.find_or_add_leaf(taker_leaf).path}
    return [stand for stand in standing.find_or_add_leaf(leaf).path if stand.name not in shared]


def compute_borrowed_gpus(stand: QueueTotals) -> float:
    """Return how many GPUs a queue holds beyond its guarantee. A queue without a guarantee borrows all of them."""
    held = stand.held.get(ANY, 0.0)
    if ANY in stand.guaranteed:
        return max(0.0, held - stand.guaranteed[ANY])
    return max(0.0, held - sum(min(gpus, stand.held.get(model, 0.0)) for model, gpus in stand.guaranteed.items()))


def explain_no_victims(eligibility: NDArray[np.int8]) -> str:
    """Describe why running jobs may not be stopped, the commonest reason first. Returns "" if all may be.

    >>> explain_no_victims(np.array([-5, -3, -3, 1], np.int8))
    '2 jobs within the guarantee of the queue, 1 job with too short a run yet'
    """
    counts = Counter(Eligibility(code) for code in eligibility[eligibility < 0].tolist())
    return ", ".join(
        f"{count:,} {'job' if count == 1 else 'jobs'} {_SENTENCES[code]}" for code, count in counts.most_common()
    )
