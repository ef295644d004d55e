"""Import of Volcano's queues (scheduling.volcano.sh/v1beta1): volcano.sh/docs, "Queue Resource Management".

`deserved` becomes `guaranteed`: a queue gets this amount back from others, and lends it while it is idle. A
queue never lends its `guarantee`, so `lend` is `deserved` less `guarantee`. `capability` becomes `limit`. For
a queue without `capability`, the limit of its parent applies.
"""

from fleetcast.schedulers.imports.draft import (
    ANY,
    LONGEST_H,
    MOST_GPUS,
    MOST_WEIGHT,
    Draft,
    DraftQueue,
    Spell,
    make_queue_paths,
)
from fleetcast.schedulers.imports.kai import add_priority_classes, check_parents, read_queue_things
from fleetcast.schedulers.imports.kueue import is_gpu, record_unread_settings
from fleetcast.schedulers.imports.things import Fields, Thing

GROUP = "scheduling.volcano.sh/"
ROOT = "root"
STOPPED = ("Closed", "Closing")


def draft_volcano(files: dict[str, str], _spell: Spell) -> Draft:
    """Make a draft from these files (name → text). Raises ConfigError if a file is wrong."""
    draft = Draft("Volcano")
    draft.policy["half_life_h"] = LONGEST_H
    draft.add_remark(f"Volcano counts what is held, not the past: half_life_h is {LONGEST_H:.0f}; a week would be 168")
    things = read_queue_things(draft, files, GROUP)
    if len(things) > 1 and (root := things.pop(ROOT, None)):
        root.spec.drop_fields("weight")
        root.spec.drop_usual_value("reclaimable", "true", "false")
        record_unread_settings(draft, root)
    named = {name: thing.spec.pop_text("parent") for name, thing in things.items()}
    parents = check_parents(things, {name: "" if above == ROOT else above for name, above in named.items()})
    paths = make_queue_paths(parents, {name: thing.line for name, thing in things.items()})
    for name, path in paths.items():
        _fill_queue(draft, path, draft.add_queue(path, DraftQueue(things[name].line)), things[name])
    add_priority_classes(draft, {paths[name]: thing for name, thing in things.items()}, 0.0)
    for thing in things.values():
        record_unread_settings(draft, thing)
    return draft


def _fill_queue(draft: Draft, path: str, queue: DraftQueue, thing: Thing) -> None:
    spec = thing.spec
    queue.weight = spec.pop_amount("weight", 1.0, MOST_WEIGHT)
    reserved = _sum_gpus(spec.pop_table("guarantee").pop_table("resource"))
    deserved = _sum_gpus(spec.pop_table("deserved"))
    limit = _sum_gpus(spec.pop_table("capability"))
    if deserved is not None or reserved is not None:
        whole = max(deserved or 0.0, reserved or 0.0)
        queue.guaranteed = {ANY: whole}
        queue.lend = {ANY: whole - (reserved or 0.0)} if reserved else {}
    if limit is not None:
        queue.limit = {ANY: limit}
    if spec.pop_text("reclaimable", "true") == "false":
        draft.add_remark(
            "reclaimable false: others get back nothing of what it borrowed there, and here no job is stopped", path
        )
    if (state := thing.top.pop_table("status").pop_text("state", "Open")) in STOPPED:
        queue.is_closed = True
        draft.add_remark("closed: the queue takes no requests (max_waiting = 0)", f"{path} ({state})")


def _sum_gpus(resources: Fields) -> float | None:
    """Return the sum of the GPUs of all vendors in a list of resources, or None if the list has no GPUs."""
    named = [name for name in resources.held if is_gpu(name)]
    return sum(resources.pop_amount(name, 0.0, MOST_GPUS) for name in named) if named else None
