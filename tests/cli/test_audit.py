"""`fleetcast audit verify`: exit codes tell, and the sentences say where."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleetcast.cli.main import app
from fleetcast.fleet.errors import ConfigError
from fleetcast.placement.ledger.ledger import LedgerError
from tests.placement.ledger.ledger_world import edit, make


@pytest.fixture
def state(tmp_path: Path) -> Path:
    make(tmp_path / "ledger.sqlite")
    return tmp_path


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, ["audit", "verify", *(str(word) for word in words)])


def test_a_ledger_that_is_as_it_was_written_ends_with_0(state: Path) -> None:
    result = invoke("--state", state)
    assert result.exit_code == 0, result.output
    assert "10 lines of audit, 5 replies, 4 intents, 2 waiting" in result.output
    assert "everything is as it was written" in result.output


def test_a_changed_reply_ends_with_1_and_is_named(state: Path) -> None:
    edit(state / "ledger.sqlite", "UPDATE decisions SET reply = x'7b7d' WHERE request_id = 'held'")
    result = invoke("--state", state)
    assert result.exit_code == 1
    assert "the decision of request 'held' is not what was written" in result.stderr
    assert "as it was written" not in result.stdout


def test_a_head_that_was_kept_is_found_again_or_missed(state: Path) -> None:
    head = json.loads(invoke("--state", state, "--json", "-").stdout)["head"]
    assert head["audit_id"] == 10
    result = invoke("--state", state, "--head", head["hash"])
    assert "the head that you saved is line 10; 0 came since" in result.stdout
    edit(
        state / "ledger.sqlite",
        "DELETE FROM audit WHERE audit_id > 9",
        "UPDATE sqlite_sequence SET seq = 9 WHERE name = 'audit'",
    )
    assert invoke("--state", state).exit_code == 0, "a chain that was cut off is a chain"
    result = invoke("--state", state, "--head", head["hash"])
    assert result.exit_code == 1
    assert "that head is not in the chain" in result.stderr


def test_the_json_says_all_of_it(state: Path) -> None:
    edit(state / "ledger.sqlite", "DELETE FROM audit WHERE audit_id = 3")
    result = invoke("--state", state, "--json", state / "verdict.json")
    assert result.exit_code == 1
    verdict = json.loads((state / "verdict.json").read_text())
    assert not verdict["ok"]
    assert verdict["findings"][0] == {
        "kind": "missing",
        "sentence": "lines 3..3 are missing before line 4",
        "audit_id": 4,
        "request_id": None,
    }
    assert {
        "ledger",
        "head",
        "held",
        "lines",
        "unchained",
        "replies",
        "waiting",
        "intents",
        "left_out",
    } <= verdict.keys()


def test_the_configuration_names_the_state(state: Path) -> None:
    config = state / "config.toml"
    config.write_text(f'state = "{state}"\n')
    assert invoke("--config", config).exit_code == 0


@pytest.mark.parametrize("head", ["17", ""])
def test_a_head_that_is_none_is_wrong_usage(state: Path, head: str) -> None:
    """An empty one is what `$(cat head-of-last-monday)` gives where that file is not there."""
    assert isinstance(invoke("--state", state, "--head", head).exception, ConfigError)


def test_where_there_is_no_ledger_the_work_fails(tmp_path: Path) -> None:
    error = invoke("--state", tmp_path).exception
    assert isinstance(error, LedgerError)
    assert "there is no ledger" in str(error)
