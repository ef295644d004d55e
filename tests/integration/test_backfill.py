"""Backfill from a real Prometheus that has scraped for a while: once, resumed, and beside what was archived already."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from fleetcast.benchmarks.inputs.decode import make_page
from tests.integration.prometheus_writer import PrometheusWriter
from tests.integration.test_remote_write import page_server
from tests.programs import needed

pytestmark = pytest.mark.integration

NODES, SCRAPES = 3, 5


def rows(state: Path) -> list[tuple[str, str, int, float]]:
    found = []
    for path in sorted((state / "archive" / "samples").rglob("*.parquet")):
        columns = pq.ParquetFile(path).read(["entity", "metric", "time_ms", "value"]).to_pydict()
        found += list(zip(*columns.values(), strict=True))
    return found


def backfill(state: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fleetcast.cli.main", "backfill", *arguments, "--state", str(state)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=os.environ)


def test_what_prometheus_has_recorded_lands_in_the_archive_once(tmp_path: Path) -> None:
    pages = [make_page(f"old{number}", np.random.default_rng(number), gpus=2) for number in range(NODES)]
    lines = b"".join(line + b"\n" for page in pages for line in page.split(b"\n") if line and line[:1] != b"#")
    with page_server(lines) as target:
        writer = PrometheusWriter(Path(needed("prometheus")), tmp_path, [target], interval_s=1.0)
        try:
            deadline = time.monotonic() + 300
            while writer.sum("prometheus_target_interval_length_seconds_count") < SCRAPES:
                assert time.monotonic() < deadline, writer.log()
                time.sleep(0.2)
            state = tmp_path / "state"
            until = str(int(time.time()) - 1)
            first = backfill(state, writer.url, "--from", "1h", "--to", until)
            assert first.returncode == 0, first.stderr
            kept = rows(state)
            again = backfill(state, writer.url, "--from", str(int(until) - 1800), "--to", until)
            (state / "backfill.json").unlink()  # as if the run had been cut short before it could note anything
            rebuilt = backfill(state, writer.url, "--from", "1h", "--to", until, "--window", "10m")
            stepped = backfill(tmp_path / "other", writer.url, "--from", "10m", "--step", "1s", "--match", 'gpu="1"')
        finally:
            writer.stop()
        away = backfill(tmp_path / "other", writer.url, "--from", "10m")
    series = {row[:2] for row in kept}
    assert len([name for name, _ in series if name.startswith("old")]) == lines.count(b"\n")
    assert len({row[:3] for row in kept}) == len(kept) >= (SCRAPES - 2) * lines.count(b"\n")
    assert len({(*row[:2], row[3]) for row in kept}) == len(series), "the page says the same each time"
    assert "0 written" in again.stdout
    assert "were done before" in again.stderr
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert rows(state) == kept
    assert stepped.returncode == 0, stepped.stderr
    assert {name.rpartition("/")[2] for name, *_ in rows(tmp_path / "other")} == {"1"}
    does, *waits, why = away.stderr.splitlines()
    assert (away.returncode, does) == (1, "backfill (an answer may take 120 s)"), away.stderr
    assert all(line.startswith(f"waiting for {writer.url}: ") for line in waits), away.stderr
    assert "does not answer" in why
    assert "Connection refused" in why


def test_a_wrong_wish_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    for arguments in (("ftp://x", "--from", "1h"), ("http://x", "--from", "soon"), ("http://x", "--from", "now")):
        assert backfill(tmp_path, *arguments).returncode == 2
    assert not list(tmp_path.iterdir())
