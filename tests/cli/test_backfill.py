"""`fleetcast backfill` against servers that do not answer: it says that it waits, for how long, and what to do."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fleetcast.cli import backfill
from fleetcast.cli.main import app
from fleetcast.clients.prometheus import PrometheusClient, SilentServer
from fleetcast.fleet.errors import ConfigError, SourceError


@pytest.fixture
def silent() -> Iterator[str]:
    """A server that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def run(state: Path, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["backfill", *arguments, "--state", str(state)])


def test_a_silent_server_is_waited_for_aloud_and_given_up_with_what_to_do(
    tmp_path: Path, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "SAY_EVERY_S", 0.1)
    result = run(tmp_path, silent, "--from", "1h", "--timeout", "0.5s")
    assert "an answer may take 0.5 s" in result.stderr
    assert f"waiting for {silent}: names of metrics, " in result.stderr
    assert isinstance(result.exception, SourceError)
    told = str(result.exception)
    assert f"{silent} was silent for 0.5 s: " in told
    assert "--window 10m" in told
    assert "--timeout 1s" in told


def test_a_silent_server_is_not_asked_again() -> None:
    """Four times two minutes of silence, and nobody would know."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = PrometheusClient(f"http://127.0.0.1:{server.getsockname()[1]}", timeout_s=0.2)
        with pytest.raises(SilentServer):
            client.list_metric_names('{a="b"}', 0, 1000)
        with pytest.raises(SilentServer):
            client.fetch_recorded_samples("{}", 0, 1000)
        client.close()
        server.setblocking(False)
        for _ in range(2):
            server.accept()[0].close()
        with pytest.raises(BlockingIOError):
            server.accept()
    with pytest.raises(SourceError, match="does not answer"):
        PrometheusClient("http://127.0.0.1:1").fetch_recorded_samples("{}", 0, 1000)


@pytest.mark.parametrize("text", ["0s", "soon", "-1s"])
def test_a_timeout_that_is_none_is_refused(tmp_path: Path, silent: str, text: str) -> None:
    result = run(tmp_path, silent, "--from", "1h", "--timeout", text)
    assert isinstance(result.exception, ConfigError)
    assert "--timeout" in str(result.exception)
