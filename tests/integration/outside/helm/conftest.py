"""One Helm and one cluster a session, built first where they are not there."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.built import needed
from tests.integration.kubernetes.build import kubernetes
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.outside.helm.build import build
from tests.integration.outside.helm.chart import NAMESPACE, RELEASE, HelmChart
from tests.integration.outside.helm.cluster import CONTROLLERS, MERGE, NODES, volume


@pytest.fixture(scope="session")
def helm_binary(request: pytest.FixtureRequest) -> Path:
    return needed(build, request)


@pytest.fixture
def chart(helm_binary: Path, tmp_path: Path) -> HelmChart:
    return HelmChart(helm_binary, tmp_path)


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """Three nodes, the controllers that a release needs, and a scheduler."""
    plane = ControlPlane(needed(kubernetes, request), tmp_path_factory.mktemp("helm"), authorization="RBAC")
    try:
        plane.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        plane.add_nodes(list(NODES), 8)
        plane.start_controllers(*CONTROLLERS)
        with plane.scheduler():
            yield plane
    finally:
        plane.stop()


@pytest.fixture
def release(cluster: ControlPlane, helm_binary: Path, tmp_path: Path) -> Iterator[HelmChart]:
    """Helm on the cluster, with a volume for what it installs; what a test installed is taken out."""
    cluster.create("/api/v1/persistentvolumes", volume())
    chart = HelmChart(helm_binary, tmp_path, cluster.kubeconfig)
    yield chart
    chart.run("uninstall", RELEASE, "--no-hooks", "--wait")
    for path in (f"/api/v1/namespaces/{NAMESPACE}/persistentvolumeclaims", "/api/v1/persistentvolumes"):
        for thing in cluster.items(path):
            one = f"{path}/{thing['metadata']['name']}"
            cluster.http.patch(one, json={"metadata": {"finalizers": None}}, headers=MERGE)
            cluster.http.delete(one)
        cluster.until(f"no {path}", lambda path=path: not cluster.items(path))
