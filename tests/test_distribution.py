"""What the wheel holds, and that no dependency installs a package of one of our names."""

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def ours() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def test_the_wheel_lists_every_package_and_module_of_ours() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages | {path.name for path in ROOT.glob("*.py")} == ours()


def test_no_dependency_installs_one_of_our_names() -> None:
    for distribution in distributions():
        if distribution.metadata["Name"] == "fleetcast":
            continue
        tops = {file.parts[0] for file in distribution.files or ()}
        assert not tops & ours(), f"{distribution.metadata['Name']} installs {sorted(tops & ours())}"


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
