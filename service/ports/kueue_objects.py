"""Kueue's objects in v1beta1 and v1beta2. They have only the fields that we read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fleetcast.fleet.decode_faults import explain_decode_error
from fleetcast.fleet.errors import SourceError
from fleetcast.schedulers.kueue import FORECAST, GPUS, HELD, HOLD, JOB, NODES, NOTE, PENDING, RETRY, WAITS

HOSTNAME = "kubernetes.io/hostname"


class _Owner(msgspec.Struct):
    name: str = ""
    controller: bool = False


class _KueueMeta(msgspec.Struct, rename="camel"):
    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    owner_references: list[_Owner] | None = None


class _Condition(msgspec.Struct):
    type: str
    status: str
    reason: str = ""


class _Resources(msgspec.Struct):
    requests: dict[str, str | int] | None = None
    limits: dict[str, str | int] | None = None


class _Container(msgspec.Struct):
    resources: _Resources = msgspec.field(default_factory=_Resources)


class _PodSpec(msgspec.Struct):
    containers: list[_Container] | None = None


class _Template(msgspec.Struct):
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)


class _PodSet(msgspec.Struct):
    count: int = 1
    template: _Template = msgspec.field(default_factory=_Template)


class _Spec(msgspec.Struct, rename="camel"):
    pod_sets: list[_PodSet] | None = None
    active: bool | None = None


class _Individual(msgspec.Struct):
    prefix: str = ""
    suffix: str = ""
    roots: list[str] = []


class _LevelValues(msgspec.Struct):
    universal: str | None = None
    individual: _Individual = msgspec.field(default_factory=_Individual)


class _Slice(msgspec.Struct, rename="camel"):
    values_per_level: list[_LevelValues] = []


class _Domain(msgspec.Struct):
    values: list[str] = []


class _TopologyAssignment(msgspec.Struct):
    """A topology assignment. In v1beta1 it has domains, and in v1beta2 slices."""

    levels: list[str] = []
    domains: list[_Domain] | None = None
    slices: list[_Slice] | None = None


class _PodSetAssignment(msgspec.Struct, rename="camel"):
    topology_assignment: _TopologyAssignment | None = None


class _Admission(msgspec.Struct, rename="camel"):
    pod_set_assignments: list[_PodSetAssignment] | None = None


class _Eviction(msgspec.Struct):
    reason: str = ""
    count: int = 0


class _Stats(msgspec.Struct):
    evictions: list[_Eviction] | None = None


class _WorkloadStatus(msgspec.Struct, rename="camel"):
    conditions: list[_Condition] | None = None
    admission: _Admission | None = None
    admission_checks: list[dict[str, Any]] | None = None
    scheduling_stats: _Stats | None = None


class _Workload(msgspec.Struct):
    metadata: _KueueMeta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _WorkloadStatus = msgspec.field(default_factory=_WorkloadStatus)


class _CheckSpec(msgspec.Struct, rename="camel"):
    controller_name: str = ""


class _CheckStatus(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _Check(msgspec.Struct):
    metadata: _KueueMeta
    spec: _CheckSpec = msgspec.field(default_factory=_CheckSpec)
    status: _CheckStatus = msgspec.field(default_factory=_CheckStatus)


_decode_workload, _decode_check = (msgspec.json.Decoder(kind).decode for kind in (_Workload, _Check))


@dataclass(frozen=True, slots=True)
class KueueWorkload:
    """A Kueue Workload, with the fields that the port uses.

    `context`: the facts about the workload that the adapter receives. Empty if no check matters any more.
    """

    key: str  # namespace/name
    uid: str
    version: str = field(compare=False)
    reserved: bool  # it has its quota, and is not being evicted
    checks: Sequence[Mapping[str, Any]]  # as they are
    retries: int  # evictions by any admission check
    context: Mapping[str, str]

    def make_values(self, ours: frozenset[str]) -> dict[str, str]:
        """Return the workload's values, as in Seen. Empty if none of our checks waits for an answer.

        ours: the names of our checks.
        """
        mine = [check for check in self.checks if check.get("name") in ours]
        asked = [check for check in mine if check.get("state") in (PENDING, RETRY)]
        if not asked or not self.context:
            return {}
        held = max([self.retries, *(int(check.get("retryCount") or 0) for check in mine)])
        values = {**self.context, HELD: str(held)}
        standing = [check for check in asked if check["state"] == RETRY]
        notes = [str(message) for check in asked if str(message := check.get("message", "")).startswith(FORECAST)]
        if standing:
            values[HOLD] = f"{RETRY} {standing[0].get('requeueAfterSeconds', 0)}"
        elif self.reserved:
            values[HOLD] = PENDING
        else:
            values[WAITS] = "for quota"
            values |= {NOTE: notes[0]} if notes else {}
        return values


@dataclass(frozen=True, slots=True)
class KueueCheck:
    """A Kueue AdmissionCheck. `active`: the status and reason of its Active condition, or None if it has none."""

    key: str  # its name
    uid: str
    version: str = field(compare=False)
    controller: str
    active: str | None


def decode_kueue_workload(body: bytes | msgspec.Raw) -> KueueWorkload:
    """Decode a Workload. Raises SourceError if the body is not one."""
    found = _decode_object(_decode_workload, body)
    meta, status = found.metadata, found.status
    true = {row.type for row in status.conditions or () if row.status == "True"}
    evictions = (status.scheduling_stats.evictions if status.scheduling_stats else None) or ()
    return KueueWorkload(
        key=f"{meta.namespace}/{meta.name}",
        uid=meta.uid,
        version=meta.resource_version,
        reserved="QuotaReserved" in true and "Evicted" not in true,
        checks=status.admission_checks or (),
        retries=sum(row.count for row in evictions if row.reason == "AdmissionCheck"),
        context={} if "Finished" in true or found.spec.active is False else _make_context(found),
    )


def decode_kueue_check(body: bytes | msgspec.Raw) -> KueueCheck:
    """Decode an AdmissionCheck. Raises SourceError if the body is not one."""
    found = _decode_object(_decode_check, body)
    active = next((f"{row.status} {row.reason}" for row in found.status.conditions or () if row.type == "Active"), None)
    meta = found.metadata
    return KueueCheck(meta.name, meta.uid, meta.resource_version, found.spec.controller_name, active)


def _decode_object(decode: Any, body: bytes | msgspec.Raw) -> Any:
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"an object of Kueue that is none: {explain_decode_error(error, decode, body)}") from None


def _make_context(found: _Workload) -> dict[str, str]:
    meta, admission = found.metadata, found.status.admission
    owner = next((row.name for row in meta.owner_references or () if row.controller), meta.name)
    gpus = sum(
        pods.count * sum(map(_count_gpus, pods.template.spec.containers or ())) for pods in found.spec.pod_sets or ()
    )
    assigned = (admission.pod_set_assignments if admission else None) or ()
    nodes = sorted(
        {node for row in assigned if row.topology_assignment for node in _list_nodes(row.topology_assignment)}
    )
    return {JOB: f"{meta.namespace}/{owner}", GPUS: str(gpus)} | ({NODES: " ".join(nodes)} if nodes else {})


def _count_gpus(container: _Container) -> int:
    """Return the number of whole GPUs that a container requests."""
    asked = {**(container.resources.limits or {}), **(container.resources.requests or {})}
    counts = [str(amount) for name, amount in asked.items() if name.endswith("/gpu")]
    return sum(int(count) for count in counts if count.isdecimal())


def _list_nodes(assigned: _TopologyAssignment) -> Iterator[str]:
    """Yield the nodes of a topology assignment. Yields none if its lowest level is not the node."""
    if not assigned.levels or assigned.levels[-1] != HOSTNAME:
        return
    for domain in assigned.domains or ():
        yield from domain.values[-1:]
    for part in assigned.slices or ():
        for values in part.values_per_level[-1:]:
            each = values.individual
            yield from (
                [values.universal] if values.universal else [each.prefix + root + each.suffix for root in each.roots]
            )
