"""The executor `kubernetes` stops and resumes real Jobs, with the rights of examples/kubernetes-executor.yaml."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.clients.kube_api import KubeApi
from fleetcast.fleet.errors import SourceError
from fleetcast.schedulers.executor import SendOutcome
from fleetcast.schedulers.kubernetes_stop import STOPPED
from fleetcast.service.adapter_records import AdapterRecords
from fleetcast.service.config import AdapterConfig, AdaptersConfig
from fleetcast.service.executors import ExecutorHost
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.stopping import BUDGETS, IGNORED, JOBS, NODES, StoppedCluster, start_plane
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import NOW_MS, World
from tests.service.served_placer import serve_app

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

ACCEPTED, REFUSED, UNREACHABLE = SendOutcome.ACCEPTED, SendOutcome.REFUSED, SendOutcome.UNREACHABLE


@pytest.fixture(scope="module")
def plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    started = start_plane(needed(kubernetes, request), tmp_path_factory.mktemp("stopping"))
    try:
        with started.scheduler():
            yield started
    finally:
        started.stop()


@pytest.fixture
def cluster(plane: ControlPlane, tmp_path: Path) -> Iterator[StoppedCluster]:
    found = StoppedCluster(plane, tmp_path)
    yield found
    found.clear()


class DeafApi(KubeApi):
    """An API that is lost before the first real eviction."""

    async def create(self, path: str, thing: Any, *, is_trial: bool = False) -> bytes:
        if not is_trial:
            raise SourceError("no answer")
        return await super().create(path, thing, is_trial=is_trial)


@pytest.mark.parametrize("policy", [IGNORED, None])
def test_a_gang_is_stopped_and_comes_back_once_the_payer_has_its_nodes(
    cluster: StoppedCluster, policy: dict[str, Any] | None
) -> None:
    """Its pods are evicted if the Job ignores disruptions. Otherwise the suspended Job deletes them."""
    cluster.run("train", backoffLimit=1, **({"podFailurePolicy": policy} if policy else {}))
    cluster.submit("urgent")
    order = cluster.order("train", payer="default/urgent")
    assert cluster.send(order).outcome is ACCEPTED
    payers = cluster.await_running("urgent")
    assert cluster.job("train")["spec"]["suspend"]
    assert not cluster.pods("train")
    assert cluster.follow(order).outcome is ACCEPTED
    job = cluster.job("train")
    assert not job["spec"]["suspend"]
    assert STOPPED not in job["metadata"].get("labels", {})
    began = time.monotonic()
    cluster.plane.until("its new pods", lambda: len(cluster.pods("train")) == 4, 150.0)
    print(f"new pods {time.monotonic() - began:.1f} s after the resume; ", end="")
    waiting = cluster.uids(cluster.pods("train"))
    assert "failed" not in job["status"]
    assert cluster.send(order).outcome is ACCEPTED  # once more, after everything
    assert cluster.uids(cluster.pods("train")) == waiting
    assert cluster.uids(cluster.pods("urgent")) == payers


def test_a_stopped_job_waits_for_its_payer_until_the_action_expires(cluster: StoppedCluster) -> None:
    cluster.run("train")
    order = cluster.order("train", payer="some request", by_s=600.0)
    assert cluster.send(order).outcome is ACCEPTED
    assert cluster.follow(order).outcome is ACCEPTED
    assert cluster.job("train")["spec"]["suspend"]
    changed = cluster.job("train")["metadata"]["annotations"]["fleetcast.io/stop-action"].replace(str(order.by_ms), "1")
    cluster.patch(f"{JOBS}/train", {"metadata": {"annotations": {"fleetcast.io/stop-action": changed}}})
    cluster.follow(order)
    cluster.await_running("train")


@pytest.mark.parametrize(
    ("least", "words"), [(4, "needs 4 healthy pods"), (3, "allows 1 evictions, and the gang needs 4")]
)
def test_a_budget_refuses_and_every_pod_stays(cluster: StoppedCluster, least: int, words: str) -> None:
    """With 3 of 4 the server would evict the first pod, and refuse the second."""
    before = cluster.run("train")
    spec = {"minAvailable": least, "selector": {"matchLabels": {"app": "train"}}}
    cluster.plane.create(BUDGETS, {"metadata": {"name": "at-least"}, "spec": spec})
    allowed = 4 - least
    cluster.plane.until(
        "its status",
        lambda: (
            cluster.plane.items(BUDGETS)[0].get("status", {}).get("currentHealthy") == 4
            and cluster.plane.items(BUDGETS)[0]["status"]["disruptionsAllowed"] == allowed
        ),
    )
    reply = cluster.send(cluster.order("train"))
    assert reply.outcome is REFUSED
    assert words in reply.why
    assert cluster.uids(cluster.pods("train")) == before
    assert STOPPED not in cluster.job("train")["metadata"].get("labels", {})


@pytest.mark.parametrize("where", ["job", "pod"])
def test_a_label_of_its_owner_protects(cluster: StoppedCluster, where: str) -> None:
    label = {"fleetcast.io/preemptible": "false"}
    before = cluster.run("train", labels=label if where == "job" else {})
    if where == "pod":
        cluster.patch(f"/api/v1/namespaces/default/pods/{next(iter(before))}", {"metadata": {"labels": label}})
    reply = cluster.send(cluster.order("train"))
    assert (reply.outcome, reply.why) == (REFUSED, "its owner forbids it by fleetcast.io/preemptible")
    assert cluster.uids(cluster.pods("train")) == before


def test_an_attempt_elsewhere_is_untouched(cluster: StoppedCluster) -> None:
    before = cluster.run("train", pods=2)
    reply = cluster.send(cluster.order("train", nodes=NODES))
    assert reply.outcome is REFUSED
    assert reply.why.startswith("another attempt: the pods are on ")
    assert cluster.uids(cluster.pods("train")) == before


def test_after_a_crash_the_pods_of_the_next_attempt_are_untouched(cluster: StoppedCluster) -> None:
    before = cluster.run("train", podFailurePolicy=IGNORED)
    order = cluster.order("train")
    assert cluster.send(order, DeafApi).outcome is UNREACHABLE
    assert cluster.uids(cluster.pods("train")) == before
    cluster.patch(f"{JOBS}/train", {"spec": {"suspend": True}})
    cluster.plane.until("no pods", lambda: not cluster.pods("train"))
    cluster.patch(f"{JOBS}/train", {"spec": {"suspend": False}})
    after = cluster.await_running("train")
    for _ in range(2):
        assert cluster.send(order).outcome is ACCEPTED, "the attempt of the action has ended"
        assert cluster.uids(cluster.pods("train")) == after
        assert not cluster.job("train")["spec"]["suspend"]
        assert STOPPED not in cluster.job("train")["metadata"].get("labels", {})


def test_a_stop_of_an_attempt_that_has_ended_by_itself_is_accepted(cluster: StoppedCluster) -> None:
    cluster.run("train", pods=2)
    order = cluster.order("train")
    elsewhere = [name for name in NODES if name not in {rank.node for rank in order.ranks}][:1]
    other = cluster.order("train", number=2, nodes=elsewhere)
    assert cluster.send(other).outcome is ACCEPTED, "its next attempt runs on other nodes"
    cluster.patch(f"{JOBS}/train", {"spec": {"suspend": True}})
    cluster.plane.until("no pods", lambda: not cluster.pods("train"))
    assert cluster.send(order).outcome is ACCEPTED
    assert "fleetcast.io/stop-action" not in cluster.job("train")["metadata"].get("annotations", {})


def test_after_a_crash_the_same_pods_are_evicted_by_the_next_executor(cluster: StoppedCluster) -> None:
    cluster.run("train", podFailurePolicy=IGNORED)
    order = cluster.order("train")
    assert cluster.send(order, DeafApi).outcome is UNREACHABLE
    assert cluster.send(cluster.order("train", number=2)).why == "another action has stopped it"
    assert cluster.follow(order).outcome is ACCEPTED
    cluster.plane.until("no pods", lambda: not cluster.pods("train"))


def test_an_action_of_a_real_placer_stops_the_gang_through_the_host(cluster: StoppedCluster, tmp_path: Path) -> None:
    cluster.run("train")
    order = cluster.order("train")
    placer = World(tmp_path / "placer")
    placer.board.publish()
    placer.service.view.observe_fleet()
    (record,) = placer.service.actions.propose(
        [make_action(order.job, executor="kubernetes", gpus=1.0, ranks=tuple(order.ranks), by_ms=order.by_ms)], NOW_MS
    ).opened
    assert placer.service.actions.send([record.action_id], NOW_MS)

    async def run_host(port: int) -> None:
        row = AdapterConfig("kubernetes", mode="write", options=cluster.options)
        config = msgspec.structs.replace(
            placer.config,
            placer=msgspec.structs.replace(placer.config.placer, port=port),
            adapters=AdaptersConfig(executor=(row,)),
        )
        host = ExecutorHost(config, placer.clock, AdapterRecords(tmp_path), lambda: None)
        host.run(may_send=True)
        async with asyncio.timeout(90.0):
            while placer.service.actions.get_action(record.action_id).state.value != "accepted":
                await asyncio.sleep(0.05)
        await host.close()
        await asyncio.sleep(0.2)  # TLS connections end a moment later

    with serve_app(placer.app) as port:
        asyncio.run(run_host(port))
    placer.close()
    assert cluster.job("train")["spec"]["suspend"]
    cluster.plane.until("no pods", lambda: not cluster.pods("train"))
