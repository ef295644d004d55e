"""The extra `lab`: the service starts without it, and each command that lacks it says what to type."""

import re
import subprocess
import sys
import tomllib

import pytest

from fleetcast.cli.kit.lab_extra import LAB_MODULES
from fleetcast.cli.run import MODULES
from tests.test_arrows import ROOT, imports, modules

SERVICE = ("fleet", "clients", "ingest", "features", "models", "placement", "schedulers", "service")
OF_BACKFILL = {"clients/prometheus.py"}  # `fleetcast backfill` alone imports it
WITHOUT = f"import sys; sys.modules.update(dict.fromkeys({sorted(LAB_MODULES)}));"


def run_without_lab(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code, *words], capture_output=True, text=True, check=False)


def test_the_table_has_the_distributions_of_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split("[<>=]", one)[0] for one in project["optional-dependencies"]["lab"]}
    assert names == set(LAB_MODULES.values())
    assert not names & {re.split("[<>=;]", one)[0] for one in project["dependencies"]}


def test_the_service_imports_nothing_of_the_laboratory() -> None:
    found = {
        str(path.relative_to(ROOT)): sorted(lab)
        for package in SERVICE
        for path in modules(package)
        if (lab := {name.partition(".")[0] for name in imports(path)[0]} & LAB_MODULES.keys())
    }
    assert found.keys() == OF_BACKFILL, found


def test_each_role_can_be_imported_without_the_laboratory() -> None:
    names = sorted({*MODULES.values(), "fleetcast.service.supervise"})
    done = run_without_lab(f"import importlib; [importlib.import_module(name) for name in {names}]")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "distribution"),
    [
        (("backfill", "http://127.0.0.1:1", "--from", "2026-01-01"), "prometheus-api-client"),
        (("simulate", "day"), "pandas"),
        (("evaluate", "start", "--train", ".", "--test", "."), "pandas"),
    ],
)
def test_a_command_that_lacks_the_laboratory_says_what_to_type(words: tuple[str, ...], distribution: str) -> None:
    done = run_without_lab("from fleetcast.cli.main import main; main()", *words)
    assert done.returncode == 2
    assert done.stderr.endswith(f"needs {distribution}, which is not installed: pip install 'fleetcast[lab]'\n")


def test_help_and_placement_need_no_laboratory() -> None:
    done = run_without_lab("from fleetcast.cli.main import main; main()", "run", "--help")
    assert done.returncode == 0, done.stderr
