"""The commands of the page on Helm, with a real one."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, text_of
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.kubernetes.page_reader import reader_at, remove_namespace
from tests.integration.outside.helm.chart import NAMESPACE, RELEASE
from tests.integration.outside.helm.cluster import may

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

PAGE = ROOT / "docs" / "schedulers" / "helm.md"
SETS = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets"


@pytest.mark.usefixtures("release")
def test_every_command_of_the_page_works(cluster: ControlPlane, helm_binary: Path, tmp_path: Path) -> None:
    cluster.start_controllers("namespace-controller")
    remove_namespace(cluster)
    reader = reader_at(cluster, tmp_path / "reader", TOKEN="t" * 40)
    (reader.folder / "bin" / "helm").symlink_to(helm_binary)
    (reader.folder / "tokens.txt").write_text(f"all read {'t' * 40}\n")

    def shell(command: str) -> str:
        variables = {**os.environ, **reader.variables}
        done = subprocess.run(["sh", "-c", command], env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_installed() -> None:
        assert [row["metadata"]["name"] for row in cluster.items(SETS)] == [f"{RELEASE}-control"]
        assert may(cluster, "patch", "nodes")
        notes = shell(f"helm get notes {RELEASE} -n {NAMESPACE}")
        (secret,) = re.findall(r"kubectl .*create secret .*", notes)
        assert secret in text_of(PAGE), "the notes print the command of the page"
        (address,) = re.findall(r"kubectl .*get service .*", notes)
        assert shell(address).startswith("10.")

    reader.run_page(PAGE, "run in helm", before={"helm uninstall": is_installed})
    assert cluster.items(SETS) == []
    assert not may(cluster, "patch", "nodes")
    secret = cluster.http.get(f"/api/v1/namespaces/{NAMESPACE}/secrets/fleetcast-tokens").json()
    assert sorted(secret["data"]) == ["read", "tokens"]
