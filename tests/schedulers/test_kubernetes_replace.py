"""The rules by which the executor `kubernetes` replaces pods on lost and failing nodes."""

from typing import Any

import msgspec
import pytest

from fleetcast.schedulers.kubernetes_replace import (
    COUNTS_AS_FAILED,
    HostNode,
    ReplaceMethod,
    choose_replace_method,
    explain_missing_pods,
    explain_open_nodes,
    list_lost_pods,
)
from fleetcast.schedulers.kubernetes_stop import StoppableJob, StoppablePod, StoppableWorkload

IGNORES = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}
NOW_MS = 1_795_773_027_000  # 2026-11-27T09:50:27Z
SWAPPED, MOVED = ReplaceMethod.PODS, ReplaceMethod.GANG


def make_pod(node: str = "a", phase: str = "Running", deleted: str | None = None, **toleration: str) -> StoppablePod:
    meta = {"name": "p", "uid": "u", **({"deletionTimestamp": deleted} if deleted else {})}
    spec = {"nodeName": node, "tolerations": [toleration] if toleration else []}
    return msgspec.convert({"metadata": meta, "spec": spec, "status": {"phase": phase}}, StoppablePod)


def make_node(ready: str = "True", *, cordoned: bool = False, **taint: str) -> HostNode:
    spec = {"unschedulable": cordoned, "taints": [taint] if taint else []}
    return msgspec.convert({"spec": spec, "status": {"conditions": [{"type": "Ready", "status": ready}]}}, HostNode)


def make_job(*, ignores: bool) -> StoppableJob:
    spec = {"podFailurePolicy": IGNORES} if ignores else {}
    return msgspec.convert({"metadata": {"name": "j"}, "spec": spec}, StoppableJob)


def make_workload(*, is_topology_aware: bool) -> StoppableWorkload:
    row: dict[str, Any] = {"topologyAssignment": {"levels": ["rack"]}} if is_topology_aware else {}
    thing = {"metadata": {"name": "w"}, "status": {"admission": {"podSetAssignments": [row]}}}
    return msgspec.convert(thing, StoppableWorkload)


@pytest.mark.parametrize(
    ("node", "toleration", "is_open"),
    [
        (make_node(), {}, True),
        (make_node("Unknown"), {}, False),
        (make_node(cordoned=True), {}, False),
        (make_node(key="gpu", effect="NoSchedule"), {}, False),
        (make_node(key="gpu", effect="PreferNoSchedule"), {}, True),
        (make_node(key="gpu", effect="NoSchedule"), {"key": "gpu", "operator": "Exists"}, True),
        (make_node(key="gpu", effect="NoSchedule"), {"operator": "Exists"}, True),
        (make_node(key="gpu", effect="NoExecute"), {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}, False),
        (make_node(key="gpu", value="a", effect="NoSchedule"), {"key": "gpu", "value": "b"}, False),
        (make_node(key="gpu", value="a", effect="NoSchedule"), {"key": "gpu", "value": "a"}, True),
    ],
)
def test_a_node_is_open_while_a_copy_of_the_pod_may_go_there(
    node: HostNode, toleration: dict[str, str], is_open: bool
) -> None:
    assert node.accepts(make_pod(**toleration)) is is_open
    assert bool(explain_open_nodes([make_pod(**toleration)], {"a": node})) is is_open


def test_a_deleted_node_is_not_open() -> None:
    assert explain_open_nodes([make_pod("gone")], {}) == ""


def test_an_action_for_nodes_without_a_pod_is_for_another_attempt() -> None:
    assert explain_missing_pods([make_pod("a"), make_pod("b")], {"a"}) == ""
    why = explain_missing_pods([make_pod("a")], {"a", "c", "b"})
    assert why == "another attempt: the Job has no pod on b, c"


@pytest.mark.parametrize(
    ("ignores", "kueue", "lost", "named", "expected"),
    [
        (True, "", "a", "a", SWAPPED),
        (True, "", "", "ab", SWAPPED),
        (False, "", "a", "a", COUNTS_AS_FAILED),
        (True, "quota", "", "ab", SWAPPED),
        (False, "quota", "a", "a", MOVED),
        (True, "topology", "a", "a", SWAPPED),
        (True, "topology", "", "a", MOVED),
        (True, "topology", "ab", "ab", MOVED),
        (True, "topology", "a", "ab", MOVED),
        (False, "topology", "a", "a", MOVED),
    ],
)
def test_pods_are_swapped_where_the_cluster_lets_them_go_elsewhere(
    ignores: bool, kueue: str, lost: str, named: str, expected: ReplaceMethod | str
) -> None:
    workload = make_workload(is_topology_aware=kueue == "topology") if kueue else None
    job = make_job(ignores=ignores)
    assert choose_replace_method(job, workload, set(lost), set(named), is_all=False) == expected
    assert choose_replace_method(job, workload, set(lost), set(named), is_all=True) == MOVED


@pytest.mark.parametrize(
    ("pod", "node", "is_lost"),
    [
        (make_pod(deleted="2026-11-27T09:50:26Z"), make_node("Unknown"), True),
        (make_pod(deleted="2026-11-27T09:50:26Z"), None, True),
        (make_pod(deleted="2026-11-27T09:50:27Z"), make_node("False"), False),  # within its grace
        (make_pod(deleted="2026-11-27T09:50:26Z"), make_node("True"), False),
        (make_pod(), make_node("Unknown"), False),
        (make_pod(phase="Failed", deleted="2026-11-27T09:50:26Z"), make_node("Unknown"), False),
        (make_pod("", deleted="2026-11-27T09:50:26Z"), None, False),
    ],
)
def test_a_pod_is_lost_after_its_grace_on_a_node_that_cannot_report(
    pod: StoppablePod, node: HostNode | None, is_lost: bool
) -> None:
    assert list_lost_pods([pod], {"a": node} if node else {}, NOW_MS) == ([pod] if is_lost else [])
