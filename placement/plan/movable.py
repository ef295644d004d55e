"""The running jobs that may move to other nodes, and the requests by which they are placed again."""

import math
from collections.abc import Collection

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.machines.running_jobs import PREEMPTIBLE, PROTECTED, RunningJobs
from fleetcast.placement.machines.slots import WHOLE, list_held_parts
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.queues.tree import QueueTree

MOST_NAME = 200  # characters of a request's id


def mask_movable(jobs: RunningJobs, tree: QueueTree, now_ms: int, barred: Collection[str] = ()) -> NDArray[np.bool_]:
    """Return (j,) whether each job may be stopped to start again elsewhere.

    The owner or the queue may forbid it. The bounds of `ReclaimPolicy` on stops count as well. Jobs of no queue of
    the tree do not move. barred: further jobs that do not.
    """
    policy, found = tree.policy.reclaim, np.zeros(len(jobs), bool)
    for row, (name, leaf, preemptible) in enumerate(zip(jobs.names, jobs.leaf, jobs.preemptible.tolist(), strict=True)):
        queue = leaf if leaf in tree.row else leaf.rpartition("/")[0]  # a user's leaf is below its queue
        if not queue or queue not in tree.row or name in barred or preemptible == PROTECTED:
            continue
        found[row] = preemptible == PREEMPTIBLE or tree.find_node(queue).preemptible != "none"
    is_old = (jobs.started_ms >= 0) & (now_ms - jobs.started_ms >= 1000 * policy.min_run_s)
    return np.asarray(found & is_old & (jobs.stops < policy.stops_a_day))


def make_job_shapes(jobs: RunningJobs, view: ClusterView) -> dict[str, PlacementRequest]:
    """Return job → the request for the same members on nodes of the same model and pool.

    Jobs whose shape is not known are left out: those that share GPUs, and those whose members are of unknown size and
    hold different numbers of GPUs on their nodes.
    """
    parts, g = list_held_parts(view.holders, view.parts), view.milli.shape[1]
    first = np.searchsorted(parts.job, np.arange(len(view.jobs) + 1))
    shared = np.zeros(len(view.jobs), bool)
    shared[parts.job[parts.milli < WHOLE]] = True
    found: dict[str, PlacementRequest] = {}
    for number, name in enumerate(view.jobs):
        row, (begin, end) = jobs.row.get(name, -1), first[number : number + 2].tolist()
        if row < 0 or begin == end or shared[number]:
            continue
        nodes, held = np.unique(parts.gpu[begin:end] // g, return_counts=True)
        each = int(jobs.gpus_per_member[row]) or int(held[0])
        if not (held % each).any() and (int(jobs.gpus_per_member[row]) or (held == each).all()):
            found[name] = _make_shape(jobs, row, view, nodes, each, int(held.sum()) // each)
    return found


def _make_shape(
    jobs: RunningJobs, row: int, view: ClusterView, nodes: NDArray[np.int64], each: int, members: int
) -> PlacementRequest:
    inventory, name = view.inventory, jobs.names[row]
    models, pools = (set(codes[nodes].tolist()) for codes in (inventory.gpu_model, inventory.pool))
    cpus, memory_gib = float(jobs.cpus_per_member[row]), float(jobs.host_memory_gib_per_member[row])
    return PlacementRequest(
        request_id=f"move {name}"[:MOST_NAME],
        job=name,
        attempt=int(jobs.attempt[row]),
        queue=jobs.leaf[row].removesuffix(f"/{jobs.user[row]}") if jobs.user[row] else jobs.leaf[row],
        user=jobs.user[row],
        preemptible=None if jobs.preemptible[row] < 0 else bool(jobs.preemptible[row]),
        gang=members,
        gpus_per_node=each,
        gpu_models=tuple(inventory.gpu_models[code] for code in sorted(models) if code >= 0),
        pool=inventory.pools[pools.pop()] if len(pools) == 1 and min(pools) >= 0 else "",
        cpus=math.ceil(cpus) if cpus > 0 else None,
        host_memory_gib=memory_gib if memory_gib > 0 else None,
        topology=msgspec.convert({"required": jobs.required_level[row] or None}, TopologyConstraint),
    )
