"""Import of the KAI Scheduler's queues (scheduling.run.ai/v2). Sources: its docs/queues and queue_types.go.

`quota` becomes `guaranteed`. A quota of -1 means that there is no bound. GPUs beyond quotas are shared
by `overQuotaWeight`, and a queue of weight 0 gets none. A `limit` of -1 means no limit. If the limit is 0 or
missing, the queue gets no more than its quota. `lendingLimit` becomes `lend`. In KAI a higher `priority` goes
first only for GPUs beyond the quotas. Here its class goes first within the quotas, too.
"""

from fleetcast.schedulers.imports.draft import (
    ANY,
    LONGEST_H,
    MOST_GPUS,
    MOST_PRIORITY,
    MOST_WEIGHT,
    Draft,
    DraftClass,
    DraftQueue,
    SourceLine,
    Spell,
    make_queue_paths,
)
from fleetcast.schedulers.imports.kueue import record_unread_settings
from fleetcast.schedulers.imports.things import Fields, Thing, read_things

GROUP = "scheduling.run.ai/"
USUAL_PRIORITY = 100.0


def draft_kai(files: dict[str, str], _spell: Spell) -> Draft:
    """Make a draft from these files (name → text). Raises ConfigError if a file is wrong."""
    draft = Draft("the KAI Scheduler")
    draft.policy["half_life_h"] = LONGEST_H
    draft.add_remark(f"KAI counts past use only if configured: half_life_h is {LONGEST_H:.0f}; a week would be 168")
    things = read_queue_things(draft, files, GROUP)
    paths = make_queue_paths(
        check_parents(things, {name: thing.spec.pop_text("parentQueue") for name, thing in things.items()}),
        {name: thing.line for name, thing in things.items()},
    )
    for name, path in paths.items():
        _fill_queue(draft, path, draft.add_queue(path, DraftQueue(things[name].line)), things[name].spec)
    add_priority_classes(draft, {paths[name]: thing for name, thing in things.items()}, USUAL_PRIORITY)
    for thing in things.values():
        record_unread_settings(draft, thing)
    return draft


def read_queue_things(draft: Draft, files: dict[str, str], group: str) -> dict[str, Thing]:
    """Return name → object, for objects of the kind Queue. Add a remark about each other object to the draft.

    Raises ConfigError if there is no queue.
    """
    found: dict[str, Thing] = {}
    for file, text in files.items():
        for thing in read_things(file, text):
            if thing.kind != "Queue" or not thing.version.startswith(group):
                draft.add_remark(f"objects of the kind {thing.kind} ({thing.version})", thing.name)
            elif thing.name in found:
                raise thing.line.make_error(f"{thing.top.name} is there twice, first in {found[thing.name].line}")
            else:
                found[thing.name] = thing
    if not found:
        raise SourceLine(next(iter(files))).make_error(f"there is no Queue of {group}… among the files")
    return found


def check_parents(things: dict[str, Thing], parents: dict[str, str]) -> dict[str, str]:
    """Return `parents` unchanged. Raises ConfigError if a parent is in none of the files."""
    for name, above in parents.items():
        if above and above not in things:
            raise things[name].line.make_error(f"Queue {name} is below {above!r}, which is in none of the files")
    return parents


def _fill_queue(draft: Draft, path: str, queue: DraftQueue, spec: Fields) -> None:
    if not spec.has_value("resources"):
        draft.add_remark("queues without resources: no guarantee, no limit", path)
        return
    resources = spec.pop_table("resources")
    for other in ("cpu", "memory"):
        declared = resources.pop_table(other)
        declared.drop_usual_value("quota", "-1", "0")
        declared.drop_usual_value("limit", "-1")
        declared.drop_fields("overQuotaWeight")
    gpu = resources.pop_table("gpu")
    quota, limit = _read_bound(gpu, "quota"), _read_bound(gpu, "limit")
    queue.weight = gpu.pop_amount("overQuotaWeight", 0.0, MOST_WEIGHT)
    if queue.weight == 0:
        queue.weight = 1.0
        if quota is not None:
            queue.borrow = {ANY: 0.0}
            draft.add_remark("overQuotaWeight 0: nothing is borrowed", path)
    if quota is None:
        draft.add_remark("a quota of -1: no guarantee is without bound here, so it has none", path)
    elif quota:
        queue.guaranteed = {ANY: quota}
    if limit is not None:
        queue.limit = {ANY: max(limit, quota or 0.0)}
    if gpu.has_value("lendingLimit") and queue.guaranteed:
        queue.lend = {ANY: gpu.pop_amount("lendingLimit", 0.0, MOST_GPUS)}


def _read_bound(gpu: Fields, key: str) -> float | None:
    """Return a bound in GPUs, or None for -1 (no bound)."""
    if gpu.held.get(key) and gpu.held[key].format_value() == "-1":
        gpu.drop_fields(key)
        return None
    return gpu.pop_amount(key, 0.0, MOST_GPUS)


def add_priority_classes(draft: Draft, things: dict[str, Thing], usual: float) -> None:
    """Add a class for each priority, unless all queues have the same.

    usual: the priority of a queue that states none.
    """
    found = {path: thing.spec.pop_number("priority", usual) for path, thing in things.items()}
    for path, priority in found.items():
        if priority != int(priority) or abs(priority) > MOST_PRIORITY:
            raise things[path].line.make_error(f"priority {priority:g} of {path!r} is no priority")
    if len(set(found.values())) < 2:
        return
    draft.add_remark("priority is a class here: it goes before shares and guarantees, and only that of a leaf counts")
    for priority in sorted(set(found.values()), reverse=True):
        draft.classes[f"priority-{priority:.0f}"] = DraftClass(int(priority))
    for path, priority in found.items():
        draft.queues[path].class_name = f"priority-{priority:.0f}"
