"""A real Kueue's queues as queues.toml: the tree is the same, and its own fair sharing is the oracle of our order."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
import yaml

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import QueueTree
from fleetcast.schedulers.imports.agreement import correct_draft
from fleetcast.schedulers.imports.kueue import KINDS, draft_kueue
from fleetcast.schedulers.imports.toml_text import format_draft
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import GPU, ControlPlane
from tests.integration.kubernetes.kueue_build import kueue
from tests.integration.kubernetes.kueue_process import GROUP, KueueManager

TEAMS = {"left": 40, "middle": 40, "right": 20}  # weights
GPUS = 10  # of the pool that the teams share
KEPT = [kind for kind in KINDS if kind != "Configuration"]
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def manager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueManager]:
    """A control plane and Kueue in it, with two trees of queues."""
    binaries, binary = needed(kubernetes, request), needed(kueue, request)
    plane = ControlPlane(binaries, tmp_path_factory.mktemp("kubernetes"))
    try:
        started = KueueManager(binary, plane, tmp_path_factory.mktemp("kueue"))
        try:
            describe(started)
            yield started
        finally:
            started.stop()
    finally:
        plane.stop()


def quota(flavor: str, **of: int) -> list[dict[str, Any]]:
    resources = [{"name": GPU, **of}]
    return [{"coveredResources": [GPU], "flavors": [{"name": flavor, "resources": resources}]}]


def describe(manager: KueueManager) -> None:
    for flavor, model in (("h100", "NVIDIA-H100"), ("a100", "NVIDIA-A100")):
        manager.create("ResourceFlavor", flavor, {"nodeLabels": {"nvidia.com/gpu.product": model}})
    manager.create("WorkloadPriorityClass", "urgent", {}, value=100)
    manager.create("Cohort", "pool", {"resourceGroups": quota("h100", nominalQuota=0)})
    for team, weight in TEAMS.items():
        shared = {"cohortName": "pool", "fairSharing": {"weight": str(weight)}, "namespaceSelector": {}}
        manager.create("ClusterQueue", team, shared | {"resourceGroups": quota("h100", nominalQuota=0)})
        manager.create("LocalQueue", team, {"clusterQueue": team})
    lender = quota("a100", nominalQuota=8, lendingLimit=6)
    manager.create("Cohort", "lab", {"parentName": "company", "fairSharing": {"weight": "500m"}})
    manager.create("ClusterQueue", "lender", {"cohortName": "lab", "namespaceSelector": {}, "resourceGroups": lender})
    borrower = {"cohortName": "lab", "namespaceSelector": {}}
    borrower |= {"resourceGroups": quota("a100", nominalQuota=4, borrowingLimit=2)}
    manager.create("ClusterQueue", "borrower", borrower | {"preemption": {"reclaimWithinCohort": "Any"}})


def imported(manager: KueueManager, version: str) -> tuple[QueueTree, dict[str, list[str]]]:
    """The tree of what the server lists: v1beta1 as JSON, v1beta2 as YAML."""
    items = [item for kind in KEPT for item in manager.items(kind, version)]
    exported = {"apiVersion": "v1", "kind": "List", "items": items}
    text = json.dumps(exported, indent=4) if version == "v1beta1" else yaml.safe_dump(exported)
    draft = draft_kueue({"export": text}, lambda name: name.removeprefix("NVIDIA-"))
    correct_draft(draft)
    return read_queues(format_draft(draft, ["export"])), draft.notes


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_the_tree_is_that_of_the_server(manager: KueueManager, version: str) -> None:
    tree, notes = imported(manager, version)
    found = {node.name: node for node in tree.nodes[1:]}
    assert {name: node.weight for name, node in found.items()} == {
        **{"pool": 1, "company": 1, "company/lab": 0.5, "company/lab/lender": 1, "company/lab/borrower": 1},
        **{f"pool/{team}": weight for team, weight in TEAMS.items()},
    }
    lender, borrower = found["company/lab/lender"], found["company/lab/borrower"]
    assert (lender.guaranteed, lender.lend) == ({"A100": 8}, {"A100": 6})
    assert (borrower.guaranteed, borrower.borrow) == ({"A100": 4}, {"A100": 2})
    assert found["company"].limit["A100"] == 12
    assert tree.classes["urgent"].priority == 100
    assert notes["ClusterQueue preemption.reclaimWithinCohort"] == ["borrower (Any)"]
    assert notes["LocalQueues are no queues of their own: requests name the ClusterQueue's"]


def test_workloads_are_admitted_in_our_order(manager: KueueManager) -> None:
    """The pool grows GPU by GPU, all teams always want more: who is admitted is whom our order has next."""
    tree, _ = imported(manager, "v1beta2")
    for team in TEAMS:  # of equal shares the oldest is next, to the second: so each team has a second of its own
        for number in range(GPUS):
            manager.create("Workload", f"{team}-{number}", workload(team))
        newest_ms = max(created_ms(item) for item in manager.items("Workload"))
        manager.plane.until("the next second", lambda newest_ms=newest_ms: time.time() * 1000 >= newest_ms + 1000)
    order: list[str] = []
    before: set[str] = set()
    for gpus in range(1, GPUS + 1):
        grow(manager, gpus)
        now = manager.plane.until(
            f"{gpus} admitted", lambda before=before: (found := admitted(manager)) > before and found
        )
        order += sorted(name.partition("-")[0] for name in now - before)
        assert len(order) == gpus
        before = now
    assert order == expected(tree, manager)
    assert {team: order.count(team) for team in TEAMS} == {"left": 4, "middle": 4, "right": 2}


def grow(manager: KueueManager, gpus: int) -> None:
    path = f"/apis/{GROUP}/v1beta2/cohorts/pool"
    change = {"spec": {"resourceGroups": quota("h100", nominalQuota=gpus)}}
    answer = manager.plane.http.patch(path, json=change, headers={"content-type": "application/merge-patch+json"})
    assert answer.status_code == 200, answer.text


def workload(team: str) -> dict[str, Any]:
    """One pod with one GPU, which never runs."""
    container = {"name": "c", "image": "none", "resources": {"requests": {GPU: "1"}, "limits": {GPU: "1"}}}
    pods = {"name": "main", "count": 1, "template": {"spec": {"containers": [container], "restartPolicy": "Never"}}}
    return {"queueName": team, "podSets": [pods]}


def admitted(manager: KueueManager) -> set[str]:
    return {
        item["metadata"]["name"]
        for item in manager.items("Workload")
        for row in item.get("status", {}).get("conditions", [])
        if (row["type"], row["status"]) == ("QuotaReserved", "True")
    }


def created_ms(item: dict[str, Any]) -> int:
    return round(datetime.fromisoformat(item["metadata"]["creationTimestamp"]).timestamp() * 1000)


def expected(tree: QueueTree, manager: KueueManager) -> list[str]:
    """Whose the first workloads are in the order of our walk, while nobody holds anything."""
    waiting = [
        WaitingEntry(
            PlacementRequest(request_id=item["metadata"]["name"], queue=queue, gpus_per_node=1), created_ms(item)
        )
        for item in manager.items("Workload")
        if (queue := f"pool/{item['spec']['queueName']}")
    ]
    standing = QueueStanding(without_limits(tree), {}, {"gpu": float(GPUS), "H100": float(GPUS)})
    found = standing.sort_entries(waiting, lambda waiters, _: waiters.rank_rows())
    return [entry.request.queue.removeprefix("pool/") for entry in found][:GPUS]


def without_limits(tree: QueueTree) -> QueueTree:
    """The pool has no quota yet when it is exported: its limit of 0 says nothing of the order."""
    return QueueTree(tuple(replace(node, limit={}) for node in tree.nodes), tree.policy, tree.classes)
