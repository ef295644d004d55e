"""The executor `kubernetes` stops Jobs that a real Kueue has admitted."""

import pytest

from fleetcast.schedulers.executor import SendOutcome
from tests.integration.kubernetes.kueue_process import KueueManager
from tests.integration.kubernetes.stopping import JOBS, StoppedCluster, find_workload, in_queue

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes and Kueue


def test_kueue_stops_the_job_and_queues_it_again_once_the_payer_runs(
    manager: KueueManager, kueue_cluster: StoppedCluster
) -> None:
    kueue_cluster.run("queued", **in_queue("gpus"))
    kueue_cluster.submit("payer", **in_queue("gpus"))
    order = kueue_cluster.order("queued", payer="default/payer")
    assert kueue_cluster.send(order).outcome is SendOutcome.ACCEPTED
    assert find_workload(manager, "queued")["spec"]["active"] is False
    payers = kueue_cluster.await_running("payer")
    assert kueue_cluster.job("queued")["spec"]["suspend"]
    assert not kueue_cluster.pods("queued")
    assert kueue_cluster.follow(order).outcome is SendOutcome.ACCEPTED
    assert find_workload(manager, "queued")["spec"]["active"] is True
    assert kueue_cluster.send(order).outcome is SendOutcome.ACCEPTED  # once more
    assert find_workload(manager, "queued")["spec"]["active"] is True
    assert kueue_cluster.uids(kueue_cluster.pods("payer")) == payers
    manager.plane.http.delete(f"{JOBS}/payer", params={"propagationPolicy": "Background"})
    kueue_cluster.await_running("queued")
    assert "failed" not in kueue_cluster.job("queued")["status"]


def test_nothing_is_stopped_where_kueue_itself_preempts(kueue_cluster: StoppedCluster) -> None:
    before = kueue_cluster.run("protected", **in_queue("theirs"))
    reply = kueue_cluster.send(kueue_cluster.order("protected"))
    assert reply.outcome is SendOutcome.REFUSED
    assert reply.why == "ClusterQueue theirs preempts by itself (withinClusterQueue: LowerPriority)"
    assert kueue_cluster.uids(kueue_cluster.pods("protected")) == before
