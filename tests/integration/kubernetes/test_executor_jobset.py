"""The executor `kubernetes` stops a JobSet of a real controller, and uses the rights that the chart gives it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fleetcast.schedulers.executor import SendOutcome
from fleetcast.schedulers.kubernetes_stop import STOPPED
from tests.integration.built import needed
from tests.integration.kubernetes.audit import list_granted_rights, read_used_rights
from tests.integration.kubernetes.jobset_build import jobset
from tests.integration.kubernetes.jobset_process import JOBSETS, JobSetManager
from tests.integration.kubernetes.kueue_process import KueueManager
from tests.integration.kubernetes.stopping import IGNORED, JOBS, StoppedCluster, make_template
from tests.integration.kubernetes.test_executor_replace import await_places, replace, run_gang

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes, Kueue and JobSet

RIGHTS = Path(__file__).parents[3] / "deploy" / "helm" / "fleetcast" / "rights.yaml"
ACCEPTED = SendOutcome.ACCEPTED


@pytest.fixture(scope="module")
def controller(
    manager: KueueManager, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[JobSetManager]:
    started = JobSetManager(needed(jobset, request), manager.plane, tmp_path_factory.mktemp("jobset"))
    yield started
    started.stop()


@pytest.fixture
def sets(controller: JobSetManager, kueue_cluster: StoppedCluster) -> Iterator[JobSetManager]:
    """JobSet's controller, without a JobSet at the end."""
    yield controller
    controller.plane.http.delete(JOBSETS, params={"propagationPolicy": "Background"})
    controller.plane.until("no JobSets", lambda: not controller.plane.items(JOBSETS))
    kueue_cluster.clear()


def test_a_jobset_is_stopped_and_comes_back_after_its_payer(sets: JobSetManager, kueue_cluster: StoppedCluster) -> None:
    """Pods name their Job as owner, and the Job its JobSet. Only the JobSet can stop both of its Jobs."""
    sets.submit("set", make_template("set"), 2)
    before = kueue_cluster.await_running("set", read_state=lambda: sets.read("set"))
    kueue_cluster.submit("urgent")
    order = kueue_cluster.order("set", payer="default/urgent")
    assert kueue_cluster.send(order).outcome is ACCEPTED
    payers = kueue_cluster.await_running("urgent")
    assert sets.read("set")["spec"]["suspend"]
    assert not kueue_cluster.pods("set")
    assert kueue_cluster.follow(order).outcome is ACCEPTED
    found = sets.read("set")
    assert not found["spec"]["suspend"]
    assert STOPPED not in found["metadata"].get("labels", {})
    assert kueue_cluster.send(order).outcome is ACCEPTED  # once more, after everything
    assert kueue_cluster.uids(kueue_cluster.pods("urgent")) == payers
    sets.plane.http.delete(f"{JOBS}/urgent", params={"propagationPolicy": "Background"})
    after = kueue_cluster.await_running("set", read_state=lambda: sets.read("set"))
    assert not set(before.values()) & set(after.values())
    assert not sets.read("set")["status"].get("restarts")


def test_a_part_of_a_jobset_is_not_replaced(sets: JobSetManager, kueue_cluster: StoppedCluster) -> None:
    """A failed pod would restart all its Jobs."""
    sets.submit("part", make_template("part"), 1)
    before = kueue_cluster.await_running("part", 2, read_state=lambda: sets.read("part"))
    failing = next(iter(kueue_cluster.place_of("part").values()))
    kueue_cluster.cordon(failing)
    reply = kueue_cluster.send(replace(kueue_cluster, "part", failing))
    assert reply.why == "an evicted pod would count as failed: its podFailurePolicy does not ignore DisruptionTarget"
    assert kueue_cluster.uids(kueue_cluster.pods("part")) == before


def test_the_executor_uses_every_right_of_the_chart_and_no_other(
    manager: KueueManager, sets: JobSetManager, kueue_cluster: StoppedCluster
) -> None:
    """The API server's audit log names what our account has asked for."""
    kueue_cluster.run("evicted", podFailurePolicy=IGNORED)
    order = kueue_cluster.order("evicted")
    assert kueue_cluster.send(order).outcome is ACCEPTED
    kueue_cluster.plane.until("no pods", lambda: not kueue_cluster.pods("evicted"))
    lost, _ = run_gang(kueue_cluster, "queued", "racks", podFailurePolicy=IGNORED)
    kueue_cluster.lose_node(lost)
    swap = replace(kueue_cluster, "queued", lost)
    assert kueue_cluster.send(swap).outcome is ACCEPTED
    await_places(kueue_cluster, swap, "queued", {lost})
    stop = kueue_cluster.order("queued", number=2, nodes=tuple(kueue_cluster.place_of("queued").values()))
    assert kueue_cluster.send(stop).outcome is ACCEPTED
    kueue_cluster.plane.until("no pods", lambda: not kueue_cluster.pods("queued"))
    kueue_cluster.restore_nodes()
    sets.submit("set", make_template("set"), 1)
    kueue_cluster.await_running("set", 2, read_state=lambda: sets.read("set"))
    places = tuple(kueue_cluster.place_of("set").values())
    assert kueue_cluster.send(kueue_cluster.order("set", nodes=places)).outcome is ACCEPTED
    granted = yaml.safe_load(RIGHTS.read_text(encoding="utf-8"))["executors"]["kubernetes"]
    used, forbidden = read_used_rights(manager.plane.folder)
    assert used == list_granted_rights(granted)
    assert not forbidden
