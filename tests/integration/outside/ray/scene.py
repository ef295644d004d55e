"""One real Ray, one real api of Fleetcast in front of a board that a test publishes, both alone in a network."""

import contextlib
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from fleetcast.fleet.clock import SystemClock
from fleetcast.schedulers.weather import DemandKey
from tests.integration.forecast_board import ForecastBoard
from tests.integration.outside.namespace import Namespace

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]
PORT = 18080  # nobody else is in that network
LIMIT_S = 600.0  # a replica is a Python process, and the machine may be busy
SERIES = DemandKey("serve", "inference", "echo", "request_rate")


class Scene:
    """Starts all of it on construction; `close` ends it, newest first, and the network."""

    def __init__(self, python: Path, network: Namespace, folder: Path) -> None:
        self.folder, self._python = folder, python
        self._short = tempfile.TemporaryDirectory(prefix="r")  # Ray's sockets lie in it, and their paths have a limit
        self._token = folder / "token"
        self._token.write_text(secrets.token_hex(32))
        self._running: list[subprocess.Popen[str]] = []
        self.network = network
        self.forecast = ForecastBoard(folder / "state" / "board", SERIES, SystemClock())
        self._config = folder / "config.toml"
        self._config.write_text(tomli_w.dumps({"state": str(folder / "state"), "api": {"port": PORT}}))
        try:
            self.api = self.start_api()
            self._driver = self.start_ray(HERE / "driver.py", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._answer() == {"ready": True}
        except BaseException:
            self.close()
            raise

    def start(self, name: str, *command: str | Path, **more: Any) -> subprocess.Popen[str]:
        with open(self.folder / f"{name}.log", "ab") as log:
            given: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": ROOT, "text": True} | more
            process: subprocess.Popen[str] = subprocess.Popen(self.network.inside(*command), **given)
        self._running.append(process)
        return process

    def start_api(self) -> subprocess.Popen[str]:
        run = (sys.executable, "-m", "fleetcast.cli.main", "run", "--role", "api", "--config", self._config)
        return self.start("api", *run)

    def start_bad(self, what: str) -> subprocess.Popen[str]:
        return self.start("bad", sys.executable, HERE / "bad_answers.py", str(PORT), what)

    def start_ray(self, *command: str | Path, **more: Any) -> subprocess.Popen[str]:
        """A process with Ray and our client."""
        return self.start("ray", self._python, *command, env=os.environ | self.variables, **more)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of programs that reach this Ray and our client."""
        return {
            "PYTHONPATH": str(ROOT / "sdk"),
            "RAY_AUTH_TOKEN_PATH": str(self._token),
            "RAY_TMPDIR": self._short.name,
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    def put_programs(self, folder: Path) -> None:
        """Make `python` and `ray` in the folder those of Ray's environment, within the network."""
        folder.mkdir(parents=True)
        for name in ("python", "ray"):
            command = shlex.join(self.network.inside(self._python.with_name(name)))
            (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            (folder / name).chmod(0o755)

    def ask(self, do: str, **arguments: Any) -> Any:
        """What Ray's process answers."""
        assert self._driver.stdin is not None
        self._driver.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        self._driver.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._driver.stdout is not None
        line = self._driver.stdout.readline()
        assert line, f"Ray's process has ended:\n{self.log('ray')}"
        return json.loads(line)

    def replicas(self, app: str) -> int:
        return int(self.ask("standing", app=app)["replicas"])

    def until(self, what: str, holds: Callable[[], bool]) -> float:
        """How many seconds it took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < LIMIT_S, f"{what}: not within {LIMIT_S:.0f} s\n{self.log('ray')}"
            time.sleep(0.2)
        return time.monotonic() - began_s

    def end(self, process: subprocess.Popen[str], number: signal.Signals = signal.SIGKILL) -> None:
        process.send_signal(number)
        process.wait(60)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def close(self) -> None:
        self.forecast.end()
        for process in reversed(self._running):
            if process.stdin is not None and process.poll() is None:
                process.stdin.close()  # Ray ends its own processes
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                self.end(process)
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self.network.close()
        self._short.cleanup()
