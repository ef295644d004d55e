"""A small simulated fleet with faults, and a whole Fleetcast on it."""

import os
import subprocess
import sys
import time
from pathlib import Path

from fleetcast.simulator.days.traces import DEFAULT_AT, parse_time_ms, shift_start_ms
from tests.integration.service_process import SPEED, Service
from tests.ports import free_port

START_S = 300.0


class SimulatedFleet:
    """Starts the simulation, then the service on it; `stop` ends both. teams: the jobs are theirs, in their queues."""

    def __init__(self, folder: Path, nodes: int, teams: bool = False) -> None:
        port, wall_ms = free_port(), time.time_ns() // 1_000_000
        epoch_ms = shift_start_ms(parse_time_ms(DEFAULT_AT), wall_ms)
        clock = ["--epoch-ms", str(epoch_ms), "--wall-ms", str(wall_ms), "--speed", str(SPEED)]
        command = ["simulate", "cluster", "--out", str(folder), "--nodes", str(nodes), *clock]
        command += ["--teams"] if teams else []
        with open(folder / "simulation.log", "wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fleetcast.cli.main", *command, "--api", f"http://127.0.0.1:{port}"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=os.environ | {"FLEETCAST_DATA": str(folder / "none")},  # jobs made for a fleet of this size
            )
        bands = {"use": "band_file", "mode": "write", "options": {"path": str(folder / "bands")}}
        try:
            self._wait_for(folder / "targets.txt")
            self.service = Service(
                folder,
                clock={"epoch_ms": epoch_ms, "wall_ms": wall_ms, "speed": SPEED},
                fleet={"topology": str(folder / "topology.toml")},
                scrape={"targets": [f"file:{folder / 'targets.txt'}"], "timeout_s": 15.0},
                api={"port": port},
                adapters={"adapter": [bands]},
                placer={"port": port + 1, "queues": str(folder / "queues.toml") if teams else ""},
            )
            self.service.port = port
        except BaseException:
            self._end()
            raise

    def _wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + START_S
        while not path.exists():
            log = path.with_name("simulation.log").read_text(errors="replace")
            assert self.process.poll() is None, f"the simulation ended: {log}"
            assert time.monotonic() < deadline, f"the simulation wrote no {path.name}: {log}"
            time.sleep(0.05)

    def _end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def stop(self) -> None:
        self.service.stop()
        self._end()
