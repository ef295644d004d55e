"""The adapter `buffers` in a real adapters role sizes CapacityBuffers of a real API server under RBAC."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from fleetcast.schedulers.buffers import GPUS, LEAST, POOL
from tests.integration.built import needed
from tests.integration.kubernetes.buffering import (
    ASKS,
    BUFFERS,
    DEFINITIONS,
    LONG_S,
    STALE_S,
    Buffering,
    apply,
    hand_over,
)
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.capacity_buffer import capacity_buffer
from tests.integration.kubernetes.control_plane import READER_TOKEN, ControlPlane
from tests.integration.kubernetes.test_kubernetes_source import MERGE, PATHS

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

EXAMPLE = Path(__file__).parents[3] / "examples" / "kubernetes-buffers.yaml"


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """An account that may do what the example allows it."""
    plane = ControlPlane(needed(kubernetes, request), tmp_path_factory.mktemp("buffers"), authorization="RBAC")
    try:
        plane.create("/api/v1/namespaces", {"metadata": {"name": "fleetcast"}})
        plane.create(DEFINITIONS, capacity_buffer())
        for thing in yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8")):
            plane.create(PATHS[thing["kind"]], thing)
        plane.until("buffers", lambda: plane.http.get(BUFFERS).status_code == 200)
        yield plane
    finally:
        plane.stop()


@pytest.fixture
def buffering(cluster: ControlPlane, tmp_path: Path) -> Iterator[Buffering]:
    """Two buffers at their minimum, and an adapter that has seen them."""
    hand_over(cluster, "ahead")
    hand_over(cluster, "second", min="1", max="3")
    made = Buffering(cluster, tmp_path)
    try:
        made.publish(40)
        made.until(1, "second")
        made.until_looked()
        yield made
    finally:
        if made.process.poll() is None:
            made.end(signal.SIGKILL)
        cluster.http.delete(BUFFERS)


def test_a_forecast_sizes_buffers_within_their_bounds_and_a_withdrawal_brings_the_minimum(buffering: Buffering) -> None:
    buffering.publish(72)
    print(f"forecast to replicas: {buffering.until(4):.2f} s; ", end="")
    buffering.until(3, "second")
    buffering.publish(40)
    buffering.until(1)  # within the slack
    buffering.publish(30)
    buffering.until(0)
    buffering.until(1, "second")
    buffering.publish(72)
    buffering.until(4)
    buffering.end()
    buffering.cli("withdraw", "buffers")
    assert (buffering.replicas(), buffering.replicas("second")) == (0, 1)


def test_boards_that_waver_by_1_percent_write_nothing(buffering: Buffering) -> None:
    buffering.publish(72.7)
    buffering.until(5)
    before = buffering.until_looked().writes
    for gpus in (71.3, 72.0, 72.7, 71.4, 72.6):
        buffering.publish(gpus)
        assert buffering.until_looked().writes == before
    assert buffering.replicas() == 5


def test_an_old_board_brings_the_minimum_back(buffering: Buffering) -> None:
    buffering.publish(72)
    buffering.until(4)
    buffering.publish(72, age_s=2 * STALE_S)
    buffering.until(0)
    buffering.until(1, "second")
    buffering.publish(72)
    buffering.until(4)


def test_a_kill_leaves_the_replicas_and_its_successor_writes_nothing_twice(buffering: Buffering) -> None:
    buffering.publish(72)
    buffering.until(4)
    buffering.until_looked()
    buffering.end(signal.SIGKILL)
    version = buffering.buffer()["metadata"]["resourceVersion"]
    buffering.start()
    buffering.publish(72)
    assert buffering.until_looked().writes == 0
    assert buffering.buffer()["metadata"]["resourceVersion"] == version


def test_replicas_that_somebody_takes_are_theirs_until_they_give_them_up(buffering: Buffering) -> None:
    taken = {"metadata": {"name": "ahead"}, "spec": {"podTemplateRef": {"name": "server"}, "replicas": 7}}
    assert apply(buffering.plane, taken, "kubectl").status_code == 409
    taken["metadata"]["annotations"] = ASKS
    assert apply(buffering.plane, taken, "kubectl", force=True).status_code == 200
    buffering.publish(72)
    buffering.until(3, "second")
    buffering.until_looked()
    buffering.cli("withdraw", "buffers")
    assert buffering.replicas() == 7
    buffering.cli("withdraw", "buffers", "--undo")
    first = {"metadata": {"name": "ahead"}, "spec": {"replicas": 7}}
    del taken["spec"]["replicas"]
    for thing, manager in ((first, "fleetcast"), (taken, "kubectl")):  # both hold it, then we alone
        assert apply(buffering.plane, thing, manager).status_code == 200
    buffering.publish(68)
    buffering.until(4)
    by_hand = buffering.plane.http.patch(f"{BUFFERS}/ahead", json={"spec": {"replicas": 9}}, headers=MERGE)
    assert by_hand.status_code == 200
    buffering.publish(72)
    buffering.until_looked()
    assert buffering.replicas() == 9
    first["spec"]["replicas"] = 0
    assert apply(buffering.plane, first, "fleetcast", force=True).status_code == 200
    buffering.publish(72)
    buffering.until(4)


def test_annotations_that_go_take_the_buffer_back(buffering: Buffering) -> None:
    buffering.publish(72)
    buffering.until(4)
    gone = {"metadata": {"annotations": {POOL: None, GPUS: None, LEAST: "2"}}}
    assert buffering.plane.http.patch(f"{BUFFERS}/ahead", json=gone, headers=MERGE).status_code == 200
    buffering.publish(72)
    buffering.until(2)


class OtherWriter(threading.Thread):
    """Changes annotations, limits and the status of a buffer all the time; `count`: how often."""

    def __init__(self, plane: ControlPlane) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self._over = threading.Event()
        self._http = httpx.Client(base_url=plane.http.base_url, headers=plane.http.headers, verify=False)

    def run(self) -> None:
        while not self._over.is_set():
            number = self.count + 1
            self._patch("", {"metadata": {"annotations": {f"other.io/a{number % 50}": str(number)}}})
            self._patch("", {"spec": {"limits": {"cpu": number}, "provisioningStrategy": f"other.io/{number}"}})
            self._patch("/status", {"status": {"replicas": number}})
            self.count = number

    def _patch(self, part: str, body: dict[str, Any]) -> None:
        answer = self._http.patch(f"{BUFFERS}/ahead{part}", json=body, headers=MERGE)
        assert answer.status_code == 200, answer.text

    def end(self) -> int:
        self._over.set()
        self.join()
        self._http.close()
        return self.count


def test_what_a_second_writer_does_meanwhile_stays(buffering: Buffering) -> None:
    other = OtherWriter(buffering.plane)
    other.start()
    try:
        for _ in range(5):
            for gpus, replicas in ((72, 4), (30, 0)):
                buffering.publish(gpus)
                buffering.until(replicas)
    finally:
        count = other.end()
    buffer = buffering.buffer()
    assert count > 0
    assert buffer["spec"]["limits"] == {"cpu": count}
    assert buffer["spec"]["provisioningStrategy"] == f"other.io/{count}"
    assert buffer["status"] == {"replicas": count}
    newest = {f"other.io/a{number % 50}": str(number) for number in range(1, count + 1)}
    assert buffer["metadata"]["annotations"] == ASKS | newest
    assert buffering.standing().conflicts == 0
    print(f"{count} rounds of a second writer; ", end="")


def test_the_account_may_do_nothing_else(buffering: Buffering) -> None:
    ours = {"authorization": f"Bearer {READER_TOKEN}"}
    assert buffering.plane.http.delete(f"{BUFFERS}/ahead", headers=ours).status_code == 403
    assert buffering.plane.http.get("/api/v1/nodes", headers=ours).status_code == 403
    assert buffering.plane.http.patch(f"{BUFFERS}/ahead/status", json={}, headers=MERGE | ours).status_code == 403


def test_an_apiserver_that_dies_is_found_again(buffering: Buffering) -> None:
    buffering.plane.kill("kube-apiserver")
    try:
        buffering.publish(72)
        buffering.plane.until("an error", lambda: buffering.standing().error or buffering.publish(72), LONG_S)
    finally:
        buffering.plane.start_apiserver()
    buffering.publish(72)
    buffering.until(4)
