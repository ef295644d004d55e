"""The Kubernetes objects, with the fields that the source uses. Decoders skip other fields."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from fleetcast.fleet.decode_faults import format_value
from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.inbox.job_events import make_malformed_error

Quantity = str | int | float
_QUANTITY = re.compile(r"([+-]?[0-9]+(?:\.[0-9]*)?|\.[0-9]+)([EPTGMk]i?|Ki|[eE][+-]?[0-9]{1,3}|[munp]|)")
_SCALE = {
    **{"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3, "p": 1e-12},
    **{"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18},
    **{"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50, "Ei": 2.0**60},
}


class _Object(msgspec.Struct, frozen=True, rename="camel"):
    pass


class Owner(_Object, frozen=True):
    """An owner reference. The kind and the API group together identify the type of the owner."""

    kind: str
    name: str
    api_version: str = ""
    uid: str = ""
    controller: bool = False


class Meta(_Object, frozen=True):
    name: str
    uid: str
    namespace: str = ""
    resource_version: str = ""
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    owner_references: tuple[Owner, ...] = ()

    def get_label(self, name: str) -> str:
        return (self.labels or {}).get(name, "")

    @property
    def controller(self) -> Owner | None:
        return next((owner for owner in self.owner_references if owner.controller), None)


class Condition(_Object, frozen=True):
    type: str
    status: str
    reason: str | None = None
    message: str | None = None
    last_transition_time: datetime | None = None

    @property
    def is_true(self) -> bool:
        return self.status == "True"

    @property
    def text(self) -> str:
        """The reason and message in one line."""
        return ": ".join(filter(None, (self.reason, self.message)))


class Resources(_Object, frozen=True):
    requests: dict[str, Quantity] | None = None
    limits: dict[str, Quantity] | None = None

    def get_amount(self, name: str) -> float:
        """Return the requested amount of a resource, else its limit, else 0. Raises RecordError."""
        for table in (self.requests, self.limits):
            if table and name in table:
                return parse_quantity(table[name])
        return 0.0

    @property
    def names(self) -> set[str]:
        return {*(self.requests or ()), *(self.limits or ())}


class Container(_Object, frozen=True):
    name: str = ""
    image: str = ""
    resources: Resources = Resources()
    restart_policy: str | None = None


class PodClaim(_Object, frozen=True):
    """A device claim of a pod. It names a ResourceClaim, or a template for one."""

    name: str = ""
    resource_claim_name: str | None = None
    resource_claim_template_name: str | None = None


class PodClaimStatus(_Object, frozen=True):
    """The name of the ResourceClaim that was made from a template for a pod."""

    name: str = ""
    resource_claim_name: str | None = None


class SchedulingGate(_Object, frozen=True):
    name: str = ""


class PodSpec(_Object, frozen=True):
    containers: tuple[Container, ...] = ()
    init_containers: tuple[Container, ...] | None = None
    node_name: str = ""
    node_selector: dict[str, str] | None = None
    priority: int | None = None
    priority_class_name: str = ""
    preemption_policy: str = ""
    resource_claims: tuple[PodClaim, ...] | None = None
    scheduling_gates: tuple[SchedulingGate, ...] | None = None
    hostname: str = ""


class ContainerRunning(_Object, frozen=True):
    started_at: datetime | None = None


class Terminated(_Object, frozen=True):
    exit_code: int = 0
    signal: int = 0
    reason: str = ""
    message: str = ""
    finished_at: datetime | None = None


class ContainerWaiting(_Object, frozen=True):
    reason: str = ""
    message: str = ""


class ContainerState(_Object, frozen=True):
    running: ContainerRunning | None = None
    terminated: Terminated | None = None
    waiting: ContainerWaiting | None = None


class ContainerStatus(_Object, frozen=True):
    restart_count: int = 0
    state: ContainerState = ContainerState()
    last_state: ContainerState = ContainerState()


class PodStatus(_Object, frozen=True):
    phase: str = ""
    reason: str = ""
    message: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    start_time: datetime | None = None
    conditions: tuple[Condition, ...] | None = None
    container_statuses: tuple[ContainerStatus, ...] | None = None
    resource_claim_statuses: tuple[PodClaimStatus, ...] | None = None


class Pod(_Object, frozen=True):
    metadata: Meta
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()

    def find_condition(self, kind: str) -> Condition | None:
        return find_condition(self.status.conditions, kind)


class TemplateMeta(_Object, frozen=True):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Template(_Object, frozen=True):
    metadata: TemplateMeta | None = None
    spec: PodSpec = PodSpec()


class JobSpec(_Object, frozen=True):
    parallelism: int | None = None
    completions: int | None = None
    completion_mode: str = ""
    active_deadline_seconds: int | None = None
    suspend: bool | None = None
    template: Template = Template()


class JobStatus(_Object, frozen=True):
    conditions: tuple[Condition, ...] | None = None
    completion_time: datetime | None = None


class Job(_Object, frozen=True):
    metadata: Meta
    spec: JobSpec = JobSpec()
    status: JobStatus = JobStatus()


class JobTemplate(_Object, frozen=True):
    spec: JobSpec = JobSpec()


class ReplicatedJob(_Object, frozen=True):
    name: str = ""
    replicas: int | None = None
    template: JobTemplate = JobTemplate()


class JobSetSpec(_Object, frozen=True):
    replicated_jobs: tuple[ReplicatedJob, ...] = ()
    suspend: bool | None = None


class JobSetStatus(_Object, frozen=True):
    conditions: tuple[Condition, ...] | None = None
    restarts: int = 0


class JobSet(_Object, frozen=True):
    metadata: Meta
    spec: JobSetSpec = JobSetSpec()
    status: JobSetStatus = JobSetStatus()


class Replicas(_Object, frozen=True):
    replicas: int | None = None
    template: Template = Template()


class ElasticPolicy(_Object, frozen=True):
    min_replicas: int | None = None
    max_replicas: int | None = None


class SchedulingPolicy(_Object, frozen=True):
    queue: str = ""
    priority_class: str = ""


class RunPolicy(_Object, frozen=True):
    suspend: bool | None = None
    active_deadline_seconds: int | None = None
    scheduling_policy: SchedulingPolicy | None = None


class PyTorchJobSpec(_Object, frozen=True):
    pytorch_replica_specs: dict[str, Replicas] = {}
    elastic_policy: ElasticPolicy | None = None
    run_policy: RunPolicy | None = None


class PyTorchJob(_Object, frozen=True):
    metadata: Meta
    spec: PyTorchJobSpec = PyTorchJobSpec()
    status: JobStatus | None = None


class Taint(_Object, frozen=True):
    key: str
    effect: str = ""
    time_added: datetime | None = None


class KubernetesNodeSpec(_Object, frozen=True):
    unschedulable: bool | None = None
    taints: tuple[Taint, ...] | None = None


class NodeAddress(_Object, frozen=True):
    """An address of a node. type: Hostname, InternalIP, ExternalIP, InternalDNS or ExternalDNS."""

    type: str
    address: str


class NodeStatus(_Object, frozen=True):
    conditions: tuple[Condition, ...] | None = None
    capacity: dict[str, Quantity] | None = None
    addresses: tuple[NodeAddress, ...] | None = None


class Node(_Object, frozen=True):
    metadata: Meta
    spec: KubernetesNodeSpec = KubernetesNodeSpec()
    status: NodeStatus = NodeStatus()


class PriorityClass(_Object, frozen=True):
    metadata: Meta
    value: int = 0
    global_default: bool = False


class UndecodedObject:
    """An object that could not be decoded: the error, and its name and uid if they can be read."""

    __slots__ = ("error", "name", "uid")

    def __init__(self, error: RecordError, record: bytes) -> None:
        self.error = error
        try:
            head = msgspec.json.decode(record, type=_Head).metadata
        except (ValueError, RecursionError):
            head = _HeadMeta()
        self.name, self.uid = head.name, head.uid


class _HeadMeta(_Object, frozen=True):
    name: str = ""
    uid: str = ""


class _Head(_Object, frozen=True):
    metadata: _HeadMeta = _HeadMeta()


T = TypeVar("T", bound=msgspec.Struct)


def decode(record: bytes, kind: type[T]) -> T:
    """Decode an object of a kind. Raises RecordError.

    >>> decode(b'{"metadata": {"name": "p", "uid": "1"}, "value": 7}', PriorityClass).value
    7
    """
    try:
        return msgspec.json.decode(record, type=kind)
    except (ValueError, RecursionError) as error:
        why = make_malformed_error(error, record, kind)
        raise RecordError("kubernetes_object", f"{kind.__name__}: {why}") from None


def find_condition(conditions: Sequence[Condition] | None, kind: str) -> Condition | None:
    return next((row for row in conditions or () if row.type == kind), None)


def convert_to_ms(moment: datetime | None) -> int | None:
    """Convert a time to Unix ms. A time without a zone is UTC. Returns None for None.

    >>> convert_to_ms(datetime(2026, 1, 1, tzinfo=UTC))
    1767225600000
    """
    if moment is None:
        return None
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def parse_quantity(value: Quantity) -> float:
    """Parse a resource quantity as a number. Raises RecordError.

    >>> parse_quantity("1500m"), parse_quantity("2Gi") / 2**30, parse_quantity(8), parse_quantity("1e3")
    (1.5, 2.0, 8.0, 1000.0)
    """
    if not isinstance(value, str):
        return float(value)
    found = _QUANTITY.fullmatch(value)
    if found is None:
        raise RecordError(
            "kubernetes_object", f"quantity {format_value(value)}: expected a number such as 8, 500m or 64Gi"
        )
    number, suffix = found.groups()
    return float(number + suffix) if suffix not in _SCALE else float(number) * _SCALE[suffix]
