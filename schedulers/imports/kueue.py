"""Import of Kueue's ClusterQueues and Cohorts (v1beta1 and v1beta2 of kueue.x-k8s.io).

It also reads Cohorts of v1alpha1. `nominalQuota` is a guarantee, `borrowingLimit` and
`lendingLimit` are `borrow` and `lend`. Queues do not borrow across the trees of Cohorts. So the
limit of a root is the quota of its whole tree. The limit of a ClusterQueue without a Cohort is its
own quota. A Cohort's own quota is a pool that its queues share. Here it is a guarantee of the
parent (kueue.sigs.k8s.io/docs/concepts/cohort). Quotas are by ResourceFlavor. Its node labels name
the GPU model.

Kueue's fair sharing prefers the queue with the least share: its usage beyond its quota, over what
can be lent, by weight (kueue.sigs.k8s.io/docs/concepts/fair_sharing). It counts present usage only.
So past use has no weight here, unless admission fair sharing has a half-life.
"""

import math
import re
from dataclasses import dataclass, field

from fleetcast.fleet.gpu_resources import is_gpu_resource
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
    is_name,
    make_path_part,
    make_queue_paths,
)
from fleetcast.schedulers.imports.things import Fields, Thing, read_things

GROUP, CONFIG = "kueue.x-k8s.io/", "config.kueue.x-k8s.io/"
VERSIONS = ("v1alpha1", "v1beta1", "v1beta2")
MODEL_LABELS = (
    "nvidia.com/gpu.product",
    "amd.com/gpu.product-name",
    "cloud.google.com/gke-accelerator",
    "karpenter.k8s.aws/instance-gpu-name",
)
BY_USE = "UsageBasedAdmissionFairSharing"
KINDS = ("ClusterQueue", "Cohort", "LocalQueue", "ResourceFlavor", "WorkloadPriorityClass", "Configuration")
_DURATION = re.compile(r"(?:(\d{1,9}(?:\.\d+)?)h)?(?:(\d{1,9}(?:\.\d+)?)m)?(?:(\d{1,9}(?:\.\d+)?)s)?", re.ASCII)


@dataclass(slots=True)
class FlavorQuota:
    """The quota of one flavor in GPUs. borrowing, lending: None for no limit."""

    model: str  # "" where the flavor's labels do not tell
    nominal: float
    borrowing: float | None
    lending: float | None


@dataclass(slots=True)
class _KueueObjects:
    """The objects in the files, by kind and name, and values that are computed from them."""

    things: dict[str, dict[str, Thing]] = field(default_factory=dict)
    quotas: dict[str, list[FlavorQuota]] = field(default_factory=dict)  # by path
    by_use: dict[str, str] = field(default_factory=dict)  # ClusterQueues whose LocalQueues share → path

    def get_things(self, kind: str) -> dict[str, Thing]:
        return self.things.get(kind, {})


def draft_kueue(files: dict[str, str], spell: Spell) -> Draft:
    """Make a draft from these files (name → text). Raises ConfigError if a file is wrong."""
    draft, found = Draft("Kueue"), _KueueObjects()
    for file, text in files.items():
        for thing in read_things(file, text):
            _add_thing(draft, found, thing)
    if not found.get_things("ClusterQueue"):
        raise SourceLine(next(iter(files))).make_error("there is no ClusterQueue among the files")
    models = {name: _read_gpu_model(draft, thing, spell) for name, thing in found.get_things("ResourceFlavor").items()}
    _add_queues(draft, found, models)
    _set_amounts(draft, found, set(models.values()) - {""})
    _add_local_queues(draft, found)
    for thing in found.get_things("WorkloadPriorityClass").values():
        value = thing.top.pop_number("value", 0)
        if value != int(value) or abs(value) > MOST_PRIORITY:
            raise thing.line.make_error(f"{thing.top.name}: value {value:g} is no priority")
        thing.top.drop_fields("description")
        draft.classes[thing.name] = DraftClass(int(value))
    _set_policy(draft, found)
    for kind in KINDS:
        for thing in found.get_things(kind).values():
            record_unread_settings(draft, thing)
    return draft


def _add_thing(draft: Draft, found: _KueueObjects, thing: Thing) -> None:
    ours = thing.version.startswith(GROUP) or (thing.kind == "Configuration" and thing.version.startswith(CONFIG))
    if not ours or thing.kind not in KINDS:
        draft.add_remark(f"objects of the kind {thing.kind}", thing.name)
        return
    if thing.version.rpartition("/")[2] not in VERSIONS:
        raise thing.line.make_error(f"{thing.top.name} is of {thing.version}; read are {', '.join(VERSIONS)}")
    key = f"{thing.namespace}/{thing.name}" if thing.kind == "LocalQueue" else thing.name
    known = found.things.setdefault(thing.kind, {})
    if key in known:
        raise thing.line.make_error(f"{thing.top.name} is there twice, first in {known[key].line}")
    known[key] = thing


def record_unread_settings(draft: Draft, thing: Thing) -> None:
    """Add a remark to the draft for each setting of an object that has no counterpart in Fleetcast."""
    thing.top.drop_fields("status")
    for key, value in thing.top.list_unread_fields():
        if not key.startswith("metadata."):
            draft.add_remark(f"{thing.kind} {key}", f"{thing.name} ({value[:60]})" if thing.name else value[:60])


def _read_gpu_model(draft: Draft, flavor: Thing, spell: Spell) -> str:
    labels = flavor.spec.pop_table("nodeLabels")
    for label in MODEL_LABELS:
        if model := labels.pop_text(label):
            if not is_name(model):
                raise flavor.line.make_error(f"{label} of {flavor.top.name} is {model[:60]!r}, which is no name")
            return spell(model)
    draft.add_remark("ResourceFlavors whose node labels name no GPU model: their quotas count GPUs of any", flavor.name)
    return ""


def _add_queues(draft: Draft, found: _KueueObjects, models: dict[str, str]) -> None:
    """Add the Cohorts, including those that are only mentioned, and then the ClusterQueues."""
    parents, lines = {}, {}
    for name, thing in found.get_things("Cohort").items():
        parents[name] = thing.spec.pop_text("parentName") or thing.spec.pop_text("parent")
        lines[name] = thing.line
    joins = {
        name: thing.spec.pop_text("cohortName") or thing.spec.pop_text("cohort")
        for name, thing in found.get_things("ClusterQueue").items()
    }
    for name, thing in found.get_things("ClusterQueue").items():
        lines.setdefault(joins[name], thing.line)
    for name, above in list(parents.items()):
        if above:
            parents.setdefault(above, "")
            lines.setdefault(above, lines[name])
    for above in filter(None, joins.values()):
        parents.setdefault(above, "")
    paths = make_queue_paths(parents, lines)
    for name, path in paths.items():
        queue = draft.add_queue(path, DraftQueue(lines[name], says=f"Cohort {name}"))
        if name in found.get_things("Cohort"):
            _fill_queue(draft, found, path, queue, found.get_things("Cohort")[name], models)
    for name, thing in found.get_things("ClusterQueue").items():
        path = f"{paths[joins[name]]}/{make_path_part(name)}" if joins[name] else make_path_part(name)
        while path in draft.queues:
            draft.add_remark(
                "a ClusterQueue with the name of a Cohort has another name here", f"{path} is {path}-queue"
            )
            path += "-queue"
        _fill_queue(
            draft,
            found,
            path,
            draft.add_queue(path, DraftQueue(thing.line, says=f"ClusterQueue {name}")),
            thing,
            models,
        )
        _set_queue_policy(draft, found, path, thing)


def _fill_queue(
    draft: Draft, found: _KueueObjects, path: str, queue: DraftQueue, thing: Thing, models: dict[str, str]
) -> None:
    queue.weight = thing.spec.pop_table("fairSharing").pop_amount("weight", 1.0, MOST_WEIGHT)
    found.quotas[path] = [
        quota
        for group in thing.spec.pop_rows("resourceGroups")
        for flavor in group.pop_rows("flavors")
        for quota in _read_flavor_quotas(draft, path, flavor, models)
    ]
    for group in thing.spec.below:
        group.drop_fields("coveredResources")


def _read_flavor_quotas(draft: Draft, path: str, flavor: Fields, models: dict[str, str]) -> list[FlavorQuota]:
    name, quotas = flavor.pop_text("name"), []
    for row in flavor.pop_rows("resources"):
        resource = row.pop_text("name")
        if not is_gpu(resource):
            draft.add_remark(
                "quotas of other than GPUs", f"{path} ({resource} {row.pop_text('nominalQuota', '0')} of {name})"
            )
            row.drop_fields("borrowingLimit", "lendingLimit")
            continue
        if name not in models:
            draft.add_remark("flavors without their ResourceFlavor among the files: GPUs of any model", name)
        nominal = row.pop_amount("nominalQuota", 0.0, MOST_GPUS)
        borrowing = row.pop_amount("borrowingLimit", 0.0, MOST_GPUS) if row.has_value("borrowingLimit") else None
        lending = row.pop_amount("lendingLimit", 0.0, MOST_GPUS) if row.has_value("lendingLimit") else None
        quotas.append(FlavorQuota(models.get(name, ""), nominal, borrowing, lending))
    return quotas


def is_gpu(resource: str) -> bool:
    """Return whether a resource counts whole GPUs or accelerators.

    >>> is_gpu("nvidia.com/gpu"), is_gpu("habana.ai/gaudi"), is_gpu("nvidia.com/mig-1g.10gb")
    (True, True, False)
    """
    return resource.endswith("/gpu") or is_gpu_resource(resource)


def _set_queue_policy(draft: Draft, found: _KueueObjects, path: str, thing: Thing) -> None:
    """Import the order and the stop policy of a ClusterQueue. Usual values get no remark."""
    spec = thing.spec
    if spec.pop_text("queueingStrategy") == "StrictFIFO":
        draft.add_remark("StrictFIFO: a job that does not fit lets others of its queue pass here", path)
    if (policy := spec.pop_text("stopPolicy", "None")) != "None":
        draft.queues[path].is_closed = True
        draft.add_remark("stopPolicy: the queue takes no requests (max_waiting = 0)", f"{path} ({policy})")
    if spec.pop_table("admissionScope").pop_text("admissionMode") == BY_USE:
        found.by_use[thing.name] = path
    preemption = spec.pop_table("preemption")
    preemption.drop_usual_value("reclaimWithinCohort", "Never")
    preemption.drop_usual_value("withinClusterQueue", "Never")
    preemption.drop_usual_value("borrowWithinCohort", "{policy: Never}")
    fungibility = spec.pop_table("flavorFungibility")
    fungibility.drop_usual_value("whenCanBorrow", "Borrow", "MayStopSearch")
    fungibility.drop_usual_value("whenCanPreempt", "TryNextFlavor")


def _set_amounts(draft: Draft, found: _KueueObjects, named: set[str]) -> None:
    """Set guarantees and limits by model, and for any model if some flavor names no model."""
    every = [quota for quotas in found.quotas.values() for quota in quotas]
    models = sorted(named)
    resources = [*models, *([ANY] if not models or any(not quota.model for quota in every) else [])]
    totals: dict[str, dict[str, float]] = {}
    for path in reversed(draft.queues):
        quotas, queue = found.quotas.get(path, []), draft.queues[path]
        own = {name: math.fsum(one.nominal for one in _filter_quotas(quotas, name)) for name in resources}
        below = [totals[child] for child in draft.list_children(path)]
        totals[path] = {name: own[name] + math.fsum(total[name] for total in below) for name in resources}
        queue.guaranteed = {name: totals[path][name] for name in resources if own[name]}
        for name in resources:
            _set_bounds(queue, name, _filter_quotas(quotas, name), is_leaf=not below)
        if "/" not in path:
            whole = totals[path].get(ANY, math.fsum(totals[path].values()))
            queue.limit = {**totals[path], ANY: queue.line.check_amount("the quota of the whole tree", whole)}
            queue.borrow, queue.lend = {}, {}


def _set_bounds(queue: DraftQueue, resource: str, quotas: list[FlavorQuota], is_leaf: bool) -> None:
    if not quotas:
        if is_leaf:
            queue.limit[resource] = 0.0  # a ClusterQueue has nothing of a flavor that it does not name
        return
    borrowing = [one.borrowing for one in quotas if one.borrowing is not None]
    if len(borrowing) == len(quotas):
        queue.borrow[resource] = math.fsum(borrowing)
    if any(one.lending is not None for one in quotas):
        queue.lend[resource] = math.fsum(one.nominal if one.lending is None else one.lending for one in quotas)


def _filter_quotas(quotas: list[FlavorQuota], resource: str) -> list[FlavorQuota]:
    return [one for one in quotas if resource in (ANY, one.model)]


def _add_local_queues(draft: Draft, found: _KueueObjects) -> None:
    """Add the LocalQueues of a ClusterQueue as queues, if past use decides how they share it.

    Otherwise a LocalQueue is only another name of its ClusterQueue.
    """
    paths = {
        draft.queues[path].says.removeprefix("ClusterQueue "): path
        for path in draft.queues
        if "ClusterQueue " in draft.queues[path].says
    }
    for key, thing in found.get_things("LocalQueue").items():
        target = thing.spec.pop_text("clusterQueue")
        if target not in paths:
            draft.add_remark("LocalQueues of a ClusterQueue that is in none of the files", f"{key} ({target})")
            continue
        thing.spec.drop_usual_value("stopPolicy", "None")
        weight = thing.spec.pop_table("fairSharing").pop_amount("weight", 1.0, MOST_WEIGHT)
        if target in found.by_use:
            path = f"{paths[target]}/{make_path_part(key).replace('|', '.', 1)}"
            draft.add_queue(path, DraftQueue(thing.line, weight, says=f"LocalQueue {key}"))
        else:
            draft.add_remark(
                "LocalQueues are no queues of their own: requests name the ClusterQueue's", f"{key} is {paths[target]}"
            )


def _set_policy(draft: Draft, found: _KueueObjects) -> None:
    half_life_h = 0.0
    for thing in found.get_things("Configuration").values():
        sharing = thing.top.pop_table("admissionFairSharing")
        if sharing.has_value("usageHalfLifeTime"):
            half_life_h = _parse_hours(sharing.find_line("usageHalfLifeTime"), sharing.pop_text("usageHalfLifeTime"))
        if not thing.top.has_value("fairSharing"):
            draft.add_remark(
                "the Configuration has no fairSharing: Kueue goes by borrowing and arrival, here shares count"
            )
        thing.top.held.clear()
        thing.top.below.clear()
    draft.policy["half_life_h"] = LONGEST_H
    if found.by_use and half_life_h:
        draft.policy["half_life_h"] = min(half_life_h, LONGEST_H)
    elif found.by_use:
        draft.add_remark(
            "admission fair sharing by use: add Kueue's Configuration to the files, its half-life is not known"
        )
    else:
        draft.add_remark(
            f"Kueue counts what is held, not the past: half_life_h is {LONGEST_H:.0f}; a week would be 168"
        )


def _parse_hours(line: SourceLine, text: str) -> float:
    found = _DURATION.fullmatch(text)
    if not text or found is None:
        raise line.make_error(f"usageHalfLifeTime is {text[:40]!r}, must be a time such as 168h")
    hours, minutes, seconds = (float(part or 0) for part in found.groups())
    return hours + minutes / 60 + seconds / 3600
