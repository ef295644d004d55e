"""The lines for other schedulers that an install prints: their own programs and definitions read them."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.notes import asked_by, forecast_of, snippets, things, trigger_of
from tests.integration.kubernetes.control_plane import ControlPlane
from tests.integration.outside.helm.chart import ADAPTERS, CHART, RELEASE, HelmChart, adapters
from tests.integration.outside.helm.cluster import applied, defined, downloaded
from tests.integration.outside.helm.test_rendering import values_with

pytestmark = [pytest.mark.outside, pytest.mark.timeout(1800)]  # the first run builds Kubernetes

EXAMPLES = CHART.parents[2] / "examples"
KEDA = "github.com/kedacore/keda/v2@v2.21.0"
HOST = "weather.fleetcast.svc"
NOTES = "\nNOTES:\n"


@pytest.fixture
def printer(cluster: ControlPlane, helm_binary: Path, tmp_path: Path) -> HelmChart:
    return HelmChart(helm_binary, tmp_path, cluster.kubeconfig)


@pytest.fixture
def notes(printer: HelmChart) -> dict[str, str]:
    """By HTTP, with every adapter on that does without TLS: each snippet by the name of its file."""
    return printed(printer, values_with(*(name for name in ADAPTERS if name != "expander")))


def printed(chart: HelmChart, values: dict[str, Any]) -> dict[str, str]:
    return snippets(chart.done("install", RELEASE, str(CHART), "--dry-run=server", values=values).partition(NOTES)[2])


def shape(document: Any) -> Any:
    """Without addresses: those are of the release."""
    if isinstance(document, dict):
        return {key: shape(value) for key, value in document.items()}
    if isinstance(document, list):
        return [shape(value) for value in document]
    return re.sub(r"https?://[^/]*", "URL", document) if isinstance(document, str) else document


def test_lines_are_printed_for_the_adapters_that_are_on(printer: HelmChart, notes: dict[str, str]) -> None:
    every = ["hpa.yaml", "kube-scheduler.yaml", "scaledobject.yaml", "slurm.conf", "trimaran.yaml"]
    assert sorted(notes) == [*every, "volcano-scheduler.yaml"]
    assert printed(printer, adapters()) == {}
    assert list(printed(printer, values_with("keda"))) == ["scaledobject.yaml"]


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
def kinds_of_keda(cluster: ControlPlane, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[None]:
    """KEDA's own definitions of what the lines make, out of its published Go module."""
    bases = downloaded(KEDA, tmp_path, request) / "config" / "crd" / "bases"
    with defined(cluster, *(bases / f"keda.sh_{name}.yaml" for name in ("scaledobjects", "triggerauthentications"))):
        yield


@pytest.mark.usefixtures("kinds_of_keda")
@pytest.mark.parametrize(
    ("tls", "keys"),
    [
        ({}, []),
        ({"secret": "cert"}, ["caCert"]),
        ({"secret": "cert", "clients": True}, ["caCert", "tlsClientCert", "tlsClientKey"]),
    ],
    ids=["http", "tls", "certificates"],
)
def test_kedas_own_definitions_take_its_lines_and_our_answerer_answers(
    cluster: ControlPlane, printer: HelmChart, tls: dict[str, Any], keys: list[str]
) -> None:
    lines = printed(printer, values_with("keda", tls=tls))["scaledobject.yaml"]
    made = things(lines)
    for thing in made.values():
        answer = applied(cluster, thing)
        assert answer.is_success, answer.text
    external = made["ScaledObject"]["spec"]["triggers"][0]
    assert external["metadata"]["scalerAddress"] == f"{HOST}:9090"
    assert external["metadata"].get("enableTLS") == ("true" if tls else None)
    trust = made.get("TriggerAuthentication", {"metadata": None, "spec": {"secretTargetRef": []}})
    assert external.get("authenticationRef") == trust["metadata"]
    assert [row["parameter"] for row in trust["spec"]["secretTargetRef"]] == keys
    assert forecast_of(trigger_of(lines).series).group == "served"
    made["ScaledObject"]["spec"]["fallback"]["failureTreshold"] = 1
    assert not applied(cluster, made["ScaledObject"]).is_success


def test_the_server_takes_the_autoscaler_and_our_answerer_answers_it(
    cluster: ControlPlane, notes: dict[str, str]
) -> None:
    answer = applied(cluster, things(notes["hpa.yaml"])["HorizontalPodAutoscaler"])
    assert answer.is_success, answer.text
    assert forecast_of(asked_by(notes["hpa.yaml"])).group == "served"


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


HEALTH, SUBMIT, TOKENS = "HealthCheckProgram", "JobSubmitPlugins", "AuthAltTypes"


@pytest.mark.parametrize(
    ("on", "keys"),
    [
        (("slurm",), [TOKENS]),
        (("slurm_durations",), [SUBMIT]),
        (("band_file",), [HEALTH, "HealthCheckInterval", "HealthCheckNodeState"]),
        (("band_file", "slurm"), [TOKENS]),  # the health check and `slurm` are one of two
        (("slurm", "slurm_durations"), [TOKENS, SUBMIT]),
    ],
    ids="+".join,
)
def test_lines_of_slurm_are_those_of_the_adapter(printer: HelmChart, on: tuple[str, ...], keys: list[str]) -> None:
    lines = printed(printer, values_with(*on))["slurm.conf"].splitlines()
    given = [line for line in lines if not line.startswith("# ")]
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+=\S+", line) for line in given)
    assert [line.partition("=")[0] for line in given] == keys


def test_a_volcano_without_us_schedules_on(notes: dict[str, str]) -> None:
    (plugin,) = yaml.safe_load(notes["volcano-scheduler.yaml"])["tiers"][0]["plugins"]
    assert plugin["arguments"]["extender.ignorable"] is True
