"""The executor `kubernetes` stops Jobs that a real Kueue has admitted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetcast.schedulers.executor import SendOutcome
from tests.integration.built import needed
from tests.integration.kubernetes.audit import list_granted_rights, read_used_rights
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import GPU
from tests.integration.kubernetes.kueue_build import kueue
from tests.integration.kubernetes.kueue_process import KueueManager
from tests.integration.kubernetes.stopping import IGNORED, JOBS, StoppedCluster, start_plane

RIGHTS = Path(__file__).parents[3] / "deploy" / "helm" / "fleetcast" / "rights.yaml"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes and Kueue


@pytest.fixture(scope="module")
def manager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueManager]:
    """Two queues for 32 GPUs each: `gpus`, and `theirs`, in which Kueue itself preempts."""
    plane = start_plane(needed(kubernetes, request), tmp_path_factory.mktemp("stopping"))
    try:
        with plane.scheduler():
            started = KueueManager(needed(kueue, request), plane, tmp_path_factory.mktemp("kueue"))
            try:
                started.create("ResourceFlavor", "plain", {})
                for name, preemption in (("gpus", {}), ("theirs", {"withinClusterQueue": "LowerPriority"})):
                    quotas = [{"name": GPU, "nominalQuota": 32}, {"name": "cpu", "nominalQuota": 100}]
                    flavors = [{"name": "plain", "resources": quotas}]
                    groups = [{"coveredResources": [GPU, "cpu"], "flavors": flavors}]
                    spec = {"namespaceSelector": {}, "resourceGroups": groups, "preemption": preemption}
                    started.create("ClusterQueue", name, spec)
                    started.create("LocalQueue", name, {"clusterQueue": name})
                yield started
            finally:
                started.stop()
    finally:
        plane.stop()


@pytest.fixture
def cluster(manager: KueueManager, tmp_path: Path) -> Iterator[StoppedCluster]:
    found = StoppedCluster(manager.plane, tmp_path)
    yield found
    found.clear()


def find_workload(manager: KueueManager, job: str) -> dict[str, Any]:
    return next(
        row for row in manager.items("Workload") if row["metadata"].get("ownerReferences", [{}])[0].get("name") == job
    )


def in_queue(name: str) -> dict[str, Any]:
    return {"labels": {"kueue.x-k8s.io/queue-name": name}, "suspend": True}


def test_kueue_stops_the_job_and_queues_it_again_once_the_payer_runs(
    manager: KueueManager, cluster: StoppedCluster
) -> None:
    cluster.run("queued", **in_queue("gpus"))
    cluster.submit("payer", **in_queue("gpus"))
    order = cluster.order("queued", payer="default/payer")
    assert cluster.send(order).outcome is SendOutcome.TAKEN
    assert find_workload(manager, "queued")["spec"]["active"] is False
    payers = cluster.await_running("payer")
    assert cluster.job("queued")["spec"]["suspend"]
    assert not cluster.pods("queued")
    assert cluster.follow(order).outcome is SendOutcome.TAKEN
    assert find_workload(manager, "queued")["spec"]["active"] is True
    assert cluster.send(order).outcome is SendOutcome.TAKEN  # once more
    assert find_workload(manager, "queued")["spec"]["active"] is True
    assert cluster.uids(cluster.pods("payer")) == payers
    manager.plane.http.delete(f"{JOBS}/payer", params={"propagationPolicy": "Background"})
    cluster.await_running("queued")
    assert "failed" not in cluster.job("queued")["status"]


def test_nothing_is_stopped_where_kueue_itself_preempts(cluster: StoppedCluster) -> None:
    before = cluster.run("protected", **in_queue("theirs"))
    reply = cluster.send(cluster.order("protected"))
    assert reply.outcome is SendOutcome.REFUSED
    assert reply.why == "ClusterQueue theirs preempts by itself (withinClusterQueue: LowerPriority)"
    assert cluster.uids(cluster.pods("protected")) == before


def test_the_executor_uses_every_right_of_the_chart_and_no_other(
    manager: KueueManager, cluster: StoppedCluster
) -> None:
    """The API server's audit log names what our account has asked for."""
    cluster.run("evicted", podFailurePolicy=IGNORED)
    order = cluster.order("evicted")
    assert cluster.send(order).outcome is SendOutcome.TAKEN
    cluster.plane.until("no pods", lambda: not cluster.pods("evicted"))
    cluster.run("deactivated", **in_queue("gpus"))
    assert cluster.send(cluster.order("deactivated")).outcome is SendOutcome.TAKEN
    assert cluster.follow(order).outcome is SendOutcome.TAKEN
    granted = yaml.safe_load(RIGHTS.read_text(encoding="utf-8"))["executors"]["kubernetes"]
    used, forbidden = read_used_rights(manager.plane.folder)
    assert used == list_granted_rights(granted)
    assert not forbidden
