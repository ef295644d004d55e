"""A control plane on loopback: etcd, kube-apiserver, kwok, and a kube-scheduler that a test configures."""

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.integration.kubernetes.build import Kubernetes
from tests.ports import free_port, free_ports

TOKEN = "loopback-only-admin"
READER, READER_TOKEN = "system:serviceaccount:fleetcast:fleetcast", "loopback-only-reader"
START_S = 180.0  # a busy machine
GPU = "nvidia.com/gpu"
EXAMPLE = Path(__file__).parents[3] / "examples" / "kube-scheduler.yaml"
UNSERVED = "--disable-admission-plugins=ServiceAccount,TaintNodesByCondition"  # nobody is here to lift the taint


class ControlPlane:
    """Starts on construction; `stop` ends what it started, newest first. `stages`: what kwok does, if not the usual.

    The admin may do everything; a `reader` what roles allow it, where `authorization` is RBAC.
    """

    def __init__(
        self,
        binaries: Kubernetes,
        folder: Path,
        stages: Path | None = None,
        authorization: str = "AlwaysAllow",
        apiserver: tuple[str, ...] = (),
    ) -> None:
        """apiserver: further flags of it."""
        self.binaries, self.folder, self.authorization, self._flags = binaries, folder, authorization, apiserver
        self.stages = stages or binaries.stages
        self.store = ""  # etcd's address
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self.port = free_port()
        self.http = httpx.Client(
            base_url=f"https://127.0.0.1:{self.port}",
            headers={"authorization": f"Bearer {TOKEN}"},
            verify=False,  # it made its own certificate a moment ago
            timeout=START_S,
        )
        self.kubeconfig, self.reader = folder / "kubeconfig", folder / "reader"
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        etcd, peers, kwok = free_ports(3)
        tokens = f'{TOKEN},admin,admin,"system:masters"\n{READER_TOKEN},{READER},reader\n'
        (self.folder / "tokens.csv").write_text(tokens, encoding="utf-8")
        self.kubeconfig.write_text(yaml.safe_dump(self._kubeconfig(TOKEN)), encoding="utf-8")
        self.reader.write_text(yaml.safe_dump(self._kubeconfig(READER_TOKEN)), encoding="utf-8")
        store = self.store = f"http://127.0.0.1:{etcd}"
        peer = f"http://127.0.0.1:{peers}"
        self.run(
            "etcd",
            *("--data-dir", str(self.folder / "etcd"), "--log-level=warn", "--unsafe-no-fsync"),
            *(f"--listen-client-urls={store}", f"--advertise-client-urls={store}", f"--listen-peer-urls={peer}"),
            *(f"--initial-advertise-peer-urls={peer}", f"--initial-cluster=default={peer}"),
        )
        self.start_apiserver()
        self.run(
            "kwok",
            *(f"--kubeconfig={self.kubeconfig}", "--manage-all-nodes=true", f"--config={self.stages}"),
            *("--node-ip=127.0.0.1", "--cidr=10.64.0.0/14", "--node-lease-duration-seconds=40"),
            f"--server-address=127.0.0.1:{kwok}",
        )

    def start_apiserver(self) -> None:
        certs = self.folder / "certs"
        key = certs / "apiserver.key"  # made at its first start, before it is read
        self.run(
            "kube-apiserver",
            *(f"--etcd-servers={self.store}", f"--cert-dir={certs}", f"--token-auth-file={self.folder / 'tokens.csv'}"),
            *("--bind-address=127.0.0.1", f"--secure-port={self.port}", "--advertise-address=127.0.0.1"),
            *("--endpoint-reconciler-type=none", "--service-cluster-ip-range=10.0.0.0/16", UNSERVED),
            *(f"--authorization-mode={self.authorization}", "--service-account-issuer=https://kubernetes.default.svc"),
            *(f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}"),
            *self._flags,
        )
        self.until("the apiserver", lambda: self._answers("/readyz"))

    def start_controllers(self, *names: str, flags: tuple[str, ...] = ()) -> None:
        """The kube-controller-manager with these of its controllers."""
        self.run(
            "kube-controller-manager",
            *(f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", f"--controllers={','.join(names)}"),
            *("--bind-address=127.0.0.1", f"--secure-port={free_port()}", "--concurrent-job-syncs=2"),
            *flags,
        )

    def kill(self, name: str) -> None:
        """At once, as a power cut does."""
        process = next(process for known, process in self._running if known == name)
        self._running.remove((name, process))
        process.kill()
        process.wait()

    def _kubeconfig(self, token: str) -> dict[str, Any]:
        cluster = {"server": f"https://127.0.0.1:{self.port}", "insecure-skip-tls-verify": True}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "l", "cluster": cluster}],
            "users": [{"name": "admin", "user": {"token": token}}],
            "contexts": [{"name": "l", "context": {"cluster": "l", "user": "admin"}}],
            "current-context": "l",
        }

    def run(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with open(self.log_file(name), "ab") as log:
            command = [str(self.binaries.binary(name)), *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._running.append((name, process))
        return process

    def log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _answers(self, path: str) -> bool:
        try:
            return self.http.get(path).status_code == 200
        except httpx.HTTPError:
            return False

    def until(self, what: str, check: Callable[[], Any], limit_s: float = START_S) -> Any:
        """The first truthy answer; fails when there is none in time, or at once when a process of ours has ended."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            answer = check()
            if answer:
                return answer
            for name, process in self._running:
                assert process.poll() is None, f"{name} ended:\n{self.log(name)}"
            time.sleep(0.05)
        names = [name for name, _ in self._running]
        raise AssertionError(f"{what}: not within {limit_s:.0f} s\n" + "\n".join(map(self.log, names)))

    def log(self, name: str) -> str:
        return f"--- {name}\n" + self.log_file(name).read_text(errors="replace")[-2000:]

    @contextlib.contextmanager
    def scheduler(self, *extenders: dict[str, Any]) -> Iterator[Path]:
        """A kube-scheduler with these extenders; yields its log."""
        port = free_port()
        config = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(self.kubeconfig), "qps": 1000, "burst": 1000},
            "percentageOfNodesToScore": 100,
            "podMaxBackoffSeconds": 1,
            "extenders": list(extenders),
        }
        path = self.folder / "scheduler.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.log_file("kube-scheduler").unlink(missing_ok=True)
        process = self.run("kube-scheduler", f"--config={path}", "--bind-address=127.0.0.1", f"--secure-port={port}")
        try:
            self.until("the scheduler", lambda: self._answers(f"https://127.0.0.1:{port}/readyz"))
            yield self.log_file("kube-scheduler")
        finally:
            self._running.remove(("kube-scheduler", process))
            _end(process)

    def create(self, path: str, thing: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=thing)
        assert answer.status_code == 201, answer.text
        created: dict[str, Any] = answer.json()
        return created

    def add_nodes(self, names: list[str], gpus: int) -> None:
        for name in names:
            self.create("/api/v1/nodes", node(name, gpus))
        self.until("nodes that are ready", lambda: all(map(is_ready, self.items("/api/v1/nodes"))))

    def items(self, path: str) -> list[dict[str, Any]]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        items: list[dict[str, Any]] = answer.json()["items"]
        return items

    def add_pod(self, name: str, gpus: int, **spec: Any) -> None:
        self.create(PODS, pod(name, gpus, **spec))

    def place(self, name: str, gpus: int, limit_s: float = 30.0, **spec: Any) -> str:
        """Create a pod; the node that it was bound to."""
        self.add_pod(name, gpus, **spec)
        return self.bound(name, limit_s)

    def bound(self, name: str, limit_s: float = 30.0) -> str:
        found: str = self.until(f"pod {name} bound", lambda: self.pod(name)["spec"].get("nodeName"), limit_s)
        return found

    def pod(self, name: str) -> dict[str, Any]:
        answer = self.http.get(f"{PODS}/{name}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def why_pending(self, name: str) -> str:
        """What the scheduler says of a pod that it could not place; empty as long as it says nothing."""
        conditions = self.pod(name)["status"].get("conditions", [])
        return next((row.get("message", "") for row in conditions if row["type"] == "PodScheduled"), "")

    def clear_pods(self) -> None:
        self.http.delete(PODS, params={"gracePeriodSeconds": 0})
        self.until("no pods", lambda: not self.items(PODS))

    def stop(self) -> None:
        """At once: nothing of it is kept, and an apiserver waits long for who watches it."""
        while self._running:
            self.kill(self._running[-1][0])
        self.http.close()


PODS = "/api/v1/namespaces/default/pods"


def is_ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions", [])
    return any(row["type"] == "Ready" and row["status"] == "True" for row in conditions)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def node(name: str, gpus: int) -> dict[str, Any]:
    resources = {"cpu": "128", "memory": "1Ti", "pods": "110", GPU: str(gpus)}
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"allocatable": resources, "capacity": resources},
    }


def pod(name: str, gpus: int, **spec: Any) -> dict[str, Any]:
    resources = {"cpu": "1", "memory": "1Gi"} | ({GPU: str(gpus)} if gpus else {})
    container = {"name": "c", "image": "fake", "resources": {"requests": resources, "limits": resources}}
    return {"metadata": {"name": name}, "spec": {"containers": [container], **spec}}


def extender(url: str, **more: Any) -> dict[str, Any]:
    """As the example tells an operator to write it, less what `more` says otherwise."""
    example = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    return {**example["extenders"][0], "urlPrefix": url, **more}
