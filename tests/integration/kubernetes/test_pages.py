"""The commands of the pages on Kubernetes, with a real API server, Kueue and our adapters."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fleetcast.schedulers.nodes import MARK, SLINKY
from tests.docs.pages import ROOT
from tests.docs.runner import Done
from tests.integration.built import needed
from tests.integration.kubernetes.buffering import BUFFERS, DEFINITIONS, Buffering
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.capacity_buffer import capacity_buffer
from tests.integration.kubernetes.control_plane import PODS, READER_TOKEN, ControlPlane
from tests.integration.kubernetes.custom import definition
from tests.integration.kubernetes.kueue_build import kueue
from tests.integration.kubernetes.kueue_checking import NODES as RACKED
from tests.integration.kubernetes.kueue_checking import Checking
from tests.integration.kubernetes.kueue_process import GROUP, KueueManager
from tests.integration.kubernetes.page_reader import apply_examples, reader_at, remove_namespace
from tests.integration.kubernetes.test_kubernetes_source import MERGE
from tests.integration.kubernetes.test_nodes import NODES, Marking

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]  # the first run builds Kubernetes and Kueue

PAGES = ROOT / "docs" / "schedulers"
RUN = "run in kubernetes"
KAI, VOLCANO = ("scheduling.run.ai", "v2"), ("scheduling.volcano.sh", "v1beta1")


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    plane = ControlPlane(needed(kubernetes, request), tmp_path_factory.mktemp("pages"), authorization="RBAC")
    try:
        plane.start_controllers("namespace-controller")
        plane.add_nodes([*NODES, *RACKED], 8)
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="module")
def manager(
    cluster: ControlPlane, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[KueueManager]:
    """Kueue, and eight nodes with the label of its flavor."""
    for name in RACKED:
        labels = {"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}}
        assert cluster.http.patch(f"/api/v1/nodes/{name}", json=labels, headers=MERGE).status_code == 200
    started = KueueManager(needed(kueue, request), cluster, tmp_path_factory.mktemp("kueue"))
    try:
        yield started
    finally:
        started.stop()


@pytest.fixture
def plane(cluster: ControlPlane) -> ControlPlane:
    """The cluster without the namespace of Fleetcast."""
    remove_namespace(cluster)
    return cluster


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The folder of an adapters role."""
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def link_state(folder: Path, config: Path) -> None:
    """Give the reader the state folder of a role, with the configuration that `fleetcast run` saves in it."""
    state = config.parent / "state"
    (state / "config.toml").symlink_to(config)
    (folder / "var").symlink_to(state)


def printed(done: list[Done], command: str) -> str:
    """Return what the first command that begins so printed."""
    return next(row.output for row in done if row.command.startswith(command))


class MarkedNodes:
    """An adapters role with `nodes`, started by the page's first look at the nodes; m01 is at risk."""

    def __init__(self, plane: ControlPlane, site: Path, reader: Path, **options: Any) -> None:
        self._plane, self._site, self._reader, self._options = plane, site, reader, options

    def start(self) -> None:
        self.marking = Marking(self._plane, self._site, "NoSchedule", **self._options)
        link_state(self._reader, self.marking.config)
        self.mark()

    def mark(self) -> None:
        self.marking.publish(m01=0.9)
        self.marking.until("m01", "True", "high", [MARK])
        self.marking.until("m02", "False", "low", [])

    def mark_and_die(self) -> None:
        """Let the role mark again what was withdrawn, and end it: what follows is for a dead Fleetcast."""
        self.marking.cli("withdraw", "nodes", "--undo")
        self.mark()
        self.marking.end(signal.SIGKILL)


def test_every_command_of_the_page_on_nodes_works(plane: ControlPlane, site: Path, tmp_path: Path) -> None:
    reader = reader_at(plane, tmp_path / "reader", NODE="m01")
    nodes = MarkedNodes(plane, site, reader.folder)
    try:
        before = {"kubectl get nodes": nodes.start, "kubectl get node NODE": nodes.mark}
        before |= {"fleetcast adapters withdraw": nodes.mark, "kubectl taint nodes": nodes.mark_and_die}
        done = reader.run_page(PAGES / "nodes.md", RUN, before=before)
        assert "high" in printed(done, "kubectl get nodes")
        assert '"reason":"HighRisk"' in printed(done, "kubectl get node NODE")
        assert nodes.marking.marks("m01") == ("", None, [])
        assert nodes.marking.marks("m02") == (
            "False",
            None,
            [],
        )  # its condition is for another round of the command
    finally:
        if nodes.marking.process.poll() is None:
            nodes.marking.end()


def test_every_command_of_the_page_on_slinky_works(plane: ControlPlane, site: Path, tmp_path: Path) -> None:
    apply_examples(plane, "kubernetes-nodes.yaml")
    reader = reader_at(plane, tmp_path / "reader")
    nodes = MarkedNodes(plane, site, reader.folder, slinky=True)

    def features(name: str) -> str | None:
        found: str | None = nodes.marking.node(name)["metadata"].get("annotations", {}).get(SLINKY)
        return found

    def out_of_reach() -> None:
        assert features("m01") is None
        theirs = {"metadata": {"annotations": {SLINKY: "risk_low"}}}
        assert plane.http.patch("/api/v1/nodes/m03", json=theirs, headers=MERGE).status_code == 200

    nodes.start()
    try:
        plane.until("the annotation of m01", lambda: features("m01") == "risk_high")
        reader.run_page(PAGES / "slinky.md", RUN, before={"kubectl annotate": out_of_reach})
        assert features("m03") is None
    finally:
        nodes.marking.end()


def test_every_command_of_the_page_on_buffers_works(plane: ControlPlane, site: Path, tmp_path: Path) -> None:
    plane.create(DEFINITIONS, capacity_buffer())
    plane.until("buffers", lambda: plane.http.get(BUFFERS).status_code == 200)
    reader = reader_at(plane, tmp_path / "reader")
    running: list[Buffering] = []

    def start() -> None:
        running.append(Buffering(plane, site))
        link_state(reader.folder, running[0].config)
        grow()

    def grow() -> None:
        running[0].publish(72)
        running[0].until(4)

    def grow_and_die() -> None:
        assert running[0].replicas() == 0
        running[0].cli("withdraw", "buffers", "--undo")
        grow()
        running[0].end(signal.SIGKILL)

    try:
        before = {"kubectl get capacitybuffers": start, "kubectl patch capacitybuffer": grow_and_die}
        done = reader.run_page(PAGES / "karpenter.md", RUN, before=before)
        assert "ahead" in printed(done, "kubectl get capacitybuffers")
        assert "p90 of wanted GPUs within 10 min is 72, now 40" in printed(done, "fleetcast adapters show")
        assert running[0].replicas() == 0
    finally:
        for one in running:
            if one.process.poll() is None:
                one.end()


def test_every_command_of_the_page_on_the_source_works(plane: ControlPlane, tmp_path: Path) -> None:
    reader = reader_at(plane, tmp_path / "reader")
    reader.run_page(ROOT / "docs/sources/kubernetes.md", RUN)
    ours = {"authorization": f"Bearer {READER_TOKEN}"}
    assert plane.http.get(PODS, headers=ours).status_code == 200


def test_every_command_of_the_page_on_kueue_works(
    plane: ControlPlane, manager: KueueManager, site: Path, tmp_path: Path
) -> None:
    reader = reader_at(plane, tmp_path / "reader")
    running: list[Checking] = []

    def start() -> None:
        checking = Checking(manager, site)
        running.append(checking)
        link_state(reader.folder, checking.config)
        checking.until("an active check", lambda: checking.is_active("AdmissionCheck", "fleetcast"))

    def admit() -> None:
        checking = running[0]
        checking.until("an active queue", lambda: checking.is_active("ClusterQueue", "gpus"))
        checking.until("labels", lambda: "fleetcast.io/rack" in checking.labels(RACKED[-1]))
        checking.submit("train", queue="gpus", pods=2, topologyRequest={"required": "fleetcast.io/rack"})
        checking.until_ready("train")

    def label_by_hand() -> None:
        assert "fleetcast.io/rack" not in running[0].labels("m1")
        labels = {"metadata": {"labels": {"fleetcast.io/rack": "r1"}}}
        assert plane.http.patch("/api/v1/nodes/m1", json=labels, headers=MERGE).status_code == 200

    try:
        before = {"kubectl get admissionchecks": start, "kubectl get workloads": admit}
        done = reader.run_page(PAGES / "kueue.md", RUN, before=before | {"kubectl label nodes": label_by_hand})
        assert '"type":"Active"' in printed(done, "kubectl get admissionchecks")
        assert "train\trisk 0% within 1 h on its 2 nodes" in printed(done, "kubectl get workloads")
        assert "fleetcast.io/rack" not in running[0].labels("m1")
        (queue,) = manager.items("ClusterQueue")
        assert "admissionChecksStrategy" not in queue["spec"]
        assert manager.items("AdmissionCheck") == []
    finally:
        for checking in running:
            checking.end()


@pytest.mark.usefixtures("manager")
def test_every_export_of_the_page_on_queues_is_imported(plane: ControlPlane, tmp_path: Path) -> None:
    """The queues of KAI and Volcano are objects of their names: their controllers are not here."""
    apply_examples(plane, "kubernetes-nodes.yaml", "kubernetes-kueue.yaml")
    for group, version in (KAI, VOLCANO):
        plane.create(DEFINITIONS, definition(group, version, "Queue", scope="Cluster"))
        queues = f"/apis/{group}/{version}/queues"
        plane.until(queues, lambda queues=queues: plane.http.get(queues).status_code == 200)
        thing = {"apiVersion": f"{group}/{version}", "kind": "Queue", "metadata": {"name": "lab"}}
        plane.create(queues, thing | {"spec": {"weight": 3}})
    reader = reader_at(plane, tmp_path / "reader")
    written: list[str] = []

    def read_and_remove() -> None:
        """The page's imports are alternatives, and none writes over a file that is there."""
        if (out := tmp_path / "reader" / "queues.toml").exists():
            written.append(out.read_text())
            out.unlink()

    reader.run_page(ROOT / "docs/queues.md", RUN, files=False, before={"fleetcast queues import": read_and_remove})
    read_and_remove()
    assert [name in text for name, text in zip(("gpus", "lab", "lab"), written, strict=True)] == [True] * 3
    assert GROUP in (tmp_path / "reader" / "kueue.yaml").read_text()
