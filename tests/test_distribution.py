"""Check what the wheel and the lock files hold, and that no dependency installs a package of our name."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_wheel_holds_one_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["fleetcast"]
    assert list(ROOT.glob("*.py")) == []


def test_the_source_archive_holds_each_package_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    excluded = set(project["tool"]["hatch"]["build"]["targets"]["sdist"]["exclude"])
    assert {f"/{path.name}" for path in (ROOT / "fleetcast").iterdir() if path.is_symlink()} < excluded


def test_no_dependency_installs_a_package_of_our_name() -> None:
    for distribution in distributions():
        if distribution.metadata["Name"] == "fleetcast":
            continue
        tops = {file.parts[0] for file in distribution.files or ()}
        assert "fleetcast" not in tops, f"{distribution.metadata['Name']} installs fleetcast"


def test_the_lock_files_hold_hashes_and_no_addresses() -> None:
    for name in ("requirements.lock", "requirements-image.lock", "requirements-dev.lock"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert "://" not in text
        pinned = [line for line in text.splitlines() if "==" in line]
        assert pinned
        assert text.count("--hash=sha256:") >= len(pinned)


def test_every_dependency_has_its_reason_beside_it() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    reasons = dict(re.findall(r'^  "([^"]+)",  # (\S.+)$', text, re.MULTILINE))
    for requirement in [*project["dependencies"], *extras["dev"]]:
        assert len(reasons.get(requirement, "")) > 5, f"pyproject.toml does not say why {requirement} is here"
