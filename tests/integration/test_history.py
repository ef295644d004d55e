"""The archive of a whole Fleetcast: fed by scrapes and events, killed, stopped, and read with DuckDB meanwhile."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest

from tests.integration.service_process import Service
from tests.integration.test_main_path import GPUS, gpu_page

pytestmark = pytest.mark.integration

SAMPLES = "count(*), count(DISTINCT (kind, metric, entity, time_ms)), count(DISTINCT time_ms // 15000)"
EVENTS = "count(*), count(DISTINCT (of, name, attempt, source, sequence))"


def count(service: Service, what: str, dataset: str) -> tuple[int, ...]:
    """Of what is there now; zeroes before the first file."""
    folder = service.folder / "state" / "archive" / dataset
    if not list(folder.rglob("*.parquet")):
        return (0, 0, 0)
    return tuple(duckdb.sql(f"SELECT {what} FROM '{folder}/**/*.parquet'").fetchall()[0])


def more_rounds(service: Service, number: int) -> None:
    """Wait until so many further scrapes are in the archive."""
    there = count(service, SAMPLES, "samples")[2]
    service.until("new rounds in the archive", lambda: count(service, SAMPLES, "samples")[2] >= there + number, 60)


def kill_pipeline(service: Service) -> None:
    pid = service.pids()["pipeline"]
    os.kill(pid, signal.SIGKILL)
    service.until("another pipeline", lambda: service.pids().get("pipeline") not in (None, pid), 60)


def finished(job: str, sequence: int) -> dict[str, Any]:
    return {"job": job, "sequence": sequence, "time_ms": time.time_ns() // 1_000_000 - 5_000, "type": "finished"}


def test_each_sample_and_event_is_in_the_archive_once_whatever_is_killed(
    folder_server: tuple[Path, str], start_service: Callable[..., Service]
) -> None:
    root, url = folder_server
    (root / "metrics").write_text(gpu_page())
    service = start_service(scrape={"targets": [url]}, pipeline={"snapshot_s": 15.0})
    sent = 0
    for life in range(4):
        service.until("the api", lambda: service.get("/v1/ingestion"), 60)
        for number in range(25):
            event = finished(f"j{life}", number)
            status, _, _ = service.request("POST", "/v1/events", [event, event])
            sent += status in (200, 202)
        more_rounds(service, 3)
        kill_pipeline(service)
    service.until("all events", lambda: count(service, EVENTS, "events")[0] >= sent, 60)
    told = service.until("an archive that is told", lambda: (service.get("/v1/ingestion") or {}).get("archive"))
    assert told["failing"] == ""
    service.stop()
    rows, distinct, _ = count(service, SAMPLES, "samples")
    assert rows == distinct > 4 * GPUS
    assert count(service, EVENTS, "events") == (sent, sent)
    shown = subprocess.run(
        [sys.executable, "-m", "fleetcast.cli.main", "history", "show", "--state", str(service.folder / "state")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{rows:,}" in shown.stdout
