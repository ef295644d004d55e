from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from fleet.errors import ConfigError


def check(path: Path, text: str) -> str:
    path.write_text(text)
    result = CliRunner().invoke(app, ["check-config", str(path)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_a_good_file_is_called_fine_with_what_it_means(tmp_path: Path) -> None:
    said = check(tmp_path / "c.toml", '[scrape]\ntargets = ["http://n1:9400"]\n')
    assert "c.toml: fine" in said
    assert "scrape targets: 1, every 15 s" in said


def test_a_target_that_is_no_url_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ftp://x"):
        check(tmp_path / "c.toml", '[scrape]\ntargets = ["ftp://x"]\n')


def test_where_the_archive_lies_is_told_and_what_cannot_be_one_refused(tmp_path: Path) -> None:
    assert "archive: seen/archive\n" in check(tmp_path / "c.toml", 'state = "seen"\n')
    assert "archive: none\n" in check(tmp_path / "c.toml", "[archive]\nenabled = false\n")
    with pytest.raises(ConfigError, match="s4"):
        check(tmp_path / "c.toml", '[archive]\nurl = "s4://bucket/fleetcast"\n')


def test_it_says_who_may_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "access: everybody on this machine" in check(tmp_path / "c.toml", "")
    with pytest.raises(ConfigError, match="beyond loopback"):
        check(tmp_path / "c.toml", "[api]\nhost = '0.0.0.0'\n")
    monkeypatch.setenv("FLEETCAST_TOKENS", "ada read 0123456789abcdef")
    assert "access: ada\n" in check(tmp_path / "c.toml", "[api]\nhost = '0.0.0.0'\n")
