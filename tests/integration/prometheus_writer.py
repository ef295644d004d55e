"""A real Prometheus of today that scrapes a page and writes what it finds to us, in either version of the protocol."""

import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port

MESSAGES = {1: "prometheus.WriteRequest", 2: "io.prometheus.write.v2.Request"}
START_S = 30.0


class PrometheusWriter:
    """Starts on construction; `stop` ends it. `write`: the URL of a receiver; `targets`: addresses to scrape."""

    def __init__(
        self,
        program: Path,
        folder: Path,
        targets: list[str],
        *,
        write: str = "",
        version: int = 1,
        interval_s: float = 1.0,
        options: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.url = f"http://127.0.0.1:{free_port()}"
        config: dict[str, Any] = {
            "global": {"scrape_interval": f"{round(interval_s * 1000)}ms"},
            "scrape_configs": [{"job_name": "dcgm", "static_configs": [{"targets": targets}]}],
        }
        if write:
            retry = {"min_backoff": "100ms", "max_backoff": "1s", "batch_send_deadline": "1s"}
            row = {"url": write, "protobuf_message": MESSAGES[version], "queue_config": retry}
            config["remote_write"] = [row]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        self._arguments = [
            str(program),
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address={self.url.removeprefix('http://')}",
            *options,
        ]
        self.start()

    def start(self) -> None:
        with open(self.folder / "prometheus.log", "ab") as log:
            self.process = subprocess.Popen(self._arguments, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_S
        while not self._ready():
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    def log(self) -> str:
        return (self.folder / "prometheus.log").read_text(errors="replace")[-3000:]

    def metrics(self) -> dict[str, float]:
        """What it says of itself: name with labels → value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in rows}

    def sum(self, name: str) -> float:
        """Over all labels."""
        return sum(value for key, value in self.metrics().items() if key.partition("{")[0] == name)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
