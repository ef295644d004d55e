"""Labels of an exporter's series that name the holder of a GPU: Kubernetes pods and Slurm jobs.

    pod, namespace, container      Kubernetes mapping; `exported_*` where a Prometheus keeps its own labels
    hpc_job                        HPC mapping: the id of a Slurm job
    job_id, job_user, job_partition   the same of AMD's exporter

Pods of slurmd, Ray nodes and other schedulers' workers are not jobs but nodes of these schedulers.
`find_host_pod` finds them.

A pod's job is NAMESPACE/OWNER, as in the Kubernetes source. The owner is the pod's name without the parts
that controllers append. A Deployment appends two random parts, and a Job one. A training operator appends a
role with its numbers (`train-42-worker-0` → `train-42`). A number alone is not removed: `train-42` may be a
name, and jobs that share a wrong name would never end.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.events import JobClass

# What Kubernetes makes random parts of names of (k8s.io/apimachinery: util/rand), so that they spell no words.
_RANDOM = "[bcdfghjklmnpqrstvwxz2456789]"
_DEPLOYMENT = re.compile(rf"(.+)-{_RANDOM}{{6,10}}-{_RANDOM}{{5}}")
_JOB = re.compile(rf"(.+)-{_RANDOM}{{5}}")
_ROLE = re.compile(r"(.+?)-(?:worker|master|launcher|chief|ps|leader|head|evaluator)s?(?:-\d+)+")
_PODS = (("exported_pod", "exported_namespace"), ("pod", "namespace"))
_JOBS = ("hpc_job", "job_id")
_HOLDERS = frozenset({*_JOBS, *(pod for pod, _ in _PODS)})
_WORKER = re.compile(
    r"slurmd([-_].*)?|ray[-_](head|worker|node)|pbs[-_]mom|(ht)?condor[-_](startd|execute|worker)|sge[-_]execd"
    r"|(yarn[-_])?node[-_]?manager|dask[-_]worker"
)
_NONE = frozenset({"", "0", "none", "None", "N/A"})


class JobLabel(msgspec.Struct, frozen=True, array_like=True):
    """The job that a series' labels name.

    pod: the pod's own name, without the namespace. Empty for Slurm's jobs.
    """

    job: str
    queue: str = ""
    pod: str = ""
    user: str = ""
    class_: JobClass = "training"


class ObservedJobLabels(msgspec.Struct, frozen=True, gc=False):
    """The job labels of one page or one request.

    gpus: rows of all GPUs in it. jobs: the labels of each GPU that has any. divided: rows of GPUs whose labels belong
    to MIG instances, and so do not name a job of the whole GPU.
    """

    time_ms: int
    gpus: Sequence[int]
    jobs: Mapping[int, Sequence[JobLabel]]
    divided: Sequence[int] = ()


def parse_job_label(labels: Mapping[str, str]) -> JobLabel | None:
    """Return the job that holds the GPU.

    Returns None if the labels name no holder, a scheduler's own node, or the exporter's own pod.

    >>> parse_job_label({"pod": "train-42-worker-0", "namespace": "ml", "container": "torch"}).job
    'ml/train-42'
    >>> parse_job_label({"hpc_job": "4711"}).job, parse_job_label({"pod": "", "namespace": ""})
    ('4711', None)
    """
    if _HOLDERS.isdisjoint(labels):
        return None
    for key in _JOBS:
        job = labels.get(key, "")
        if job not in _NONE and (key == "hpc_job" or "job_user" in labels):
            return _make_slurm_label(job, labels.get("job_partition", ""), labels.get("job_user", ""))
    if find_host_pod(labels):
        return None
    for pod_key, namespace_key in _PODS:
        pod = labels.get(pod_key, "")
        if pod and not (pod_key == "pod" and _is_exporter(pod, labels.get("container", ""))):
            return _make_pod_label(pod, labels.get(namespace_key, ""))
    return None


def find_host_pod(labels: Mapping[str, str]) -> tuple[str, str] | None:
    """Return (pod, namespace) of the pod that is another scheduler's node and holds the GPU, or None.

    >>> find_host_pod({"pod": "worker-0", "namespace": "soperator", "container": "slurmd"})
    ('worker-0', 'soperator')
    """
    if _HOLDERS.isdisjoint(labels):
        return None
    for pod_key, namespace_key in _PODS:
        container = labels.get(pod_key.replace("pod", "container"), "")
        if labels.get(pod_key) and _WORKER.fullmatch(container):
            return labels[pod_key], labels.get(namespace_key, "")
    return None


def _is_exporter(pod: str, container: str) -> bool:
    """Return whether a pod is the exporter's own.

    Prometheus may add the labels of its targets. A series without a pod of its own then has the exporter's pod.
    """
    return "exporter" in pod or "exporter" in container


@lru_cache(65_536)
def _make_slurm_label(job: str, queue: str, user: str) -> JobLabel | None:
    names = (job, queue, user)
    return JobLabel(job, queue, user=user) if all(map(_may_be_job_name, names)) else None


@lru_cache(65_536)
def _make_pod_label(pod: str, namespace: str) -> JobLabel | None:
    if not (_may_be_job_name(pod) and _may_be_job_name(namespace)):
        return None
    owner, class_ = parse_owner(pod)
    return JobLabel(f"{namespace or 'default'}/{owner}", namespace, pod, class_=class_)


def _may_be_job_name(text: str) -> bool:
    return len(text) <= MAX_NAME_LENGTH // 2 and (not text or text.isprintable())


def parse_owner(pod: str) -> tuple[str, JobClass]:
    """Return the name of a pod's job, and its class.

    >>> parse_owner("vllm-6d4cf56db6-x7k2p"), parse_owner("bert-x7k2p"), parse_owner("train-42")
    (('vllm', 'inference'), ('bert', 'training'), ('train-42', 'training'))
    >>> parse_owner("set-workers-0-3-x7k2p"), parse_owner("llm-master-0")
    (('set', 'training'), ('llm', 'training'))
    """
    if found := _DEPLOYMENT.fullmatch(pod):
        return found.group(1), "inference"
    if found := _JOB.fullmatch(pod):
        pod = found.group(1)
    found = _ROLE.fullmatch(pod)
    return (found.group(1) if found else pod), "training"
