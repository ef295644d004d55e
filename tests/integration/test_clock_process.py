"""A real pipeline process whose clock is set back and ahead by hours, and which is stopped for a while."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.pipeline.pipeline_clock import STILL_WALL_S

HOUR_MS = 3_600_000
LAUNCH = """
import sys, time
from pathlib import Path
real, offset = time.time_ns, Path(sys.argv.pop(1))
time.time_ns = lambda: real() + int(offset.read_text() or 0) * 10**6
from fleetcast.cli.main import app
app()
"""
PAGE = """\
DCGM_FI_DEV_GPU_TEMP{{gpu="{gpu}",UUID="GPU-{gpu}",modelName="NVIDIA H100",Hostname="n001"}} 60
DCGM_FI_DEV_POWER_USAGE{{gpu="{gpu}",UUID="GPU-{gpu}",modelName="NVIDIA H100",Hostname="n001"}} 400
"""


class Process:
    """A pipeline role whose clock is `offset` ms ahead of the machine's."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.offset = folder / "offset"
        self.set_clock(0)
        config = {
            "state": str(folder / "state"),
            "scrape": {"targets": [url], "interval_s": 1.0},
            "pipeline": {"tick_s": 1.0, "snapshot_s": 3.0},
        }
        (folder / "config.toml").write_text(tomli_w.dumps(config))
        self.reader = BoardReader(folder / "state" / "board")
        (folder / "launch.py").write_text(LAUNCH)
        command = [sys.executable, str(folder / "launch.py"), str(self.offset)]
        command += ["run", "--role", "pipeline", "--config", str(folder / "config.toml")]
        (folder / "state").mkdir()
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=_environment())

    def set_clock(self, by_ms: int) -> None:
        beside = self.offset.with_suffix(".tmp")
        beside.write_text(str(by_ms))
        beside.replace(self.offset)
        self.by_ms = by_ms

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self.by_ms

    def until(self, what: str, check: Callable[[Board], Any], limit_s: float = 150.0) -> Board:
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log()
            board = self.reader.latest()
            if board is not None and check(board):
                return board
            time.sleep(0.1)
        raise AssertionError(f"{what}: not within {limit_s:.0f} s\n{self.log()[-2000:]}")

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def settled(self) -> Board:
        """A board of the clock as it is set, with samples by that clock."""

        def fits(board: Board) -> bool:
            newest_ms = board.json("doc.ingestion")["newest_sample_ms"] or 0
            return abs(self.now_ms() - board.as_of_ms) < 5000 and 0 <= board.as_of_ms - newest_ms < 5000

        return self.until("a board and samples of this clock", fits)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}


@pytest.fixture
def pipeline(tmp_path: Path, folder_server: tuple[Path, str]) -> Iterator[Process]:
    root, url = folder_server
    (root / "metrics").write_text("".join(PAGE.format(gpu=gpu) for gpu in range(8)))
    folder = tmp_path / "clock"
    folder.mkdir()
    made = Process(folder, url)
    yield made
    if made.process.poll() is None:
        made.process.send_signal(signal.SIGCONT)
        made.process.terminate()
        made.process.wait(20)


def healthy(board: Board) -> None:
    (row,) = board.json("doc.fleet")["nodes"]
    assert (row["node"], row["flagged"], row["state"]) == ("n001", False, "ok")
    assert all(gpu["usable"] for gpu in row["gpus"])
    assert board.json("doc.ingestion")["late_total"] == 0


@pytest.mark.integration
def test_a_process_goes_on_when_its_clock_is_set_and_when_it_was_stopped(pipeline: Process) -> None:
    healthy(pipeline.settled())
    for by_ms in (-3 * HOUR_MS, 2 * HOUR_MS, 0):
        pipeline.set_clock(by_ms)
        healthy(pipeline.settled())
    log = pipeline.log()
    assert "the clock was set back by 10800 s" in log
    assert "the clock was set ahead by 18000 s" in log
    pipeline.process.send_signal(signal.SIGSTOP)
    time.sleep(STILL_WALL_S + 2)
    pipeline.process.send_signal(signal.SIGCONT)
    healthy(pipeline.settled())
    assert "this process stood still for" in pipeline.log()
    assert "Traceback" not in pipeline.log()
