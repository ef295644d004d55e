"""CapacityBuffers of a real API server, and a real adapters role that sizes them from a board that a test publishes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tomli_w

from fleetcast.schedulers.weather import DemandKey
from fleetcast.service.adapter_records import AdapterRecords, AdapterStatus
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from tests.integration.kubernetes.control_plane import READER_TOKEN, ControlPlane
from tests.schedulers.small_fleet import wanted

GROUP = "autoscaling.x-k8s.io"
BUFFERS = f"/apis/{GROUP}/v1beta1/namespaces/default/capacitybuffers"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
APPLY = {"content-type": "application/apply-patch+yaml"}
ASKS = {"fleetcast.io/pool": "serve", "fleetcast.io/gpus-per-replica": "8"}
STALE_S = 225.0
LONG_S = 120.0  # of a busy machine


class Buffering:
    """Starts on construction; each GPU wanted above the 40 of now is an eighth of a replica."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.plane, self.folder = plane, folder
        token = folder / "token"
        token.write_text(READER_TOKEN)
        options = {
            "server": f"https://127.0.0.1:{plane.port}",
            "token_file": str(token),
            "ca_file": str(plane.folder / "certs" / "apiserver.crt"),
        }
        config = {
            "state": str(folder / "state"),
            "api": {"stale_after_s": STALE_S},
            "adapters": {
                "withdraw_after_s": STALE_S,
                "adapter": [{"use": "buffers", "mode": "write", "options": options}],
            },
        }
        self.config = folder / "config.toml"
        self.config.write_text(tomli_w.dumps(config))
        self.board, self.published = BoardWriter(folder / "state" / "board"), 0
        self.start()

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleetcast.cli.main", "run", "--role", "adapters", "--config", str(self.config)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(60)

    def publish(self, gpus: float, age_s: float = 0.0) -> None:
        """A board of this age, whose p90 in ten minutes is `gpus`."""
        self.published += 1
        now_ms = time.time_ns() // 1_000_000 - int(age_s * 1000)
        demand = wanted(40.0, gpus, gpus, issued_ms=now_ms)
        assert DemandKey("serve", "all", "all", "wanted") in demand
        parts: dict[str, Any] = {
            "names.node": b"m01",
            "node.risk": np.zeros((3, 4, 1)),
            "node.state": np.zeros(1, np.int8),
            "gpu.usable": np.ones((1, 8), bool),
            "gpu.job": np.full((1, 8), -1, np.int32),
            "risk.reason": b"{}",
        }
        sections = [Section(name, data, now_ms) for name, data in parts.items()]
        self.board.publish([*sections, *make_demand_sections([*demand.values()], {}, [], now_ms)], now_ms)

    def buffer(self, name: str = "ahead") -> dict[str, Any]:
        answer = self.plane.http.get(f"{BUFFERS}/{name}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def replicas(self, name: str = "ahead") -> int | None:
        found: int | None = self.buffer(name)["spec"].get("replicas")
        return found

    def until(self, replicas: int, name: str = "ahead") -> float:
        """Seconds until there are so many."""
        began = time.monotonic()
        try:
            self.plane.until(f"{replicas} replicas", lambda: self.replicas(name) == replicas, LONG_S)
        except AssertionError:
            log = (self.folder / "log").read_text()[-3000:]
            raise AssertionError(f"{self.replicas(name)} replicas, not {replicas}\n{log}") from None
        return time.monotonic() - began

    def cli(self, *words: str) -> str:
        command = [sys.executable, "-m", "fleetcast.cli.main", "adapters", *words, "--config", str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def standing(self) -> AdapterStatus:
        (row,) = AdapterRecords(self.folder / "state").read_status().adapters or [
            AdapterStatus(name="", use="", mode="")
        ]
        return row

    def until_looked(self) -> AdapterStatus:
        """How it stands once it has done what the newest board asks for."""
        self.plane.until("a look at the board", lambda: self.standing().board == self.published, LONG_S)
        return self.standing()


def apply(plane: ControlPlane, thing: dict[str, Any], manager: str, *, force: bool = False) -> httpx.Response:
    """As `kubectl apply --server-side --field-manager=…` does."""
    name = thing["metadata"]["name"]
    head = {"apiVersion": f"{GROUP}/v1beta1", "kind": "CapacityBuffer"}
    query = {"fieldManager": manager, "force": str(force).lower()}
    return plane.http.patch(f"{BUFFERS}/{name}", params=query, headers=APPLY, content=json.dumps(head | thing))


def hand_over(plane: ControlPlane, name: str, **annotations: str) -> None:
    """A buffer as the documentation tells a user to make it: its replicas are Fleetcast's from the start."""
    first = {"metadata": {"name": name}, "spec": {"replicas": 0}}
    named = {f"fleetcast.io/{key.replace('_', '-')}": value for key, value in annotations.items()}
    theirs = {"metadata": {"name": name, "annotations": ASKS | named}, "spec": {"podTemplateRef": {"name": "server"}}}
    for thing, manager in ((first, "fleetcast"), (theirs, "kubectl")):
        answer = apply(plane, thing, manager)
        assert answer.status_code in (200, 201), answer.text
