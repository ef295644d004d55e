"""What the client's wheel holds: our one package, typed, and no dependency."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.sdk.conftest import SDK


def test_the_wheel_holds_one_typed_package_and_needs_nothing(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    build = f"from hatchling.build import build_wheel; print(build_wheel({str(tmp_path)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=SDK, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fleetcast_client-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        about = file.read(next(name for name in names if name.endswith("METADATA"))).decode()
    modules = {f"fleetcast_client/{path.name}" for path in Path(SDK, "fleetcast_client").glob("*.py")}
    assert modules | {"fleetcast_client/py.typed"} == {name for name in names if name.startswith("fleetcast_client/")}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"fleetcast_client"}
    assert "Requires-Dist" not in about
    assert "Requires-Python: >=3.9" in about
    assert any(name.endswith("LICENSE") for name in names)


def test_the_client_is_typed_strictly() -> None:
    command = [sys.executable, "-m", "mypy", "--strict", "--python-version", "3.10", "--cache-dir", "/dev/null"]
    done = subprocess.run(
        [*command, "fleetcast_client"], cwd=SDK, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout
