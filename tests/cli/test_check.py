from pathlib import Path

import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError


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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[pipeline]\nforecasters = ["nowhere.at:All"]\n', r"c.toml: line 2: pipeline.forecasters: 'nowhere.at:All'"),
        ('[placer]\n\nfilters = ["nowhere.at:all"]\n', r"c.toml: line 3: placer.filters: 'nowhere.at:all'"),
        ('[[pipeline.sources]]\nuse = "nowhere.at:All"\n', r"c.toml: line 2: pipeline.sources\[0\].use .*No module"),
        (
            '[[adapters.adapter]]\nuse = "nowhere.at:all"\n',
            r"line 1: adapters.adapter\[0\] nowhere.at:all: .*No mod",
        ),
        (
            '[[pipeline.sources]]\nuse = "slurm"\n[pipeline.sources.options]\ninterval = 5\n',
            r"line 4: pipeline.sources\[0\] slurm: options.interval: no such key; did you mean interval_s\?",
        ),
        (
            '[[adapters.adapter]]\nuse = "band_file"\noptions = {paht = "x"}\n',
            r"line 3: adapters.adapter\[0\] band_file: options.paht: no such key; did you mean path\?",
        ),
    ],
)
def test_a_plugin_that_is_not_there_fails_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(tmp_path / "c.toml", text)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def broken(:\n", "cannot be imported: SyntaxError: .*line 1"),
        ("import json\nx = y\n", "cannot be imported: NameError: name 'y' is not defined .*line 2"),
        ("raise SystemError('no driver')\n", "cannot be imported: SystemError: no driver"),
        ("class make:\n    def __init__(self):\n        self.x = {}['a']\n", "cannot be made: KeyError: 'a' .*line 3"),
        ("make = 5\n", "is int: expected a function or a class"),
    ],
)
def test_a_plugin_whose_code_fails_is_named_with_the_line_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, says: str
) -> None:
    name = f"failing_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=f"c.toml: line 2: pipeline.forecasters: '{name}:make' {says}"):
        check(tmp_path / "c.toml", f'[pipeline]\nforecasters = ["{name}:make"]\n')
