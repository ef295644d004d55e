"""One control plane a session, and one Fleetcast that watches its nodes."""

from collections.abc import Iterator

import pytest

from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.fleet import GPUS, NODES, WatchedFleet


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
