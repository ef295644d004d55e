"""A real Karpenter makes machines for a buffer that the adapter `buffers` sizes by a forecast."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.integration.built import needed
from tests.integration.kubernetes.buffering import BUFFERS, DEFINITIONS, LONG_S, STALE_S, Buffering, apply, hand_over
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.outside.karpenter.build import KarpenterBinary, karpenter
from tests.integration.outside.karpenter.network import own_network
from tests.ports import free_ports

pytestmark = [pytest.mark.outside, pytest.mark.timeout(3600)]  # the first run builds Kubernetes and Karpenter

PATHS = {
    "KWOKNodeClass": "/apis/karpenter.kwok.sh/v1alpha1/kwoknodeclasses",
    "NodePool": "/apis/karpenter.sh/v1/nodepools",
    "PodTemplate": "/api/v1/namespaces/default/podtemplates",
}
GATES = "CapacityBuffer=true,NodeOverlay=true,NodeRepair=false"
THREE_CPUS = {"requests": {"cpu": "3", "memory": "4Gi"}, "limits": {}}


class KarpenterProcess:
    """Starts on construction. It listens on every interface, so it runs where there is a loopback only."""

    def __init__(self, binary: KarpenterBinary, plane: ControlPlane) -> None:
        self.plane, self.log = plane, plane.folder / "karpenter.log"
        for definition in filter(None, yaml.safe_load_all(binary.definitions.read_text(encoding="utf-8"))):
            plane.create(DEFINITIONS, definition)
        for path in (BUFFERS, *PATHS.values()):
            plane.until(path, lambda path=path: plane.http.get(path).status_code == 200)
        metrics, health = free_ports(2)
        variables = {
            **{"KUBECONFIG": str(plane.kubeconfig), "SYSTEM_NAMESPACE": "default", "KARPENTER_SERVICE": "karpenter"},
            **{"DISABLE_LEADER_ELECTION": "true", "FEATURE_GATES": GATES, "MEMORY_LIMIT": "1000000000"},
            **{"METRICS_PORT": str(metrics), "HEALTH_PROBE_PORT": str(health), "DISABLE_WEBHOOK": "true"},
            **{"BATCH_MAX_DURATION": "1s", "BATCH_IDLE_DURATION": "200ms", "KUBERNETES_MIN_VERSION": "1.19.0-0"},
        }
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [str(binary.controller)], stdout=log, stderr=log, env=os.environ | variables, start_new_session=True
            )
        try:
            plane.until("Karpenter", lambda: self._is_ready(health), LONG_S)
            for thing in yaml.safe_load_all(Path(__file__).with_name("objects.yaml").read_text(encoding="utf-8")):
                plane.create(PATHS[thing["kind"]], thing)
        except BaseException:
            self.stop()
            raise

    def _is_ready(self, port: int) -> bool:
        assert self._process.poll() is None, self.log.read_text(errors="replace")[-3000:]
        try:
            return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
        except httpx.HTTPError:
            return False

    def nodes(self) -> list[dict[str, Any]]:
        """Machines that it has made and that are ready."""
        nodes = self.plane.items("/api/v1/nodes")
        return [row for row in nodes if "karpenter.sh/initialized" in row["metadata"]["labels"]]

    def cpus(self) -> int:
        return sum(int(row["status"]["capacity"]["cpu"]) for row in self.nodes())

    def until(self, what: str, wanted: bool) -> float:
        """Seconds until there is room for four pods, or none at all."""
        began = time.monotonic()
        try:
            self.plane.until(what, lambda: self.cpus() >= 12 if wanted else not self.nodes(), 2 * LONG_S)
        except AssertionError:
            raise AssertionError(f"{what}: {self.cpus()} CPUs\n{self.log.read_text()[-3000:]}") from None
        return time.monotonic() - began

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KarpenterProcess]:
    """A control plane with a scheduler, and a Karpenter."""
    binaries, binary = needed(kubernetes, request), needed(karpenter, request)
    inside = own_network()
    needed(lambda say: inside.__enter__(), request)
    try:
        plane = ControlPlane(binaries, tmp_path_factory.mktemp("karpenter"))
        try:
            made = KarpenterProcess(binary, plane)
            try:
                with plane.scheduler():
                    yield made
            finally:
                made.stop()
        finally:
            plane.stop()
    finally:
        inside.__exit__(None, None, None)


@pytest.fixture
def buffering(machines: KarpenterProcess, tmp_path: Path) -> Iterator[Buffering]:
    """A buffer at its minimum, no machine, no pod."""
    plane = machines.plane
    hand_over(plane, "ahead")
    made = Buffering(plane, tmp_path)
    try:
        made.publish(40)
        made.until_looked()
        yield made
    finally:
        if made.process.poll() is None:
            made.end(signal.SIGKILL)
        plane.clear_pods()
        none = {"metadata": {"name": "ahead"}, "spec": {"replicas": 0}}
        assert apply(plane, none, "fleetcast", force=True).status_code == 200
        machines.until("no machine", wanted=False)
        plane.http.delete(
            f"{BUFFERS}/ahead"
        )  # last: Karpenter may keep the machine of a buffer that goes before it shrank


def burst(plane: ControlPlane) -> None:
    for number in range(4):
        pod = {"containers": [{"name": "c", "image": "fake", "resources": THREE_CPUS}]}
        plane.create("/api/v1/namespaces/default/pods", {"metadata": {"name": f"burst-{number}"}, "spec": pod})


def test_capacity_is_there_before_the_burst(buffering: Buffering, machines: KarpenterProcess) -> None:
    plane = machines.plane
    assert not machines.nodes()
    buffering.publish(72)
    written_s = buffering.until(4)
    room_s = machines.until("room for four pods", wanted=True)
    ready = {row["metadata"]["name"] for row in machines.nodes()}
    assert not plane.items("/api/v1/namespaces/default/pods")
    began = time.monotonic()
    burst(plane)
    bound_to = {plane.bound(f"burst-{number}", LONG_S) for number in range(4)}
    print(f"written {written_s:.1f} s, room {room_s:.1f} s, bound {time.monotonic() - began:.1f} s; ", end="")
    assert bound_to <= ready


def test_room_that_is_free_already_is_counted_by_karpenter(buffering: Buffering, machines: KarpenterProcess) -> None:
    """Which is why the adapter does not subtract it."""
    buffering.publish(72)
    buffering.until(4)
    machines.until("room for four pods", wanted=True)
    before = {row["metadata"]["name"] for row in machines.nodes()}
    for gpus, replicas in ((48, 2), (72, 4)):
        buffering.publish(gpus)
        buffering.until(replicas)
        machines.plane.until("Karpenter's look at it", lambda wanted=replicas: provisioned(buffering) == wanted, LONG_S)
    assert {row["metadata"]["name"] for row in machines.nodes()} == before


def provisioned(buffering: Buffering) -> int | None:
    """Replicas that there is room for."""
    status = buffering.buffer()["status"]
    conditions = {row["type"]: row["status"] for row in status["conditions"]}
    return status["replicas"] if conditions.get("Provisioning") == "True" else None


def test_an_old_board_and_a_withdrawal_bring_the_minimum_back(buffering: Buffering, machines: KarpenterProcess) -> None:
    buffering.publish(72)
    buffering.until(4)
    machines.until("room for four pods", wanted=True)
    buffering.publish(72, age_s=2 * STALE_S)
    buffering.until(0)
    machines.until("no machine", wanted=False)
    buffering.publish(72)
    buffering.until(4)
    machines.until("room for four pods", wanted=True)
    buffering.cli("withdraw", "buffers")
    buffering.until(0)
    machines.until("no machine", wanted=False)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_was_killed_or_stood_still_takes_back_on_its_return(
    buffering: Buffering, machines: KarpenterProcess, how: signal.Signals
) -> None:
    buffering.publish(72)
    buffering.until(4)
    machines.until("room for four pods", wanted=True)
    buffering.process.send_signal(how)
    buffering.publish(72, age_s=2 * STALE_S)
    time.sleep(3)
    assert buffering.replicas() == 4  # nobody else takes it back
    if how == signal.SIGKILL:
        buffering.process.wait(30)
        buffering.start()
    else:
        buffering.process.send_signal(signal.SIGCONT)
    buffering.until(0)
    machines.until("no machine", wanted=False)
