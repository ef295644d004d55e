"""Another package of one of our names is refused by name, before a part of it is taken for ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from fleet import installation
from fleet.installation import PACKAGES, check_packages
from tests.test_distribution import ours

CHECK = "from fleet.installation import check_packages; check_packages()"


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """With what lies in `folder` before all that is installed."""
    return subprocess.run([sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False)


def wheel(site: Path) -> Path:
    """A folder as pip leaves it: our packages, and what the wheel wrote down of them."""
    rows = []
    for name in PACKAGES:
        file = site / name / "__init__.py"
        file.parent.mkdir()
        file.write_text(f'"""{name}"""\n')
        rows.append(f"{name}/__init__.py,{installation._hash(file)},{file.stat().st_size}")
    for name in ("errors.py", "installation.py"):
        (site / "fleet" / name).write_text((Path(installation.__file__).parent / name).read_text())
    info = site / "fleetcast-0.1.0.dist-info"
    info.mkdir()
    (info / "RECORD").write_text("\n".join([*rows, "fleetcast-0.1.0.dist-info/RECORD,,"]) + "\n")
    return site


def test_every_package_of_the_wheel_is_checked() -> None:
    assert set(PACKAGES) == {name for name in ours() if not name.endswith(".py")}


def test_a_source_tree_passes() -> None:
    assert installation._recorded_hashes(Path(installation.__file__).parents[1]) == {}
    check_packages()


def test_another_module_first_on_the_path_is_refused_with_its_file_and_the_fix(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("mine = True\n")
    ended = python(tmp_path, "-m", "cli.main", "--help")
    assert ended.returncode == 2
    assert f"'models' is {tmp_path / 'models.py'}" in ended.stderr
    assert "install fleetcast into an environment of its own" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_an_installed_wheel_passes(tmp_path: Path) -> None:
    ended = python(wheel(tmp_path), "-c", CHECK)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("name", ["models", "training"])
def test_a_package_that_another_wheel_wrote_over_is_refused(tmp_path: Path, name: str) -> None:
    (wheel(tmp_path) / name / "__init__.py").write_text("mine = True\n")
    ended = python(tmp_path, "-c", CHECK)
    assert ended.returncode == 1
    assert f"ConfigError: the package '{name}' is {tmp_path / name / '__init__.py'}" in ended.stderr


def test_a_package_that_is_gone_is_named(tmp_path: Path) -> None:
    (wheel(tmp_path) / "service" / "__init__.py").rename(tmp_path / "elsewhere.py")
    (tmp_path / "service").rmdir()
    ended = python(tmp_path, "-S", "-c", CHECK)
    assert "ConfigError: the package 'service' is missing" in ended.stderr
