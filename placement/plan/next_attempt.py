"""The request of a running job's next attempt, as far as the running job shows it.

Recovery plans the missing members of a gang by it, and sampled futures let a stopped job wait by it.
"""

from collections.abc import Collection

import msgspec

from fleetcast.fleet.requests import Gang, PlacementRequest, TopologyConstraint
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.view import ClusterView


def make_next_attempt(
    jobs: RunningJobs, row: int, members: int, nodes: Collection[int], view: ClusterView, request_id: str
) -> PlacementRequest:
    """Return the request by which a running job would be placed again.

    It has the GPU model and the pool of its present nodes if all of them agree. members: how many run if its gang is
    not elastic. nodes: rows of the nodes that it holds.
    """
    models, pools = ({int(kind[at]) for at in nodes} for kind in (view.inventory.gpu_model, view.inventory.pool))
    known, pool = (found.pop() if len(found) == 1 else -1 for found in (models, pools))
    sizes = (int(jobs.gang_min[row]), int(jobs.gang_desired[row]), int(jobs.gang_step[row]))
    return PlacementRequest(
        request_id=request_id,
        job=jobs.names[row],
        attempt=int(jobs.attempt[row]),
        gang=Gang(*sizes) if 0 < sizes[0] < sizes[1] else members,
        gpu_models=(view.inventory.gpu_models[known],) if known >= 0 else (),
        pool=view.inventory.pools[pool] if pool >= 0 else "",
        topology=msgspec.convert({"required": jobs.required_level[row] or None}, TopologyConstraint),
    )
