"""A real control plane runs jobs; a real Fleetcast follows them: its jobs and nodes agree with the cluster's."""

import base64
import json
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fleetcast.ingest.kubernetes.source import KINDS
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import GPU, PODS, ControlPlane, pod
from tests.integration.kubernetes.custom import JOBSET, PYTORCHJOB
from tests.integration.service_process import Service, soon

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

NODES = ("k1", "k2", "k3", "k4")
GPUS = 8
JOBS = "/apis/batch/v1/namespaces/default/jobs"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
PYTORCHJOBS = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
CONTROLLERS = ("job-controller", "garbage-collector-controller", "pod-garbage-collector-controller")
HARD_SIGNAL_S = 1.0
EXAMPLE = Path(__file__).parents[3] / "examples" / "kubernetes-reader.yaml"
PATHS = {
    "ServiceAccount": "/api/v1/namespaces/fleetcast/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}
MERGE = {"content-type": "application/merge-patch+json"}
STRATEGIC = {"content-type": "application/strategic-merge-patch+json"}


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane with a scheduler and the controller of Jobs, whose pods run until a test ends them."""
    binaries = needed(kubernetes, request)
    folder = tmp_path_factory.mktemp("jobs")
    stages = folder / "stages.yaml"
    usual = binaries.stages.read_text().split("\n---\n")
    stages.write_text("\n---\n".join(part for part in usual if "name: pod-complete" not in part))
    plane = ControlPlane(binaries, folder, stages, authorization="RBAC")
    try:
        allow(plane)
        plane.add_nodes(list(NODES), GPUS)
        for custom in (JOBSET, PYTORCHJOB):
            plane.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", custom)
        for path in (JOBSETS, PYTORCHJOBS):
            plane.until(path, lambda path=path: plane.http.get(path).status_code == 200)
        plane.start_controllers(*CONTROLLERS)
        with plane.scheduler():
            yield plane
    finally:
        plane.stop()


def allow(plane: ControlPlane) -> None:
    """What the example tells an operator to apply."""
    plane.create("/api/v1/namespaces", {"metadata": {"name": "fleetcast"}})
    for thing in yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8")):
        plane.create(PATHS[thing["kind"]], thing)


@pytest.fixture(scope="module")
def fleetcast(cluster: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("fleetcast")
    options = {"kubeconfig": str(cluster.reader), "cluster": "test"}
    service = Service(
        folder,
        speed=1.0,
        pipeline={"tick_s": 1.0, "snapshot_s": 2.0, "sources": [{"use": "kubernetes", "options": options}]},
    )
    try:
        service.until("the source", lambda: source(service).get("up"))
        yield service
    finally:
        service.stop()


def source(service: Service) -> dict[str, Any]:
    rows = (service.get("/v1/ingestion") or {"sources": []})["sources"]
    return next((row for row in rows if row["name"] == "kubernetes"), {})


def job(name: str, pods: int, gpus: int = 8, **spec: Any) -> dict[str, Any]:
    resources = {"requests": {"cpu": "1", GPU: str(gpus)}, "limits": {GPU: str(gpus)}}
    template = {"containers": [{"name": "c", "image": "fake", "resources": resources}], "restartPolicy": "Never"}
    priority = {"priorityClassName": spec.pop("priority")} if "priority" in spec else {}
    return {
        "metadata": {"name": name, "labels": {"kueue.x-k8s.io/queue-name": "nightly"}},
        "spec": {
            **{"parallelism": pods, "completions": pods, "completionMode": "Indexed", "backoffLimit": 2},
            **{"template": {"spec": {**template, **priority}}, **spec},
        },
    }


def pods_of(plane: ControlPlane, name: str) -> dict[int, dict[str, Any]]:
    """The living pods of a Job by completion index."""
    rows = [row for row in plane.items(PODS) if row["metadata"]["labels"].get("batch.kubernetes.io/job-name") == name]
    index = "batch.kubernetes.io/job-completion-index"
    alive = [row for row in rows if row["status"].get("phase") == "Running"]
    return {int(row["metadata"]["labels"][index]): row for row in alive}


def running(plane: ControlPlane, name: str, pods: int) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = plane.until(
        f"{pods} pods of {name}", lambda: rows if len(rows := pods_of(plane, name)) == pods else None
    )
    return found


def utc_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def end(plane: ControlPlane, name: str, code: int, reason: str = "") -> None:
    """What a kubelet says of a pod whose container ended."""
    now = utc_now()
    state = {"exitCode": code, "reason": reason or ("Error" if code else "Completed"), "finishedAt": now}
    container = {"name": "c", "image": "fake", "imageID": "", "ready": False, "restartCount": 0}
    status = {
        "phase": "Failed" if code else "Succeeded",
        "containerStatuses": [{**container, "state": {"terminated": {**state, "startedAt": now}}}],
    }
    answer = plane.http.patch(f"{PODS}/{name}/status", json={"status": status}, headers=STRATEGIC)
    assert answer.status_code == 200, answer.text


def told(service: Service, name: str, state: str, attempt: int = 1) -> dict[str, Any]:
    """The job as our API knows it, once it is in a state."""

    def look() -> dict[str, Any] | None:
        row = service.get(f"/v1/jobs/default/{name}")
        return row if row and (row["state"], row["attempt"]) == (state, attempt) else None

    found: dict[str, Any] = service.until(f"{name} {state}, attempt {attempt}", look)
    return found


def test_the_example_allows_all_that_is_followed(fleetcast: Service) -> None:
    followed = set(KINDS)
    fleetcast.until("them", lambda: source(fleetcast)["collections"] == dict.fromkeys(followed, "followed"))


def test_a_gang_runs_where_the_scheduler_put_it_and_finishes(cluster: ControlPlane, fleetcast: Service) -> None:
    cluster.create(JOBS, job("train", 3))
    pods = running(cluster, "train", 3)
    row = told(fleetcast, "train", "running")
    places = [(rank["rank"], rank["node"]) for rank in row["placement"]]
    assert places == [(index, pods[index]["spec"]["nodeName"]) for index in range(3)]
    assert (row["gpus"], row["queue"], row["class"]) == (24, "nightly", "training")
    assert fleetcast.get("/v1/fleet")["gpus"]["running"] in (0, 24)  # without telemetry its nodes have no GPUs
    for index in range(3):
        end(cluster, pods[index]["metadata"]["name"], 0)
    told(fleetcast, "train", "finished")


def test_a_member_out_of_memory_ends_the_attempt_and_its_successor_begins_the_next(
    cluster: ControlPlane, fleetcast: Service
) -> None:
    cluster.create(JOBS, job("oom", 2))
    first = running(cluster, "oom", 2)
    told(fleetcast, "oom", "running")
    end(cluster, first[1]["metadata"]["name"], 137, "OOMKilled")
    row = told(fleetcast, "oom", "running", attempt=2)
    again = running(cluster, "oom", 2)
    assert again[1]["metadata"]["name"] != first[1]["metadata"]["name"]
    assert [rank["node"] for rank in row["placement"]] == [again[index]["spec"]["nodeName"] for index in range(2)]
    assert cluster.http.delete(f"{JOBS}/oom", params={"propagationPolicy": "Background"}).status_code == 200
    ended = told(fleetcast, "oom", "failed", attempt=2)
    assert ended["events"][-1]["category"] == "cancelled"
    cluster.clear_pods()


def test_who_is_preempted_by_the_scheduler_is_preempted(cluster: ControlPlane, fleetcast: Service) -> None:
    for name, value in (("low", 1), ("high", 100)):
        cluster.create("/apis/scheduling.k8s.io/v1/priorityclasses", {"metadata": {"name": name}, "value": value})
    cluster.create(JOBS, job("low", 4, priority="low"))
    running(cluster, "low", 4)
    told(fleetcast, "low", "running")
    cluster.create(JOBS, job("high", 1, priority="high"))
    told(fleetcast, "high", "running")
    row = fleetcast.until("its end", lambda: _with(fleetcast, "low", "preempted"))
    assert row["by"] == "kube-scheduler"
    for name in ("low", "high"):
        cluster.http.delete(f"{JOBS}/{name}", params={"propagationPolicy": "Background"})
    cluster.clear_pods()


def _with(service: Service, name: str, kind: str) -> dict[str, Any] | None:
    """The job's event of a type, when it was told."""
    row = service.get(f"/v1/jobs/default/{name}") or {"events": []}
    return next((event for event in row["events"] if event["type"] == kind), None)


def test_a_cordoned_node_is_drained_within_a_second(cluster: ControlPlane, fleetcast: Service) -> None:
    url = "/api/v1/nodes/k4"
    for unschedulable, state in ((True, "drained"), (False, None)):
        began = time.monotonic()
        answer = cluster.http.patch(url, json={"spec": {"unschedulable": unschedulable}}, headers=MERGE)
        assert answer.status_code == 200, answer.text
        if state:
            fleetcast.until(state, lambda state=state: (fleetcast.get("/v1/nodes/k4") or {}).get("state") == state)
            assert time.monotonic() - began < soon(HARD_SIGNAL_S)
    fleetcast.until("undrained", lambda: (fleetcast.get("/v1/nodes/k4") or {}).get("state") != "drained")


def test_a_node_that_is_deleted_is_lost(cluster: ControlPlane, fleetcast: Service) -> None:
    cluster.add_nodes(["k5"], GPUS)
    cluster.create(JOBS, job("spread", 1))
    running(cluster, "spread", 1)
    assert cluster.http.delete("/api/v1/nodes/k5").status_code == 200
    fleetcast.until("lost", lambda: (fleetcast.get("/v1/nodes/k5") or {}).get("state") == "lost")
    cluster.http.delete(f"{JOBS}/spread", params={"propagationPolicy": "Background"})
    cluster.clear_pods()


def member(name: str, node: str, labels: dict[str, str], owner: dict[str, Any] | None = None) -> dict[str, Any]:
    made = pod(name, 4, nodeName=node, restartPolicy="Never")
    made["metadata"]["labels"] = labels
    if owner:
        meta = owner["metadata"]
        reference = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "controller": True}
        made["metadata"]["ownerReferences"] = [{**reference, "name": meta["name"], "uid": meta["uid"]}]
    return made


def template(gpus: int) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "c", "resources": {"limits": {GPU: gpus}}}]}}


def test_a_jobset_and_its_restart(cluster: ControlPlane, fleetcast: Service) -> None:
    """Its controller is not here: the test does what that does."""
    rows = [{"name": "w", "replicas": 2, "template": {"spec": {"parallelism": 1, "template": template(4)}}}]
    thing = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": {"name": "set"}}
    cluster.create(JOBSETS, {**thing, "spec": {"replicatedJobs": rows}})
    for restart in (0, 1):
        for number in (1, 0):
            labels = {"jobset.sigs.k8s.io/jobset-name": "set", "jobset.sigs.k8s.io/job-global-index": str(number)}
            labels |= {"jobset.sigs.k8s.io/restart-attempt": str(restart)}
            labels |= {"batch.kubernetes.io/job-completion-index": "0"}
            cluster.create(PODS, member(f"set-w-{number}-{restart}", NODES[number + restart], labels))
        row = told(fleetcast, "set", "running", attempt=restart + 1)
        assert [rank["node"] for rank in row["placement"]] == [NODES[restart], NODES[restart + 1]]
        if not restart:
            end(cluster, "set-w-1-0", 1)
            told(fleetcast, "set", "failed")
            patch = {"status": {"restarts": 1}}
            assert cluster.http.patch(f"{JOBSETS}/set/status", json=patch, headers=MERGE).status_code == 200
            cluster.clear_pods()
    done = {"conditions": [{"type": "Completed", "status": "True", "lastTransitionTime": utc_now()}]}
    cluster.http.patch(f"{JOBSETS}/set/status", json={"status": done}, headers=MERGE)
    told(fleetcast, "set", "finished", attempt=2)
    cluster.clear_pods()


def test_a_pytorchjob_with_its_master_first(cluster: ControlPlane, fleetcast: Service) -> None:
    replicas = {"Master": {"replicas": 1, "template": template(4)}, "Worker": {"replicas": 1, "template": template(4)}}
    thing = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "ddp"}}
    made = cluster.create(PYTORCHJOBS, {**thing, "spec": {"pytorchReplicaSpecs": replicas}})
    for kind, node in (("worker", "k1"), ("master", "k2")):
        labels = {"training.kubeflow.org/replica-type": kind, "training.kubeflow.org/replica-index": "0"}
        cluster.create(PODS, member(f"ddp-{kind}-0", node, labels, made))
    row = told(fleetcast, "ddp", "running")
    assert [rank["node"] for rank in row["placement"]] == ["k2", "k1"]
    failed = {"type": "Failed", "status": "True", "reason": "DeadlineExceeded", "message": "too long"}
    cluster.http.patch(f"{PYTORCHJOBS}/ddp/status", json={"status": {"conditions": [failed]}}, headers=MERGE)
    assert told(fleetcast, "ddp", "failed")["events"][-1]["category"] == "timeout"
    cluster.http.delete(f"{PYTORCHJOBS}/ddp")
    cluster.clear_pods()


def test_what_happens_while_we_are_dead_is_told_afterwards_and_once(cluster: ControlPlane, fleetcast: Service) -> None:
    cluster.create(JOBS, job("long", 2))
    pods = running(cluster, "long", 2)
    told(fleetcast, "long", "running")
    before, said = events(fleetcast, "long"), len(fleetcast.log())
    time.sleep(2.5)  # a snapshot has it
    os.kill(fleetcast.pids()["supervisor"], signal.SIGSTOP)
    try:
        fleetcast.kill("pipeline")
        end(cluster, pods[0]["metadata"]["name"], 137, "OOMKilled")
        running(cluster, "long", 2)
    finally:
        os.kill(fleetcast.pids()["supervisor"], signal.SIGCONT)
    told(fleetcast, "long", "running", attempt=2)
    assert before in (["submitted", "started"], ["submitted", "queued", "started"])
    assert "is gone" not in fleetcast.log()[said:]
    cluster.http.delete(f"{JOBS}/long", params={"propagationPolicy": "Background"})
    assert told(fleetcast, "long", "failed", attempt=2)["events"][-1]["category"] == "cancelled"
    cluster.clear_pods()


def events(service: Service, name: str) -> list[str]:
    return [event["type"] for event in service.get(f"/v1/jobs/default/{name}")["events"]]


def test_it_goes_on_when_the_apiserver_was_killed(cluster: ControlPlane, fleetcast: Service) -> None:
    cluster.create(JOBS, job("before", 1))
    pods = running(cluster, "before", 1)
    told(fleetcast, "before", "running")
    cluster.kill("kube-apiserver")
    fleetcast.until("it is away", lambda: source(fleetcast).get("up") is False)
    cluster.start_apiserver()
    fleetcast.until("it is back", lambda: source(fleetcast).get("up"))
    end(cluster, pods[0]["metadata"]["name"], 0)
    told(fleetcast, "before", "finished")


def test_what_the_server_forgot_is_found_by_comparison(cluster: ControlPlane, fleetcast: Service) -> None:
    """Every version that we know is compacted away while we are dead: 410, and a new list."""
    cluster.create(JOBS, job("gone", 1))
    cluster.create(JOBS, job("stays", 1))
    for name in ("gone", "stays"):
        told(fleetcast, name, "running")
    time.sleep(2.5)  # a snapshot has them
    os.kill(fleetcast.pids()["supervisor"], signal.SIGSTOP)
    try:
        fleetcast.kill("pipeline")
        cluster.http.delete(f"{JOBS}/gone", params={"propagationPolicy": "Background"})
        cluster.until("no pod of it", lambda: not pods_of(cluster, "gone"))
        cluster.kill("kube-apiserver")  # with what it remembers of the past
        compact(cluster.store)
        cluster.start_apiserver()
    finally:
        os.kill(fleetcast.pids()["supervisor"], signal.SIGCONT)
    assert told(fleetcast, "gone", "failed")["events"][-1]["category"] == "cancelled"
    assert told(fleetcast, "stays", "running")["attempt"] == 1
    assert re.search(r"version \d+ is gone", fleetcast.log())


def compact(store: str) -> None:
    """Make etcd forget all but the last version of everything."""
    key = base64.b64encode(b"any").decode()
    put = httpx.post(f"{store}/v3/kv/put", json={"key": key, "value": key}).json()
    answer = httpx.post(f"{store}/v3/kv/compaction", json={"revision": put["header"]["revision"], "physical": True})
    assert answer.status_code == 200, answer.text


def test_nothing_was_told_twice_or_refused(fleetcast: Service) -> None:
    document = fleetcast.get("/v1/ingestion")
    assert document["bad_total"] == 0, json.dumps(document["bad_examples"])
    assert document["duplicates_total"] == 0
