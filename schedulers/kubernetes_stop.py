"""The rules by which a Kubernetes Job is stopped and resumed. They read objects of the API, and write none.

A Job that we stop carries a StopMark until it is resumed. So a repeated action stops nothing twice, even after a
restart of the executor.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

STOPPED = "fleetcast.io/stopped"  # label: an action has stopped the Job, and has not resumed it yet
MARK = "fleetcast.io/stop-action"  # annotation: the StopMark as JSON. It stays after the Job is resumed
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
NEVER = "Never"


class StopMark(msgspec.Struct, frozen=True):
    """A record on a Job of the action that stops it.

    since_ms: Unix ms at which it was written, 0 unknown. by_ms: Unix ms at which the Job is resumed at the latest.
    pods: name → UID of the pods that are stopped. workload: the name of Kueue's workload, or "". is_done: every pod is
    evicted, and no new pod starts. restarts: the Job is resumed as soon as these pods are gone. only_pods: the Job
    itself is not stopped, only these pods are.
    """

    action: str
    payer: str
    by_ms: int
    pods: dict[str, str]
    workload: str = ""
    is_done: bool = False
    restarts: bool = False
    only_pods: bool = False
    since_ms: int = 0


class _MetaFields(msgspec.Struct, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None

    def get_word(self, name: str) -> str:
        """Return the value of a label, or else of an annotation. Returns "" without one."""
        return (self.labels or {}).get(name) or (self.annotations or {}).get(name, "")


class PodToleration(msgspec.Struct):
    """A toleration of a pod."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""


class _PodSpecFields(msgspec.Struct, rename="camel"):
    node_name: str = ""
    tolerations: list[PodToleration] = []


class _PodStatusFields(msgspec.Struct):
    phase: str = ""


class StoppablePod(msgspec.Struct):
    """A pod of a Job."""

    metadata: _MetaFields
    spec: _PodSpecFields = msgspec.field(default_factory=_PodSpecFields)
    status: _PodStatusFields = msgspec.field(default_factory=_PodStatusFields)

    @property
    def has_ended(self) -> bool:
        return self.status.phase in ("Succeeded", "Failed")

    @property
    def is_active(self) -> bool:
        """The claim that the pod runs or will run: it has not ended, and is not being deleted."""
        return not self.has_ended and self.metadata.deletion_timestamp is None


class _PodCondition(msgspec.Struct):
    type: str
    status: str = "True"


class _FailureRule(msgspec.Struct, rename="camel"):
    action: str
    on_pod_conditions: list[_PodCondition] | None = None


class _FailurePolicy(msgspec.Struct):
    rules: list[_FailureRule] = []


class _PartSpec(msgspec.Struct):
    parallelism: int = 1


class _PartTemplate(msgspec.Struct):
    spec: _PartSpec = msgspec.field(default_factory=_PartSpec)


class _ReplicatedJob(msgspec.Struct):
    replicas: int = 1
    template: _PartTemplate = msgspec.field(default_factory=_PartTemplate)


class _JobSpecFields(msgspec.Struct, rename="camel"):
    parallelism: int = 1
    completions: int | None = None
    completion_mode: str = "NonIndexed"
    pod_failure_policy: _FailurePolicy | None = None
    replicated_jobs: list[_ReplicatedJob] = []  # of a JobSet


class StoppableJob(msgspec.Struct):
    """A batch/v1 Job, or a JobSet, with the fields that the executor reads. is_set: it is a JobSet."""

    metadata: _MetaFields
    spec: _JobSpecFields = msgspec.field(default_factory=_JobSpecFields)
    is_set: bool = False

    @property
    def mark(self) -> StopMark | None:
        """The record of the last action that stopped the Job. None without one, or if it is unreadable."""
        try:
            return msgspec.json.decode((self.metadata.annotations or {}).get(MARK, ""), type=StopMark)
        except msgspec.DecodeError:
            return None

    @property
    def ignores_disruptions(self) -> bool:
        """True if an evicted pod does not count as failed.

        Otherwise each eviction brings the Job nearer to its backoffLimit, and delays its next pods by minutes.
        """
        for rule in self.spec.pod_failure_policy.rules if self.spec.pod_failure_policy else ():
            if any(row.type == "DisruptionTarget" and row.status == "True" for row in rule.on_pod_conditions or ()):
                return rule.action == "Ignore"
        return False

    @property
    def wanted_pods(self) -> int:
        """How many pods run at once."""
        if self.is_set:
            return sum(row.replicas * row.template.spec.parallelism for row in self.spec.replicated_jobs)
        return self.spec.parallelism

    @property
    def is_stopped_by_us(self) -> bool:
        return STOPPED in (self.metadata.labels or {})


class _Requirement(msgspec.Struct):
    key: str
    operator: str
    values: list[str] = []

    def matches(self, labels: Mapping[str, str]) -> bool:
        value = labels.get(self.key)
        if self.operator == "In":
            return value in self.values
        if self.operator == "NotIn":
            return value not in self.values
        return (value is not None) == (self.operator == "Exists")


class _LabelSelector(msgspec.Struct, rename="camel"):
    match_labels: dict[str, str] = {}
    match_expressions: list[_Requirement] = []

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            rule.matches(labels) for rule in self.match_expressions
        )


class _BudgetSpec(msgspec.Struct):
    selector: _LabelSelector | None = None


class _BudgetStatus(msgspec.Struct, rename="camel"):
    disruptions_allowed: int = 0


class DisruptionBudget(msgspec.Struct):
    """A policy/v1 PodDisruptionBudget."""

    metadata: _MetaFields
    spec: _BudgetSpec = msgspec.field(default_factory=_BudgetSpec)
    status: _BudgetStatus = msgspec.field(default_factory=_BudgetStatus)


class _BorrowPolicy(msgspec.Struct):
    policy: str = NEVER


class _QueuePreemption(msgspec.Struct, rename="camel"):
    within_cluster_queue: str = NEVER
    reclaim_within_cohort: str = NEVER
    borrow_within_cohort: _BorrowPolicy | None = None


class _ClusterQueueSpec(msgspec.Struct, rename="camel"):
    cohort_name: str = ""
    cohort: str = ""  # in v1beta1
    preemption: _QueuePreemption | None = None


class KueueClusterQueue(msgspec.Struct):
    """A ClusterQueue of Kueue."""

    metadata: _MetaFields
    spec: _ClusterQueueSpec = msgspec.field(default_factory=_ClusterQueueSpec)

    @property
    def cohort(self) -> str:
        return self.spec.cohort_name or self.spec.cohort

    @property
    def own_preemption(self) -> str:
        """The first setting by which Kueue preempts here, such as "withinClusterQueue: LowerPriority", or ""."""
        rules = self.spec.preemption or _QueuePreemption()
        borrowing = rules.borrow_within_cohort.policy if rules.borrow_within_cohort else NEVER
        settings = {
            "withinClusterQueue": rules.within_cluster_queue,
            "reclaimWithinCohort": rules.reclaim_within_cohort,
            "borrowWithinCohort": borrowing,
        }
        return next((f"{name}: {value}" for name, value in settings.items() if value != NEVER), "")


class _ChosenNodes(msgspec.Struct):
    levels: list[str] = []


class _PodSetPlaces(msgspec.Struct, rename="camel"):
    topology_assignment: _ChosenNodes | None = None


class _QueueAdmission(msgspec.Struct, rename="camel"):
    cluster_queue: str = ""
    pod_set_assignments: list[_PodSetPlaces] = []


class _WorkloadSpecFields(msgspec.Struct):
    active: bool = True


class _WorkloadStatusFields(msgspec.Struct):
    admission: _QueueAdmission | None = None


class StoppableWorkload(msgspec.Struct):
    """A Workload of Kueue with the fields that the executor reads."""

    metadata: _MetaFields
    spec: _WorkloadSpecFields = msgspec.field(default_factory=_WorkloadSpecFields)
    status: _WorkloadStatusFields = msgspec.field(default_factory=_WorkloadStatusFields)

    @property
    def is_topology_aware(self) -> bool:
        """The claim that Kueue has chosen the nodes of the pods."""
        rows = self.status.admission.pod_set_assignments if self.status.admission else ()
        return any(row.topology_assignment is not None for row in rows)


class JobAddress(NamedTuple):
    """The namespace and name of a Kubernetes object."""

    namespace: str
    name: str


def parse_job_name(job: str, prefix: str) -> JobAddress | None:
    """Return the address of a job that the source `kubernetes` has named. Returns None for any other name.

    >>> parse_job_name("east/default/train", "east/")
    JobAddress(namespace='default', name='train')
    >>> parse_job_name("4711", "") is None
    True
    """
    namespace, slash, name = job.removeprefix(prefix).partition("/")
    is_ours = job.startswith(prefix) and slash and namespace and name and "/" not in name
    return JobAddress(namespace, name) if is_ours else None


def explain_other_places(pods: Sequence[StoppablePod], nodes: Collection[str]) -> str:
    """Return why these pods are not the attempt that an action names, or "" if they are.

    pods: the active pods of the Job. nodes: the nodes of the ranks that the action names.
    """
    if not pods:
        return "the Job has no active pod"
    present = {pod.spec.node_name for pod in pods} - {""}
    if present != set(nodes):
        shown, named = (", ".join(sorted(names)) or "no node" for names in (present, nodes))
        return f"another attempt: the pods are on {shown}, and the action names {named}"
    return ""


def explain_budgets(pods: Sequence[StoppablePod], budgets: Sequence[DisruptionBudget]) -> str:
    """Return why disruption budgets forbid to evict all these pods at once, or "" if they permit it."""
    for budget in budgets:
        if budget.spec.selector is None:
            continue
        count = sum(budget.spec.selector.matches(pod.metadata.labels or {}) for pod in pods)
        if count > budget.status.disruptions_allowed:
            allowed = budget.status.disruptions_allowed
            return f"PodDisruptionBudget {budget.metadata.name} allows {allowed} evictions, and the gang needs {count}"
    return ""


def explain_own_preemption(workload: StoppableWorkload, queues: Sequence[KueueClusterQueue]) -> str:
    """Return how Kueue itself preempts in the cohort of a workload's queue, or "" if it does not."""
    name = workload.status.admission.cluster_queue if workload.status.admission else ""
    cohort = next((queue.cohort for queue in queues if queue.metadata.name == name), "")
    for queue in queues:
        shares_quota = queue.metadata.name == name or (cohort and queue.cohort == cohort)
        if shares_quota and queue.own_preemption:
            return f"ClusterQueue {queue.metadata.name} preempts by itself ({queue.own_preemption})"
    return ""


def parse_ms(text: str) -> int:
    """Return a timestamp of the API as Unix ms.

    >>> parse_ms("2026-11-27T09:50:27Z")
    1795773027000
    """
    return round(datetime.fromisoformat(text).timestamp() * 1000)


def make_mark_fields(mark: StopMark, *, is_open: bool) -> dict[str, dict[str, str | None]]:
    """Return the labels and annotations of a merge patch that writes a StopMark. None removes a label."""
    return {
        "labels": {STOPPED: "true" if is_open else None},
        "annotations": {MARK: msgspec.json.encode(mark).decode()},
    }


def make_eviction(pod: str, namespace: str, uid: str, grace_s: float) -> dict[str, object]:
    """Return the Eviction of one pod, which the server refuses for a pod with another UID."""
    return {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": namespace},
        "deleteOptions": {"gracePeriodSeconds": round(grace_s), "preconditions": {"uid": uid}},
    }
