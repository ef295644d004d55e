"""A converter of Kubernetes jobs of any kind into workloads, and of their pods with GPUs into members.

    JobSet          its pods by label, ranked by (the job's global index, completion index)
    PyTorchJob      master, then workers by index. With an elastic policy it may start with fewer
    Job             one gang when all its pods run at once (completions = parallelism), by completion index
    any other owner (`owners.py`)    an elastic job: its pods join and leave
    a pod without an owner           a job with one member

Pods without a GPU (launchers, drivers) are not members.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeVar, get_args

import msgspec

from fleetcast.fleet.events import JobClass, Submitted
from fleetcast.fleet.requests import Gang
from fleetcast.ingest.gpus import shorten_model
from fleetcast.ingest.kubernetes.asked_gpus import (
    ASKED_RESOURCES,
    AskedGpus,
    NodeGpus,
    list_running_containers,
    may_hold_gpus,
    read_asked_gpus,
)
from fleetcast.ingest.kubernetes.claims import GPU_CLASSES, ClaimTable
from fleetcast.ingest.kubernetes.failures import Ending, classify_condition, find_pod_ending, make_disruption_ending
from fleetcast.ingest.kubernetes.objects import (
    Condition,
    Job,
    JobSet,
    JobSpec,
    Meta,
    Pod,
    PodSpec,
    PodStatus,
    PyTorchJob,
    Template,
    TemplateMeta,
    convert_to_ms,
    find_condition,
)
from fleetcast.ingest.kubernetes.owners import (
    JOBSET_NAME,
    NO_JOBS,
    USUAL_CLASSES,
    find_owner,
    find_stated_queue,
    is_placeholder_pod,
)
from fleetcast.ingest.kubernetes.waits import KUEUE_QUEUE, PodWait, find_pod_wait
from fleetcast.ingest.lifecycle import SUBMITTED
from fleetcast.ingest.preemptible import LABEL, make_unread_label, parse_preemptible

JOBSET_UID = "jobset.sigs.k8s.io/jobset-uid"
JOBSET_RESTART = "jobset.sigs.k8s.io/restart-attempt"
JOB_INDEX = ("jobset.sigs.k8s.io/job-global-index", "jobset.sigs.k8s.io/job-index")
POD_INDEX = (
    *("batch.kubernetes.io/job-completion-index", "training.kubeflow.org/replica-index"),
    *("apps.kubernetes.io/pod-index", "leaderworkerset.sigs.k8s.io/worker-index", "volcano.sh/task-index"),
)
GROUP_INDEX = "leaderworkerset.sigs.k8s.io/group-index"
REPLICA_TYPE = "training.kubeflow.org/replica-type"
MODEL_SELECTORS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", "karpenter.k8s.aws/instance-gpu-name")
CLASSES = frozenset(get_args(JobClass))

NO_STATUS = PodStatus()

S = TypeVar("S", bound=msgspec.Struct)
Stage = Literal["pending", "running", "broken", "failed", "succeeded"]


class SiteTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The meaning of names and labels at a site.

    A label is looked up in a pod's labels, then in its annotations.
    """

    cluster: str = ""
    prefix: str = ""
    queue_label: str = "kueue.x-k8s.io/queue-name"
    tenant_label: str = ""
    user_label: str = ""
    class_label: str = "fleetcast/class"
    preemptible_label: str = "fleetcast/preemptible"
    keep_labels: tuple[str, ...] = ()
    gpu_resources: tuple[str, ...] = ASKED_RESOURCES
    gpu_classes: tuple[str, ...] = GPU_CLASSES
    admission: Literal["waits", "blocked"] = "waits"


class Workload(msgspec.Struct, frozen=True, omit_defaults=True):
    """A job as its own object describes it, or as its first pod does (`alone`).

    The pod describes the job if its object is not followed. members: the number of pods with GPUs that
    it wants. least: the smallest number of pods with which it can start. elastic: pods join and leave while
    it runs. awaits_admission: while it is suspended, it waits for a quota and not for a person.
    """

    kind: str
    uid: str
    submitted: Submitted  # of attempt 1
    members: int
    least: int
    elastic: bool = False
    alone: bool = False
    suspended: bool = False
    awaits_admission: bool = False
    restarts: int = 0
    deleted_ms: int | None = None
    finished_ms: int | None = None
    failed: Ending | None = None


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """A pod with GPUs.

    slot: its place in the gang, which its successor inherits. attempt: the number that its labels state, or
    0. kind, owner: the kind of its owner (Pod if it has none), and the owner's uid if stated. left_ms: when its
    deletion began, or None.
    """

    job: str
    kind: str
    uid: str
    name: str
    created_ms: int
    stage: Stage
    owner: str = ""
    slot: tuple[int, ...] = ()
    node: str = ""
    running_ms: int | None = None
    restarts: int = 0
    attempt: int = 0
    ending: Ending | None = None
    waiting: str = ""
    is_blocked: bool = False
    left_ms: int | None = None


@dataclass(frozen=True, slots=True)
class _Part:
    """The pods made from one template. status: the status of the pod, if there is only one."""

    pods: int
    template: Template
    status: PodStatus = NO_STATUS


class WorkloadReader:
    """A converter of Kubernetes objects into workloads and members.

    `priorities`: name of a priority class → its value. The caller may add to this table. `claims`: device
    claims. `node_gpus`: a function that returns how a node divides its GPUs.
    """

    def __init__(
        self,
        terms: SiteTerms,
        priorities: Mapping[str, int],
        claims: ClaimTable,
        node_gpus: Callable[[str], NodeGpus],
    ) -> None:
        self.terms = terms
        self._priorities = priorities
        self._claims = claims
        self._node_gpus = node_gpus

    def make_job_name(self, meta: Meta, name: str = "") -> str:
        return f"{self.terms.prefix}{meta.namespace}/{name or meta.name}"

    def make_job_workload(self, job: Job, now_ms: int) -> Workload | None:
        """Return the workload of a Job, or None if it has no GPUs or is part of a JobSet."""
        if job.metadata.get_label(JOBSET_NAME):
            return None
        spec = job.spec
        pods = _count_pods(spec)
        elastic = pods != _replace_none(spec.completions, 1)
        made = self._make_workload("Job", job.metadata, [_Part(pods, spec.template)], spec.active_deadline_seconds)
        if made is None:
            return None
        ended = _read_ended_fields(job.status.conditions, "Complete", now_ms, job.status.completion_time)
        made = _replace_fields(
            made, suspended=bool(spec.suspend), elastic=elastic, least=1 if elastic else pods, **ended
        )
        return (
            _set_job_class(made, "batch")
            if elastic and not self._find_label(job.metadata, self.terms.class_label)
            else made
        )

    def make_jobset_workload(self, jobset: JobSet, now_ms: int) -> Workload | None:
        rows = jobset.spec.replicated_jobs
        parts = [
            _Part(_replace_none(row.replicas, 1) * _count_pods(row.template.spec), row.template.spec.template)
            for row in rows
        ]
        limits = [row.template.spec.active_deadline_seconds for row in rows]
        limit_s = max((limit for limit in limits if limit is not None), default=None)
        made = self._make_workload("JobSet", jobset.metadata, parts, limit_s)
        if made is None:
            return None
        ended = _read_ended_fields(jobset.status.conditions, "Completed", now_ms)
        return _replace_fields(made, suspended=bool(jobset.spec.suspend), restarts=jobset.status.restarts, **ended)

    def make_pytorchjob_workload(self, job: PyTorchJob, now_ms: int) -> Workload | None:
        spec, policy = job.spec, job.spec.run_policy
        parts = [_Part(_replace_none(row.replicas, 1), row.template) for row in spec.pytorch_replica_specs.values()]
        made = self._make_workload(
            "PyTorchJob", job.metadata, parts, policy.active_deadline_seconds if policy else None
        )
        if made is None:
            return None
        ended = _read_ended_fields(job.status.conditions if job.status else None, "Succeeded", now_ms)
        made = _replace_fields(made, suspended=bool(policy and policy.suspend), **ended)
        if policy and policy.scheduling_policy and policy.scheduling_policy.queue and not made.submitted.queue:
            made = _replace_fields(
                made, submitted=_replace_fields(made.submitted, queue=policy.scheduling_policy.queue)
            )
        elastic = spec.elastic_policy
        if elastic is None:
            return made
        least = min(made.members, _replace_none(elastic.min_replicas, made.members))
        gang = Gang(least, max(made.members, _replace_none(elastic.max_replicas, made.members)))
        return _replace_fields(made, elastic=True, least=least, submitted=_replace_fields(made.submitted, gang=gang))

    def make_pod_workload(self, pod: Pod, member: Member) -> Workload | None:
        """Return the workload that a pod alone describes, or None if the pod requests no GPU."""
        part = _Part(1, _make_template(pod), pod.status)
        owner = find_owner(pod)
        made = self._make_workload(owner.kind, pod.metadata, [part], None, owner.name)
        if made is None:
            return None
        made = _replace_fields(made, alone=True, elastic=not owner.is_single, uid=member.uid if owner.is_single else "")
        usual = USUAL_CLASSES.get(owner.kind)
        return (
            _set_job_class(made, usual)
            if usual and not self._find_label(pod.metadata, self.terms.class_label)
            else made
        )

    def make_member(self, pod: Pod, now_ms: int) -> Member | None:
        """Return the pod as a member of its job. Returns None if it has no GPUs or belongs to a DaemonSet.

        A pod with device claims may have GPUs. `holds_gpus` decides once the claims have been read.
        """
        meta = pod.metadata
        kind, name, _ = find_owner(pod)
        if kind in NO_JOBS or is_placeholder_pod(pod):
            return None
        if not may_hold_gpus(pod.spec, self.terms.gpu_resources, meta.annotations):
            return None
        stage = _find_stage(pod)
        statuses = pod.status.container_statuses or ()
        restarts = sum(status.restart_count for status in statuses)
        began = [convert_to_ms(row.state.running.started_at) for row in statuses if row.state.running]
        running_ms = max((moment for moment in began if moment), default=convert_to_ms(pod.status.start_time))
        label = meta.get_label(JOBSET_RESTART)
        wait = (
            find_pod_wait(pod, admission_blocks=self.terms.admission == "blocked") if stage == "pending" else PodWait()
        )
        return Member(
            job=self.make_job_name(meta, name),
            kind=kind,
            uid=meta.uid,
            name=meta.name,
            created_ms=convert_to_ms(meta.creation_timestamp) or now_ms,
            stage=stage,
            owner=meta.get_label(JOBSET_UID) if kind == "JobSet" else meta.controller.uid if meta.controller else "",
            slot=_find_slot(meta),
            node=pod.spec.node_name,
            running_ms=running_ms if stage == "running" else None,
            restarts=restarts,
            attempt=int(label) + 1 if label.isdecimal() and len(label) < 9 else 0,
            ending=_find_ending(pod, stage, restarts, now_ms),
            waiting=wait.reason,
            is_blocked=wait.is_blocked,
            left_ms=convert_to_ms(meta.deletion_timestamp),
        )

    def holds_gpus(self, pod: Pod) -> bool:
        """Return whether a pod holds GPUs, given the claims read so far."""
        return self._read_asked_gpus(pod.metadata, _Part(1, _make_template(pod), pod.status)).gpus >= 1

    def _read_asked_gpus(self, meta: Meta, part: _Part) -> AskedGpus:
        spec = part.template.spec
        return read_asked_gpus(
            spec,
            self.terms.gpu_resources,
            annotations=part.template.metadata.annotations if part.template.metadata else None,
            node=self._node_gpus(spec.node_name),
            claimed=self._claims.count_claimed_gpus(meta.namespace, spec, part.status)
            if spec.resource_claims
            else None,
        )

    def _make_workload(
        self, kind: str, meta: Meta, parts: Sequence[_Part], limit_s: int | None, name: str = ""
    ) -> Workload | None:
        """Return the workload of an object with these templates, or None if none of them requests a GPU."""
        asked = [(part, self._read_asked_gpus(meta, part)) for part in parts]
        asked = [row for row in asked if row[1].gpus > 0 and row[0].pods > 0]
        if not asked:
            return None
        members = sum(part.pods for part, _ in asked)
        largest, wants = max(asked, key=lambda row: row[1].gpus)
        spec = largest.template.spec
        label_values = {label: value for label in self.terms.keep_labels if (value := self._find_label(meta, label))}
        stated = self._find_label(meta, self.terms.class_label)
        word = self._find_label(meta, LABEL) or self._find_label(meta, self.terms.preemptible_label)
        submitted = Submitted(
            job=self.make_job_name(meta, name),
            sequence=SUBMITTED,
            time_ms=convert_to_ms(meta.creation_timestamp) or 0,
            cluster=self.terms.cluster,
            tenant=self._find_label(meta, self.terms.tenant_label) or meta.namespace,
            queue=self._find_label(meta, self.terms.queue_label) or find_stated_queue(meta.labels, meta.annotations),
            user=self._find_label(meta, self.terms.user_label),
            name=name or meta.name,
            class_=stated if stated in CLASSES else "training",  # type: ignore[arg-type]
            gang=members,
            gpus_per_node=wants.gpus,
            gpu_model=_find_gpu_model(spec),
            gpu_share=wants.share,
            priority=self._find_priority(spec),
            preemptible=parse_preemptible(word),
            limit_s=limit_s,
            cpus=round(_sum_resource(spec, "cpu")) or None,
            host_memory_gib=round(_sum_resource(spec, "memory") / 2**30, 3) or None,
            labels=label_values | _make_gpu_labels(wants) | make_unread_label(word) | {"kind": kind},
        )
        admitted = bool(self._find_label(meta, KUEUE_QUEUE) or self._find_label(meta, self.terms.queue_label))
        return Workload(
            kind,
            meta.uid,
            submitted,
            members,
            members,
            awaits_admission=admitted and self.terms.admission == "waits",
            deleted_ms=convert_to_ms(meta.deletion_timestamp),
        )

    def _find_priority(self, spec: PodSpec) -> int:
        return self._priorities.get(spec.priority_class_name, 0) if spec.priority is None else spec.priority

    def _find_label(self, meta: Meta, name: str) -> str:
        return meta.get_label(name) or (meta.annotations or {}).get(name, "") if name else ""


def _make_template(pod: Pod) -> Template:
    return Template(TemplateMeta(None, pod.metadata.annotations), pod.spec)


def _make_gpu_labels(wants: AskedGpus) -> dict[str, str]:
    """Return labels for a job that record its MIG profile and its unreadable device claims."""
    unread = ", ".join(wants.unread)[:200]
    return ({"mig": wants.profile} if wants.profile else {}) | ({"unread_claims": unread} if unread else {})


def _replace_fields(row: S, **changes: object) -> S:
    return msgspec.structs.replace(row, **changes)


def _set_job_class(made: Workload, name: JobClass) -> Workload:
    return _replace_fields(made, submitted=_replace_fields(made.submitted, class_=name))


def _replace_none(value: int | None, default: int) -> int:
    return default if value is None else value


def _count_pods(spec: JobSpec) -> int:
    """Return the number of a Job's pods that run at the same time."""
    pods = _replace_none(spec.parallelism, 1)
    return pods if spec.completions is None else min(pods, spec.completions)


def _sum_resource(spec: PodSpec, resource: str) -> float:
    return sum(container.resources.get_amount(resource) for container in list_running_containers(spec))


def _find_gpu_model(spec: PodSpec) -> str:
    """Return the GPU model that a pod's node selector requires, or ""."""
    wanted = (spec.node_selector or {}).get
    stated = next((value for label in MODEL_SELECTORS if (value := wanted(label))), "")
    return shorten_model(stated) if stated else ""


def _read_ended_fields(
    conditions: Sequence[Condition] | None, good: str, now_ms: int, completed: datetime | None = None
) -> dict[str, object]:
    """Return the Workload field `finished_ms` or `failed` with its value, or {} if the job has not ended.

    good: the type of the condition of a successful end.
    """
    done, failed = find_condition(conditions, good), find_condition(conditions, "Failed")
    if done is not None and done.is_true:
        return {"finished_ms": convert_to_ms(completed) or convert_to_ms(done.last_transition_time) or now_ms}
    if failed is not None and failed.is_true:
        at_ms = convert_to_ms(failed.last_transition_time) or now_ms
        return {"failed": Ending(at_ms, classify_condition(failed.reason or ""), failed.text)}
    return {}


def _find_slot(meta: Meta) -> tuple[int, ...]:
    """Return the place in the gang that a pod's labels or annotations state, or () if they state none."""
    index = _find_number(meta, POD_INDEX)
    if index is None:
        return ()
    if meta.get_label(REPLICA_TYPE):
        return int(meta.get_label(REPLICA_TYPE).lower() not in ("master", "chief")), index
    outer = _find_number(meta, (*JOB_INDEX, GROUP_INDEX))
    return (index,) if outer is None else (outer, index)


def _find_number(meta: Meta, names: Sequence[str]) -> int | None:
    for table in (meta.labels or {}, meta.annotations or {}):
        for name in names:
            text = table.get(name, "")
            if text.isdecimal() and text.isascii() and len(text) < 10:
                return int(text)
    return None


def _find_stage(pod: Pod) -> Stage:
    if pod.status.phase in ("Failed", "Succeeded"):
        return "failed" if pod.status.phase == "Failed" else "succeeded"
    if pod.status.phase not in ("Running", "Unknown"):
        return "pending"
    states = [status.state for status in pod.status.container_statuses or ()]
    crashed = any(state.terminated and state.terminated.exit_code != 0 for state in states)
    return "broken" if crashed or any(state.waiting for state in states) else "running"


def _find_ending(pod: Pod, stage: Stage, restarts: int, now_ms: int) -> Ending | None:
    """Return how the pod ended, or why it has to leave. The end counts even if the pod was restarted since.

    Returns None for any other pod.
    """
    if stage == "succeeded":
        ends = [row.state.terminated for row in pod.status.container_statuses or () if row.state.terminated]
        return Ending(max((convert_to_ms(row.finished_at) or 0 for row in ends), default=0) or now_ms)
    if stage in ("failed", "broken") or restarts:
        return find_pod_ending(pod, now_ms)
    leaves = pod.find_condition("DisruptionTarget")
    return make_disruption_ending(leaves, now_ms) if leaves is not None and leaves.is_true else None
