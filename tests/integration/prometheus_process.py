"""A real Prometheus with the committed configuration, scraping one address every second."""

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import yaml

from tests.dashboards.grafana import FOLDER
from tests.ports import free_port
from tests.programs import needed

SCRAPE_S = 1
START_S = 150.0


class Prometheus:
    """Starts on construction; `stop` ends it. The rules are the committed ones, evaluated every second.

    scrape: what else `scrape_configs` says of the target.
    """

    def __init__(self, folder: Path, target: str, **scrape: Any) -> None:
        program = needed("prometheus")
        self.url = f"http://127.0.0.1:{free_port()}"
        config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
        config["scrape_configs"][0] |= {"static_configs": [{"targets": [target]}], **scrape}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with open(folder / "prometheus.log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'prometheus'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._until_ready(folder)

    def _until_ready(self, folder: Path) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                    return
            except OSError:
                log = (folder / "prometheus.log").read_text(errors="replace")
                assert self.process.poll() is None, log
                assert time.monotonic() < deadline, log
                time.sleep(0.05)

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer; raises AssertionError with Prometheus' words when it refuses."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.loads(response.read())["data"]
        except urllib.error.HTTPError as error:
            with error:
                raise AssertionError(f"{parameters}: {error.read().decode(errors='replace')}") from None

    def instant(self, expr: str) -> list[dict[str, Any]]:
        """Rows {"metric", "value": [time_s, text]} of now."""
        rows: list[dict[str, Any]] = self.get("query", query=expr)["result"]
        return rows

    def range(self, expr: str, seconds: int) -> list[dict[str, Any]]:
        """Rows {"metric", "values": [[time_s, text]...]} of the last seconds."""
        now = time.time()
        span = {"start": f"{now - seconds:.3f}", "end": f"{now:.3f}", "step": f"{SCRAPE_S}s"}
        rows: list[dict[str, Any]] = self.get("query_range", query=expr, **span)["result"]
        return rows

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
