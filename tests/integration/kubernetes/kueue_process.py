"""Kueue's manager on loopback beside a control plane: its definitions, webhooks and conversions, nothing of jobs."""

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.kueue_build import VARIABLE, KueueBinary
from tests.ports import free_ports

GROUP = "kueue.x-k8s.io"
NAMESPACE = "kueue-system"
CONVERTED = ("ClusterQueue", "Cohort", "LocalQueue", "Workload", "MultiKueueCluster")
CONFIGURATION = {
    "apiVersion": "config.kueue.x-k8s.io/v1beta2",
    "kind": "Configuration",
    "leaderElection": {"leaderElect": False},
    "internalCertManagement": {"enable": False},
    "clientConnection": {"qps": 500, "burst": 1000},
    "integrations": {"frameworks": ["batch/job"]},
    "fairSharing": {"preemptionStrategies": ["LessThanOrEqualToFinalShare", "LessThanInitialShare"]},
}


class KueueManager:
    """Starts on construction; `stop` ends it. Workloads are created by themselves: nothing of them ever runs."""

    def __init__(self, binary: KueueBinary, plane: ControlPlane, folder: Path) -> None:
        self.binary, self.plane, self.folder = binary, plane, folder
        self.webhook, self.health = free_ports(2)
        self._certify()
        for definition in _documents(binary.definitions):
            plane.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", self._converted(definition))
        plane.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        plane.until("Kueue's kinds", self._is_defined)
        self._process = self._start()
        try:
            plane.until("Kueue", self._is_ready)
            for hooks in _documents(binary.webhooks):
                plane.create(f"/apis/admissionregistration.k8s.io/v1/{hooks['kind'].lower()}s", self._hooked(hooks))
        except BaseException:
            self.stop()
            raise

    def _certify(self) -> None:
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "9", "-subj", "/CN=kueue"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "tls.key", "-out", "tls.crt"]
        subprocess.run(command, cwd=self.folder, check=True, capture_output=True, timeout=60)
        self._authority = base64.b64encode((self.folder / "tls.crt").read_bytes()).decode()

    def _start(self) -> "subprocess.Popen[bytes]":
        config = CONFIGURATION | {
            "health": {"healthProbeBindAddress": f"127.0.0.1:{self.health}"},
            "metrics": {"bindAddress": "0"},
            "webhook": {"host": "127.0.0.1", "port": self.webhook, "certDir": str(self.folder)},
        }
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        environment = os.environ | {"KUBECONFIG": str(self.plane.kubeconfig), "POD_NAMESPACE": NAMESPACE}
        command = [str(self.binary.manager), f"--config={self.folder / 'config.yaml'}", "--zap-log-level=1"]
        command += ["--feature-gates=VisibilityOnDemand=false"]  # its server wants certificates below /
        with open(self.folder / "kueue.log", "ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=environment | {VARIABLE: str(self.folder)}, start_new_session=True
            )

    def _is_defined(self) -> bool:
        answer = self.plane.http.get(f"/apis/{GROUP}/v1beta2")
        served = {row["kind"] for row in answer.json()["resources"]} if answer.status_code == 200 else set()
        return served >= {row["spec"]["names"]["kind"] for row in _documents(self.binary.definitions)}

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, (self.folder / "kueue.log").read_text(errors="replace")[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{self.health}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def _client(self, path: str) -> dict[str, Any]:
        return {"url": f"https://127.0.0.1:{self.webhook}{path}", "caBundle": self._authority}

    def _converted(self, definition: dict[str, Any]) -> dict[str, Any]:
        """With the conversion between versions, of the kinds whose versions differ."""
        if definition["spec"]["names"]["kind"] in CONVERTED:
            how = {"clientConfig": self._client("/convert"), "conversionReviewVersions": ["v1"]}
            definition["spec"]["conversion"] = {"strategy": "Webhook", "webhook": how}
        return definition

    def _hooked(self, configuration: dict[str, Any]) -> dict[str, Any]:
        """Of Kueue's own kinds alone."""
        own = [hook for hook in configuration["webhooks"] if hook["rules"][0]["apiGroups"] == [GROUP]]
        for hook in own:
            hook["clientConfig"] = self._client(hook["clientConfig"]["service"]["path"])
        return configuration | {"webhooks": own}

    def create(self, kind: str, name: str, spec: dict[str, Any], *, version: str = "v1beta2", **more: Any) -> None:
        """An object of the cluster, or of the namespace `default`."""
        spaced = "namespaces/default/" if kind in ("LocalQueue", "Workload") else ""
        path = f"/apis/{GROUP}/{version}/{spaced}{plural(kind)}"
        thing = {"apiVersion": f"{GROUP}/{version}", "kind": kind, "metadata": {"name": name}, **more}
        self.plane.create(path, thing | ({"spec": spec} if spec else {}))

    def items(self, kind: str, version: str = "v1beta2") -> list[dict[str, Any]]:
        """As `kubectl get … -o json` lists them: each says its own kind."""
        found = self.plane.items(f"/apis/{GROUP}/{version}/{plural(kind)}")
        return [{"apiVersion": f"{GROUP}/{version}", "kind": kind, **item} for item in found]

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("gy") else name + ("es" if name.endswith("s") else "s")


def _documents(path: Path) -> list[dict[str, Any]]:
    return [row for row in yaml.load_all(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader) if row]
