"""The adapter `nodes` in a real adapters role marks the nodes of a real API server under RBAC and our policy."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tomli_w
import yaml

from fleetcast.fleet.nodes import FAILURE_EXPECTED
from fleetcast.schedulers.nodes import MARK, SLINKY
from fleetcast.service.board.board import BoardWriter, Section
from tests.docs.pages import ROOT, text_of
from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import READER_TOKEN, ControlPlane
from tests.integration.kubernetes.test_kubernetes_source import MERGE, PATHS, STRATEGIC

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

NODES = tuple(f"m{number:02d}" for number in range(1, 21))
EXAMPLE = ROOT / "examples" / "kubernetes-nodes.yaml"
PAGE = ROOT / "docs" / "schedulers" / "nodes.md"
POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
JSON = {"content-type": "application/json-patch+json"}
THEIRS = {"key": "other.io/mine", "value": "x", "effect": "NoSchedule"}
SPEED = 15.0  # of fleet time: a board is stale after fifteen seconds of ours
STALE_S = 225.0


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(needed(kubernetes, request), tmp_path_factory.mktemp("nodes"), authorization="RBAC")
    try:
        fill(plane, NODES)
        yield plane
    finally:
        plane.stop()


def fill(plane: ControlPlane, nodes: tuple[str, ...]) -> None:
    """These nodes, and an account that may do what the example allows it."""
    paths = {
        **PATHS,
        "ValidatingAdmissionPolicy": POLICIES,
        "ValidatingAdmissionPolicyBinding": POLICIES.replace("policies", "policybindings"),
    }
    plane.create("/api/v1/namespaces", {"metadata": {"name": "fleetcast"}})
    for thing in yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8")):
        plane.create(paths[thing["kind"]], thing)
    plane.add_nodes(list(nodes), 8)


class Marking:
    """A board of these nodes that a test publishes, and a real adapters role that follows it.

    taint: its effect. more: further options of the adapter.
    """

    def __init__(
        self, plane: ControlPlane, folder: Path, taint: str, nodes: tuple[str, ...] = NODES, **more: Any
    ) -> None:
        self.plane, self.folder, self.nodes = plane, folder, nodes
        token = folder / "token"
        token.write_text(READER_TOKEN)
        options = {
            "server": f"https://127.0.0.1:{plane.port}",
            "token_file": str(token),
            "ca_file": str(plane.folder / "certs" / "apiserver.crt"),
            "taint": taint,
            **more,
        }
        self.began_ms = time.time_ns() // 1_000_000
        config = {
            "state": str(folder / "state"),
            "clock": {"epoch_ms": self.began_ms, "wall_ms": self.began_ms, "speed": SPEED},
            "adapters": {
                "withdraw_after_s": STALE_S,
                "adapter": [{"use": "nodes", "mode": "write", "options": options}],
            },
        }
        self.config = folder / "config.toml"
        self.config.write_text(tomli_w.dumps(config))
        self.board, self.published = BoardWriter(folder / "state" / "board"), 0
        self.start()

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleetcast.cli.main", "run", "--role", "adapters", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(30)

    def publish(self, age_s: float = 0.0, **risk: float) -> None:
        """Risks of nodes within an hour; those of all others are low."""
        self.published += 1
        now_ms = self.began_ms + int((time.time_ns() / 1e6 - self.began_ms) * SPEED - age_s * 1000)
        n, hour = len(self.nodes), np.array([risk.get(name, 0.001) for name in self.nodes])
        parts: dict[str, Any] = {
            "names.node": "\n".join(self.nodes).encode(),
            "node.risk": np.tile(hour, (3, 4, 1)),
            "node.state": np.zeros(n, np.int8),
            "gpu.usable": np.ones((n, 8), bool),
            "gpu.job": np.full((n, 8), -1, np.int32),
            "risk.reason": json.dumps({"m01": "GPU 3: XID 63 twice"}).encode(),
        }
        self.board.publish([Section(name, data, now_ms) for name, data in parts.items()], now_ms)

    def node(self, name: str) -> dict[str, Any]:
        answer = self.plane.http.get(f"/api/v1/nodes/{name}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def condition(self, name: str) -> dict[str, str]:
        rows = self.node(name)["status"]["conditions"]
        return next((row for row in rows if row["type"] == FAILURE_EXPECTED), {"status": ""})

    def marks(self, name: str) -> tuple[str, str | None, list[str]]:
        """Status of the condition, the label, keys of all taints."""
        node = self.node(name)
        taints = [row["key"] for row in node["spec"].get("taints", [])]
        return self.condition(name)["status"], node["metadata"]["labels"].get(MARK), taints

    def is_marked(self, name: str, wanted: bool) -> bool:
        """Whether condition and taint are both there, or neither is."""
        status, _, taints = self.marks(name)
        return (status == "True", MARK in taints) == (wanted, wanted)

    def until(self, name: str, *marks: object) -> None:
        try:
            self.plane.until(f"{name} {marks}", lambda: self.marks(name) == marks)
        except AssertionError:
            raise AssertionError(f"{self.marks(name)}\n{(self.folder / 'log').read_text()[-3000:]}") from None

    def cli(self, *words: str) -> str:
        command = [sys.executable, "-m", "fleetcast.cli.main", "adapters", *words, "--config", str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def standing(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.cli("list", "--json"))[-1]
        return row


@pytest.fixture
def marking(cluster: ControlPlane, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Marking]:
    """All nodes are marked, and each has a label and a taint of somebody else. A parameter is the taint's effect."""
    for name in NODES:
        theirs = {"metadata": {"labels": {"other.io/mine": "x"}}, "spec": {"taints": [THEIRS]}}
        assert cluster.http.patch(f"/api/v1/nodes/{name}", json=theirs, headers=MERGE).status_code == 200
    made = Marking(cluster, tmp_path, getattr(request, "param", "PreferNoSchedule"))
    try:
        made.publish()
        for name in NODES:
            made.until(name, "False", "low", ["other.io/mine"])
        yield made
    finally:
        if made.process.poll() is None:
            made.end()
        made.cli("withdraw", "nodes")
        for name in NODES:
            assert made.marks(name) == ("", None, ["other.io/mine"])


class SecondWriter(threading.Thread):
    """Changes taints, labels and conditions of nodes all the time; `counted`: how many taints it gave each."""

    def __init__(self, plane: ControlPlane, names: tuple[str, ...]) -> None:
        super().__init__(daemon=True)
        self.counted = dict.fromkeys(names, 0)
        self._over = threading.Event()
        self._http = httpx.Client(base_url=plane.http.base_url, headers=plane.http.headers, verify=False)

    def run(self) -> None:
        while not self._over.is_set():
            for name in self.counted:
                self.counted[name] += self._write(f"/api/v1/nodes/{name}", self.counted[name] + 1)

    def _write(self, path: str, number: int) -> bool:
        """Whether the taint is there now: somebody else may have changed the node at the same time."""
        label = {"metadata": {"labels": {"other.io/count": str(number)}}}
        condition = {"type": "OthersOwn", "status": "True", "reason": f"R{number}"}
        self._http.patch(path, json=label, headers=MERGE)
        self._http.patch(f"{path}/status", json={"status": {"conditions": [condition]}}, headers=STRATEGIC)
        version = self._http.get(path).json()["metadata"]["resourceVersion"]
        test = {"op": "test", "path": "/metadata/resourceVersion", "value": version}
        taint = {"key": f"other.io/t{number}", "effect": "NoSchedule"}
        steps = [test, {"op": "add", "path": "/spec/taints/0", "value": taint}]
        return self._http.patch(path, json=steps, headers=JSON).status_code == 200

    def end(self) -> dict[str, int]:
        self._over.set()
        self.join()
        self._http.close()
        return self.counted


MARKED = ("True", "high", ["other.io/mine", MARK])
LOW = ("False", "low", ["other.io/mine"])


def test_a_band_becomes_marks_and_goes_again(marking: Marking) -> None:
    others = {row["type"] for row in marking.node("m01")["status"]["conditions"]} - {FAILURE_EXPECTED}
    marking.publish(m01=0.9)
    began = time.monotonic()
    marking.until("m01", *MARKED)
    print(f"band to marks: {time.monotonic() - began:.2f} s; ", end="")
    condition = marking.condition("m01")
    assert (condition["reason"], condition["message"]) == ("HighRisk", "risk 90% within 1 h: GPU 3: XID 63 twice")
    assert others < {row["type"] for row in marking.node("m01")["status"]["conditions"]}
    assert marking.marks("m02") == LOW
    marking.publish()
    marking.until("m01", *LOW)


def test_at_most_a_tenth_of_a_pool_is_marked(marking: Marking) -> None:
    marking.publish(m01=0.5, m02=0.9, m03=0.8, m04=0.7)
    for name in ("m02", "m03"):
        marking.until(name, *MARKED)
    for name in ("m01", "m04"):
        marking.until(name, "False", "elevated", ["other.io/mine"])


def test_what_a_second_writer_does_meanwhile_stays(marking: Marking) -> None:
    other = SecondWriter(marking.plane, ("m01", "m02"))
    other.start()
    try:
        for _ in range(4):
            for risk in (0.9, 0.0):
                marking.publish(m01=risk, m02=risk)
                for name in other.counted:
                    marking.plane.until(f"{name} at {risk}", partial(marking.is_marked, name, risk > 0.5))
    finally:
        over = other.end()
    for name, count in over.items():
        node = marking.node(name)
        assert count > 0
        assert {row["key"] for row in node["spec"]["taints"]} == {
            "other.io/mine",
            *(f"other.io/t{number}" for number in range(1, count + 1)),
        }
        assert int(node["metadata"]["labels"]["other.io/count"]) >= count
        assert any(row["type"] == "OthersOwn" for row in node["status"]["conditions"])
        clean = {"spec": {"taints": [THEIRS]}}
        assert marking.plane.http.patch(f"/api/v1/nodes/{name}", json=clean, headers=MERGE).status_code == 200


def test_a_label_that_somebody_else_takes_is_theirs(marking: Marking) -> None:
    theirs = {"metadata": {"labels": {MARK: "mine"}}}
    assert marking.plane.http.patch("/api/v1/nodes/m01", json=theirs, headers=MERGE).status_code == 200
    marking.publish(m01=0.9)
    marking.until("m01", "True", "mine", ["other.io/mine", MARK])
    gone = {"metadata": {"labels": {MARK: None}}}
    marking.publish()
    marking.until("m01", "False", "mine", ["other.io/mine"])
    assert marking.plane.http.patch("/api/v1/nodes/m01", json=gone, headers=MERGE).status_code == 200


def test_the_policy_keeps_the_account_from_all_else(marking: Marking) -> None:
    ours = {"authorization": f"Bearer {READER_TOKEN}"}
    others = marking.node("m05")

    def refusal(body: Any, part: str = "", headers: dict[str, str] = MERGE) -> str:
        """The sentence of the policy; empty where the account may."""
        answer = marking.plane.http.patch(f"/api/v1/nodes/m05{part}", json=body, headers={**headers, **ours})
        assert answer.status_code in (200, 422), answer.text
        told: str = answer.json()["message"].rpartition("denied request: ")[2] if answer.status_code == 422 else ""
        return told

    def told(type: str, status: str) -> dict[str, Any]:
        return {"status": {"conditions": [{"type": type, "status": status, "reason": "Test"}]}}

    owner = {"apiVersion": "v1", "kind": "Node", "name": "gone", "uid": "gone"}
    for part in ("", "/status"):
        assert refusal({"metadata": {"labels": {"other.io/mine": "y"}}}, part) == "labels of others"
        assert refusal({"metadata": {"labels": {"other.io/mine": None}}}, part) == "labels of others"
        assert refusal({"metadata": {"annotations": {"other.io/mine": "y"}}}, part) == "annotations of others"
        assert refusal({"metadata": {"finalizers": ["other.io/mine"]}}, part) == "how long the node lives"
        assert refusal({"metadata": {"ownerReferences": [owner]}}, part) == "how long the node lives"
        for value in ("risk_low", None):
            assert refusal({"metadata": {"annotations": {SLINKY: value, "fleetcast.io/a": value}}}, part) == ""
    assert refusal({"spec": {"unschedulable": True}}) == "fleetcast does not cordon"
    assert refusal({"spec": {"taints": []}}) == "taints of others"
    assert refusal({"spec": {"taints": [THEIRS, {"key": MARK, "effect": "PreferNoSchedule"}]}}) == ""
    assert refusal({"spec": {"taints": [THEIRS]}}) == ""
    assert refusal(told("Ready", "False"), "/status", STRATEGIC) == "conditions of others"
    assert refusal(told("OthersOwn", "True"), "/status", STRATEGIC) == "conditions of others"
    assert refusal({"status": {"conditions": None}}, "/status") == "conditions of others"
    assert "kubelet" in refusal({"status": {"capacity": {"nvidia.com/gpu": "0"}}}, "/status")
    assert "kubelet" in refusal({"status": {"allocatable": {"nvidia.com/gpu": "0"}}}, "/status")
    assert refusal(told(FAILURE_EXPECTED, "False"), "/status", STRATEGIC) == ""
    assert marking.plane.http.delete("/api/v1/nodes/m05", headers=ours).status_code == 403
    assert marking.plane.http.get("/api/v1/secrets", headers=ours).status_code == 403
    found = marking.node("m05")
    for key in ("labels", "annotations", "finalizers", "ownerReferences"):
        assert found["metadata"].get(key) == others["metadata"].get(key)
    assert (found["spec"], found["status"]["capacity"]) == (others["spec"], others["status"]["capacity"])


def test_a_kill_leaves_the_marks_and_its_successor_writes_nothing_twice(marking: Marking) -> None:
    marking.publish(m01=0.9)
    marking.until("m01", *MARKED)
    marking.end(signal.SIGKILL)
    assert marking.marks("m01") == MARKED
    since = marking.condition("m01")["lastTransitionTime"]
    first = marking.published
    marking.publish(m01=0.9)
    marking.start()

    def has_looked() -> bool:
        """It finds no board old, however long it takes to start."""
        marking.publish(m01=0.9)
        return (marking.standing()["board"] or 0) > first

    marking.plane.until("a successor that has looked", has_looked)
    assert marking.standing()["writes"] == 0
    assert (marking.marks("m01"), marking.condition("m01")["lastTransitionTime"]) == (MARKED, since)


def test_who_stands_still_leaves_the_marks_and_going_on_heeds_the_newest_board(marking: Marking) -> None:
    marking.publish(m01=0.9)
    marking.until("m01", *MARKED)
    marking.process.send_signal(signal.SIGSTOP)
    try:
        marking.publish(m02=0.9)
        with marking.plane.scheduler():
            assert marking.plane.place("avoids", 1, **on("m01", "m02")) == "m02"
            assert marking.plane.place("must", 1, **on("m01")) == "m01"
        assert (marking.marks("m01"), marking.marks("m02")) == (MARKED, LOW)
    finally:
        marking.process.send_signal(signal.SIGCONT)
        marking.plane.clear_pods()
    marking.publish(m02=0.9)
    marking.until("m02", *MARKED)
    marking.until("m01", *LOW)


@pytest.mark.parametrize("marking", ["NoSchedule"], indirect=True)
def test_the_scheduler_places_no_pod_on_a_marked_node_until_its_mark_goes(marking: Marking) -> None:
    plane = marking.plane
    marking.publish(m01=0.9, m02=0.8)
    for name in ("m01", "m02"):
        marking.until(name, *MARKED)
    try:
        with plane.scheduler():
            for name in ("m01", "m02"):
                plane.add_pod(f"for-{name}", 1, **on(name))
                assert "untolerated taint" in plane.until("why it waits", partial(plane.why_pending, f"for-{name}"))
            assert plane.place("elsewhere", 1, **on("m01", "m02", "m03")) == "m03"
            marking.publish(m01=0.9)
            assert plane.bound("for-m02", 60) == "m02"
            assert "nodeName" not in plane.pod("for-m01")["spec"]
            marking.cli("withdraw", "nodes")
            assert plane.bound("for-m01", 60) == "m01"
    finally:
        plane.clear_pods()


def on(*names: str) -> dict[str, Any]:
    """Of a pod that stands the taint of somebody else, and may be on these nodes only."""
    match = [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(names)}]
    required = {"nodeSelectorTerms": [{"matchExpressions": match}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return {"affinity": affinity, "tolerations": [{"key": THEIRS["key"], "operator": "Exists"}]}


def test_an_old_board_takes_back_what_restricts(marking: Marking) -> None:
    marking.publish(m01=0.9)
    marking.until("m01", *MARKED)
    marking.publish(age_s=2 * STALE_S, m01=0.9)
    marking.until("m01", "Unknown", None, ["other.io/mine"])
    assert marking.condition("m01")["reason"] == "NoForecast"
    marking.publish(m01=0.9)
    marking.until("m01", *MARKED)


def test_the_condition_goes_by_hand_as_the_page_says(marking: Marking) -> None:
    (by_hand,) = re.findall(r"--subresource=status --type=strategic .*?-p '(.*?)'", text_of(PAGE), re.DOTALL)
    marking.end()
    others = [row for row in marking.node("m01")["status"]["conditions"] if row["type"] != FAILURE_EXPECTED]
    path = "/api/v1/nodes/m01/status"
    assert marking.plane.http.patch(path, content=by_hand, headers=STRATEGIC).status_code == 200
    assert marking.node("m01")["status"]["conditions"] == others
    marking.start()
    marking.publish()
    marking.until("m01", *LOW)


def test_an_apiserver_that_dies_is_found_again(marking: Marking) -> None:
    marking.plane.kill("kube-apiserver")
    try:
        marking.plane.until("an error", lambda: marking.standing()["error"] or marking.publish(m01=0.9))
    finally:
        marking.plane.start_apiserver()
    marking.publish(m01=0.9)
    marking.until("m01", *MARKED)
