"""Real processes to measure: a server on its own core, and a pipeline that publishes boards."""

import contextlib
import multiprocessing
import os
import random
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import tomli_w

from fleetcast.benchmarks.kit.case import describe_machine
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.ticks.tick import GPUS_PER_NODE

START_S = 30.0
TICK_PAUSE_S = 1.0
MAKE_S = 300.0
PORTS = range(20_000, 32_000)


@lru_cache(1)
def list_cores() -> tuple[int, ...]:
    """Return the cores that this process had at its start."""
    return tuple(sorted(os.sched_getaffinity(0)))


@contextlib.contextmanager
def pin_to_cores(wanted: set[int]) -> Iterator[None]:
    """Pin this process, and the processes that it starts, to some cores while the context is open."""
    describe_machine()  # it remembers how many cores there are, not how many are left now
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def pin_beside_server() -> contextlib.AbstractContextManager[None]:
    """Pin this process, which generates the load, to the second core. The server has the first core."""
    return pin_to_cores(set(list_cores()[1:2] or list_cores()))


def choose_board_cores() -> set[int]:
    """Return the cores for a pipeline that ticks.

    With three cores, the pipeline does not share a core with the server or the load generator. With two cores it
    shares the server's core. If the generator had to wait for its core, it would attribute that delay to the
    server.
    """
    return set(list_cores()[2:] or list_cores()[:1])


def read_cpu_s(pid: int) -> float:
    """Return the user and system CPU seconds of a process so far, as clock_getcpuclockid(3) of Linux measures them.

    `/proc/PID/stat` counts in ticks of 10 ms: a short run takes none. Raises OSError if there is no such process.
    """
    return time.clock_gettime(~pid << 3 | 2)  # 2: CPUCLOCK_SCHED


def find_free_port() -> int:
    """Return an unused loopback port below the ephemeral range.

    An outgoing connection cannot occupy such a port before the server binds it.
    """
    for port in random.sample(PORTS, 50):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError("no free port")


def write_topology(folder: Path, gpus: int) -> Path:
    """Write `topology.toml` for a fleet of this size, and return its path.

    The nodes are n00000, n00001, … in racks of 16.
    """
    last = max(1, gpus // GPUS_PER_NODE) - 1
    racks = [
        {"name": f"r{first // 16}", "nodes": f"n[{first:05d}-{min(first + 15, last):05d}]"}
        | {"gpus": GPUS_PER_NODE, "gpu_model": "H100"}
        for first in range(0, last + 1, 16)
    ]
    path = folder / "topology.toml"
    path.write_text(tomli_w.dumps({"rack": racks}), encoding="utf-8")
    return path


class ServerProcess:
    """A running HTTP server, pinned to the first core."""

    def __init__(self, port: int, command: list[str]) -> None:
        self.port = port
        with pin_to_cores({list_cores()[0]}):
            self.process = ChildProcess("the server", command)

    @classmethod
    def start_role(cls, name: str, folder: Path, **sections: dict[str, Any]) -> "ServerProcess":
        """Start our own `api` or `placer` on a state folder. sections: more sections of its configuration."""
        ports = {"api": find_free_port(), "placer": find_free_port()}
        config: dict[str, Any] = {"state": str(folder)} | {role: {"port": port} for role, port in ports.items()}
        for section, values in sections.items():
            config[section] = config.get(section, {}) | values
        path = folder / f"{name}.toml"
        path.write_text(tomli_w.dumps(config))
        return cls(
            ports[name], [sys.executable, "-m", "fleetcast.cli.main", "run", "--role", name, "--config", str(path)]
        )

    def wait_for_answer(self, path: str, said: bytes = b"") -> None:
        """Wait until the server answers `path` with 200 and a body that contains `said`."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            self.process.check_running()
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as response:
                    body = response.read()
                if said in body:
                    return
            time.sleep(0.05)
        self.process.check_running(unless=f"{path}: no answer within {START_S:.0f} s")

    def measure_cpu_s(self) -> float:
        return read_cpu_s(self.process.pid)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.stop(10)


class BoardProcess:
    """A process with a pipeline of `gpus` GPUs. The pipeline publishes a new board every second, or ticks."""

    def __init__(self, folder: Path, gpus: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        with pin_to_cores(choose_board_cores()):
            self._process = context.Process(target=_run_pipeline, args=(folder, gpus, theirs), daemon=True)
            self._process.start()
        theirs.close()  # so that its end is seen here
        assert self._line.poll(MAKE_S), "the fleet was not made in time"
        self.nodes: int = self._receive_message()

    def set_mode(self, mode: str) -> None:
        """Set the mode `swap`, `tick` or `rest`, and wait until the pipeline confirms it."""
        self._line.send(mode)
        assert self._line.poll(MAKE_S), "the pipeline does not answer"
        assert self._receive_message() == mode

    def _receive_message(self) -> Any:
        try:
            return self._line.recv()
        except EOFError:
            self._process.join(10)
            raise AssertionError(
                f"the pipeline ended with {self._process.exitcode}; its traceback is printed above"
            ) from None

    def __enter__(self) -> "BoardProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.join(10)


def _run_pipeline(folder: Path, gpus: int, line: Connection) -> None:
    from fleetcast.benchmarks.ticks.tick import BusyFleet

    if len(list_cores()) == 1:
        os.nice(5)  # it shares the generator's core, and a generator that is late measures itself
    fleet = BusyFleet(gpus, folder)
    line.send(fleet.run_tick())
    mode = "rest"
    while True:
        if line.poll(TICK_PAUSE_S if mode != "rest" else None):
            mode = line.recv()
            line.send(mode)
        if mode == "tick":
            fleet.run_tick()
        elif mode == "swap":
            fleet.clock.advance(1)
            fleet.pipeline.board.publish([], fleet.clock.now_ms())
