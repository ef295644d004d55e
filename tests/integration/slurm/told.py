"""A board that a test publishes, a real adapters role that follows it, and the Slurm that it tells."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fleetcast.service.board.board import BoardWriter, Section
from tests.integration.slurm.cluster import GPUS, SlurmCluster

SPEED = 15.0  # of fleet time: a board is stale after seconds of ours
STALE_S = 225.0


class Telling:
    """nodes: those of the board, which may be more than Slurm has. adapters: further rows of them."""

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        nodes: tuple[str, ...],
        adapters: tuple[dict[str, Any], ...] = (),
        **options: Any,
    ) -> None:
        self.slurm, self.folder, self.nodes = slurm, folder, nodes
        self.began_ms = time.time_ns() // 1_000_000
        row = {"use": "slurm", "mode": "write", "options": {"timeout_s": 5.0, **options}}
        config = {
            "state": str(folder / "state"),
            "clock": {"epoch_ms": self.began_ms, "wall_ms": self.began_ms, "speed": SPEED},
            "adapters": {"withdraw_after_s": STALE_S, "max_share": 0.5, "adapter": [row, *adapters]},
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
                env=self.slurm.environment | {"PATH": os.environ["PATH"]},
                start_new_session=True,
            )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def publish(self, age_s: float = 0.0, **risk: float) -> None:
        """Risks of nodes within an hour; those of all others are low."""
        self.published += 1
        now_ms = self.began_ms + int((time.time_ns() / 1e6 - self.began_ms) * SPEED - age_s * 1000)
        hour, n = np.array([risk.get(name, 0.001) for name in self.nodes]), len(self.nodes)
        parts: dict[str, Any] = {
            "names.node": "\n".join(self.nodes).encode(),
            "node.risk": np.tile(hour, (3, 4, 1)),
            "node.state": np.zeros(n, np.int8),
            "gpu.usable": np.ones((n, GPUS), bool),
            "gpu.job": np.full((n, GPUS), -1, np.int32),
            "risk.reason": json.dumps({"n1": "GPU 3: XID 63 twice"}).encode(),
        }
        self.board.publish([Section(name, data, now_ms) for name, data in parts.items()], now_ms)

    def node(self, name: str) -> tuple[bool, str, str]:
        """Whether it is drained, its reason, its features."""
        line = self.slurm.run("scontrol", "show", "node", name, "-o")
        features = re.search(r" AvailableFeatures=(\S*) ActiveFeatures=(\S*)", line)
        assert features
        reason = re.search(r" Reason=(.*?)(?: \[\S+@\S+\])?(?: (?:Comment|Extra)=.*)?\s*$", line)
        state = re.search(r" State=(\S+)", line)
        assert features[1] == features[2]
        return "DRAIN" in str(state and state[1]), reason[1] if reason else "", features[1]

    def until(self, name: str, drained: bool, reason: str, features: str, limit_s: float = 60.0) -> float:
        """Seconds until it was so."""
        wanted, began = (drained, reason, features), time.monotonic()
        while (found := self.node(name)) != wanted:
            if time.monotonic() - began > limit_s:
                raise AssertionError(f"{name}: {found}, not {wanted}\n{(self.folder / 'log').read_text()[-3000:]}")
            time.sleep(0.1)
        return time.monotonic() - began

    def cli(self, *words: str) -> str:
        command = [sys.executable, "-m", "fleetcast.cli.main", "adapters", *words, "--config", str(self.config)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=self.slurm.environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def standing(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.cli("list", "--json"))[-1]
        return row
