"""The executor `kubernetes` replaces pods on lost and failing nodes of a real cluster, with and without Kueue."""

import time

import pytest

from fleetcast.schedulers.executor import ActionOrder, SendOutcome
from tests.integration.kubernetes.kueue_process import KueueManager
from tests.integration.kubernetes.stopping import BUDGETS, IGNORED, StoppedCluster, find_workload, in_queue

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes and Kueue

ACCEPTED, REFUSED = SendOutcome.ACCEPTED, SendOutcome.REFUSED


def run_gang(cluster: StoppedCluster, name: str, queue: str = "", **spec: object) -> tuple[str, str]:
    """Run a Job of two pods. Returns the nodes of its pods."""
    more = in_queue(queue) | ({"topology": "rack"} if queue == "racks" else {}) if queue else {}
    cluster.run(name, 2, **more, **spec)
    first, second = cluster.place_of(name).values()
    return first, second


def replace(cluster: StoppedCluster, job: str, *nodes: str) -> ActionOrder:
    return cluster.order(job, kind="replace", nodes=nodes)


def await_places(cluster: StoppedCluster, order: ActionOrder, job: str, left: set[str], pods: int = 2) -> set[str]:
    """Follow an action until the Job has all its pods, none of them on the nodes that it should leave."""

    def find_places() -> set[str]:
        assert cluster.follow(order).outcome is ACCEPTED
        places = set(cluster.place_of(job).values())
        return places if len(places) == pods and "" not in places and not places & left else set()

    began = time.monotonic()
    found: set[str] = cluster.plane.until("new places", find_places, 90.0)
    print(f"{job}: new places {time.monotonic() - began:.1f} s after the order; ", end="")
    return found


@pytest.mark.parametrize("queue", ["", "gpus", "racks"])
def test_the_pod_of_a_lost_node_runs_elsewhere_and_the_others_stay(kueue_cluster: StoppedCluster, queue: str) -> None:
    """Its kubelet never reports the end, so the Job controller alone would wait for ever."""
    name = f"lost-{queue or 'plain'}"
    lost, healthy = run_gang(kueue_cluster, name, queue, podFailurePolicy=IGNORED)
    before = kueue_cluster.uids(kueue_cluster.pods(name))
    kueue_cluster.lose_node(lost)
    order = replace(kueue_cluster, name, lost)
    assert kueue_cluster.send(order).outcome is ACCEPTED
    places = await_places(kueue_cluster, order, name, {lost})
    assert healthy in places
    after = kueue_cluster.uids(kueue_cluster.pods(name))
    assert len(set(before.values()) & set(after.values())) == 1
    assert not kueue_cluster.job(name)["status"].get("failed")
    assert kueue_cluster.send(order).outcome is ACCEPTED  # once more, after everything
    assert kueue_cluster.uids(kueue_cluster.pods(name)) == after


def test_two_nodes_restart_the_gang_where_kueue_chooses_the_nodes(
    manager: KueueManager, kueue_cluster: StoppedCluster
) -> None:
    """Kueue itself would evict the workload. It waits until three nodes can have it."""
    kueue_cluster.run("three", 3, **in_queue("racks"), topology="rack", podFailurePolicy=IGNORED)
    lost, failing, _ = kueue_cluster.place_of("three").values()
    before = kueue_cluster.uids(kueue_cluster.pods("three"))
    kueue_cluster.lose_node(lost)
    kueue_cluster.cordon(failing)
    order = replace(kueue_cluster, "three", lost, failing)
    assert kueue_cluster.send(order).outcome is ACCEPTED
    assert find_workload(manager, "three")["spec"]["active"] is False
    kueue_cluster.plane.until("no pods", lambda: not kueue_cluster.pods("three"))
    kueue_cluster.cordon(failing, is_on=False)
    await_places(kueue_cluster, order, "three", {lost}, 3)
    assert not set(before.values()) & set(kueue_cluster.uids(kueue_cluster.pods("three")).values())
    assert find_workload(manager, "three")["spec"]["active"] is True
    assert not kueue_cluster.job("three")["status"].get("failed")


@pytest.mark.parametrize("queue", ["", "racks"])
def test_a_gang_leaves_a_node_that_is_expected_to_fail(kueue_cluster: StoppedCluster, queue: str) -> None:
    """Kueue holds new pods to a node that is ready, so the whole gang gets other nodes."""
    name = f"expected-{queue or 'plain'}"
    failing, _ = run_gang(kueue_cluster, name, queue, podFailurePolicy=IGNORED)
    before = kueue_cluster.uids(kueue_cluster.pods(name))
    refused = kueue_cluster.send(replace(kueue_cluster, name, failing))
    assert refused.outcome is REFUSED
    assert refused.why == f"node {failing} accepts new pods: cordon it, or let the adapter `nodes` taint it"
    assert kueue_cluster.uids(kueue_cluster.pods(name)) == before
    kueue_cluster.cordon(failing)
    order = replace(kueue_cluster, name, failing)
    assert kueue_cluster.send(order).outcome is ACCEPTED
    await_places(kueue_cluster, order, name, {failing})
    stayed = set(before.values()) & set(kueue_cluster.uids(kueue_cluster.pods(name)).values())
    assert len(stayed) == (0 if queue else 1)
    assert not kueue_cluster.job(name)["status"].get("failed")


def test_a_whole_gang_moves_even_if_evictions_would_count(kueue_cluster: StoppedCluster) -> None:
    first, second = run_gang(kueue_cluster, "moved")
    kueue_cluster.cordon(first)
    kueue_cluster.cordon(second)
    order = replace(kueue_cluster, "moved", first, second)
    assert kueue_cluster.send(order).outcome is ACCEPTED
    await_places(kueue_cluster, order, "moved", {first, second})
    assert not kueue_cluster.job("moved")["status"].get("failed")


def test_nothing_is_replaced_where_it_would_harm(kueue_cluster: StoppedCluster) -> None:
    failing, other = run_gang(kueue_cluster, "counting")
    kueue_cluster.cordon(failing)
    before = kueue_cluster.uids(kueue_cluster.pods("counting"))
    reply = kueue_cluster.send(replace(kueue_cluster, "counting", failing))
    assert reply.why == "an evicted pod would count as failed: its podFailurePolicy does not ignore DisruptionTarget"
    reply = kueue_cluster.send(replace(kueue_cluster, "counting", "s9"))
    assert reply.why == "another attempt: the Job has no pod on s9"
    kueue_cluster.cordon(other)
    spec = {"minAvailable": 2, "selector": {"matchLabels": {"app": "counting"}}}
    kueue_cluster.plane.create(BUDGETS, {"metadata": {"name": "at-least"}, "spec": spec})
    budgets = kueue_cluster.plane.items
    kueue_cluster.plane.until("its status", lambda: budgets(BUDGETS)[0].get("status", {}).get("currentHealthy") == 2)
    reply = kueue_cluster.send(replace(kueue_cluster, "counting", failing, other))
    assert "needs 2 healthy pods" in reply.why
    kueue_cluster.plane.http.delete(BUDGETS)
    label = {"fleetcast.io/preemptible": "false"}
    kueue_cluster.patch("/apis/batch/v1/namespaces/default/jobs/counting", {"metadata": {"labels": label}})
    reply = kueue_cluster.send(replace(kueue_cluster, "counting", failing, other))
    assert (reply.outcome, reply.why) == (REFUSED, "its owner forbids it by fleetcast.io/preemptible")
    assert kueue_cluster.uids(kueue_cluster.pods("counting")) == before
