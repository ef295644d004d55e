"""The wheel in an environment of its own, started beside a project whose packages have the names of our folders."""

import json
import subprocess
import sys
import sysconfig
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("models", "service", "training", "placement", "fleet", "cli")  # packages of the user's project
STARTS_S = 120.0
TOPOLOGY = """
[[rack]]
name = "r01"
nodes = ["n[001-002]"]
gpus = 8
gpu_model = "H100"
"""
MINE = """
from fleetcast.models.demand.naive import Persistence

class Mine(Persistence):
    name = "mine"
"""
FORECAST = """
import models.mine, service, training
import numpy as np
from fleetcast.models.forecast import Panel
from fleetcast.service.plugins import make_forecaster
values = np.full((1, 400), 7.0)
panel = Panel("demand", ("train",), 600, 0, values, np.array([1000.0]))
print(make_forecaster("models.mine:Mine").forecast(panel, np.array([399]), (1,))[3, 0, 0, 0], models.__file__)
"""


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder


def test_the_wheel_and_the_source_archive_hold_each_module_once_below_fleetcast(dist: Path) -> None:
    (wheel,), (archive,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fleetcast"}
    with tarfile.open(archive) as file:
        archived = [member.name.partition("/")[2] for member in file.getmembers()]
    folders = [ROOT / "fleetcast", *(ROOT / "fleetcast").iterdir()]
    ours = {path.relative_to(ROOT).as_posix() for folder in folders for path in folder.rglob("*.py")}
    in_wheel = {name for name in names if name.endswith(".py")}
    in_archive = {name for name in archived if name.startswith("fleetcast/") and name.endswith(".py")}
    assert (sorted(in_wheel ^ ours), sorted(in_archive ^ ours)) == ([], [])
    assert [name for name in archived if name.partition("/")[0] in NAMES] == []


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of a new environment with the wheel. It finds the dependencies of this environment."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (wheel,) = dist.glob("*.whl")
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), *install], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return folder / "bin/python"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Make a project whose packages have the names of our folders, with a forecaster for Fleetcast."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    (tmp_path / "models" / "mine.py").write_text(MINE)
    (tmp_path / "topology.toml").write_text(TOPOLOGY)
    settings = '[fleet]\ntopology = "topology.toml"\n[pipeline]\nforecasters = ["models.mine:Mine"]\n'
    (tmp_path / "config.toml").write_text(settings)
    return tmp_path


def run(project: Path, *command: str | Path) -> str:
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_runs_beside_a_project_with_packages_of_our_names(python: Path, project: Path) -> None:
    assert "A weather service for GPU fleets" in run(project, python.with_name("fleetcast"), "--help")
    assert "A weather service for GPU fleets" in run(project, python, "-m", "fleetcast", "--help")
    ours = run(project, python, "-c", "import fleetcast.models; print(fleetcast.models.__file__)")
    assert ours.strip().endswith("site-packages/fleetcast/models/__init__.py")


def test_a_forecaster_of_the_project_forecasts(python: Path, project: Path) -> None:
    median, file = run(project, python, "-c", FORECAST).split()
    assert float(median) == 7.0
    assert file == str(project / "models" / "__init__.py")


@pytest.fixture
def url(python: Path, project: Path) -> Iterator[str]:
    port = free_port()
    command = [python, "-m", "fleetcast", "run", "--config", "config.toml", "--port", str(port)]
    with (project / "printed").open("wb") as printed:
        process = subprocess.Popen(command, cwd=project, stdout=printed, stderr=subprocess.STDOUT)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def answer(url: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask until the service has started."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    ends_s = time.monotonic() + STARTS_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                decoded: dict[str, Any] = json.load(response)
                return decoded
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > ends_s:
                raise
            time.sleep(0.2)


def test_the_service_forecasts_and_places_beside_such_a_project(url: str) -> None:
    assert answer(f"{url}/v1/demand")["as_of_ms"] > 0
    decided = answer(f"{url}/v1/placements", {"request_id": "train-1", "gpus_per_node": 4})
    assert decided["nodes"] == decided["candidates"] + sum(decided["rejected"].values()) == 2
