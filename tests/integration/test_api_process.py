"""The API as a process: real sockets, huge bodies, an end on SIGTERM, and nothing acknowledged lost by SIGKILL."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fleetcast.ingest.inbox.inbox import InboxSource
from tests.ports import free_port
from tests.service.api_world import publish

pytestmark = pytest.mark.integration

PROGRAM = """
import sys, uvloop
from fleetcast.service.api.role import serve
from fleetcast.service.config import ApiConfig, Config
uvloop.run(serve(Config(state=sys.argv[1], api=ApiConfig(port=int(sys.argv[2]), max_body_bytes=2**20))))
"""


@contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    port = free_port()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(port)])
    try:
        for _ in range(1200):  # a busy machine starts it later
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.05)
        yield process, port
    finally:
        process.kill()
        process.wait()


def ask(port: int, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def event(sequence: int) -> dict[str, Any]:
    return {"job": "a", "sequence": sequence, "time_ms": time.time_ns() // 1_000_000, "type": "finished"}


def test_a_huge_body_is_refused_and_the_server_stays_small(tmp_path: Path) -> None:
    with serving(tmp_path) as (process, port):
        assert ask(port, "POST", "/v1/events", b" " * 100_000_000)[0] == 413
        assert ask(port, "POST", "/v1/events", (b" " * 65_536 for _ in range(500)))[0] == 413
        status = Path(f"/proc/{process.pid}/status").read_text()
        (line,) = [line for line in status.splitlines() if line.startswith("VmHWM")]
        assert int(line.split()[1]) < 300_000
        assert ask(port, "POST", "/v1/events", json.dumps(event(1)))[0] == 202


def test_it_ends_soon_on_sigterm_though_a_stream_is_open(tmp_path: Path) -> None:
    publish(tmp_path)
    with serving(tmp_path) as (process, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/v1/stream")
        response = connection.getresponse()
        assert response.read1(100).startswith(b"retry:")
        process.send_signal(signal.SIGTERM)
        assert b"event: board" in response.read()
        assert process.wait(5) == 0
        connection.close()


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(sock.getsockname()[1])]
        ended = subprocess.run(command, capture_output=True, timeout=30, check=False)
    assert ended.returncode != 0
    assert b"Address already in use" in ended.stderr


def test_what_was_acknowledged_outlives_a_kill(tmp_path: Path) -> None:
    acknowledged: set[int] = set()
    for round_ in range(3):
        with serving(tmp_path) as (process, port):
            for number in range(40):
                sequence = round_ * 1000 + number
                assert ask(port, "POST", "/v1/events", json.dumps(event(sequence)))[0] == 202
                acknowledged.add(sequence)
            process.kill()

    async def read() -> set[int]:
        source, found = InboxSource(tmp_path / "inbox"), set[int]()
        while acknowledged - found:
            found |= {event.sequence for event in (await asyncio.wait_for(source.next(), 2.0)).events}
        return found

    assert asyncio.run(read()) == acknowledged
