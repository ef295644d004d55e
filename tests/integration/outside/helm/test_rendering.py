"""What the chart renders, adapter by adapter: its configuration is one that our own reader takes."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetcast.fleet.errors import ConfigError
from fleetcast.service.config import GRPC_SERVICES, Config, load_config
from fleetcast.service.doors import WRITERS, open_doors, open_executors
from tests.integration.outside.helm.chart import ADAPTERS, CHART, HelmChart, adapters, executors, only

pytestmark = pytest.mark.outside

KINDS = ["ConfigMap", "Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service", "Service", "ServiceAccount"]
KINDS += ["StatefulSet"]
NEEDED: dict[str, dict[str, Any]] = {"slurm": {"url": "https://slurm:6820", "token_file": "/run/slurm/token"}}
MONITORED = {"enabled": True, "labels": {"release": "prometheus"}, "interval": "15s"}
EVERY = pytest.mark.parametrize("on", [(), *((name,) for name in ADAPTERS), tuple(ADAPTERS)], ids="+".join)


def values_with(*on: str, **more: Any) -> dict[str, Any]:
    """These adapters on, with what they cannot do without. By gRPC whoever shows no certificate is answered, too."""
    values = adapters(*on, **more)
    for name, options in NEEDED.items():
        values["adapters"][name] |= {"options": options}
    config = values.get("config", {})
    values["config"] = config | {"api": {"grpc_open": [name for name in GRPC_SERVICES if name in on]}}
    if "expander" in on:
        values.setdefault("tls", {"secret": "cert"})
    return values


def known(text: str) -> str | None:
    """What keeps this version of the service from reading it: a key of an adapter that it does not have."""
    for section, keys in tomllib.loads(text).items():
        fields = getattr(Config(), section, None)
        missing = [key for key in keys if not hasattr(fields, key)] if isinstance(keys, dict) else []
        if fields is None or missing:
            return f"{section} {missing}"
    return None


def test_a_linter_finds_no_fault(chart: HelmChart) -> None:
    printed = chart.done("lint", "--strict", str(CHART), values=values_with(*ADAPTERS))
    assert "0 chart(s) failed" in printed
    assert "WARN" not in printed


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nosuch": 1}, "nosuch"),
        ({"adapters": {"nodes": {"mode": "sometimes"}}}, "mode"),
        ({"adapters": {"noodles": {"enabled": True}}}, "noodles"),
        ({"config": {"pipeline": {"tick": 5}}}, "tick"),
        ({"api": {"port": 0}}, "port"),
    ],
)
def test_a_value_that_is_none_is_refused_before_anything_is_sent(
    chart: HelmChart, values: dict[str, Any], told: str
) -> None:
    refusal = chart.refusal(values)
    assert "values don't meet the specifications of the schema" in refusal
    assert told in refusal


@EVERY
def test_our_own_reader_takes_the_configuration(chart: HelmChart, tmp_path: Path, on: tuple[str, ...]) -> None:
    files = only(chart.things(values_with(*on)), "ConfigMap")["data"]
    if missing := known(files["config.toml"]):
        pytest.skip(f"this version of the service has no {missing}")
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    control, replica = load_config(tmp_path / "config.toml"), load_config(tmp_path / "replica.toml")
    writers = [name for name in sorted(on) if "mode" in ADAPTERS[name]]
    assert [(row.use, row.mode) for row in control.adapters.adapter] == [(name, "observe") for name in writers]
    assert control.api.host == replica.api.host == "0.0.0.0"
    assert control.api.grpc_open == tuple(name for name in GRPC_SERVICES if name in on)
    scheme = "https" if "expander" in on else "http"
    assert replica.api.board == f"{scheme}://weather-control.fleetcast.svc:8080/v1/board"
    assert not replica.adapters.adapter
    if set(writers) <= set(WRITERS):
        assert [door.name for door in open_doors(control.adapters)] == writers


def test_sections_files_and_options_reach_the_configuration(chart: HelmChart, tmp_path: Path) -> None:
    (tmp_path / "queues.toml").write_text("[queue.research]\n")
    config = {
        "fleet": {"name": 'an "east" <fleet>'},
        "scrape": {"targets": ["http_sd:http://targets/"], "interval_s": 5, "max_body_bytes": 16_777_216},
        "pipeline": {"sources": [{"use": "kafka", "options": {"topics": ["a", "b"], "from_start": True}}]},
        "placer": {"queues": str(tmp_path / "queues.toml"), "max_risk": 0.25},
        "adapters": {"high": 0.4, "writes_per_minute": 10},
    }
    values = values_with("nodes", config=config, files={"queues.toml": "[queue.research]\n"})
    values["adapters"]["nodes"] |= {"mode": "write", "options": {"taint": "NoSchedule"}}
    files = only(chart.things(values), "ConfigMap")["data"]
    (tmp_path / "config.toml").write_text(files["config.toml"], encoding="utf-8")
    read = load_config(tmp_path / "config.toml")
    assert files["queues.toml"] == "[queue.research]\n"
    assert read.fleet.name == 'an "east" <fleet>'
    assert (read.scrape.interval_s, read.scrape.max_body_bytes) == (5, 16_777_216)
    assert read.pipeline.sources[0].options == {"topics": ["a", "b"], "from_start": True}
    assert (read.placer.max_risk, read.adapters.high, read.adapters.writes_per_minute) == (0.25, 0.4, 10)
    (row,) = read.adapters.adapter
    assert (row.use, row.mode, row.options) == ("nodes", "write", {"taint": "NoSchedule"})


def test_a_certificate_turns_on_https_everywhere(chart: HelmChart, tmp_path: Path) -> None:
    config = {"access": {"subjects": {"keda": ["read"]}}}
    things = chart.things(values_with(tls={"secret": "cert", "clients": True}, config=config))
    files = only(things, "ConfigMap")["data"]
    for name in ("config.toml", "replica.toml"):
        (tmp_path / name).write_text(files[name], encoding="utf-8")
        read = load_config(tmp_path / name)
        assert read.api.tls_cert == "/run/fleetcast/tls/tls.crt"
        assert read.api.client_ca == "/run/fleetcast/tls/ca.crt"
        assert read.access.subjects == {"keda": ("read",)}
    assert load_config(tmp_path / "replica.toml").api.board.startswith("https://")
    for kind in ("StatefulSet", "Deployment"):
        (container,) = only(things, kind)["spec"]["template"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
        assert "/run/fleetcast/tls" in [row["mountPath"] for row in container["volumeMounts"]]


def test_a_certificate_for_clients_alone_is_told_by_our_own_reader(chart: HelmChart, tmp_path: Path) -> None:
    values = values_with(tls={"secret": "cert", "clients": True})
    (tmp_path / "config.toml").write_text(only(chart.things(values), "ConfigMap")["data"]["config.toml"])
    with pytest.raises(ConfigError, match=r"access\.subjects"):
        load_config(tmp_path / "config.toml")


CERTIFICATE, OF_CLIENTS = {"secret": "cert"}, {"secret": "cert", "clients": True}


@pytest.mark.parametrize(
    ("name", "tls", "opened"),
    [
        *(("keda", {}, []), ("keda", CERTIFICATE, []), ("keda", {"clients": True}, ["expander"])),
        *(("expander", CERTIFICATE, []), ("expander", {}, ["expander"]), ("expander", OF_CLIENTS, ["expander"])),
    ],
)
def test_an_adapter_that_could_answer_nobody_is_refused_with_the_fix(
    chart: HelmChart, name: str, tls: dict[str, Any], opened: list[str]
) -> None:
    refusal = chart.refusal(adapters(name, tls=tls, config={"api": {"grpc_open": opened}}))
    assert f"adapters.{name} is on, and no caller could be answered" in refusal
    assert f"config.api.grpc_open: [{name}]" in refusal
    assert "tls.clients" in refusal


@pytest.mark.parametrize(
    ("name", "tls", "opened"),
    [("keda", OF_CLIENTS, []), ("keda", {}, ["keda"]), ("expander", CERTIFICATE, ["expander"])],
)
def test_an_adapter_that_can_answer_is_rendered(
    chart: HelmChart, name: str, tls: dict[str, Any], opened: list[str]
) -> None:
    assert chart.refusal(adapters(name, tls=tls, config={"api": {"grpc_open": opened}})) == ""


@pytest.mark.parametrize("tls", [{}, CERTIFICATE], ids=["http", "https"])
def test_a_monitor_finds_the_pod_with_all_roles(chart: HelmChart, tls: dict[str, str]) -> None:
    things = chart.things(values_with(*(("expander",) if tls else ()), tls=tls, serviceMonitor=MONITORED))
    monitor, service = only(things, "ServiceMonitor"), only(things, "Service", "-control")
    assert monitor["metadata"]["labels"].items() > MONITORED["labels"].items()
    wanted, labels = monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"]
    assert wanted.items() <= labels.items()
    others = [row for row in things if row["kind"] == "Service" and row is not service]
    assert not any(wanted.items() <= row["metadata"]["labels"].items() for row in others)
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [row["name"] for row in service["spec"]["ports"]]
    assert (endpoint["path"], endpoint["interval"]) == ("/metrics", MONITORED["interval"])
    assert endpoint["authorization"] == {"credentials": {"name": "fleetcast-tokens", "key": "read"}}
    assert (endpoint.get("scheme"), "tlsConfig" in endpoint) == (("https", True) if tls else (None, False))


def test_with_every_adapter_off_there_are_no_rights_and_no_hook(chart: HelmChart) -> None:
    things = chart.things(values_with())
    assert sorted(thing["kind"] for thing in things) == KINDS
    pod = only(things, "StatefulSet")["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False


@EVERY
def test_rights_are_those_of_the_adapters_that_are_on(chart: HelmChart, on: tuple[str, ...]) -> None:
    rights = yaml.safe_load((CHART / "rights.yaml").read_text(encoding="utf-8"))["adapters"]
    wanted = [rule for name in sorted(on) for rule in rights.get(name, ())]
    roles = [thing for thing in chart.things(values_with(*on)) if thing["kind"] == "ClusterRole"]
    assert [rule for role in roles for rule in role["rules"]] == wanted


def test_an_executor_reaches_the_configuration_with_its_rights(chart: HelmChart, tmp_path: Path) -> None:
    things = chart.things(values_with(executors=executors("kubernetes")))
    for name, text in only(things, "ConfigMap")["data"].items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    control, replica = load_config(tmp_path / "config.toml"), load_config(tmp_path / "replica.toml")
    assert [(row.name, row.row.mode) for row in open_executors(control.adapters)] == [("kubernetes", "observe")]
    assert not control.adapters.adapter
    assert not replica.adapters.executor
    rights = yaml.safe_load((CHART / "rights.yaml").read_text(encoding="utf-8"))["executors"]
    assert only(things, "ClusterRole")["rules"] == rights["kubernetes"]
    assert only(things, "StatefulSet")["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
    assert not [thing for thing in things if thing["kind"] == "Job"]


def test_the_policy_is_that_of_the_example(chart: HelmChart) -> None:
    example = CHART.parents[2] / "examples" / "kubernetes-nodes.yaml"
    written = only(list(yaml.safe_load_all(example.read_text(encoding="utf-8"))), "ValidatingAdmissionPolicy")["spec"]
    rendered = only(chart.things(values_with("nodes")), "ValidatingAdmissionPolicy")["spec"]
    account = written["matchConditions"][0]["expression"].replace("fleetcast:fleetcast", "fleetcast:weather")
    written["matchConditions"][0]["expression"] = account
    assert rendered == written


def test_no_pod_is_more_than_it_must_be(chart: HelmChart) -> None:
    things = chart.things(values_with(*ADAPTERS))
    pods = [
        thing["spec"]["template"]["spec"] for thing in things if thing["kind"] in ("StatefulSet", "Deployment", "Job")
    ]
    assert len(pods) == 3
    for pod in pods:
        (container,) = pod["containers"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert not any(row.get("value", "").startswith("Bearer") for row in container["env"])
    assert only(things, "Deployment")["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_whoever_selects_the_pods_that_answer_finds_no_hook(chart: HelmChart) -> None:
    things = chart.things(values_with("nodes"))
    selector = next(row for row in things if row["kind"] == "Service" and row["metadata"]["name"] == "weather")
    wanted = selector["spec"]["selector"].items()
    labels = {
        kind: only(things, kind)["spec"]["template"]["metadata"]["labels"]
        for kind in ("StatefulSet", "Deployment", "Job")
    }
    assert [kind for kind, row in labels.items() if wanted <= row.items()] == ["StatefulSet", "Deployment"]
