"""Corrections that make a draft obey the rules of `queues.toml`, so that the file is never refused.

Each change gets a remark in the draft. Other schedulers accept queue trees that break these rules. For
example, children may be guaranteed more than their parent has, or more than its limit.
"""

import math

from fleetcast.schedulers.imports.draft import LEAST_GPUS, LEAST_WEIGHT, MOST_WEIGHT, Draft, DraftQueue

SMALLEST = 1e6  # parts of a GPU that a lowered guarantee is rounded down to


def correct_draft(draft: Draft) -> None:
    """Correct a draft so that it obeys the rules of `queues.toml`.

    Guarantees are lowered to limits. A parent's guarantee is raised to the sum of its children's. Classes
    with the name of a queue are renamed. Two classes never preempt each other.
    """
    for path, queue in draft.queues.items():
        _correct_queue(draft, path, queue)
    for path in draft.queues:  # parents first: what is lowered above is lowered below, too
        _lower_guarantees_below(draft, path)
    for path in reversed(draft.queues):
        _raise_guarantee_to_children(draft, path)
    _rename_classes(draft)
    _drop_unknown_classes(draft)
    _drop_preemption_cycles(draft)


def _correct_queue(draft: Draft, path: str, queue: DraftQueue) -> None:
    if not 0 <= queue.weight <= MOST_WEIGHT:
        raise queue.line.make_error(f"the weight of {path!r} is {queue.weight:g}, must lie in 0..{MOST_WEIGHT:g}")
    if queue.weight < LEAST_WEIGHT:
        draft.add_remark(f"weight 0 became {LEAST_WEIGHT:f}: the queue comes after its siblings", path)
        queue.weight = LEAST_WEIGHT
    for amounts in (queue.guaranteed, queue.limit, queue.lend, queue.borrow):
        amounts.update({name: 0.0 for name, gpus in amounts.items() if gpus < LEAST_GPUS})
    for name, gpus in queue.guaranteed.items():
        if gpus > queue.limit.get(name, math.inf):
            draft.add_remark("a guarantee above the limit was lowered to it", path)
            queue.guaranteed[name] = queue.limit[name]


def _sum_guarantee(draft: Draft, path: str, resource: str) -> float:
    """Return a queue's guarantee in GPUs, or the sum of its children's guarantees if that is more."""
    below = math.fsum(_sum_guarantee(draft, child, resource) for child in draft.list_children(path))
    return max(draft.queues[path].guaranteed.get(resource, 0.0), below)


def _lower_guarantees_below(draft: Draft, path: str) -> None:
    for resource, most in draft.queues[path].limit.items():
        promised = _sum_guarantees_below(draft, path, resource)
        if promised > most:
            draft.add_remark("guarantees below it were lowered: they were above its limit", path)
        while promised > most:
            scale = most / promised
            for name in draft.list_descendants(path):
                _scale_guarantee(draft.queues[name], resource, scale)
            promised = _sum_guarantees_below(draft, path, resource)


def _sum_guarantees_below(draft: Draft, path: str, resource: str) -> float:
    return math.fsum(_sum_guarantee(draft, child, resource) for child in draft.list_children(path))


def _scale_guarantee(queue: DraftQueue, resource: str, scale: float) -> None:
    if resource in queue.guaranteed:
        queue.guaranteed[resource] = math.floor(queue.guaranteed[resource] * scale * SMALLEST) / SMALLEST


def _raise_guarantee_to_children(draft: Draft, path: str) -> None:
    queue = draft.queues[path]
    children = [draft.queues[name].guaranteed for name in draft.list_children(path)]
    for resource in sorted({name for amounts in children for name in amounts}):
        promised = math.fsum(amounts.get(resource, 0.0) for amounts in children)
        own = queue.guaranteed.get(resource)
        if own is not None and promised > own * (1 + 1e-9):
            draft.add_remark("a guarantee below that of its queues was raised to their sum", path)
        queue.guaranteed[resource] = max(own or 0.0, promised)
    for name, gpus in queue.lend.items():
        if gpus > queue.guaranteed.get(name, 0.0):
            queue.lend[name] = queue.guaranteed.get(name, 0.0)
    if queue.credits and not queue.guaranteed:
        draft.add_remark("credits need a guarantee, and it has none", path)
        queue.credits = None


def _rename_classes(draft: Draft) -> None:
    """Rename each class that has the name of a queue. Otherwise the class would apply to that queue."""
    queues = {path.rpartition("/")[2] for path in draft.queues}
    for name in [name for name in draft.classes if name in queues]:
        other = f"{name}-class"
        while other in queues or other in draft.classes:
            other += "-"
        draft.add_remark("a class with the name of a queue has another name here", f"{name} is {other}")
        draft.classes[other] = draft.classes.pop(name)
        for found in draft.classes.values():
            found.preempts = tuple(other if one == name else one for one in found.preempts)
        for queue in draft.queues.values():
            queue.class_name = other if queue.class_name == name else queue.class_name


def _drop_unknown_classes(draft: Draft) -> None:
    for name, found in draft.classes.items():
        unknown = [one for one in found.preempts if one not in draft.classes]
        if unknown:
            draft.add_remark("it may preempt what is in none of the files", f"{name} ({', '.join(unknown)})")
        found.preempts = tuple(one for one in found.preempts if one in draft.classes)


def _drop_preemption_cycles(draft: Draft) -> None:
    """Drop each `preempts` entry that would let two classes stop each other's jobs."""
    wanted = {name: found.preempts for name, found in draft.classes.items()}
    for found in draft.classes.values():
        found.preempts = ()
    for name, others in wanted.items():
        for other in others:
            if name in _list_preempted_classes(draft, other):
                draft.add_remark("two classes cannot preempt each other: the first one read does", f"{name} ({other})")
            else:
                draft.classes[name].preempts += (other,)


def _list_preempted_classes(draft: Draft, name: str) -> set[str]:
    """Return a class, and all that it preempts directly or through others."""
    found, rest = {name}, [name]
    while rest:
        new = set(draft.classes[rest.pop()].preempts) - found
        found |= new
        rest += new
    return found
