"""How much a queue may have as it is defined: every size is tried, and every reserve is added up from the leaves."""

from typing import Any

from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.placement.queues.standing import QueueStanding, QueueTotals, format_gpus


def limit_plainly(standing: QueueStanding, request: PlacementRequest) -> tuple[int, str]:
    """Return the largest size that a gang may have, or 0 and why not even the smallest may start."""
    gang: Gang = request.members
    for size in range(gang.desired, gang.min - 1, -gang.step):
        why = explain_plainly(standing, request.queue, standing.compute_amounts(request, size))
        if not why:
            return size, ""
    return 0, why


def list_queues_above(standing: QueueStanding, leaf: str) -> list[QueueTotals]:
    """Return a queue and those above it."""
    found = [standing.stands[leaf]]
    while (above := found[-1].parent) is not None:
        found.append(above)
    return found


def explain_plainly(standing: QueueStanding, leaf: str, amounts: dict[str, float]) -> str:
    path = list_queues_above(standing, leaf)
    for stand in path:
        for name, gpus in amounts.items():
            held, most = stand.held.get(name, 0.0), stand.node.find_limit(name) if stand.node else float("inf")
            if held + gpus > most:
                said = f"{held:g} of {format_gpus(name, most)} held, {gpus:g} wanted"
                return f"queue {stand.name!r} is at its limit: {said}"
    if all(stand.is_within_guarantee(amounts) for stand in path if stand.node and stand.name):
        return ""
    for name, gpus in amounts.items():
        room = standing.capacity.get(name, 0.0) - add_up_reserve(standing.stands[""], name, gpus, path)
        if name in standing.tree.resources and room < 0:
            lent = f"{max(0.0, room + gpus):g}"
            return f"queue {leaf!r} wants {format_gpus(name, gpus)} more, and others leave it {lent} now"
    return ""


def add_up_reserve(stand: QueueTotals, name: str, gpus: float, path: list[Any]) -> float:
    """Return the GPUs that nobody else may have than a queue, if all of `path` held so many more."""
    more = gpus if any(stand is above for above in path) else 0.0
    children = sum(add_up_reserve(child, name, gpus, path) for child in stand.children)
    return max(stand.compute_own_amount(name), stand.held.get(name, 0.0) + more, children)
