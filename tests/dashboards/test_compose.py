"""The composition and the image, read by the programs that are made for it; what runs in them is tried elsewhere."""

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleetcast.cli.run import RoleName
from fleetcast.service.config import Config
from tests.dashboards.grafana import ROOT
from tests.programs import needed

DOCKERFILE = ROOT / "Dockerfile"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def steps() -> list[list[str]]:
    """The Dockerfile's instructions as words, continued lines joined."""
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split() for line in text.splitlines() if line and not line.startswith("#")]


def test_compose_takes_the_file_with_and_without_kafka() -> None:
    for profile in ([], ["--profile", "kafka"]):
        command = [needed("docker-compose"), "-f", str(ROOT / "docker-compose.yml"), *profile, "config", "-q"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (0, "")


def test_every_role_is_a_service_of_one_image(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert set(services) == {*(role.value for role in RoleName), "prometheus", "grafana", "kafka"}
    for role in RoleName:
        service = services[role.value]
        assert service["image"] == "fleetcast"
        assert service["command"][:3] == ["run", "--role", role.value]
        assert service["volumes"] == services["api"]["volumes"]
    assert services["kafka"]["profiles"] == ["kafka"]
    assert not any("profiles" in service for name, service in services.items() if name != "kafka")


def test_what_is_mounted_is_there(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"], (name, volume)


def test_prometheus_finds_its_rules_where_they_are_mounted(compose: dict[str, Any]) -> None:
    mounted = [volume.split(":")[1] for volume in compose["services"]["prometheus"]["volumes"]]
    config = yaml.safe_load((ROOT / "dashboards" / "prometheus.yml").read_text(encoding="utf-8"))
    assert {f"/etc/prometheus/{name}" for name in ("prometheus.yml", *config["rule_files"])} <= set(mounted)
    assert config["scrape_configs"][0]["static_configs"][0]["targets"] == [f"127.0.0.1:{Config().api.port}"]


def test_nothing_listens_beyond_loopback(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert all(service["network_mode"] == "host" for service in services.values())
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    listeners = services["kafka"]["environment"]["KAFKA_LISTENERS"]
    assert re.findall(r"//([^:]+):", listeners) == ["127.0.0.1", "127.0.0.1"]


def test_a_linter_finds_no_fault_with_the_image() -> None:
    done = subprocess.run(
        [needed("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_image_copies_what_is_there_and_runs_our_command() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stages = {words[3] for words in steps() if words[0] == "FROM" and len(words) > 3}
    for words in steps():
        if words[0] == "COPY" and not words[1].startswith("--from="):
            assert all((ROOT / source).exists() and source not in ignored for source in words[1:-1])
        if words[0] == "COPY" and words[1].startswith("--from="):
            assert words[1].removeprefix("--from=") in stages
    entry = next(words for words in steps() if words[0] == "ENTRYPOINT")
    assert entry[1].strip('["]') in project["scripts"]
    version = re.search(r"python:(3\.\d+)", DOCKERFILE.read_text(encoding="utf-8"))
    assert version is not None
    assert f">={version[1]}" == project["requires-python"]


def test_the_state_of_all_roles_lies_in_the_volume(compose: dict[str, Any]) -> None:
    folder = next(Path(words[1]) for words in reversed(steps()) if words[0] == "WORKDIR")
    mounts = dict(volume.split(":")[:2] for volume in compose["services"]["api"]["volumes"])
    assert folder.joinpath(Config().state).is_relative_to(mounts["state"])
    assert ["EXPOSE", str(Config().api.port)] in steps()
