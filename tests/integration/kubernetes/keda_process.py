"""KEDA's operator and metrics adapter on loopback beside a control plane with the autoscaler's controllers."""

import base64
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.keda_build import KedaBinaries
from tests.ports import free_port, free_ports
from tests.service.certificate_files import Authority

NAMESPACE, ADAPTER = "keda", "keda-metrics-apiserver"
NAMES = f"IP:127.0.0.1,DNS:localhost,DNS:keda-operator.keda.svc,DNS:{ADAPTER}.{NAMESPACE}.svc"
KINDS = "/apis/keda.sh/v1alpha1/namespaces/default"
APPS = "/apis/apps/v1/namespaces/default"
CONTROLLERS = ("deployment", "replicaset", "horizontalpodautoscaling")
AT_ONCE = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 100, "periodSeconds": 1}]}


class KedaCluster:
    """Starts on construction; `stop` ends KEDA. Deployments scale at once, up and down, at a poll a second."""

    def __init__(self, binaries: KedaBinaries, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder, self._binaries = plane, folder, binaries
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._authority = Authority(folder, "ca")
        self._certify()
        self._define()
        plane.run(
            "kube-controller-manager",
            *(f"--kubeconfig={plane.kubeconfig}", "--leader-elect=false", f"--controllers={','.join(CONTROLLERS)}"),
            *("--bind-address=127.0.0.1", f"--secure-port={free_port()}"),
            *("--horizontal-pod-autoscaler-sync-period=1s", "--horizontal-pod-autoscaler-downscale-stabilization=0s"),
        )
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _certify(self) -> None:
        pair = self._authority.sign("keda", NAMES)
        (self.folder / "tls.crt").write_bytes(pair.cert.read_bytes())
        (self.folder / "tls.key").write_bytes(pair.key.read_bytes())
        (self.folder / "ca.crt").write_bytes(self._authority.cert.read_bytes())

    def _define(self) -> None:
        text = self._binaries.definitions.read_text(encoding="utf-8")
        for definition in filter(None, yaml.load_all(text, Loader=yaml.CSafeLoader)):
            self.plane.create("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", definition)
        self.plane.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        self.plane.until("KEDA's kinds", self._is_defined)

    def _is_defined(self) -> bool:
        answer = self.plane.http.get("/apis/keda.sh/v1alpha1")
        served = {row["kind"] for row in answer.json()["resources"]} if answer.status_code == 200 else set()
        return served >= {"ScaledObject", "TriggerAuthentication", "ScaledJob"}

    def _start(self) -> None:
        metrics, probe, service, secure, port = free_ports(5)
        self._health = f"http://127.0.0.1:{probe}/readyz"
        self._run(
            "keda-operator",
            *(f"--cert-dir={self.folder}", f"--metrics-bind-address=127.0.0.1:{metrics}", "--zap-encoder=console"),
            *(f"--health-probe-bind-address=127.0.0.1:{probe}", f"--metrics-service-bind-address=127.0.0.1:{service}"),
            *("--enable-webhook-patching=false", "--enable-apiservice-patching=false", "--kube-api-qps=200"),
        )
        self.plane.until("KEDA's operator", self._is_ready, 120)
        self._run(
            "keda-adapter",
            *("--bind-address=127.0.0.1", f"--secure-port={secure}", f"--metrics-service-address=127.0.0.1:{service}"),
            *(f"--tls-cert-file={self.folder / 'tls.crt'}", f"--tls-private-key-file={self.folder / 'tls.key'}"),
            *(f"--cert-dir={self.folder}", f"--port={port}", "--authentication-tolerate-lookup-failure=true"),
            *(f"--{what}-kubeconfig={self.plane.kubeconfig}" for what in ("authentication", "authorization", "lister")),
        )
        self._aggregate(secure)
        self.plane.until("KEDA's metrics", self._is_served, 120)

    def _run(self, name: str, *arguments: str) -> None:
        environment = os.environ | {"KUBECONFIG": str(self.plane.kubeconfig), "POD_NAMESPACE": NAMESPACE}
        environment |= {"KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE, "WATCH_NAMESPACE": ""}
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [str(self._binaries.binary(name)), *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self._processes.append((name, process))

    def log(self, name: str = "keda-operator") -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _is_ready(self) -> bool:
        for name, process in self._processes:
            assert process.poll() is None, f"{name} ended:\n{self.log(name)[-3000:]}"
        try:
            return httpx.get(self._health).status_code == 200
        except httpx.HTTPError:
            return False

    def _aggregate(self, port: int) -> None:
        spec = {"type": "ExternalName", "externalName": "localhost"}
        self.plane.create(
            f"/api/v1/namespaces/{NAMESPACE}/services",
            {"metadata": {"name": ADAPTER}, "spec": spec},
        )
        group = {"group": "external.metrics.k8s.io", "version": "v1beta1"}
        service = {"name": ADAPTER, "namespace": NAMESPACE, "port": port}
        bundle = base64.b64encode(self._authority.cert.read_bytes()).decode()
        more = {"groupPriorityMinimum": 100, "versionPriority": 100, "service": service, "caBundle": bundle}
        thing = {"metadata": {"name": "v1beta1.external.metrics.k8s.io"}, "spec": {**group, **more}}
        self.plane.create("/apis/apiregistration.k8s.io/v1/apiservices", thing)

    def _is_served(self) -> bool:
        self._is_ready()
        return self.plane.http.get("/apis/external.metrics.k8s.io/v1beta1").status_code == 200

    def trust(self, name: str, files: dict[str, Path]) -> None:
        """A TriggerAuthentication whose parameters are these files, from a secret."""
        data = {key: base64.b64encode(path.read_bytes()).decode() for key, path in files.items()}
        self.plane.create("/api/v1/namespaces/default/secrets", {"metadata": {"name": name}, "data": data})
        references = [{"parameter": key, "name": name, "key": key} for key in files]
        thing = {"apiVersion": "keda.sh/v1alpha1", "kind": "TriggerAuthentication", "metadata": {"name": name}}
        self.plane.create(f"{KINDS}/triggerauthentications", thing | {"spec": {"secretTargetRef": references}})

    def scale(self, name: str, triggers: list[dict[str, Any]], replicas: int = 0, **spec: Any) -> None:
        """A Deployment of so many replicas, and the ScaledObject that scales it."""
        container = {"name": "c", "image": "fake", "resources": {"requests": {"cpu": "1m"}}}
        template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}}
        deployment = {"replicas": replicas, "selector": {"matchLabels": {"app": name}}, "template": template}
        self.plane.create(f"{APPS}/deployments", {"metadata": {"name": name}, "spec": deployment})
        behavior = {"scaleUp": AT_ONCE, "scaleDown": AT_ONCE}
        whole = {
            **{"scaleTargetRef": {"name": name}, "pollingInterval": 1, "cooldownPeriod": 1, "triggers": triggers},
            **{"minReplicaCount": 0, "maxReplicaCount": 20},
            **{"advanced": {"horizontalPodAutoscalerConfig": {"behavior": behavior}}, **spec},
        }
        thing = {"apiVersion": "keda.sh/v1alpha1", "kind": "ScaledObject", "metadata": {"name": name}, "spec": whole}
        self.plane.create(f"{KINDS}/scaledobjects", thing)

    def replicas(self, name: str) -> int:
        found: int = self.plane.http.get(f"{APPS}/deployments/{name}").json()["spec"]["replicas"]
        return found

    def status(self, name: str) -> dict[str, Any]:
        """Of a ScaledObject."""
        found: dict[str, Any] = self.plane.http.get(f"{KINDS}/scaledobjects/{name}").json().get("status", {})
        return found

    def until_replicas(self, name: str, wanted: int, limit_s: float = 120.0) -> None:
        try:
            self.plane.until(f"{wanted} replicas of {name}", lambda: self.replicas(name) == wanted, limit_s)
        except AssertionError as error:
            told = f"{self.replicas(name)} replicas, {self.status(name)}\n{self.log()[-3000:]}"
            raise AssertionError(f"{error}\n{told}") from None

    def remove(self, name: str) -> None:
        self.plane.http.delete(f"{KINDS}/scaledobjects/{name}")
        gone = lambda: self.plane.http.get(f"{KINDS}/scaledobjects/{name}").status_code == 404  # noqa: E731
        self.plane.until(f"no ScaledObject {name}", gone)
        self.plane.http.delete(f"{APPS}/deployments/{name}")

    def stop(self) -> None:
        for _, process in reversed(self._processes):
            process.kill()
            process.wait()
