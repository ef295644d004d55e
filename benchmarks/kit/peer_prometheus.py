"""A real Prometheus as a peer: named by FLEETCAST_PROMETHEUS, built by our tests, or on the path."""

import contextlib
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.kit.service import find_free_port

VARIABLE = "FLEETCAST_PROMETHEUS"
START_S = 60.0


def find_prometheus() -> str | None:
    """Return the path of a Prometheus program, or None if there is none.

    If our tests built several of them, the newest one is returned.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fleetcast"
    built = [str(path) for path in sorted(cache.glob("prometheus-*/bin/prometheus"), reverse=True)]
    named = os.environ.get(VARIABLE)
    return next((path for path in (named, *built, shutil.which("prometheus")) if path), None)


def read_version(program: str) -> str:
    """Return a program's name for a record, such as "Prometheus 3.15.0"."""
    shown = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    words = (shown.stdout + shown.stderr).split()
    return f"Prometheus {words[words.index('version') + 1]}" if "version" in words else "Prometheus"


class PrometheusPeer:
    """A running Prometheus, which accepts remote writes of both versions.

    config: the contents of prometheus.yml.
    """

    def __init__(self, program: str, folder: Path, config: dict[str, Any]) -> None:
        self.name = read_version(program)
        self.port = find_free_port()
        folder.mkdir(exist_ok=True)
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [
            program,
            f"--config.file={path}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
            "--web.enable-remote-write-receiver",
        ]
        self.process = ChildProcess(self.name, command)
        self._wait_until_ready()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.process.check_running()
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self._url}/-/ready", timeout=5):
                return
            time.sleep(0.05)
        self.process.check_running(unless=f"not ready within {START_S:.0f} s")

    @property
    def _url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def count_samples(self) -> int:
        """Return how many samples Prometheus has stored so far."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        name = "prometheus_tsdb_head_samples_appended_total"
        return round(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)))

    def close(self) -> None:
        self.process.stop()
