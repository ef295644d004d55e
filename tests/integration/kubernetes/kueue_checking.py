"""A cluster with Kueue and the queue of our example, a board that a test publishes, and a real adapters role."""

import json
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import yaml

from fleetcast.service.board.board import BoardWriter, Section
from tests.integration.kubernetes.control_plane import GPU, READER_TOKEN, ControlPlane
from tests.integration.kubernetes.kueue_process import GROUP, KueueManager, plural
from tests.integration.kubernetes.test_kubernetes_source import MERGE, PATHS
from tests.ports import free_port

EXAMPLES = Path(__file__).parents[3] / "examples"
NODES = tuple(f"m{number}" for number in range(1, 9))
RACKS = ("r1", "r1", "r1", "r1", "r2", "r2", "r2", "r2")
WORKLOADS = f"/apis/{GROUP}/v1beta2/namespaces/default/workloads"
JOBS = "/apis/batch/v1/namespaces/default/jobs"
CHECK = "fleetcast"


def describe(plane: ControlPlane) -> None:
    """The account of our examples, its rights and our policy; nodes, of which each has a label of somebody else."""
    policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
    bindings = policies.replace("policies", "policybindings")
    paths = {**PATHS, "ValidatingAdmissionPolicy": policies, "ValidatingAdmissionPolicyBinding": bindings}
    plane.create("/api/v1/namespaces", {"metadata": {"name": "fleetcast"}})
    for name in ("kubernetes-nodes.yaml", "kubernetes-kueue.yaml"):
        for thing in yaml.safe_load_all((EXAMPLES / name).read_text(encoding="utf-8")):
            if not thing["apiVersion"].startswith(GROUP):
                plane.create(paths[thing["kind"]], thing)
    plane.add_nodes(list(NODES), 8)
    for name in NODES:
        labels = {"metadata": {"labels": {"nvidia.com/gpu.present": "true", "other.io/rack": "x"}}}
        assert plane.http.patch(f"/api/v1/nodes/{name}", json=labels, headers=MERGE).status_code == 200


def make_queues(manager: KueueManager) -> None:
    """The queue `gpus` of our example, `plain` without a topology, `both` that asks another check too, `theirs`."""
    for thing in yaml.safe_load_all((EXAMPLES / "kubernetes-kueue.yaml").read_text(encoding="utf-8")):
        if thing["apiVersion"].startswith(GROUP):
            manager.create(thing["kind"], thing["metadata"]["name"], thing["spec"])
    manager.create("AdmissionCheck", "theirs", {"controllerName": "other.io/other"})
    active = {"type": "Active", "status": "True", "reason": "Up", "message": "", "lastTransitionTime": now()}
    path = f"/apis/{GROUP}/v1beta2/admissionchecks/theirs/status"
    answer = manager.plane.http.patch(path, json={"status": {"conditions": [active]}}, headers=MERGE)
    assert answer.status_code == 200, answer.text
    manager.create("ResourceFlavor", "plain", {})
    for name, checks in (("plain", [CHECK]), ("both", [CHECK, "theirs"]), ("theirs", ["theirs"])):
        resources = [{"name": GPU, "nominalQuota": 64}]
        groups = [{"coveredResources": [GPU], "flavors": [{"name": "plain", "resources": resources}]}]
        asks = {"admissionChecks": [{"name": check} for check in checks]}
        spec = {"namespaceSelector": {}, "resourceGroups": groups, "admissionChecksStrategy": asks}
        manager.create("ClusterQueue", name, spec)
        manager.create("LocalQueue", name, {"clusterQueue": name})


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class PlacersQueue:
    """Answers `/queue` as the placer does: the start of one job."""

    def __init__(self, job: str, p50_ms: int, p90_ms: int) -> None:
        row = {"request_id": "r", "job": job, "position": 1, "why": "", "start_ms": {"p50": p50_ms, "p90": p90_ms}}
        body = json.dumps({"as_of_ms": 0, "rows": [row]}).encode()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class Checking:
    """A board of eight nodes in two racks, and an adapters role with `kueue` and `topology`."""

    def __init__(self, manager: KueueManager, folder: Path, placer_port: int = 0, **options: Any) -> None:
        self.manager, self.plane, self.folder = manager, manager.plane, folder
        (folder / "token").write_text(READER_TOKEN)
        account = {
            "server": f"https://127.0.0.1:{self.plane.port}",
            "token_file": str(folder / "token"),
            "ca_file": str(self.plane.folder / "certs" / "apiserver.crt"),
        }
        rows = [
            {"use": "kueue", "mode": "write", "options": account | options},
            {"use": "topology", "mode": "write", "options": account},
        ]
        config = {
            "state": str(folder / "state"),
            "api": {"stale_after_s": 900.0},
            "placer": {"port": placer_port or free_port()},
            "adapters": {"withdraw_after_s": 3600.0, "adapter": rows},
        }
        self.config = folder / "config.toml"
        self.config.write_text(tomli_w.dumps(config))
        self.board = BoardWriter(folder / "state" / "board")
        self.publish()
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
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        self.process.wait(60)

    def publish(self, age_s: float = 0.0, risk: float = 0.001) -> None:
        now_ms = int((time.time() - age_s) * 1000)
        n = len(NODES)
        racks = np.array([sorted(set(RACKS)).index(rack) for rack in RACKS], np.int32)
        parts: dict[str, Any] = {
            "names.node": "\n".join(NODES).encode(),
            "node.risk": np.full((3, 4, n), risk),
            "node.state": np.zeros(n, np.int8),
            "gpu.usable": np.ones((n, 8), bool),
            "gpu.job": np.full((n, 8), -1, np.int32),
            "risk.reason": b"{}",
            "names.rack": b"r1\nr2",
            "node.domain.rack": racks,
            "names.block": b"hall 1/b1",
            "node.domain.block": np.zeros(n, np.int32),
        }
        self.board.publish([Section(name, data, now_ms) for name, data in parts.items()], now_ms)

    def submit(self, name: str, queue: str = "plain", gpus: int = 8, pods: int = 1, **pod_set: Any) -> None:
        container = {
            "name": "c",
            "image": "none",
            "resources": {"requests": {GPU: str(gpus)}, "limits": {GPU: str(gpus)}},
        }
        template = {"spec": {"containers": [container], "restartPolicy": "Never"}}
        pods_of = {"name": "main", "count": pods, "template": template, **pod_set}
        self.manager.create("Workload", name, {"queueName": queue, "podSets": [pods_of]})

    def submit_job(self, name: str, queue: str = "plain") -> str:
        """A Job of one pod with eight GPUs, of whose workload Kueue takes the quota away; the workload's name."""
        container = {"name": "c", "image": "none", "resources": {"requests": {GPU: "8"}, "limits": {GPU: "8"}}}
        spec = {"suspend": True, "template": {"spec": {"containers": [container], "restartPolicy": "Never"}}}
        labels = {"kueue.x-k8s.io/queue-name": queue}
        self.plane.create(JOBS, {"metadata": {"name": name, "labels": labels}, "spec": spec})
        found: str = self.until("its workload", lambda: self._workload_of(name))
        return found

    def set_stop_policy(self, queue: str, policy: str) -> None:
        """Let a ClusterQueue give no quota ("Hold"), or give it again ("None")."""
        path = f"/apis/{GROUP}/v1beta2/clusterqueues/{queue}"
        answer = self.plane.http.patch(path, json={"spec": {"stopPolicy": policy}}, headers=MERGE)
        assert answer.status_code == 200, answer.text

    def _workload_of(self, job: str) -> str:
        owned = (
            (row["metadata"]["name"], row["metadata"].get("ownerReferences", []))
            for row in self.manager.items("Workload")
        )
        return next((name for name, owners in owned if any(owner["name"] == job for owner in owners)), "")

    def workload(self, name: str) -> dict[str, Any]:
        answer = self.plane.http.get(f"{WORKLOADS}/{name}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def delete(self, name: str) -> None:
        self.plane.http.delete(f"{WORKLOADS}/{name}")

    def is_true(self, name: str, condition: str) -> bool:
        return condition in conditions_of(self.workload(name))

    def check(self, name: str, check: str = CHECK) -> dict[str, Any]:
        rows = self.workload(name).get("status", {}).get("admissionChecks", [])
        return next((row for row in rows if row["name"] == check), {"state": "", "message": ""})

    def holds(self, name: str, check: str = CHECK) -> bool:
        """Whether it has its quota, and waits for the check."""
        return self.is_true(name, "QuotaReserved") and self.check(name, check)["state"] == "Pending"

    def until(self, what: str, check: Any, limit_s: float = 120.0) -> Any:
        try:
            return self.plane.until(what, check, limit_s)
        except AssertionError as error:
            log = (self.folder / "log").read_text()[-3000:]
            raise AssertionError(f"{error}\n--- adapters\n{log}\n{self.manager.items('Workload')}") from None

    def until_ready(self, name: str) -> str:
        """The message of our check once it is Ready and the workload is admitted."""
        self.until(f"{name} admitted", lambda: self.is_true(name, "Admitted"))
        found = self.check(name)
        assert found["state"] == "Ready"
        message: str = found["message"]
        return message

    def cli(self, *words: str) -> str:
        command = [sys.executable, "-m", "fleetcast.cli.main", "adapters", *words, "--config", str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def labels(self, name: str) -> dict[str, str]:
        found: dict[str, str] = self.plane.http.get(f"/api/v1/nodes/{name}").json()["metadata"]["labels"]
        return found

    def is_active(self, kind: str, name: str) -> bool:
        rows = self.plane.http.get(f"/apis/{GROUP}/v1beta2/{plural(kind)}/{name}").json().get("status", {})
        return any((row["type"], row["status"]) == ("Active", "True") for row in rows.get("conditions", []))


def conditions_of(workload: dict[str, Any]) -> set[str]:
    """Those that are true."""
    rows = workload.get("status", {}).get("conditions", [])
    return {row["type"] for row in rows if row["status"] == "True"}
