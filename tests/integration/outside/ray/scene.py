"""One real Ray, one real api of Fleetcast in front of a board that a test publishes, both alone in a network."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tomli_w

from schedulers.weather import DemandKey
from service.board.board import BoardWriter
from service.pipeline.demand.sections import demand_sections
from tests.integration.outside.namespace import Namespace
from tests.schedulers.small_demand import row

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[4]
PORT = 18080  # nobody else is in that network
LIMIT_S = 300.0  # a replica is a Python process, and the machine may be busy
SERIES = DemandKey("serve", "inference", "echo", "request_rate")


class Forecast(threading.Thread):
    """Publishes a board with a new forecast each half second; `value`: of SERIES, at every quantile and horizon."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.value, self.is_published = 0.0, True
        self._board = BoardWriter(folder)
        self._over = threading.Event()

    def publish(self) -> None:
        now_ms = time.time_ns() // 1_000_000
        made = row(SERIES, self.value, [[self.value] * 3 for _ in range(3)], issued_ms=now_ms)
        self._board.publish(demand_sections([made], {}, [], now_ms), now_ms)

    def run(self) -> None:
        while not self._over.wait(0.5):
            if self.is_published:
                self.publish()

    def end(self) -> None:
        self._over.set()
        self.join()


class Scene:
    """Starts all of it on construction; `close` ends it, newest first."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.folder, self._python = folder, python
        self._running: list[subprocess.Popen[str]] = []
        self.network = Namespace()
        self.forecast = Forecast(folder / "state" / "board")
        self.forecast.publish()
        self.forecast.start()
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
            given = {"stdout": log, "stderr": log, "cwd": ROOT, "text": True} | more
            process: subprocess.Popen[str] = subprocess.Popen(self.network.inside(*command), **given)
        self._running.append(process)
        return process

    def start_api(self) -> subprocess.Popen[str]:
        run = (sys.executable, "-m", "cli.main", "run", "--role", "api", "--config", self._config)
        return self.start("api", *run)

    def start_bad(self, what: str) -> subprocess.Popen[str]:
        return self.start("bad", sys.executable, HERE / "bad_answers.py", str(PORT), what)

    def start_ray(self, *command: str | Path, **more: Any) -> subprocess.Popen[str]:
        """A process with Ray and our client."""
        own = {"PYTHONPATH": str(ROOT / "sdk"), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}
        return self.start("ray", self._python, *command, env=os.environ | own, **more)

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
        self.network.close()
