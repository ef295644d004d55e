"""Every command teaches: its help shows it in use, and nothing is swallowed on the way to the terminal."""

from importlib.metadata import version

import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app

COMMANDS = (
    *("", "run", "demo", "bench", "check-config"),
    *(
        "simulate",
        "simulate cluster",
        "simulate faults",
        "simulate steps",
        "simulate day",
        "simulate starts",
        "simulate compare",
    ),
    *(
        "data",
        "data list",
        "data split",
        "data import",
        "train",
        "train risk",
        "train demand",
        "train duration",
        "backtest",
        "drift",
    ),
    *("topology", "topology show"),
    *("models", "models list", "models show", "models promote", "models rollback", "models prune"),
    *("state", "state show", "state accept", "state downgrade"),
    *("actions", "actions list", "actions show", "actions pause", "actions resume", "actions reset"),
    *("adapters", "adapters list", "adapters show", "adapters withdraw"),
    *("history", "history show", "history compact", "history prune"),
)


def help_of(command: str) -> str:
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_shows_it_in_use(command: str) -> None:
    assert f"  fleetcast {command}".rstrip() in help_of(command)


def test_what_stands_in_brackets_reaches_the_reader() -> None:
    assert "[now]" in help_of("simulate cluster")
    assert "[fleet] topology" in help_of("simulate cluster")


def test_the_version_is_that_of_the_package() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"fleetcast {version('fleetcast')}\n")
