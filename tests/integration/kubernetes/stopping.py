"""A cluster of four nodes whose Jobs an executor stops, with the rights of our example alone."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from fleetcast.clients.kube_api import KubeAccount, KubeApi
from fleetcast.fleet.requests import RankPlacement
from fleetcast.schedulers.executor import ActionOrder, SendReply
from fleetcast.service.ports.kubernetes_executor import KubernetesExecutor
from tests.integration.kubernetes.audit import make_audit_flags
from tests.integration.kubernetes.build import Kubernetes
from tests.integration.kubernetes.control_plane import GPU, PODS, READER_TOKEN, ControlPlane, is_ready
from tests.integration.kubernetes.kueue_process import KueueManager
from tests.integration.kubernetes.test_kubernetes_source import MERGE, PATHS

EXAMPLES = Path(__file__).parents[3] / "examples"
NODES = ("s1", "s2", "s3", "s4")
LABELS = {"pool": "gpu", "rack": "r1"}
JOBS = "/apis/batch/v1/namespaces/default/jobs"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
IGNORED = {"rules": [{"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}]}


def make_pod_stage(name: str, phases: str, following: str) -> str:
    """Return a Stage of kwok for pods that are being deleted.

    phases: those in which it applies, such as "[Pending, Running]". following: what it does, as YAML.
    """
    return f"""\
apiVersion: kwok.x-k8s.io/v1alpha1
kind: Stage
metadata: {{name: {name}}}
spec:
  resourceRef: {{apiGroup: v1, kind: Pod}}
  selector:
    matchExpressions:
    - {{key: .metadata.deletionTimestamp, operator: Exists}}
    - {{key: .status.phase, operator: In, values: {phases}}}
  next: {following}
"""


POD_STAGES = (  # as a kubelet reports the end of a pod that is deleted
    make_pod_stage("pod-ends", "[Pending, Running]", '{statusTemplate: "phase: Failed"}'),
    make_pod_stage("pod-leaves", "[Failed, Succeeded]", "{delete: true}"),
)


LOST = "lost"  # the label of a node whose kubelet does not answer, and of its pods: kwok leaves them alone
UNREACHABLE = {"key": f'.metadata.labels["{LOST}"]', "operator": "DoesNotExist"}


def start_plane(binaries: Kubernetes, folder: Path) -> ControlPlane:
    """The controllers of Jobs and budgets run. A Job's pods run until they are stopped."""
    stages = folder / "stages.yaml"
    usual = [stage for stage in yaml.safe_load_all(binaries.stages.read_text()) if stage]
    usual = [stage for stage in usual if stage["metadata"]["name"] not in ("pod-complete", "pod-delete")]
    usual += [yaml.safe_load(stage) for stage in POD_STAGES]
    for stage in usual:
        stage["spec"]["selector"].setdefault("matchExpressions", []).append(UNREACHABLE)
    stages.write_text(yaml.safe_dump_all(usual))
    plane = ControlPlane(binaries, folder, stages, authorization="RBAC", apiserver=make_audit_flags(folder))
    plane.create("/api/v1/namespaces", {"metadata": {"name": "fleetcast"}})
    for thing in yaml.safe_load_all((EXAMPLES / "kubernetes-executor.yaml").read_text()):
        plane.create(PATHS[thing["kind"]], thing)
    plane.add_nodes(list(NODES), 8)
    for name in NODES:
        plane.http.patch(f"/api/v1/nodes/{name}", json={"metadata": {"labels": LABELS}}, headers=MERGE)
    plane.start_controllers(
        "job-controller", "disruption-controller", "garbage-collector-controller", "node-lifecycle-controller"
    )
    return plane


def make_template(app: str, topology: str = "") -> dict[str, Any]:
    """Return the template of pods with eight GPUs each. topology: the level that Kueue must keep them in, or ""."""
    resources = {"cpu": "1", GPU: "8"}
    container = {"name": "c", "image": "fake", "resources": {"requests": resources, "limits": {GPU: "8"}}}
    required = {"kueue.x-k8s.io/podset-required-topology": topology} if topology else {}
    return {
        "metadata": {"labels": {"app": app}, "annotations": required},
        "spec": {"containers": [container], "restartPolicy": "Never"},
    }


class StoppedCluster:
    """Jobs of whole nodes, and an executor. `clear` removes all of them."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        (folder / "token").write_text(READER_TOKEN)

    @property
    def options(self) -> dict[str, str]:
        """Options of the executor that name this cluster and its account."""
        certificate = self.plane.folder / "certs" / "apiserver.crt"
        server, token = f"https://127.0.0.1:{self.plane.port}", str(self.folder / "token")
        return {"server": server, "token_file": token, "ca_file": str(certificate)}

    def submit(
        self, name: str, pods: int = 4, labels: dict[str, str] | None = None, topology: str = "", **spec: Any
    ) -> None:
        """A Job whose pods have eight GPUs each. topology: the level that Kueue must keep them in, or ""."""
        template = make_template(name, topology)
        parallel = {"parallelism": pods, "completions": pods}
        meta = {"name": name, "labels": labels or {}}
        self.plane.create(JOBS, {"metadata": meta, "spec": {**parallel, "template": template, **spec}})

    def run(self, name: str, pods: int = 4, **more: Any) -> dict[str, str]:
        """Submit a Job and wait until all its pods run. Returns pod → UID."""
        self.submit(name, pods, **more)
        return self.await_running(name, pods)

    def await_running(self, name: str, pods: int = 4, read_state: Callable[[], object] | None = None) -> dict[str, str]:
        """Wait until all pods of a Job run. Returns pod → UID. read_state: the Job in a failure, if it is no Job."""

        def find_running() -> dict[str, str]:
            rows = [row for row in self.pods(name) if row["status"].get("phase") == "Running"]
            return self.uids(rows) if len(rows) == pods else {}

        try:
            found: dict[str, str] = self.plane.until(f"{pods} pods of {name}", find_running)
        except AssertionError as error:
            raise AssertionError(
                f"{error}\n{read_state() if read_state else self.job(name)['status']}\n{self.pods(name)}"
            ) from None
        return found

    def pods(self, job: str) -> list[dict[str, Any]]:
        rows = self.plane.http.get(PODS, params={"labelSelector": f"app={job}"}).json()["items"]
        return [row for row in rows if "deletionTimestamp" not in row["metadata"]]

    @staticmethod
    def uids(pods: Sequence[dict[str, Any]]) -> dict[str, str]:
        return {row["metadata"]["name"]: row["metadata"]["uid"] for row in pods}

    def job(self, name: str) -> dict[str, Any]:
        answer = self.plane.http.get(f"{JOBS}/{name}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def place_of(self, job: str) -> dict[str, str]:
        """Pod → node, of the pods that are not being deleted."""
        return {row["metadata"]["name"]: row["spec"].get("nodeName", "") for row in self.pods(job)}

    def lose_node(self, name: str) -> None:
        """Its kubelet ends: the node is not ready, and its pods stay as they are."""
        for row in self.plane.items(PODS):
            if row["spec"].get("nodeName") == name:
                self.patch(f"{PODS}/{row['metadata']['name']}", {"metadata": {"labels": {LOST: "true"}}})
        path = f"/api/v1/nodes/{name}"
        self.patch(path, {"metadata": {"labels": {LOST: "true"}}})
        conditions = self.plane.http.get(path).json()["status"]["conditions"]
        ready = next(row for row in conditions if row["type"] == "Ready")
        ready |= {"status": "Unknown", "lastTransitionTime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        self.patch(f"{path}/status", {"status": {"conditions": conditions}})
        self.plane.until("its taint", lambda: self.plane.http.get(path).json()["spec"].get("taints"))

    def cordon(self, name: str, *, is_on: bool = True) -> None:
        path = f"/api/v1/nodes/{name}"
        self.patch(path, {"spec": {"unschedulable": is_on}})
        self.plane.until("its taint", lambda: bool(self.plane.http.get(path).json()["spec"].get("taints")) is is_on)

    def restore_nodes(self) -> None:
        for name in NODES:
            self.patch(f"/api/v1/nodes/{name}", {"metadata": {"labels": {LOST: None}}, "spec": {"unschedulable": None}})
        self.plane.until(
            "ready nodes without a taint",
            lambda: (
                not any(row["spec"].get("taints") for row in self.plane.items("/api/v1/nodes"))
                and all(map(is_ready, self.plane.items("/api/v1/nodes")))
            ),
        )

    def order(self, job: str, number: int = 1, payer: str = "", by_s: float = 600.0, **more: Any) -> ActionOrder:
        kind = more.pop("kind", "preempt")
        ranks = [RankPlacement(rank, node, tuple(range(8))) for rank, node in enumerate(more.pop("nodes", NODES))]
        by_ms = int((time.time() + by_s) * 1000)
        return ActionOrder(f"0f{job}-{number}", kind, f"default/{job}", 1, 32.0, ranks, (), payer, 5.0, by_ms)

    def send(self, order: ActionOrder, api: type[KubeApi] = KubeApi) -> SendReply:
        return asyncio.run(self._use(api, order, follow=False))

    def follow(self, order: ActionOrder) -> SendReply:
        return asyncio.run(self._use(KubeApi, order, follow=True))

    async def _use(self, api: type[KubeApi], order: ActionOrder, *, follow: bool) -> SendReply:
        """A new executor each time: it has nothing in memory, as after a restart."""
        account = KubeAccount(**self.options)
        executor = KubernetesExecutor(api(account))
        try:
            return (await executor.follow([order]))[0] if follow else await executor.send(order)
        finally:
            await executor.close()
            await asyncio.sleep(0.1)  # TLS connections end a moment later

    def patch(self, path: str, change: dict[str, Any]) -> None:
        answer = self.plane.http.patch(path, json=change, headers=MERGE)
        assert answer.status_code == 200, answer.text

    def clear(self) -> None:
        self.plane.http.delete(JOBS, params={"propagationPolicy": "Background"})
        self.plane.http.delete(BUDGETS)
        self.plane.until("no Jobs", lambda: not self.plane.items(JOBS))
        self.plane.http.delete(PODS, params={"gracePeriodSeconds": 0})
        self.plane.until("no pods", lambda: not self.plane.items(PODS))
        self.restore_nodes()


def find_workload(manager: KueueManager, job: str) -> dict[str, Any]:
    return next(
        row for row in manager.items("Workload") if row["metadata"].get("ownerReferences", [{}])[0].get("name") == job
    )


def in_queue(name: str) -> dict[str, Any]:
    return {"labels": {"kueue.x-k8s.io/queue-name": name}, "suspend": True}
