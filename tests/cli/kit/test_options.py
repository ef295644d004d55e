"""Commands beside a service read the configuration that it runs with."""

from pathlib import Path

from fleetcast.cli.kit.options import load_site_config
from fleetcast.service.config import Config, FleetConfig, save_config


def test_the_configuration_is_the_one_that_the_service_saved(tmp_path: Path) -> None:
    (tmp_path / "var").mkdir()
    save_config(Config(state="elsewhere", fleet=FleetConfig(name="saved")), tmp_path / "var" / "config.toml")
    found = load_site_config(None, str(tmp_path / "var"))
    assert found.fleet.name == "saved"
    assert found.folder == tmp_path / "var"


def test_a_file_that_is_named_goes_before_it_and_without_both_the_defaults_hold(tmp_path: Path) -> None:
    save_config(Config(fleet=FleetConfig(name="saved")), tmp_path / "config.toml")
    named = tmp_path / "named.toml"
    named.write_text('[fleet]\nname = "named"\n')
    assert load_site_config(named, str(tmp_path)).fleet.name == "named"
    assert load_site_config(None, str(tmp_path / "empty")).fleet.name == Config().fleet.name
