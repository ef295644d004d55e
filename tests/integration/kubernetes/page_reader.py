"""A reader of the documents who types kubectl at a control plane."""

import subprocess
from pathlib import Path

import httpx

from tests.docs.pages import ROOT
from tests.docs.runner import Reader
from tests.integration.kubernetes.control_plane import ControlPlane

NAMESPACE = "/api/v1/namespaces/fleetcast"


def reader_at(plane: ControlPlane, folder: Path, **places: str) -> Reader:
    """Return a reader with the kubectl of this Kubernetes version, as the administrator of the cluster.

    places: text of the page -> what it is here.
    """
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "kubectl").symlink_to(plane.binaries.binary("kubectl"))
    return Reader(folder, places, {"KUBECONFIG": str(plane.kubeconfig)})


def apply_examples(plane: ControlPlane, *names: str) -> None:
    """Apply these files of `examples` in the namespace of Fleetcast."""
    if plane.http.get(NAMESPACE).status_code == 404:
        plane.create("/api/v1/namespaces", {"metadata": {"name": "fleetcast"}})
    for name in names:
        command = [plane.binaries.binary("kubectl"), f"--kubeconfig={plane.kubeconfig}", "apply"]
        done = subprocess.run([*command, "-f", ROOT / "examples" / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def remove_namespace(plane: ControlPlane) -> None:
    """Remove the namespace of Fleetcast, which a page before this one made."""
    answer: httpx.Response = plane.http.delete(NAMESPACE)
    assert answer.status_code in (200, 404), answer.text
    plane.until("the namespace is gone", lambda: plane.http.get(NAMESPACE).status_code == 404)
