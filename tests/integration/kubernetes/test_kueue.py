"""The adapters `kueue` and `topology` in a real adapters role, with a real Kueue, under RBAC."""

import asyncio
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleetcast.clients.kube_api import KubeAccount, KubeApi
from fleetcast.schedulers.adapter import Seen, Write, WriteOutcome
from fleetcast.schedulers.kueue import ACTIVE, CHECK, GPUS, HOLD, PENDING
from fleetcast.schedulers.kueue import NODES as NODES_SEEN
from fleetcast.service.ports import kueue as kueue_port
from fleetcast.service.ports.kueue import CONTROLLER, KueuePort
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import GPU, ControlPlane
from tests.integration.kubernetes.kueue_build import kueue
from tests.integration.kubernetes.kueue_checking import (
    JOBS,
    NODES,
    RACKS,
    WORKLOADS,
    Checking,
    PlacersQueue,
    conditions_of,
    describe,
    make_queues,
    now,
)
from tests.integration.kubernetes.kueue_process import KueueManager

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes and Kueue

JSON = {"content-type": "application/json-patch+json"}
APPLY = {"content-type": "application/apply-patch+yaml"}
FLAVOR = {"name": "plain", "resources": [{"name": GPU, "nominalQuota": 8}]}
QUEUE = {
    "namespaceSelector": {},
    "resourceGroups": [{"coveredResources": [GPU], "flavors": [FLAVOR]}],
    "admissionChecksStrategy": {"admissionChecks": [{"name": "fleetcast"}]},
}


@pytest.fixture(scope="module")
def manager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueManager]:
    binaries, binary = needed(kubernetes, request), needed(kueue, request)
    plane = ControlPlane(binaries, tmp_path_factory.mktemp("kubernetes"), authorization="RBAC")
    try:
        describe(plane)
        started = KueueManager(binary, plane, tmp_path_factory.mktemp("kueue"))
        try:
            make_queues(started)
            yield started
        finally:
            started.stop()
    finally:
        plane.stop()


@pytest.fixture
def cleared(manager: KueueManager) -> Iterator[KueueManager]:
    """No workload is left over for the next test."""
    yield manager
    manager.plane.http.delete(JOBS, params={"propagationPolicy": "Background"})
    manager.plane.http.delete(WORKLOADS)
    manager.plane.until("no workloads", lambda: not manager.items("Workload"))


@pytest.fixture
def checking(cleared: KueueManager, tmp_path: Path) -> Iterator[Checking]:
    """Gate off, the queues are active."""
    with_gate_off = Checking(cleared, tmp_path)
    try:
        with_gate_off.until("an active queue", lambda: with_gate_off.is_active("ClusterQueue", "plain"))
        yield with_gate_off
    finally:
        with_gate_off.end(signal.SIGKILL)


def test_a_workload_is_ready_as_soon_as_it_has_its_quota(checking: Checking) -> None:
    took_s: list[float] = []
    for number in range(5):
        name = f"ready-{number}"
        checking.submit(name)
        checking.until("its quota", partial(checking.is_true, name, "QuotaReserved"))
        began = time.monotonic()
        message = checking.until_ready(name)
        took_s.append(time.monotonic() - began)
        assert message == "risk 0% within 1 h in the safest block, hall 1/b1"
    print(f"quota to admission: median {statistics.median(took_s):.2f} s, most {max(took_s):.2f} s; ", end="")


def test_the_message_has_the_start_time_for_who_is_ready_and_for_who_waits_for_quota(
    cleared: KueueManager, tmp_path: Path
) -> None:
    placer = PlacersQueue("default/told", 4_000_000_000_000, 4_000_003_600_000)
    checking = Checking(cleared, tmp_path, placer.port)
    expected = "expected start 2096-10-02T07:06Z, p90 2096-10-02T08:06Z"
    try:
        checking.submit("told", gpus=800)
        checking.until("a note", lambda: checking.check("told")["message"] == f"forecast: {expected}")
        assert checking.check("told")["state"] == "Pending"
        checking.delete("told")
        checking.submit("told")
        assert checking.until_ready("told").startswith(f"{expected}; risk ")
    finally:
        checking.end()
        placer.stop()


def test_with_the_gate_the_quota_is_given_back_until_the_hold_ends(cleared: KueueManager, tmp_path: Path) -> None:
    checking = Checking(cleared, tmp_path, gate=True, max_risk=0.3, retry_s=4, hold_s=8)
    try:
        checking.publish(risk=0.6)
        checking.until("the risk is seen", lambda: '"board": 2' in checking.cli("list", "--json"))
        risky = checking.submit_job("risky")
        checking.until("it is held", lambda: checking.check(risky)["state"] == "Retry")
        checking.set_stop_policy("plain", "Hold")  # else the note is gone as soon as the quota is there again
        try:
            checking.until(
                "a note", lambda: checking.check(risky)["message"].startswith("forecast: held back, 1 so far")
            )
        finally:
            checking.set_stop_policy("plain", "None")
        assert checking.until_ready(risky).endswith("held for 8 s, which is the limit")
        status = checking.workload(risky)["status"]
        assert [(row["reason"], row["count"]) for row in status["schedulingStats"]["evictions"]] == [
            ("AdmissionCheck", 2)
        ]
        assert conditions_of(checking.workload(risky)) >= {"Requeued", "QuotaReserved", "Admitted"}
        assert not checking.is_true(risky, "Evicted")  # it stays until the quota was given back, and taken anew
        checking.publish()
        checking.until("the risk is gone", lambda: '"board": 3' in checking.cli("list", "--json"))
        checking.submit("quiet")
        checking.until_ready("quiet")
        assert "schedulingStats" not in checking.workload("quiet")["status"]
    finally:
        checking.end()


def test_who_came_while_we_were_dead_or_stood_still_is_ready_once_we_are_back(checking: Checking) -> None:
    checking.end(signal.SIGKILL)
    checking.submit("meanwhile")
    checking.until("its quota", partial(checking.holds, "meanwhile"))
    checking.start()
    checking.until_ready("meanwhile")
    checking.process.send_signal(signal.SIGSTOP)
    checking.submit("stopped")
    checking.until("its quota", partial(checking.holds, "stopped"))
    checking.process.send_signal(signal.SIGCONT)
    checking.until_ready("stopped")


@pytest.mark.parametrize("gate", [False, True])
def test_nothing_is_held_by_a_stale_board_or_a_withdrawal(cleared: KueueManager, tmp_path: Path, gate: bool) -> None:
    checking = Checking(cleared, tmp_path, gate=gate, max_risk=0.3)
    try:
        checking.publish(age_s=10_000.0, risk=0.9)
        checking.until("it is seen to be stale", lambda: '"withdrawn": true' in checking.cli("list", "--json"))
        checking.submit("stale")
        assert checking.until_ready("stale") == "there is no forecast now"
        checking.publish(risk=0.9)
        checking.cli("withdraw", "kueue")
        checking.submit("withdrawn")
        assert checking.until_ready("withdrawn") == "there is no forecast: Fleetcast is withdrawn"
        assert checking.is_active("ClusterQueue", "plain")
    finally:
        checking.end()


def test_a_check_of_somebody_else_is_theirs(checking: Checking) -> None:
    checking.submit("theirs", queue="theirs")
    checking.submit("ours")
    checking.until_ready("ours")
    checking.until("its quota", partial(checking.holds, "theirs", "theirs"))
    before = checking.workload("theirs")["status"]
    checking.submit("later")
    checking.until_ready("later")
    assert checking.workload("theirs")["status"] == before
    assert before["admissionChecks"][0]["state"] == "Pending"


def test_what_a_second_controller_writes_meanwhile_stays(checking: Checking) -> None:
    """Of ten workloads with both checks it writes its own all the time, and makes it Ready at last."""
    names = [f"both-{number}" for number in range(8)]
    over = threading.Event()
    written = dict.fromkeys(names, 0)

    def write(name: str, state: str, number: int) -> bool:
        """Whether it is there now; somebody else may have changed the workload at the same time."""
        workload = checking.workload(name)
        rows = workload.get("status", {}).get("admissionChecks", [])
        at = next((at for at, row in enumerate(rows) if row["name"] == "theirs"), None)
        if at is None:
            return False
        test = {"op": "test", "path": "/metadata/resourceVersion", "value": workload["metadata"]["resourceVersion"]}
        row = {**rows[at], "state": state, "message": f"theirs {number}", "lastTransitionTime": now()}
        steps = [test, {"op": "replace", "path": f"/status/admissionChecks/{at}", "value": row}]
        return checking.plane.http.patch(f"{WORKLOADS}/{name}/status", json=steps, headers=JSON).status_code == 200

    def second() -> None:
        while not over.is_set():
            for name in names:
                written[name] += write(name, "Pending", written[name] + 1)

    for name in names:
        checking.submit(name, queue="both")
    other = threading.Thread(target=second, daemon=True)
    other.start()
    try:
        for name in names:
            checking.until(f"{name} ready", lambda name=name: checking.check(name)["state"] == "Ready")
    finally:
        over.set()
        other.join()
    for name in names:
        assert checking.check(name, "theirs")["message"] == f"theirs {written[name]}" or not written[name]
        checking.until(f"{name} by both", partial(write, name, "Ready", 0))
        checking.until_ready(name)
    assert any(written.values())


def test_a_gang_is_placed_within_one_rack_by_our_labels(checking: Checking) -> None:
    for name, rack in zip(NODES, RACKS, strict=True):
        checking.until("its labels", lambda name=name, rack=rack: rack_of(checking, name) == rack)
        assert checking.labels(name)["other.io/rack"] == "x"
    checking.submit("gang", queue="gpus", pods=3, topologyRequest={"required": "fleetcast.io/rack"})
    assert "% within 1 h on its 3 nodes" in checking.until_ready("gang")
    nodes = nodes_of(assignment(checking, "gang"))
    assert len(nodes) == 3
    assert len({rack_of(checking, name) for name in nodes}) == 1


def test_topology_labels_outlast_our_death_and_an_old_board_and_go_with_a_withdrawal(checking: Checking) -> None:
    checking.until("labels", lambda: racks(checking) == RACKS)
    for how in (signal.SIGSTOP, signal.SIGKILL):
        checking.process.send_signal(how)
        checking.submit(f"gang-{how.name.lower()}", queue="gpus", topologyRequest={"required": "fleetcast.io/rack"})
        checking.until("its nodes", partial(checking.holds, f"gang-{how.name.lower()}"))
        assert racks(checking) == RACKS
    checking.end(signal.SIGKILL)
    checking.publish(age_s=10_000.0)
    checking.start()
    for gang in ("gang-sigstop", "gang-sigkill"):
        assert checking.until_ready(gang) == "there is no forecast now"
    assert racks(checking) == RACKS
    checking.cli("withdraw", "topology")
    assert set(racks(checking)) == {""}
    assert {checking.labels(name)["other.io/rack"] for name in NODES} == {"x"}


def racks(checking: Checking) -> tuple[str, ...]:
    return tuple(rack_of(checking, name) for name in NODES)


def test_who_takes_the_check_out_of_the_queue_needs_us_no_more(checking: Checking) -> None:
    checking.manager.create("ClusterQueue", "way-out", QUEUE)
    checking.manager.create("LocalQueue", "way-out", {"clusterQueue": "way-out"})
    checking.until("an active queue", lambda: checking.is_active("ClusterQueue", "way-out"))
    checking.end(signal.SIGKILL)
    checking.submit("left-alone", queue="way-out")
    checking.until("its quota", partial(checking.holds, "left-alone"))
    steps = [{"op": "remove", "path": "/spec/admissionChecksStrategy"}]  # as the docs have it
    path = "/apis/kueue.x-k8s.io/v1beta2/clusterqueues/way-out"
    assert checking.plane.http.patch(path, json=steps, headers=JSON).status_code == 200
    checking.until("admitted", partial(checking.is_true, "left-alone", "Admitted"))


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_both_versions_are_spoken(
    cleared: KueueManager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """The port alone, as if the server served no other version."""
    monkeypatch.setattr(kueue_port, "VERSIONS", (version,))
    plane, name = cleared.plane, f"spoken-{version}"
    checking = Checking(cleared, tmp_path)
    checking.until("active queues", lambda: checking.is_active("ClusterQueue", "gpus"))
    checking.until("labels", lambda: rack_of(checking, NODES[-1]) == RACKS[-1])
    checking.end()
    checking.submit(name, queue="gpus", pods=2, topologyRequest={"required": "fleetcast.io/rack"})
    checking.until("its quota", partial(checking.holds, name))
    authority = str(plane.folder / "certs" / "apiserver.crt")
    account = KubeAccount(f"https://127.0.0.1:{plane.port}", str(tmp_path / "token"), authority)

    async def answer() -> tuple[Seen, Sequence[WriteOutcome]]:
        port = KueuePort(KubeApi(account), CONTROLLER)
        try:
            seen = await port.read()
            other = Write(f"default/{name}", HOLD, None, "Retry 5", "")
            return seen, await port.write([other, other._replace(seen=PENDING, why="because")])
        finally:
            await port.close()
            await asyncio.sleep(0.5)  # the loop closes TLS connections a little later

    seen, outcomes = asyncio.run(answer())
    assert outcomes == [WriteOutcome.CONFLICT, WriteOutcome.DONE]
    assert seen["fleetcast"] == {CHECK: CONTROLLER, ACTIVE: "True Serving"}
    nodes = seen[f"default/{name}"][NODES_SEEN].split()
    assert nodes == nodes_of(assignment(checking, name))
    assert (len(nodes), seen[f"default/{name}"][GPUS]) == (2, "16")
    assert checking.until_ready(name) == "because"


def test_an_apply_that_is_not_forced_is_refused_which_is_why_we_patch(checking: Checking) -> None:
    checking.end()
    checking.submit("applied")
    checking.until("its quota", partial(checking.holds, "applied"))
    row = {"name": "fleetcast", "state": "Ready", "message": "", "lastTransitionTime": now()}
    thing = {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": "Workload", "metadata": {"name": "applied"}}
    applied = checking.plane.http.patch(
        f"{WORKLOADS}/applied/status?fieldManager=fleetcast",
        json=thing | {"status": {"admissionChecks": [row]}},
        headers=APPLY,
    )
    assert (applied.status_code, "conflict" in applied.text) == (409, True)


def test_an_apiserver_that_dies_is_found_again(checking: Checking) -> None:
    checking.plane.kill("kube-apiserver")
    try:
        checking.until("an error", lambda: '"error": "cannot follow' in checking.cli("list", "--json"))
    finally:
        checking.plane.start_apiserver()
    checking.submit("again")
    checking.until_ready("again")


def rack_of(checking: Checking, node: str) -> str:
    return checking.labels(node).get("fleetcast.io/rack", "")


def assignment(checking: Checking, name: str) -> dict[str, Any]:
    found: dict[str, Any] = checking.workload(name)["status"]["admission"]["podSetAssignments"][0]["topologyAssignment"]
    return found


def nodes_of(assigned: dict[str, Any]) -> list[str]:
    """Of an assignment whose lowest level is the node, in v1beta2."""
    assert assigned["levels"][-1] == "kubernetes.io/hostname"
    found: list[str] = []
    for part in assigned["slices"]:
        values = part["valuesPerLevel"][-1]
        each = values.get("individual", {"roots": []})
        roots = [each.get("prefix", "") + root + each.get("suffix", "") for root in each["roots"]]
        found += roots or [values["universal"]]
    return found
