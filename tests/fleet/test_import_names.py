"""A configuration that names a module of ours without `fleetcast` is refused with the new path."""

from pathlib import Path

import pytest

from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.import_names import full_name
from fleetcast.service.plugins import load
from fleetcast.training.judges.own_forecasters import make


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
    assert full_name(old) == new


@pytest.mark.parametrize(
    "module", ["json", "json.decoder", "models", "models.mine", "mine.filters", "fleetcast.fleet", ""]
)
def test_any_other_path_has_none(module: str) -> None:
    assert full_name(module) is None


def test_a_module_of_the_users_own_is_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is that of a module of ours, which the user's file on the path hides."""
    folder = tmp_path / "dashboards_of_users"
    folder.mkdir()
    (folder / "filters.py").write_text("mine = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert full_name("dashboards_of_users.filters") is None
    assert load("placer.filters", "dashboards_of_users.filters:mine") is True


def test_the_configuration_is_refused_with_the_path_to_write() -> None:
    with pytest.raises(
        ConfigError, match=r"^pipeline\.forecasters: .*give 'fleetcast\.models\.demand\.naive:Persistence'$"
    ):
        load("pipeline.forecasters", "models.demand.naive:Persistence")
    with pytest.raises(ConfigError, match=r"^placer\.filters: .*give 'fleetcast\.placement\.machines\.filters:busy'$"):
        load("placer.filters", "placement.filters:busy")


def test_an_option_of_the_command_is_refused_with_the_path_to_write() -> None:
    with pytest.raises(ConfigError, match=r"^--forecaster: .*give 'fleetcast\.models\.demand\.theta:Theta'$"):
        make("models.demand.theta:Theta")
