"""Api processes over boards that a test publishes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import tomli_w

from fleetcast.models.demand.rows import DemandRow
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.demand.metrics import make_demand_page, make_parts_page
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from tests.ports import free_ports
from tests.service.api_world import publish
from tests.service.certificate_files import Authority, Pair

EVERY_S = 1.0
START_S = 120.0
HORIZONS_S, QUANTILES = [60, 300, 1800, 3600], [0.5, 0.9]


class DemandBoard:
    """Publishes a board a second with these demands by pool, the p90 of `running`; `hold` stops that.

    A pool serves one model of its name, which is asked as many requests a second.
    """

    def __init__(self, folders: list[Path]) -> None:
        self.values: dict[str, float] = {}
        self._writers = [publish(folder, _now_ms()) for folder in folders]
        self._held = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._publish_forever, daemon=True)
        self._thread.start()

    def hold(self, held: bool) -> None:
        """True: the boards age from now on."""
        (self._held.set if held else self._held.clear)()

    def _publish_forever(self) -> None:
        while not self._over.wait(EVERY_S):
            if not self._held.is_set():
                now_ms = _now_ms()
                rows = [row for pool, value in list(self.values.items()) for row in _rows(pool, value, now_ms)]
                page = Section("metrics.fleet", make_demand_page(rows) + make_parts_page(rows), now_ms)
                for writer in self._writers:
                    writer.publish([*make_demand_sections(rows, {}, [], now_ms), page], now_ms)

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


def _rows(pool: str, value: float, now_ms: int) -> list[DemandRow]:
    row = DemandRow(
        queue=pool,
        class_="all",
        group="all",
        target="running",
        now=value,
        model="persistence",
        issued_ms=now_ms,
        horizons_s=HORIZONS_S,
        quantiles=QUANTILES,
        values=[[value / 2] * len(HORIZONS_S), [value] * len(HORIZONS_S)],
        record=None,
    )
    return [row, msgspec.structs.replace(row, class_="inference", group=pool, target="request_rate")]


class ApiProcess:
    """One api with TLS that asks for clients' certificates; answers by HTTP and by gRPC. Starts on construction."""

    def __init__(self, folder: Path, shown: Pair, clients: Authority) -> None:
        self.port, self.grpc_port, placer = free_ports(3)
        self.folder = folder
        api = {"port": self.port, "grpc_port": self.grpc_port, "stale_after_s": 5.0, "client_ca": str(clients.cert)}
        config = {
            "state": str(folder),
            "api": api | {"tls_cert": str(shown.cert), "tls_key": str(shown.key)},
            "access": {"subjects": {"keda.example": ["read"]}},
            "placer": {"port": placer},
        }
        (folder / "api.toml").write_text(tomli_w.dumps(config))
        self.start()

    def start(self) -> None:
        """Again, on the ports of before. Returns once it answers."""
        command = [
            sys.executable,
            "-m",
            "fleetcast.cli.main",
            "run",
            "--role",
            "api",
            "--config",
            str(self.folder / "api.toml"),
        ]
        with open(self.folder / "api.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, (self.folder / "api.log").read_text()[-3000:]
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"https://127.0.0.1:{self.port}/healthz", verify=False).status_code < 500:
                    return
            time.sleep(0.1)
        raise AssertionError((self.folder / "api.log").read_text()[-3000:])

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
