"""A site of a few hosts: the time to the first scores, then memory and CPU of all processes.

`fleetcast run` scrapes exporters on loopback, one for each host, with one adapter, so that every
role runs. Memory is the proportional set size (PSS): a page that processes share counts once. A
wake-up is a voluntary context switch: a thread waited and was woken.
"""

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.kit.exporters import ExporterFarm
from fleetcast.benchmarks.kit.service import find_free_port, read_cpu_s
from fleetcast.benchmarks.ticks.tick import GPUS_PER_NODE
from fleetcast.service.board.board import BoardReader

SIZES = (4 * GPUS_PER_NODE,)
WARM_UP_S = 75.0  # past the first snapshot
REST_S = 30.0
PATIENCE_S = 120.0
POLL_S = 0.01
MIB = 2**20


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the records of each size in GPUs: start, wake-ups, memory, CPU at rest, snapshot bytes."""
    for gpus in sizes:
        with tempfile.TemporaryDirectory() as folder:
            yield from _measure_cases(Path(folder), gpus)


def _measure_cases(folder: Path, gpus: int) -> Iterator[dict[str, Any]]:
    farm = ExporterFarm(max(1, gpus // GPUS_PER_NODE))
    try:
        site = SmallSite(folder, farm)
        try:
            size = {"gpus": gpus}
            start_s = site.wait_for_scores()
            yield make_record("small_site", "start to first scores", size, [start_s], "s", cpu_s=site.sum_cpu_s())
            time.sleep(WARM_UP_S)
            began, before, woken = time.monotonic(), site.sum_cpu_s(), site.count_process_wake_ups()
            time.sleep(REST_S)
            used, took_s = site.sum_cpu_s() - before, time.monotonic() - began
            for name, count in site.count_process_wake_ups().items():
                rate = (count - woken[name]) / took_s
                yield make_record("small_site", f"wake-ups at rest, {name}", size, [rate], "1/s", cpu_s=used)
            for name, pid in site.read_pids().items():
                yield make_record("small_site", f"memory, {name}", size, [read_pss_bytes(pid) / MIB], "MiB", cpu_s=used)
            yield make_record("small_site", "memory, all roles", size, [site.sum_pss_bytes() / MIB], "MiB", cpu_s=used)
            yield make_record(
                "small_site", "CPU at rest, all roles", size, [1000 * used / took_s], "ms/s of time", cpu_s=used
            )
            yield make_record(
                "small_site", "snapshots on disk", size, [site.measure_snapshot_bytes() / MIB], "MiB", cpu_s=used
            )
        finally:
            site.stop()
    finally:
        farm.close()


class SmallSite:
    """A whole Fleetcast that scrapes a farm of exporters."""

    def __init__(self, folder: Path, farm: ExporterFarm) -> None:
        self._state = folder / "state"
        self._gpus = farm.nodes * GPUS_PER_NODE
        farm.write_groups(folder / "targets.json")
        config = folder / "config.toml"
        bands = {"use": "band_file", "mode": "write", "options": {"path": str(folder / "bands")}}
        settings = {
            "state": str(self._state),
            "scrape": {"targets": [f"file_sd:{folder / 'targets.json'}"]},
            "api": {"port": find_free_port()},
            "placer": {"port": find_free_port()},
            "adapters": {"adapter": [bands]},
        }
        config.write_text(tomli_w.dumps(settings), encoding="utf-8")
        self._began = time.monotonic()
        command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(config)]
        self._process = ChildProcess("the service", command)

    def wait_for_scores(self) -> float:
        """Wait until a board has all GPUs of all hosts. Returns the seconds since the start."""
        reader, deadline = BoardReader(self._state / "board"), self._began + PATIENCE_S
        while True:
            board = reader.latest() if (self._state / "board").exists() else None
            if board is not None and board.array("gpu.usable").sum() == self._gpus:
                return time.monotonic() - self._began
            self._process.check_running(unless="no scores of all hosts in time" if time.monotonic() > deadline else "")
            time.sleep(POLL_S)

    def read_pids(self) -> dict[str, int]:
        """Return process name → id, as the supervisor wrote them."""
        lines = (self._state / "pids").read_text(encoding="utf-8").splitlines()
        return {name: int(pid) for name, pid in (line.split() for line in lines)}

    def sum_pss_bytes(self) -> int:
        return sum(map(read_pss_bytes, self.read_pids().values()))

    def sum_cpu_s(self) -> float:
        return sum(map(read_cpu_s, self.read_pids().values()))

    def count_process_wake_ups(self) -> dict[str, int]:
        """Return process name → voluntary context switches of its threads since their start."""
        return {name: count_wake_ups(pid) for name, pid in self.read_pids().items()}

    def measure_snapshot_bytes(self) -> int:
        """Return the bytes of the snapshots on disk. A file with several names counts once."""
        files = [path.stat() for path in (self._state / "snapshot").rglob("*") if path.is_file()]
        return sum({file.st_ino: file.st_blocks * 512 for file in files}.values())

    def stop(self) -> None:
        self._process.stop()


def read_pss_bytes(pid: int) -> int:
    """Return the proportional set size of a process in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def count_wake_ups(pid: int) -> int:
    """Return the voluntary context switches of a process's present threads."""
    files = Path(f"/proc/{pid}/task").glob("*/status")
    lines = (line for file in files for line in file.read_text(encoding="ascii").splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
