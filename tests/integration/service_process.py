"""A whole Fleetcast under its supervisor, on ports of its own, for tests that need the real thing."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any

import tomli_w

from tests.ports import free_port

SPEED = 15.0
PATIENCE = 5.0


def write_config(folder: Path, port: int, speed: float, sections: dict[str, dict[str, Any]]) -> Path:
    """`config.toml` of a service whose state is in the folder and whose fleet time begins now."""
    now_ms = time.time_ns() // 1_000_000
    config: dict[str, Any] = {
        "state": str(folder / "state"),
        "clock": {"epoch_ms": now_ms, "wall_ms": now_ms, "speed": speed},
        "api": {"port": port},
        "placer": {"port": port + 1},
    }
    for name, values in sections.items():
        config[name] = config.get(name, {}) | values
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def soon(limit_s: float) -> float:
    """What `limit_s` of a machine with a core to spare is on this one now: PATIENCE times as much where it has none."""
    return limit_s if os.getloadavg()[0] < (os.cpu_count() or 1) else limit_s * PATIENCE


class Service:
    """Starts on construction; `stop` ends only what this object started.

    `variables` are added to the environment; `token` is what requests are made with.
    """

    def __init__(
        self,
        folder: Path,
        *,
        speed: float = SPEED,
        variables: dict[str, str] | None = None,
        token: str = "",
        **sections: dict[str, Any],
    ) -> None:
        self.folder = folder
        self.variables = variables or {}
        self.token = token
        self.port = free_port()
        write_config(folder, self.port, speed, sections)
        self.start()

    def start(self) -> None:
        with open(self.folder / "service.log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(self.folder / "config.toml")],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **self.variables},
            )

    def pids(self) -> dict[str, int]:
        """Process ids by role, as the supervisor wrote them."""
        try:
            lines = (self.folder / "state" / "pids").read_text().splitlines()
        except FileNotFoundError:
            return {}
        return {name: int(pid) for name, pid in (line.split() for line in lines)}

    def kill(self, role: str) -> None:
        os.kill(self.pids()[role], signal.SIGKILL)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for role, pid in self.pids().items():
            if role != "supervisor":
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def log(self) -> str:
        return (self.folder / "service.log").read_text(errors="replace")

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded JSON (or text) and headers; status 0 when nobody answers."""
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                return (
                    response.status,
                    _decode(response.read()),
                    _lower(response.headers),
                )
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decode(error.read()), _lower(error.headers)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0, None, {}

    def get(self, path: str) -> Any:
        status, answer, _ = self.request("GET", path)
        return answer if status == 200 else None

    def until(self, what: str, check: Callable[[], Any], limit_s: float = 30.0) -> Any:
        """The first truthy answer of `check`; fails with the log's end when there is none.

        limit_s: how long a quiet machine may take at most; PATIENCE times that is waited, so that a busy one may, too.
        """
        limit_s *= PATIENCE
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            answer = check()
            if answer:
                return answer
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {limit_s:.0f} s\n{self.log()[-3000:]}")


def _lower(headers: Message) -> dict[str, str]:
    return {key.lower(): value for key, value in headers.items()}


def _decode(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode(errors="replace")
