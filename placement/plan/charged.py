"""The charge of a placement: the GPUs that it holds, and the queue and user that it belongs to."""

from collections.abc import Iterable

from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.plan.turns import list_placed_gpus
from fleetcast.placement.queues.charges import Charge, HeldGpus


def make_placement_charge(
    request: PlacementRequest,
    decision: Decision,
    leaf: str,
    view: ClusterView,
    run_times: RunTimeQuantiles,
    now_ms: int,
    queued_ms: int | None = None,
) -> Charge:
    """Return the charge for a placement that begins now: its GPUs, queue leaf and expected run time."""
    return Charge(
        charge_id=0,
        request_id=request.request_id,
        job=request.job_name,
        attempt=request.attempt,
        leaf=leaf,
        user=request.user,
        class_=request.class_,
        held=sum_held_gpus((node.pool, node.gpu_model, gpus) for node, gpus in list_placed_gpus(decision, view)),
        expected_s=run_times.estimate_run_s(
            sum(len(rank.gpus) for rank in decision.ranks), 0.5, limit_s=request.limit_s
        ),
        queued_ms=now_ms if queued_ms is None else queued_ms,
        held_ms=now_ms,
    )


def sum_held_gpus(rows: Iterable[tuple[str, str, float]]) -> tuple[HeldGpus, ...]:
    """Sum GPUs by pool and model.

    >>> sum_held_gpus([("a", "H100", 8.0), ("a", "H100", 8.0)])
    (HeldGpus(pool='a', model='H100', gpus=16.0),)
    """
    found: dict[tuple[str, str], float] = {}
    for pool, model, gpus in rows:
        found[pool, model] = found.get((pool, model), 0.0) + gpus
    return tuple(HeldGpus(pool, model, gpus) for (pool, model), gpus in sorted(found.items()))
