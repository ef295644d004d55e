"""A configuration that names a module of ours without `fleetcast` is refused with the new path."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.import_names import ROOT, find_full_module_names
from fleetcast.service.plugins import load_plugin
from fleetcast.training.judges.own_forecasters import load_factory


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("models.demand.naive", "fleetcast.models.demand.naive"),
        ("ingest.kafka.source", "fleetcast.ingest.kafka.source"),
        ("placement.filters", "fleetcast.placement.machines.filters"),
        ("placement.engine", "fleetcast.placement.engine"),
    ],
)
def test_an_old_path_of_ours_has_a_full_name(old: str, new: str) -> None:
    assert find_full_module_names(old) == (new,)


@pytest.mark.parametrize(
    "module", ["json", "json.decoder", "models", "models.mine", "mine.filters", "fleetcast.fleet", ""]
)
def test_any_other_path_has_none(module: str) -> None:
    assert find_full_module_names(module) == ()


def test_a_module_of_the_users_own_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is that of a module of ours, which the user's file on the path hides."""
    folder = tmp_path / "dashboards_of_users"
    folder.mkdir()
    (folder / "filters.py").write_text("mine = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert find_full_module_names("dashboards_of_users.filters") == ()
    assert load_plugin("placer.filters", "dashboards_of_users.filters:mine") is True


def test_a_name_that_two_modules_have_now_is_refused_with_both() -> None:
    with pytest.raises(
        ConfigError, match=r"give 'fleetcast\.placement\.ledger\.charges:X' or 'fleetcast\.placement\.q"
    ):
        load_plugin("placer.filters", "placement.charges:X")


@pytest.mark.parametrize("code", ["from models.forecaster import Mine", "raise NameError('x')"])
def test_a_package_of_the_user_that_is_named_as_one_of_ours_is_imported_as_it_is(tmp_path: Path, code: str) -> None:
    """Its modules may be named as ours, may need what a role does not import, and may fail."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models/__init__.py").write_text(code)
    (tmp_path / "models/forecaster.py").write_text("import pandas\nclass Mine: ...\n")
    script = (
        "from fleetcast.service.withheld_imports import withhold_imports\nwithhold_imports()\n"
        "from fleetcast.service.plugins import load_plugin\nprint(load_plugin('key', 'models.forecaster:Mine'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "NameError" in code:
        assert "ConfigError: key: 'models.forecaster:Mine' cannot be imported: NameError: x" in done.stderr
    else:
        assert done.stdout == "<class 'models.forecaster.Mine'>\n", done.stderr


def test_the_configuration_is_refused_with_the_path_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"^pipeline\.forecasters: .*give 'fleetcast\.models\.demand\.naive:Persistence'$"
    ):
        load_plugin("pipeline.forecasters", "models.demand.naive:Persistence")
    with pytest.raises(ConfigError, match=r"^placer\.filters: .*give 'fleetcast\.placement\.machines\.filters:busy'$"):
        load_plugin("placer.filters", "placement.filters:busy")


def test_an_option_of_the_command_is_refused_with_the_path_to_write() -> None:
    with pytest.raises(ConfigError, match=r"^--forecaster: .*give 'fleetcast\.models\.demand\.theta:Theta'$"):
        load_factory("models.demand.theta:Theta")
