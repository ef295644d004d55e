"""The lines for other schedulers that an install prints: their own programs and definitions read them."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.integration.built import needed, step
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.outside.helm.chart import ADAPTERS, CHART, RELEASE, HelmChart, adapters
from tests.integration.outside.helm.cluster import applied
from tests.integration.outside.helm.test_rendering import values_with

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

EXAMPLES = CHART.parents[2] / "examples"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
HOST = "weather.fleetcast.svc"


@pytest.fixture
def notes(cluster: ControlPlane, helm_binary: Path, tmp_path: Path) -> dict[str, str]:
    """With every adapter on: each snippet by the name of its file."""
    return snippets(HelmChart(helm_binary, tmp_path, cluster.kubeconfig), values_with(*ADAPTERS))


def snippets(chart: HelmChart, values: dict[str, Any]) -> dict[str, str]:
    printed = chart.done("install", RELEASE, str(CHART), "--dry-run=server", values=values).partition("\nNOTES:\n")[2]
    return dict(re.findall(r"^# ([\w.-]+): [^\n]*\n(.*?)^# end$", printed, re.MULTILINE | re.DOTALL))


def shape(document: Any) -> Any:
    """Without addresses: those are of the release."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    if isinstance(document, list):
        return [shape(value) for value in document]
    return re.sub(r"https?://[^/]*", "URL", document) if isinstance(document, str) else document


def test_lines_are_printed_for_the_adapters_that_are_on(
    cluster: ControlPlane, helm_binary: Path, tmp_path: Path, notes: dict[str, str]
) -> None:
    every = ["hpa.yaml", "kube-scheduler.yaml", "scaledobject.yaml", "slurm.conf", "trimaran.yaml"]
    assert sorted(notes) == [*every, "volcano-scheduler.yaml"]
    chart = HelmChart(helm_binary, tmp_path, cluster.kubeconfig)
    assert snippets(chart, adapters()) == {}
    assert list(snippets(chart, adapters("keda"))) == ["scaledobject.yaml"]


def test_the_real_kube_scheduler_reads_its_lines(cluster: ControlPlane, notes: dict[str, str], tmp_path: Path) -> None:
    config = yaml.safe_load(notes["kube-scheduler.yaml"])
    assert config["extenders"][0]["urlPrefix"].endswith(f"@{HOST}:8080/v1/adapters/kube")
    config["clientConnection"] = {"kubeconfig": str(cluster.kubeconfig)}
    given, written = tmp_path / "given.yaml", tmp_path / "written.yaml"
    given.write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [str(cluster.binaries.binary("kube-scheduler")), f"--config={given}", f"--write-config-to={written}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert written.exists(), done.stderr[-2000:]
    (read,) = yaml.safe_load(written.read_text(encoding="utf-8"))["extenders"]
    assert read["urlPrefix"] == config["extenders"][0]["urlPrefix"]
    assert (read["ignorable"], read["nodeCacheCapable"], read["httpTimeout"]) == (True, True, "200ms")


@pytest.fixture
def scaled_objects(cluster: ControlPlane, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """KEDA's own definition of a ScaledObject, out of its published Go module."""
    module = json.loads(needed(lambda say: step(["go", "mod", "download", "-json", KEDA], tmp_path), request))
    path = Path(module["Dir"]) / "config" / "crd" / "bases" / "keda.sh_scaledobjects.yaml"
    cluster.create(DEFINITIONS, yaml.safe_load(path.read_text(encoding="utf-8")))
    cluster.until("the kind", lambda: cluster.http.get("/apis/keda.sh/v1alpha1").status_code == 200)
    yield
    cluster.http.delete(f"{DEFINITIONS}/scaledobjects.keda.sh")


@pytest.mark.usefixtures("scaled_objects")
def test_kedas_own_definition_takes_its_lines(cluster: ControlPlane, notes: dict[str, str]) -> None:
    thing = yaml.safe_load(notes["scaledobject.yaml"])
    assert thing["spec"]["triggers"][0]["metadata"]["scalerAddress"] == f"{HOST}:9090"
    answer = applied(cluster, thing)
    assert answer.is_success, answer.text
    thing["spec"]["fallback"]["failureTreshold"] = 1
    assert not applied(cluster, thing).is_success


def test_the_server_takes_the_autoscaler(cluster: ControlPlane, notes: dict[str, str]) -> None:
    answer = applied(cluster, yaml.safe_load(notes["hpa.yaml"]))
    assert answer.is_success, answer.text


@pytest.mark.parametrize(
    ("name", "example"),
    [("kube-scheduler.yaml", "kube-scheduler.yaml"), ("trimaran.yaml", "trimaran.yaml")],
)
def test_lines_are_those_of_the_example(notes: dict[str, str], name: str, example: str) -> None:
    path = EXAMPLES / example
    if not path.exists():
        pytest.skip(f"there is no {path.name} yet")
    printed, written = (shape(yaml.safe_load(text)) for text in (notes[name], path.read_text(encoding="utf-8")))
    for document in (printed, written):
        for extender in document.get("extenders", ()):
            del extender["managedResources"]  # a site's own
    assert printed == written


def test_lines_of_slurm_and_volcano_are_ones(notes: dict[str, str]) -> None:
    for line in notes["slurm.conf"].splitlines():
        assert re.fullmatch(r"[A-Z][A-Za-z]+=\S+", line)
    (plugin,) = yaml.safe_load(notes["volcano-scheduler.yaml"])["tiers"][0]["plugins"]
    assert plugin["arguments"]["extender.ignorable"] is True
