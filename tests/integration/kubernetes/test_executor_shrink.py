"""The executor `kubernetes` takes pods from an elastic Job of a real cluster."""

import pytest

from fleetcast.schedulers.executor import SendOutcome
from tests.integration.kubernetes.stopping import JOBS, NODES, StoppedCluster, in_queue

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes and Kueue

ACCEPTED, REFUSED = SendOutcome.ACCEPTED, SendOutcome.REFUSED
INDEX = "batch.kubernetes.io/job-completion-index"


def find_nodes(cluster: StoppedCluster, job: str) -> list[str]:
    """The nodes of a Job's pods, by index."""
    rows = sorted(cluster.pods(job), key=lambda row: int(row["metadata"]["labels"][INDEX]))
    return [row["spec"]["nodeName"] for row in rows]


def test_an_indexed_job_gives_its_last_nodes_to_the_payer(kueue_cluster: StoppedCluster) -> None:
    before = kueue_cluster.run("elastic", completionMode="Indexed", backoffLimit=0)
    first, second, third, fourth = find_nodes(kueue_cluster, "elastic")
    reply = kueue_cluster.send(kueue_cluster.order("elastic", kind="shrink", nodes=(first,)))
    assert (reply.outcome, reply.why) == (
        REFUSED,
        "a Job gives up its highest indexes first: 3, and the action names 0",
    )
    kueue_cluster.submit("urgent", 2)
    order = kueue_cluster.order("elastic", number=2, payer="default/urgent", kind="shrink", nodes=(third, fourth))
    assert kueue_cluster.send(order).outcome is ACCEPTED
    kueue_cluster.await_running("urgent", 2)
    assert find_nodes(kueue_cluster, "elastic") == [first, second]
    assert kueue_cluster.follow(order).outcome is ACCEPTED
    assert kueue_cluster.send(order).outcome is ACCEPTED  # once more, after everything
    job = kueue_cluster.job("elastic")
    assert (job["spec"]["parallelism"], job["spec"]["completions"]) == (2, 2)
    assert not job["status"].get("failed")
    left = set(kueue_cluster.uids(kueue_cluster.pods("elastic")).values())
    assert len(left) == 2
    assert left < set(before.values())


def test_a_job_under_kueue_is_not_shrunk_because_kueue_would_stop_it(kueue_cluster: StoppedCluster) -> None:
    before = kueue_cluster.run("admitted", 2, completionMode="Indexed", **in_queue("gpus"))
    last = find_nodes(kueue_cluster, "admitted")[-1]
    reply = kueue_cluster.send(kueue_cluster.order("admitted", kind="shrink", nodes=(last,)))
    assert (reply.outcome, reply.why) == (REFUSED, "Kueue suspends a Job whose parallelism changes")
    assert kueue_cluster.uids(kueue_cluster.pods("admitted")) == before
    kueue_cluster.patch(f"{JOBS}/admitted", {"spec": {"parallelism": 1, "completions": 1}})
    kueue_cluster.plane.until(
        "Kueue to stop it", lambda: not set(kueue_cluster.uids(kueue_cluster.pods("admitted"))) & set(before)
    )


def test_a_job_without_indexes_is_not_shrunk(kueue_cluster: StoppedCluster) -> None:
    kueue_cluster.run("plain")
    reply = kueue_cluster.send(kueue_cluster.order("plain", kind="shrink", nodes=NODES[:1]))
    assert reply.why == "only an Indexed Job whose completions equal its parallelism can give up pods"
    assert kueue_cluster.job("plain")["spec"]["parallelism"] == 4
