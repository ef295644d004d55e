"""Logs: one event is one line, whatever it holds, and no line holds a secret."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fleetcast.cli.kit.logs import Format, LineFormatter
from tests.forked import run_command


def record(message: str, *values: Any, error: BaseException | None = None) -> logging.LogRecord:
    info = (type(error), error, error.__traceback__) if error else None
    made = logging.LogRecord("fleetcast.service.api.role", logging.INFO, "x.py", 1, message, values, info)
    made.created = 1_795_267_400.123
    return made


def failed() -> ZeroDivisionError:
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError as error:
        return error
    raise AssertionError


def test_a_line_says_when_who_and_what() -> None:
    line = LineFormatter(Format.TEXT, "api").format(record("listening on %s", "http://127.0.0.1:8080/"))
    assert line == "2026-11-21T13:23:20.123Z INFO api fleetcast.service.api.role: listening on http://127.0.0.1:8080/"


def test_as_json_the_parts_have_names() -> None:
    row = json.loads(LineFormatter(Format.JSON, "api").format(record("took %d", 7)))
    assert row == {
        "time": "2026-11-21T13:23:20.123Z",
        "level": "info",
        "role": "api",
        "logger": "fleetcast.service.api.role",
        "message": "took 7",
    }


@pytest.mark.parametrize("form", list(Format))
@pytest.mark.parametrize("text", ["two\nlines", "\r\n", "bell\a \x1b[31mred", "\u2028", "\x85", "\udc80"])
def test_nothing_that_is_told_breaks_a_line_or_steers_a_terminal(form: Format, text: str) -> None:
    line = LineFormatter(form, "api").format(record("node %s", text, error=failed()))
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert "ZeroDivisionError" in line


@pytest.mark.parametrize("form", list(Format))
def test_no_secret_is_told_not_even_in_a_trace(form: Format) -> None:
    error = ValueError("http://me:s3cret@h/m and http://h/m?token=s3cret")
    line = LineFormatter(form, "api").format(record("asked %s", "http://h:9400/m?s3cret", error=error))
    assert "s3cret" not in line
    assert "asked http://h:9400/m?***" in line


def run(tmp_path: Path, *options: str, **variables: str) -> list[str]:
    """The lines on stderr of a `fleetcast run` that refuses to start."""
    done = run_command("run", "--state", str(tmp_path / "var"), *options, **variables)
    assert done.returncode == 2
    return done.stderr.splitlines()


def test_even_the_reason_for_not_starting_is_one_line_of_json_when_asked(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text("[api]\nhost = '0.0.0.0'\n")
    config = ("--config", str(tmp_path / "c.toml"))
    for line in run(tmp_path, *config, "--log-format", "json") + run(tmp_path, *config, FLEETCAST_LOG_FORMAT="json"):
        assert "beyond loopback" in json.loads(line)["message"]


def test_a_token_is_not_told_when_its_line_is_bad(tmp_path: Path) -> None:
    (line,) = run(tmp_path, FLEETCAST_TOKENS="ada s3crets3crets3cret")
    assert line.startswith("fleetcast: FLEETCAST_TOKENS, line 1: 2 words")
    assert "s3cret" not in line


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    (line,) = run(tmp_path, FLEETCAST_LOG_FORMAT="xml")
    assert "must be one of text, json" in line
