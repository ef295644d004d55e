"""The time from the start of a pipeline to its first board, with a fleet's snapshot on disk.

The process is a real one, with a configuration file and a topology file. The snapshot is that of a busy site:
full rings, a file for each of the last minutes, running jobs with their steps, and weeks of ended jobs. A first
start does not count. It only compiles every module, as an installation does.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from fleetcast.benchmarks.kit.case import fits_memory, make_record
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.kit.service import read_cpu_s, write_topology
from fleetcast.benchmarks.ticks.snapshot import make_old_site
from fleetcast.benchmarks.ticks.tick import BYTES_PER_GPU, BusyFleet
from fleetcast.service.board.board import BoardReader

MINUTES = 10  # saves since the last whole one
REPEATS = 3
PATIENCE_S = 300.0


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure a fleet of each size in GPUs. Sizes that do not fit the memory twice are left out."""
    for gpus in sizes:
        if not fits_memory(gpus, 2 * BYTES_PER_GPU):
            continue
        with tempfile.TemporaryDirectory() as folder:
            fleet = make_old_site(gpus, Path(folder))
            save_earlier_state(fleet)
            now_ms, jobs = fleet.clock.now_ms(), len(fleet.pipeline.state.jobs.list_running())
            del fleet
            starts = [measure_first_board(Path(folder), now_ms, gpus, jobs) for _ in range(1 + REPEATS)][1:]
            values = [took_s for took_s, _ in starts]
            cpu_s = min(starts)[1]
            yield make_record("start", "process to first board, snapshot", {"gpus": gpus}, values, "s", cpu_s=cpu_s)


def save_earlier_state(fleet: BusyFleet) -> None:
    """Write the files that an earlier process would have left on disk."""
    fleet.run_tick()
    asyncio.run(fleet.pipeline.save())
    for _ in range(MINUTES):
        for _ in range(4):
            fleet.ingest_scrape()
        asyncio.run(fleet.pipeline.save())


def measure_first_board(folder: Path, now_ms: int, gpus: int, jobs: int) -> tuple[float, float]:
    """Return the wall and CPU seconds from the start of a process to its first board.

    Asserts that the board has the running jobs.
    """
    config = _write_config(folder, now_ms, gpus)
    reader = BoardReader(folder / "board")
    before = reader.latest()
    sequence = before.sequence if before else 0
    command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--role", "pipeline", "--config", str(config)]
    began = time.monotonic()
    process = ChildProcess("the pipeline", command)
    try:
        while (board := reader.latest()) is None or board.sequence == sequence:
            process.check_running(unless="no first board in time" if time.monotonic() - began > PATIENCE_S else "")
            time.sleep(0.005)
        took_s, cpu_s = time.monotonic() - began, read_cpu_s(process.pid)
    finally:
        process.stop(0)
    assert len(board.json("jobs.running")) == jobs > 0, "the board does not know what runs"
    return took_s, cpu_s


def _write_config(folder: Path, now_ms: int, gpus: int) -> Path:
    """Write a configuration and a topology file. Returns the path of the configuration.

    The configured clock continues from `now_ms`, when the snapshot was saved.
    """
    config = folder / "config.toml"
    clock = {"epoch_ms": now_ms, "wall_ms": time.time_ns() // 1_000_000}
    settings = {"state": str(folder), "clock": clock, "fleet": {"topology": str(write_topology(folder, gpus))}}
    config.write_text(tomli_w.dumps(settings), encoding="utf-8")
    return config
