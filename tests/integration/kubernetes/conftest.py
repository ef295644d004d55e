"""One control plane a session, and one Fleetcast that watches its nodes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import GPU, ControlPlane
from tests.integration.kubernetes.fleet import GPUS, NODES, WatchedFleet
from tests.integration.kubernetes.kueue_build import kueue
from tests.integration.kubernetes.kueue_process import KueueManager
from tests.integration.kubernetes.stopping import StoppedCluster, start_plane


@pytest.fixture(scope="session")
def control_plane(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """etcd, apiserver and kwok with six GPU nodes; the first run ever builds them."""
    binaries = needed(kubernetes, request)
    plane = ControlPlane(binaries, tmp_path_factory.mktemp("kubernetes"))
    try:
        plane.add_nodes(list(NODES), GPUS)
        yield plane
    finally:
        plane.stop()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedFleet]:
    watched = WatchedFleet(tmp_path_factory.mktemp("fleetcast"))
    try:
        watched.settle()
        yield watched
    finally:
        watched.stop()


@pytest.fixture
def plane(control_plane: ControlPlane) -> Iterator[ControlPlane]:
    """The control plane without a pod."""
    control_plane.clear_pods()
    yield control_plane
    control_plane.clear_pods()


@pytest.fixture(scope="module")
def manager(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KueueManager]:
    """Kueue with three queues for 32 GPUs each.

    `gpus`, `theirs`, in which Kueue itself preempts, and `racks`, in which it chooses the nodes.
    """
    plane = start_plane(needed(kubernetes, request), tmp_path_factory.mktemp("stopping"))
    try:
        with plane.scheduler():
            started = KueueManager(needed(kueue, request), plane, tmp_path_factory.mktemp("kueue"))
            try:
                levels = [{"nodeLabel": "rack"}, {"nodeLabel": "kubernetes.io/hostname"}]
                started.create("Topology", "racks", {"levels": levels})
                started.create("ResourceFlavor", "plain", {})
                started.create("ResourceFlavor", "known", {"nodeLabels": {"pool": "gpu"}, "topologyName": "racks"})
                lower = {"withinClusterQueue": "LowerPriority"}
                for name, flavor, preemption in (
                    ("gpus", "plain", {}),
                    ("theirs", "plain", lower),
                    ("racks", "known", {}),
                ):
                    quotas = [{"name": GPU, "nominalQuota": 32}, {"name": "cpu", "nominalQuota": 100}]
                    flavors = [{"name": flavor, "resources": quotas}]
                    groups = [{"coveredResources": [GPU, "cpu"], "flavors": flavors}]
                    spec = {"namespaceSelector": {}, "resourceGroups": groups, "preemption": preemption}
                    started.create("ClusterQueue", name, spec)
                    started.create("LocalQueue", name, {"clusterQueue": name})
                yield started
            finally:
                started.stop()
    finally:
        plane.stop()


@pytest.fixture
def kueue_cluster(manager: KueueManager, tmp_path: Path) -> Iterator[StoppedCluster]:
    found = StoppedCluster(manager.plane, tmp_path)
    yield found
    found.clear()
