"""The walk over a tree of queues as it is defined: one entry after the other, from the root to the least share."""

from collections import deque
from typing import Any

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.queues.standing import QueueStanding, QueueTotals
from fleetcast.placement.queues.tree import ROOT


def walked(standing: QueueStanding, queue: list[Any]) -> list[Any]:
    """Entries in order, by arrival within a leaf; those of no queue are last."""
    entries = sorted(queue, key=lambda entry: (-entry.request.priority, entry.queued_ms, entry.request.request_id))
    leaves: dict[str, deque[Any]] = {}
    for entry in entries:
        leaves.setdefault(standing.tree.find_known_leaf(entry.request), deque()).append(entry)
    outside = list(leaves.pop(ROOT, ()))
    priorities = {name: standing.tree.list_path(name)[0].priority for name in leaves}
    given: dict[str, dict[str, float]] = {}
    found = []
    for priority in sorted(set(priorities.values()), reverse=True):
        mine = {name: entries for name, entries in leaves.items() if priorities[name] == priority}
        while any(mine.values()):
            found.append(_next(standing, mine, given))
    return found + outside


def _next(standing: QueueStanding, leaves: dict[str, deque[Any]], given: dict[str, dict[str, float]]) -> Any:
    """Who is next, taken out of his leaf."""
    stand = standing.stands[ROOT]
    while stand.name not in leaves:
        lines = {_child(stand, standing.find_or_add_leaf(name)) for name, waiting in leaves.items() if waiting} - {None}
        heads = [(_key(standing, standing.stands[name], leaves, given), name) for name in lines if name]
        stand = standing.stands[min(heads)[1]]
    entry = leaves[stand.name].popleft()
    amounts = standing.compute_amounts(entry.request, entry.request.members.min)
    if all(
        amounts.get(name, 0.0) <= above.find_limit(name) - above.held.get(name, 0.0)
        for above in stand.path
        for name in standing.tree.resources
    ):
        for above in stand.path:
            mine = given.setdefault(above.name, {})
            for name, gpus in amounts.items():
                mine[name] = mine.get(name, 0.0) + gpus
    return entry


def _child(stand: QueueTotals, leaf: QueueTotals) -> str | None:
    """Which child of a queue is above a leaf, or is it."""
    path = list(leaf.path)
    names = [one.name for one in path]
    return names[names.index(stand.name) - 1] if stand.name in names[1:] else None


def _key(
    standing: QueueStanding, stand: QueueTotals, leaves: dict[str, deque[Any]], given: dict[str, dict[str, float]]
) -> tuple[float, int, str]:
    head = _head(standing, stand, leaves, given)
    request: PlacementRequest = head.request
    more = dict(given.get(stand.name, {}))
    for name, gpus in standing.compute_amounts(request, request.members.min).items():
        more[name] = more.get(name, 0.0) + gpus
    return standing.compute_share(stand, more), head.queued_ms, stand.name


def _head(
    standing: QueueStanding, stand: QueueTotals, leaves: dict[str, deque[Any]], given: dict[str, dict[str, float]]
) -> Any:
    if stand.name in leaves:
        return leaves[stand.name][0]
    lines = {_child(stand, standing.find_or_add_leaf(name)) for name, waiting in leaves.items() if waiting} - {None}
    best = min((_key(standing, standing.stands[name], leaves, given), name) for name in lines if name)[1]
    return _head(standing, standing.stands[best], leaves, given)
