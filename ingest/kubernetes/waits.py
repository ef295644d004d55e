"""Reasons why a pod does not run yet: it waits for resources, or it is blocked.

A blocked pod would not start even if enough GPUs were free.

scheduling gates                                        blocked, except Kueue's own gates: waits for a quota
unschedulable, and some node lacks resources            waits
unschedulable for its selector, taints or volumes       blocked
a container that cannot be created (image, settings)    blocked
"""

import re
from typing import NamedTuple

from fleetcast.ingest.kubernetes.objects import Pod

KUEUE_GATES = frozenset({"kueue.x-k8s.io/admission", "kueue.x-k8s.io/topology"})
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
GATED, ADMISSION = "scheduling gates", "waits until Kueue admits it"
_LACKS_RESOURCES = re.compile(
    r"insufficient|too many pods|not enough|quota|cannot allocate|allocation|minavailable|pod ?group"
    r"|no nodes available",
    re.IGNORECASE,
)
_NEVER_FITS = re.compile(
    r"node affinity|node\(s\) didn't match|node selector|untolerated taint|that the pod didn't tolerate"
    r"|were unschedulable|persistentvolumeclaim|volume node affinity|unbound|not found|topology spread"
    r"|node\(s\) had no available volume zone",
    re.IGNORECASE,
)
_FAULTS = frozenset(
    {
        *("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError"),
        *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
    }
)


class PodWait(NamedTuple):
    """The reason why a pod does not run yet, empty if unknown.

    is_blocked: the pod may not start even if enough GPUs are free.
    """

    reason: str = ""
    is_blocked: bool = False


def find_pod_wait(pod: Pod, *, admission_blocks: bool = False) -> PodWait:
    """Return why a pending pod does not run yet.

    admission_blocks: whether a pod that waits for Kueue counts as blocked.
    """
    gates = [gate.name for gate in pod.spec.scheduling_gates or ()]
    if others := [name for name in gates if name not in KUEUE_GATES]:
        return PodWait(f"{GATED}: {', '.join(others)}", is_blocked=True)
    if gates:
        return PodWait(ADMISSION, admission_blocks)
    scheduled = pod.find_condition("PodScheduled")
    if scheduled is not None and not scheduled.is_true:
        return PodWait(scheduled.text or "not scheduled yet", _never_fits(scheduled.message or ""))
    states = [status.state.waiting for status in pod.status.container_statuses or ()]
    for row in states:
        if row and row.reason in _FAULTS:
            return PodWait(": ".join(filter(None, (row.reason, row.message))), is_blocked=True)
    return PodWait(next((": ".join(filter(None, (row.reason, row.message))) for row in states if row), ""))


def _never_fits(message: str) -> bool:
    """Return whether a pod could not start even if resources became free.

    >>> _never_fits("0/3 nodes are available: 3 node(s) didn't match Pod's node affinity/selector.")
    True
    >>> _never_fits("0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint {a: b}.")
    False
    """
    return bool(_NEVER_FITS.search(message)) and not _LACKS_RESOURCES.search(message)
