"""Nodes that Kubernetes keeps from new pods are no candidates, each for a reason of its own."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.nodes import NodeTable
from fleetcast.ingest.kubernetes.objects import Node, decode
from fleetcast.ingest.kubernetes.withheld import TAINTS, find_withheld_reasons
from tests.fuzz.bounds import examples
from tests.ingest.kubernetes.test_owners import Fed
from tests.ingest.small_kubernetes import condition, meta


def node(*taints: str, effect: str = "NoSchedule", **more: Any) -> dict[str, Any]:
    rows = [{"key": key, "effect": effect} for key in taints]
    about = {**meta("n1"), **more.pop("metadata", {})}
    return {"metadata": about, "spec": {"taints": rows, **more}, "status": {"conditions": [condition("Ready")]}}


class Nodes(Fed):
    """A source that is given states of one node, and the table of what it reports."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.nodes = NodeTable()
        self.version = 10

    def put_node(self, thing: dict[str, Any]) -> list[NodeEvent]:
        self.version += 1
        self.clock.advance(1)
        thing["metadata"]["resourceVersion"] = str(self.version)
        before = self.node_events
        self.put("nodes", thing)
        fresh = self.node_events[len(before) :]
        for event in fresh:
            self.nodes.apply(event)
        return fresh

    @property
    def state(self) -> tuple[str, str]:
        record = self.nodes.nodes.get("n1")
        return ("IN_SERVICE", "") if record is None else (record.state.name, record.withheld_reason)


@pytest.mark.parametrize(
    ("taint", "state"),
    [
        ("ToBeDeletedByClusterAutoscaler", "WITHHELD"),
        ("karpenter.sh/disrupted", "WITHHELD"),
        ("karpenter.sh/disruption", "WITHHELD"),
        ("node.kubernetes.io/out-of-service", "WITHHELD"),
        ("node.cloudprovider.kubernetes.io/shutdown", "WITHHELD"),
        ("node.cloudprovider.kubernetes.io/uninitialized", "WITHHELD"),
        ("cloud.google.com/impending-node-termination", "WITHHELD"),
        ("aws-node-termination-handler/spot-itn", "WITHHELD"),
        ("aws-node-termination-handler/scheduled-maintenance", "MAINTENANCE"),
        ("example.com/maintenance", "MAINTENANCE"),
        ("reserved-for", "RESERVED"),
        ("node.kubernetes.io/disk-pressure", "WITHHELD"),
        ("weave.works/kured-node-reboot", "MAINTENANCE"),
        ("remediator.kubernetes.azure.com/unschedulable", "MAINTENANCE"),
        ("nvidia.com/gpu-unhealthy", "MAINTENANCE"),
        ("example.com/gpu-fault", "MAINTENANCE"),
        ("node.cluster.x-k8s.io/uninitialized", "WITHHELD"),
        ("cluster.example.com/deleting", "WITHHELD"),
        ("node-role.kubernetes.io/control-plane", "IN_SERVICE"),
        ("nvidia.com/gpu", "IN_SERVICE"),
        ("dedicated", "IN_SERVICE"),
        ("fleetcast.io/risk", "IN_SERVICE"),
    ],
)
def test_a_taint_withholds_a_node_until_it_is_gone(taint: str, state: str) -> None:
    world = Nodes()
    world.put_node(node(taint))
    assert world.state == (state, "" if state == "IN_SERVICE" else f"taint {taint}")
    world.put_node(node())
    assert world.state == ("IN_SERVICE", "")


def test_a_taint_that_stops_no_pods_withholds_nothing() -> None:
    world = Nodes()
    assert world.put_node(node("DeletionCandidateOfClusterAutoscaler", effect="PreferNoSchedule")) == []


def test_a_node_that_is_being_deleted_is_withheld() -> None:
    world = Nodes()
    world.put_node(node(metadata={"deletionTimestamp": "2026-11-21T10:00:00Z"}))
    assert world.state == ("WITHHELD", "it is being deleted from the cluster")


def test_a_node_in_maintenance_by_a_label_is_withheld() -> None:
    world = Nodes()
    world.put_node(node(metadata={"labels": {"cloud.google.com/active-node-maintenance": "ONGOING"}}))
    assert world.state == ("MAINTENANCE", "cloud.google.com/active-node-maintenance is ONGOING")


def test_a_node_that_joins_is_withheld_until_it_is_ready() -> None:
    joining = node(metadata={"creationTimestamp": "2026-11-21T10:00:30Z"})
    joining["status"]["conditions"] = [condition("Ready", "KubeletNotReady", "no network", "False")]
    world = Nodes()
    world.put_node(joining)
    assert world.state == ("WITHHELD", "KubeletNotReady: no network")
    world.put_node(node())
    assert world.state == ("IN_SERVICE", "")


def test_a_cordon_is_a_drain_also_where_only_its_taint_says_so() -> None:
    for cordoned in (node(unschedulable=True), node("node.kubernetes.io/unschedulable")):
        world = Nodes()
        world.put_node(cordoned)
        assert world.state == ("DRAINED", "")
        world.put_node(node())
        assert world.state == ("IN_SERVICE", "")


def test_the_end_of_one_reason_leaves_the_others() -> None:
    world = Nodes()
    world.put_node(node("karpenter.sh/disrupted", "example.com/maintenance", unschedulable=True))
    assert world.state[0] == "DRAINED"
    world.put_node(node("karpenter.sh/disrupted"))
    assert world.state == ("WITHHELD", "taint karpenter.sh/disrupted")


def test_a_site_says_what_its_own_taints_mean() -> None:
    world = Nodes(taints={"example.com/burn-in": "maintenance", "reserved-for": ""})
    world.put_node(node("example.com/burn-in"))
    assert world.state == ("MAINTENANCE", "taint example.com/burn-in")
    world.put_node(node("reserved-for"))
    assert world.state == ("IN_SERVICE", "")


def test_repeats_and_a_restart_report_nothing_again() -> None:
    world = Nodes()
    assert len(world.put_node(node("karpenter.sh/disrupted"))) == 1
    assert world.put_node(node("karpenter.sh/disrupted")) == []
    again = Nodes()
    again.source.seek(json.loads(json.dumps(world.source.position())))
    assert again.put_node(node("karpenter.sh/disrupted")) == []
    (released,) = again.put_node(node())
    assert (released.type, released.check) == ("release", "to_be_deleted")


KEYS = [pattern.replace("*", "x") for pattern, _ in TAINTS]


@examples(100)
@given(st.lists(st.lists(st.sampled_from(KEYS), max_size=3), min_size=1, max_size=6))
def test_whatever_the_order_of_taints_the_last_state_counts(history: list[list[str]]) -> None:
    world = Nodes()
    for taints in history:
        thing = node(*taints)
        world.put_node(thing)
    reasons = find_withheld_reasons(decode(json.dumps(thing).encode(), Node), {})
    assert bool(reasons) == (world.state[0] not in ("IN_SERVICE", "DRAINED") or bool(world.state[1]))
    assert world.state[1] == "; ".join(reasons[check] for check in sorted(reasons))
