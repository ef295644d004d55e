"""A finder of the job to which a pod belongs, and of the name of the job's kind.

A kind is identified by its name and its API group: Volcano's Job is not a batch Job. A kind of its usual
group has its plain name (`Job`). Any other has the full name that Kubernetes prints
(`Job.batch.volcano.sh`). The first row that applies to a pod decides:

    label of a JobSet, LeaderWorkerSet, Ray cluster or notebook    that object, which created the pod's owner
    ReplicaSet of a Deployment or Rollout                          the Deployment or Rollout
    any other controller                                           the controller
    no controller, but the label of a group of pods                the group
    none of these                                                  the pod itself
"""

from collections.abc import Mapping
from typing import NamedTuple

from fleetcast.fleet.events import JobClass
from fleetcast.ingest.kubernetes.objects import Meta, Pod

JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"
LWS_NAME = "leaderworkerset.sigs.k8s.io/name"
RAY_CLUSTER = "ray.io/cluster"
RAY_ORIGIN_KIND, RAY_ORIGIN_NAME = "ray.io/originated-from-crd", "ray.io/originated-from-cr-name"
NOTEBOOK_NAME = "notebook-name"
POD_GROUPS = ("kueue.x-k8s.io/pod-group-name", "scheduling.x-k8s.io/pod-group", "pod-group.scheduling.sigs.k8s.io")
REVISIONS = {"pod-template-hash": "Deployment", "rollouts-pod-template-hash": "Rollout"}
QUEUES = (  # where schedulers of pods read the queue, if the configured label is absent
    "volcano.sh/queue-name",
    "scheduling.volcano.sh/queue-name",
    "kai.scheduler/queue",
    "runai/queue",
    "yunikorn.apache.org/queue",
)
HOME_GROUPS = {
    **dict.fromkeys(("Pod", "Node", "ReplicationController"), ""),
    **dict.fromkeys(("Deployment", "ReplicaSet", "StatefulSet", "DaemonSet"), "apps"),
    **dict.fromkeys(("Job", "CronJob"), "batch"),
    **dict.fromkeys(("PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob", "Notebook"), "kubeflow.org"),
    **dict.fromkeys(("RayCluster", "RayJob", "RayService"), "ray.io"),
    **dict.fromkeys(("Workflow", "Rollout"), "argoproj.io"),
    "JobSet": "jobset.x-k8s.io",
    "LeaderWorkerSet": "leaderworkerset.x-k8s.io",
    "InferenceService": "serving.kserve.io",
    "VirtualMachineInstance": "kubevirt.io",
}
STAND_INS = frozenset({"kai-resource-reservation", "runai-reservation"})  # namespaces: they hold GPUs for fractions
NO_JOBS = frozenset({"DaemonSet", "DaemonSet.apps.kruise.io", "Node"})  # their pods belong to the node
USUAL_CLASSES: dict[str, JobClass] = {
    **dict.fromkeys(("Deployment", "ReplicaSet", "StatefulSet", "ReplicationController"), "inference"),
    **dict.fromkeys(("LeaderWorkerSet", "InferenceService", "Rollout", "RayService"), "inference"),
    **dict.fromkeys(("StatefulSet.apps.kruise.io", "CloneSet.apps.kruise.io"), "inference"),
    **dict.fromkeys(("Workflow", "CronJob"), "batch"),
    "Notebook": "interactive",
}


class JobOwner(NamedTuple):
    """The object that is a pod's job. is_single: the object is the pod itself."""

    kind: str
    name: str
    is_single: bool = False


def qualify_kind(kind: str, api_version: str) -> str:
    """Return the plain name of a kind in its usual API group, else its name with the group.

    >>> qualify_kind("Job", "batch/v1"), qualify_kind("Job", "batch.volcano.sh/v1alpha1"), qualify_kind("Pod", "v1")
    ('Job', 'Job.batch.volcano.sh', 'Pod')
    """
    group = api_version.rpartition("/")[0]
    if not api_version or group == HOME_GROUPS.get(kind):
        return kind
    return f"{kind}.{group or 'core'}"


def find_owner(pod: Pod) -> JobOwner:
    """Return the object that is a pod's job, by the pod's labels and owner references."""
    meta = pod.metadata
    if behind := _find_object_behind_owner(meta):
        return behind
    owner = meta.controller
    if owner is None:
        group = next((name for label in POD_GROUPS if (name := meta.get_label(label))), "")
        return JobOwner("PodGroup", group) if group else JobOwner("Pod", meta.name, is_single=True)
    kind = qualify_kind(owner.kind, owner.api_version)
    if kind == "ReplicaSet":
        for label, behind_kind in REVISIONS.items():
            suffix = f"-{meta.get_label(label)}"
            if len(suffix) > 1 and owner.name.endswith(suffix):
                return JobOwner(behind_kind, owner.name.removesuffix(suffix))
    return JobOwner(kind, owner.name)


def _find_object_behind_owner(meta: Meta) -> JobOwner | None:
    """Return the object that created a pod's owner, or None if no label of the pod names one."""
    for kind, label in (("JobSet", JOBSET_NAME), ("LeaderWorkerSet", LWS_NAME), ("Notebook", NOTEBOOK_NAME)):
        if meta.get_label(label):
            return JobOwner(kind, meta.get_label(label))
    if not meta.get_label(RAY_CLUSTER):
        return None
    if meta.get_label(RAY_ORIGIN_KIND) in ("RayJob", "RayService") and meta.get_label(RAY_ORIGIN_NAME):
        return JobOwner(meta.get_label(RAY_ORIGIN_KIND), meta.get_label(RAY_ORIGIN_NAME))
    return JobOwner("RayCluster", meta.get_label(RAY_CLUSTER))


def is_placeholder_pod(pod: Pod) -> bool:
    """Return whether a pod only reserves a GPU for other pods.

    The other pods hold parts of the GPU, and count instead of the placeholder.
    """
    return pod.metadata.namespace in STAND_INS


def find_stated_queue(labels: Mapping[str, str] | None, annotations: Mapping[str, str] | None) -> str:
    """Return the queue that a pod scheduler would charge, or "" if no label or annotation states one."""
    tables = (labels or {}, annotations or {})
    return next((queue for name in QUEUES for table in tables if (queue := table.get(name))), "")
