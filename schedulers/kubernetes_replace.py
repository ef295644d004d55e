"""The rules by which pods on lost or failing nodes are replaced. They read objects of the API, and write none."""

from collections.abc import Collection, Mapping, Sequence
from enum import Enum, auto

import msgspec

from fleetcast.schedulers.kubernetes_stop import PodToleration, StoppableJob, StoppablePod, StoppableWorkload, parse_ms

KEEPS_OUT = frozenset({"NoSchedule", "NoExecute"})
COUNTS_AS_FAILED = "an evicted pod would count as failed: its podFailurePolicy does not ignore DisruptionTarget"


class _Taint(msgspec.Struct):
    key: str
    effect: str
    value: str = ""

    def is_tolerated(self, tolerations: Sequence[PodToleration]) -> bool:
        return any(
            row.effect in ("", self.effect)
            and (row.key == self.key or (not row.key and row.operator == "Exists"))
            and (row.operator == "Exists" or row.value == self.value)
            for row in tolerations
        )


class _NodeSpec(msgspec.Struct):
    unschedulable: bool = False
    taints: list[_Taint] = []


class _NodeCondition(msgspec.Struct):
    type: str
    status: str


class _NodeStatus(msgspec.Struct):
    conditions: list[_NodeCondition] = []


class HostNode(msgspec.Struct):
    """A node with the fields that decide whether it gets new pods."""

    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _NodeStatus = msgspec.field(default_factory=_NodeStatus)

    @property
    def is_ready(self) -> bool:
        return any(row.type == "Ready" and row.status == "True" for row in self.status.conditions)

    def accepts(self, pod: StoppablePod) -> bool:
        """Return whether the scheduler may place a copy of a pod on this node."""
        taints = [row for row in self.spec.taints if row.effect in KEEPS_OUT]
        return (
            self.is_ready
            and not self.spec.unschedulable
            and all(row.is_tolerated(pod.spec.tolerations) for row in taints)
        )


class ReplaceMethod(Enum):
    """The part of a Job that is replaced: the pods on some nodes, or the whole gang."""

    PODS = auto()
    GANG = auto()


def explain_missing_pods(pods: Sequence[StoppablePod], nodes: Collection[str]) -> str:
    """Return why these pods are not the attempt that an action names, or "" if each named node has one."""
    present = {pod.spec.node_name for pod in pods} - {""}
    missing = sorted(set(nodes) - present)
    return f"another attempt: the Job has no pod on {', '.join(missing)}" if missing else ""


def explain_open_nodes(pods: Sequence[StoppablePod], nodes: Mapping[str, HostNode]) -> str:
    """Return why new pods might return to the nodes of these pods, or "" if they cannot.

    nodes: name → node, without nodes that the cluster has deleted.
    """
    for pod in pods:
        node = nodes.get(pod.spec.node_name)
        if node is not None and node.accepts(pod):
            return f"node {pod.spec.node_name} accepts new pods: cordon it, or let the adapter `nodes` taint it"
    return ""


def choose_replace_method(
    job: StoppableJob,
    workload: StoppableWorkload | None,
    lost: Collection[str],
    named: Collection[str],
    *,
    is_all: bool,
) -> ReplaceMethod | str:
    """Return what to replace, or why nothing can be replaced.

    lost: the named nodes that are not ready. named: all nodes of the action. is_all: they are all nodes of the Job.

    If one node of a topology-aware workload is not ready, Kueue gives the workload another node. If more are not ready,
    Kueue evicts the whole workload. It pins new pods to the old node as long as that node is ready.
    """
    if is_all:
        return ReplaceMethod.GANG
    if workload is None:
        return ReplaceMethod.PODS if job.ignores_disruptions else COUNTS_AS_FAILED
    swaps = len(named) == 1 and len(lost) == 1
    if job.ignores_disruptions and (swaps or not workload.is_topology_aware):
        return ReplaceMethod.PODS
    return ReplaceMethod.GANG


def list_lost_pods(pods: Sequence[StoppablePod], nodes: Mapping[str, HostNode], now_ms: int) -> list[StoppablePod]:
    """Return the pods that should have ended by now, and whose node cannot report it.

    nodes: name → node, without nodes that the cluster has deleted. now_ms: Unix ms of the server's clock, which also
    wrote the times of the pods.
    """
    return [
        pod
        for pod in pods
        if not pod.has_ended
        and pod.spec.node_name
        and pod.metadata.deletion_timestamp is not None
        and now_ms > parse_ms(pod.metadata.deletion_timestamp)
        and not (pod.spec.node_name in nodes and nodes[pod.spec.node_name].is_ready)
    ]
