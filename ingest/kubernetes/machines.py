"""Pods that represent a machine: nodes of other schedulers, and exporters.

A slurmd, a Ray node or another scheduler's worker holds GPUs for as long as it lives, even while no
job runs in it. Such a pod is a host and not a job, because its own scheduler knows the jobs. It
counts under the name of its Kubernetes node. An exporter that reports under its pod's name or
address counts under its Kubernetes node as well.
"""

import re
from fnmatch import fnmatchcase

import msgspec

from fleetcast.ingest.kubernetes.asked_gpus import read_asked_gpus
from fleetcast.ingest.kubernetes.objects import Pod
from fleetcast.ingest.kubernetes.owners import NO_JOBS, JobOwner

HOST_LABELS = (
    *("app.kubernetes.io/name=slurmd", "app.kubernetes.io/component=slurmd", "ray.io/node-type=*"),
    *("app.kubernetes.io/name=htcondor-execute", "app.kubernetes.io/name=pbs-mom"),
)
HOST_KINDS = frozenset({"NodeSet.slinky.slurm.net", "NodeSet.slurm.nebius.ai", "NodeSet.sunk.coreweave.com"})
OWN_JOBS = frozenset({"RayJob", "RayService"})  # their Ray nodes come and go with one job
SLURM_NAME = "nodeset.slinky.slurm.net/pod-hostname"
_PROGRAM = re.compile(r"slurmd|pbs[-_]mom|condor[-_](startd|execute)|sge[-_]execd|nodemanager")
_EXPORTER = re.compile(r"exporter|dcgm|metrics|telemetry|monitoring")
_NAME_LABELS = ("app.kubernetes.io/name", "app", "k8s-app", "name")


class PodPlace(msgspec.Struct, frozen=True, array_like=True):
    """The node that a pod represents, and the names under which the pod reports.

    gpus: the GPUs that the pod holds, if it is a host or runs on every node.
    """

    node: str
    names: tuple[str, ...]
    is_host: bool
    gpus: int = 0


def is_host(pod: Pod, owner: JobOwner, labels: tuple[str, ...]) -> bool:
    """Return whether a pod is a node of another scheduler. labels: KEY=VALUE patterns of such pods."""
    if owner.kind in OWN_JOBS:
        return False
    return (
        owner.kind in HOST_KINDS or _matches_label_pattern(pod, labels) or (bool(labels) and _has_worker_container(pod))
    )


def _matches_label_pattern(pod: Pod, patterns: tuple[str, ...]) -> bool:
    rows = (pattern.partition("=") for pattern in patterns)
    return any((value := pod.metadata.get_label(key)) and fnmatchcase(value, wanted or "*") for key, _, wanted in rows)


def _has_worker_container(pod: Pod) -> bool:
    programs = ((row.name, row.image.rpartition("/")[2].partition(":")[0]) for row in pod.spec.containers)
    return any(_PROGRAM.fullmatch(name) or _PROGRAM.match(image) for name, image in programs)


def find_pod_place(pod: Pod, owner: JobOwner, labels: tuple[str, ...], resources: tuple[str, ...]) -> PodPlace | None:
    """Return the machine that a pod represents, or None. resources: the names that count as GPUs."""
    if pod.status.phase in ("Failed", "Succeeded") or not pod.spec.node_name:
        return None
    host, meta = is_host(pod, owner, labels), pod.metadata
    gpus = read_asked_gpus(pod.spec, resources).gpus if host or owner.kind in NO_JOBS else 0
    names: tuple[str, ...] = ()
    if host or _is_exporter(pod, owner):
        names = (meta.name, pod.spec.hostname, meta.get_label(SLURM_NAME), pod.status.pod_ip)
    elif not gpus:
        return None
    return PodPlace(pod.spec.node_name, tuple(name for name in dict.fromkeys(names) if name), host, gpus)


def _is_exporter(pod: Pod, owner: JobOwner) -> bool:
    words = (pod.metadata.name, *(pod.metadata.get_label(label) for label in _NAME_LABELS))
    return owner.kind.startswith("DaemonSet") and any(_EXPORTER.search(word) for word in words)
