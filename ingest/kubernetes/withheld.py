"""Reasons why Kubernetes withholds a node from new pods.

The reasons are taints, a deletion that has begun, and announced maintenance. A taint counts only if it stops
pods (NoSchedule, NoExecute) and does not merely dedicate a node. Our own taint does not count, because a
forecast must not feed itself. A cordon is a drain (`nodes.py`).
"""

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from fleetcast.ingest.kubernetes.objects import Condition, Node, Taint, find_condition

HARD = frozenset({"NoSchedule", "NoExecute"})
OWN_TAINTS = "fleetcast*"
# Pattern of a taint's key, in lower case → why the node is withheld; the first that matches counts.
TAINTS: tuple[tuple[str, str], ...] = (
    (OWN_TAINTS, ""),
    ("node.kubernetes.io/unschedulable", ""),
    ("tobedeletedbyclusterautoscaler", "to_be_deleted"),
    ("karpenter.sh/disrupt*", "to_be_deleted"),
    ("karpenter.sh/unregistered", "joining"),
    ("node.cloudprovider.kubernetes.io/uninitialized", "joining"),
    ("*/agent-not-ready", "joining"),
    ("node.cloudprovider.kubernetes.io/shutdown", "powered_down"),
    ("node.kubernetes.io/out-of-service", "out_of_service"),
    ("node.kubernetes.io/not-ready", "not_responding"),
    ("node.kubernetes.io/unreachable", "not_responding"),
    ("node.kubernetes.io/network-unavailable", "not_responding"),
    ("node.kubernetes.io/*-pressure", "pressure"),
    ("aws-node-termination-handler/scheduled-maintenance", "maintenance"),
    ("aws-node-termination-handler/rebalance-recommendation", ""),
    ("aws-node-termination-handler/*", "to_be_deleted"),
    ("*/uninitialized", "joining"),
    ("*terminat*", "to_be_deleted"),
    ("*deleting*", "to_be_deleted"),
    ("*deletion*", "to_be_deleted"),
    ("*evict*", "maintenance"),
    ("*cordon*", "maintenance"),
    ("*unschedulable*", "maintenance"),
    ("*reboot*", "maintenance"),
    ("*unhealthy*", "maintenance"),
    ("*fault*", "maintenance"),
    ("*decommission*", "to_be_deleted"),
    ("*maintenance*", "maintenance"),
    ("*quarantine*", "maintenance"),
    ("*remediat*", "maintenance"),
    ("*repair*", "maintenance"),
    ("*upgrade*", "maintenance"),
    ("*drain*", "maintenance"),
    ("*reserved*", "reserved"),
    ("*reservation*", "reserved"),
)
LABELS: Mapping[str, Mapping[str, str]] = {
    "cloud.google.com/active-node-maintenance": {"ONGOING": "maintenance"},
    "nvidia.com/mig.config.state": {"pending": "maintenance", "rebooting": "maintenance"},
}
READY = "Ready"


def find_withheld_reasons(node: Node, own: Mapping[str, str]) -> dict[str, str]:
    """Return why a node gets no new pods: reason → Kubernetes' text, empty if nothing withholds it.

    own: the site's patterns of taints, which take precedence.
    """
    found: dict[str, list[str]] = {}
    for check, said in _list_reasons(node, own):
        found.setdefault(check, []).append(said)
    return {check: ", ".join(dict.fromkeys(said)) for check, said in found.items()}


def _list_reasons(node: Node, own: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    if node.metadata.deletion_timestamp is not None:
        yield "to_be_deleted", "it is being deleted from the cluster"
    for taint in node.spec.taints or ():
        check = _find_taint_check(taint, own)
        if check:
            yield check, f"taint {taint.key}"
    for label, meanings in LABELS.items():
        check = meanings.get(node.metadata.get_label(label), "")
        if check:
            yield check, f"{label} is {node.metadata.get_label(label)}"
    ready: Condition | None = find_condition(node.status.conditions, READY)
    if ready is not None and not ready.is_true:
        yield "not_responding", ready.text or "it is not ready"


def _find_taint_check(taint: Taint, own: Mapping[str, str]) -> str:
    if taint.effect not in HARD:
        return ""
    key = taint.key.lower()
    for pattern, check in (*((name.lower(), why) for name, why in own.items()), *TAINTS):
        if fnmatchcase(key, pattern):
            return check
    return ""
