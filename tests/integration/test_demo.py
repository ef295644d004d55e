"""The main job, bounded: a small simulated fleet through every process, judged by its own truth file."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port


@pytest.mark.integration
def test_a_bounded_demo_keeps_its_promises(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "fleetcast.cli.main", "demo", "--seconds", "60", "--json", str(out), "--no-worth"]
    command += ["--port", str(free_port()), "--folder", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(out.read_text())
    assert report["samples"] > 100_000
    assert report["placements"]["placed"] > 0
    assert report["bad_records"] == report["bad_records_injected"] > 0
    story = [row for row in report["faults"] if row["kind"] == "thermal_throttle"]
    assert any(row["detected_ms"] for row in story)
    assert len(report["false_nodes"]) <= 2
    turns = [turn["event"] for turn in report["story"]]
    assert "urgent" in turns
    assert "stop" in turns, "a job is chosen to stop for the urgent gang"
    assert {"shrink_seen", "short_runs", "grow_seen"} <= set(turns), "the elastic gang shrinks and grows back"
