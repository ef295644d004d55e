"""The chart in a real cluster: strict types, rights and marks of an install, an upgrade, an uninstall with its hook."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.nodes import FAILURE_EXPECTED
from fleetcast.schedulers.nodes import MARK, SLINKY
from fleetcast.service.board.board import BoardWriter, Section
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.outside.helm.chart import (
    ADAPTERS,
    CHART,
    NAMESPACE,
    RELEASE,
    HelmChart,
    adapters,
    executors,
    only,
)
from tests.integration.outside.helm.cluster import ACCOUNT, MERGE, NODES, applied, defined, downloaded, may
from tests.integration.outside.helm.test_rendering import MONITORED, values_with

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

OPERATOR = "github.com/prometheus-operator/prometheus-operator@v0.82.0"


@pytest.mark.parametrize("on", [(), tuple(ADAPTERS)], ids=["all off", "all on"])
def test_the_server_takes_every_object_strictly(cluster: ControlPlane, chart: HelmChart, on: tuple[str, ...]) -> None:
    more: dict[str, Any] = {"tls": {"secret": "cert"}, "mounts": [{"secret": "s", "path": "/run/s"}]}
    more |= {"env": [{"name": "A", "secret": "s", "key": "k"}], "files": {"topology.toml": "x"}}
    more |= {"tolerations": [{"key": "gpu", "operator": "Exists"}], "nodeSelector": {"pool": "cpu"}}
    more |= {"networkPolicy": {"from": [{"namespaceSelector": {}}]}, "image": {"pullSecrets": ["p"]}}
    values = values_with(*on, **more)
    values["adapters"]["external_metrics"] |= {"apiService": True}
    values["adapters"]["topology"] |= {"options": {"labels": {"rack": "acme.example/rack"}}}
    for thing in chart.things(values):
        answer = applied(cluster, thing)
        assert answer.is_success, (thing["kind"], answer.text)


@pytest.mark.parametrize("tls", [{}, {"secret": "cert"}], ids=["http", "https"])
def test_the_prometheus_operators_own_definition_takes_the_monitor(
    cluster: ControlPlane, chart: HelmChart, request: pytest.FixtureRequest, tmp_path: Path, tls: dict[str, str]
) -> None:
    monitor = only(chart.things(values_with(tls=tls, serviceMonitor=MONITORED)), "ServiceMonitor")
    folder = downloaded(OPERATOR, tmp_path, request) / "example" / "prometheus-operator-crd"
    with defined(cluster, folder / "monitoring.coreos.com_servicemonitors.yaml"):
        answer = applied(cluster, monitor)
        assert answer.is_success, answer.text
        monitor["spec"]["endpoints"][0]["intervall"] = "15s"
        assert not applied(cluster, monitor).is_success


def test_the_server_would_refuse_a_misspelt_field(cluster: ControlPlane, chart: HelmChart) -> None:
    thing = only(chart.things(), "StatefulSet")
    thing["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRootFilesytem"] = True
    answer = applied(cluster, thing)
    assert answer.status_code >= 400
    assert "readOnlyRootFilesytem" in answer.text


def test_rights_come_and_go_with_the_adapter_and_the_hook_runs_at_the_end(
    cluster: ControlPlane, release: HelmChart
) -> None:
    began = time.monotonic()
    release.done("install", RELEASE, str(CHART), "--wait", values=adapters("nodes"))
    print(f"install --wait: {time.monotonic() - began:.1f} s")
    assert may(cluster, "patch", "nodes")
    assert may(cluster, "patch", "nodes", part="status")
    assert not may(cluster, "delete", "nodes")
    assert not may(cluster, "create", "nodes")
    assert not may(cluster, "list", "secrets")
    assert not may(cluster, "create", "pods", part="exec")
    assert not may(cluster, "patch", "workloads", "kueue.x-k8s.io", "status")
    assert not may(cluster, "patch", "nodes", account=f"system:serviceaccount:{NAMESPACE}:default")
    release.done("upgrade", RELEASE, str(CHART), values=adapters("kueue"))
    assert not may(cluster, "patch", "nodes")
    assert may(cluster, "patch", "workloads", "kueue.x-k8s.io", "status")
    assert not may(cluster, "patch", "workloads", "kueue.x-k8s.io")
    assert not may(cluster, "create", "pods", part="eviction")
    release.done("upgrade", RELEASE, str(CHART), values=adapters(executors=executors("kubernetes")))
    assert may(cluster, "create", "pods", part="eviction")
    assert may(cluster, "patch", "jobs", "batch")
    assert not may(cluster, "delete", "pods")
    assert not may(cluster, "delete", "jobs", "batch")
    assert not may(cluster, "create", "jobs", "batch")
    release.done("upgrade", RELEASE, str(CHART), values=adapters())
    assert not may(cluster, "create", "pods", part="eviction")
    assert not may(cluster, "patch", "workloads", "kueue.x-k8s.io", "status")
    release.done("upgrade", RELEASE, str(CHART), "--wait", values=adapters("nodes"))
    release.done("uninstall", RELEASE, "--wait")
    events = cluster.items(f"/api/v1/namespaces/{NAMESPACE}/events")
    of_the_hook = [row["reason"] for row in events if row["involvedObject"]["name"] == f"{RELEASE}-withdraw"]
    assert "Completed" in of_the_hook
    assert not may(cluster, "patch", "nodes")
    assert not cluster.items(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs")


class MarkingRelease:
    """The adapters role with the configuration and the account of a release, and a board that a test publishes."""

    def __init__(self, plane: ControlPlane, release: HelmChart, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        self.token, authority = folder / "token", plane.folder / "certs" / "apiserver.crt"
        server = f"https://127.0.0.1:{plane.port}"
        options = {"server": server, "token_file": str(self.token), "ca_file": str(authority), "taint": "NoSchedule"}
        options |= {"slinky": True}
        values = adapters("nodes")
        values["adapters"]["nodes"] |= {"mode": "write", "options": options}
        values["config"] = {"adapters": {"max_share": 0.5}}
        release.done("install", RELEASE, str(CHART), "--wait", values=values)
        space = f"/api/v1/namespaces/{NAMESPACE}"
        asked = plane.create(f"{space}/serviceaccounts/{RELEASE}/token", {"spec": {"expirationSeconds": 3600}})
        self.token.write_text(asked["status"]["token"])
        given = plane.http.get(f"{space}/configmaps/{RELEASE}").json()["data"]
        (folder / "config.toml").write_text(given["config.toml"])
        self.board = BoardWriter(folder / "state" / "board")
        with open(folder / "log", "ab") as log:
            command = [*self._fleetcast("run", "--role", "adapters")]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def _fleetcast(self, *words: str) -> list[str]:
        state = ["--config", str(self.folder / "config.toml"), "--state", str(self.folder / "state")]
        return [sys.executable, "-m", "fleetcast.cli.main", *words, *state]

    def publish(self, **risk: float) -> None:
        now_ms = time.time_ns() // 1_000_000
        hour = np.array([risk.get(name, 0.001) for name in NODES])
        parts: dict[str, Any] = {
            "names.node": "\n".join(NODES).encode(),
            "node.risk": np.tile(hour, (3, 4, 1)),
            "node.state": np.zeros(len(NODES), np.int8),
            "gpu.usable": np.ones((len(NODES), 8), bool),
            "gpu.job": np.full((len(NODES), 8), -1, np.int32),
            "risk.reason": b"{}",
        }
        self.board.publish([Section(name, data, now_ms) for name, data in parts.items()], now_ms)

    def marks(self, name: str) -> tuple[str, str | None, list[str], str | None]:
        """Status of the condition, the label, our taints, what slurm-operator is told."""
        node = self.plane.http.get(f"/api/v1/nodes/{name}").json()
        status = next((row["status"] for row in node["status"]["conditions"] if row["type"] == FAILURE_EXPECTED), "")
        taints = [row["effect"] for row in node["spec"].get("taints", ()) if row["key"] == MARK]
        return status, node["metadata"]["labels"].get(MARK), taints, node["metadata"].get("annotations", {}).get(SLINKY)

    def until(self, name: str, *marks: object) -> None:
        try:
            self.plane.until(f"{name} {marks}", lambda: self.marks(name) == marks)
        except AssertionError as error:
            raise AssertionError(f"{self.marks(name)}\n{(self.folder / 'log').read_text()[-3000:]}") from error

    def hook(self, words: list[str]) -> "subprocess.CompletedProcess[str]":
        """The hook's own command, on this machine."""
        end = words.index("--config")
        return subprocess.run(self._fleetcast(*words[:end]), capture_output=True, text=True, timeout=120, check=False)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def test_the_account_of_a_release_marks_nodes_and_no_more_and_the_hook_takes_all_back(
    cluster: ControlPlane, release: HelmChart, tmp_path: Path
) -> None:
    marking = MarkingRelease(cluster, release, tmp_path)
    try:
        marking.publish(m01=0.9)
        marking.until("m01", "True", "high", ["NoSchedule"], "risk_high")
        marking.publish(m02=0.9)  # a mark that changes leaves those beside it alone
        marking.until("m02", "True", "high", ["NoSchedule"], "risk_high")
        marking.until("m01", "False", "low", [], "risk_low")
        marking.publish(m01=0.9)
        marking.until("m02", "False", "low", [], "risk_low")
        headers = MERGE | {"authorization": f"Bearer {marking.token.read_text()}"}
        for change in ({"spec": {"unschedulable": True}}, {"metadata": {"labels": {"other.io/mine": "x"}}}):
            answer = cluster.http.patch("/api/v1/nodes/m02", json=change, headers=headers)
            assert answer.status_code == 422, f"{ACCOUNT} may {change}: {answer.text}"
        (container,) = only(release.hooks(), "Job")["spec"]["template"]["spec"]["containers"]
        done = marking.hook(container["args"])
        assert done.returncode == 0, done.stderr
        assert "nodes is withdrawn and writes no more" in done.stdout
        assert [name for name in NODES if any(marking.marks(name))] == []
    finally:
        marking.end()
