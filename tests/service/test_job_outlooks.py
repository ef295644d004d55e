"""What of a board an adapter is told of jobs."""

import json
import time
from pathlib import Path
from typing import Any

from fleetcast.service.board.board import BoardReader, BoardWriter, Section
from fleetcast.service.weather import read_job_outlooks

ROW = {
    **{"job": "7", "attempt": 1, "state": "running", "class": "training", "user": "ada", "queue": "train", "gpus": 8},
    **{"nodes": ["n1"], "submitted_ms": 1, "started_ms": 2, "remaining_s": None, "slow": False},
}
DETAIL = {
    "run_s": None,
    "asks": {"limit_s": 7200.0, "gpus_per_node": 8},
    "events": [
        {"type": "submitted", "job": "7", "name": "train"},
        {"type": "started", "job": "7"},
    ],
}


def test_a_job_has_the_name_and_the_limit_of_its_submission(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "doc.jobs": [ROW, {**ROW, "job": "8"}],
        "jobs.running": [],
        "doc.stragglers": {},
        "doc.job": {"7": DETAIL, "8": {"run_s": None, "events": []}},
    }
    now_ms = time.time_ns() // 1_000_000
    sections = [Section(name, json.dumps(part).encode(), now_ms) for name, part in parts.items()]
    BoardWriter(tmp_path / "board").publish(sections, now_ms)
    board = BoardReader(tmp_path / "board").latest()
    assert board is not None
    jobs = read_job_outlooks(board)
    assert (jobs["7"].name, jobs["7"].limit_s) == ("train", 7200.0)
    assert (jobs["8"].name, jobs["8"].limit_s) == ("", None)
