"""`fleetcast history`: what is shown is what DuckDB counts; compact and prune do what they say and no more."""

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from typer.testing import CliRunner

from fleetcast.cli.history import app
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError
from fleetcast.fleet.events import Finished
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.archive.files import DAY_MS, HOUR_MS, ArchiveFiles

NOW_MS = time.time_ns() // 1_000_000
T0 = NOW_MS // DAY_MS * DAY_MS - 9 * DAY_MS  # a day begins
METRICS = tuple(find_metric_row(EntityKind.GPU, name) for name in ("power_w", "gpu_temp_c"))
GUIDE = Path(__file__).resolve().parents[2] / "docs/archive.md"


@pytest.fixture(autouse=True)
def _one_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also around midnight."""
    monkeypatch.setattr("fleetcast.cli.history._read_now_ms", lambda: NOW_MS)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two days with a part every half hour, of two blocks."""
    tmp_path = tmp_path_factory.mktemp("written")
    entities = Entities()
    topology = Topology.build([NodeSpec(f"n{row}", 2, domains={Level.BLOCK: f"b{row}"}) for row in range(2)])
    for name in topology.names:
        entities.find_or_add_node(name)
    gpus = [entities.add_to_node(EntityKind.GPU, node, index) for node in topology.names for index in range(2)]
    archive = Archive(ArchiveFiles(str(tmp_path / "archive")), entities)
    for quarter in range(2 * 96):
        base_ms = T0 + quarter * HOUR_MS // 4
        rows = [(metric, gpu, base_ms, 100.0 + quarter + gpu) for gpu in gpus for metric in METRICS]
        archive.add(SampleBatch.from_rows(EntityKind.GPU, rows), np.ones(len(rows), np.bool_))
        archive.add_event(Finished(job="j", sequence=quarter, time_ms=base_ms))
        if quarter % 2:
            archive.prepare_flush(topology, NOW_MS)()
    archive.close()
    return tmp_path


@pytest.fixture
def state(written: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may change."""
    return shutil.copytree(written, tmp_path / "state")


def invoke(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None:
        raise result.exception
    assert result.exit_code == 0
    return result.output


def shown(state: Path, *words: object) -> Any:
    return json.loads(invoke("show", "--state", state, "--json", "-", *words))


def counted(state: Path) -> tuple[int, ...]:
    query = f"SELECT count(*), count(DISTINCT (metric, entity, time_ms)) FROM '{state}/archive/samples/**/*.parquet'"
    return tuple(duckdb.sql(query).fetchall()[0])


def test_it_shows_what_is_there_by_day(state: Path) -> None:
    rows = shown(state)
    assert [(row["dataset"], row["blocks"], row["files"], row["rows"]) for row in rows] == [
        ("events", 0, 48, 96),
        ("samples", 2, 96, 768),
    ] * 2
    assert all(row["bytes_per_row"] > 0 for row in rows)
    assert "768" in invoke("show", "--state", state)
    half = shown(state, "--from", f"{(T0 + DAY_MS) // 1000}", "--block", "b1")
    assert [row["rows"] for row in half] == [384]


def test_it_shows_series_and_the_course_of_one(state: Path) -> None:
    (row,) = shown(state, "--metric", "power_w", "--entity", "n1/0")
    assert (row["samples"], row["min"], row["max"], row["first_ms"]) == (192, 102.0, 293.0, T0)
    text = invoke("show", "--state", state, "--metric", "power_w", "--entity", "n1/0")
    assert "▁" in text
    assert re.search(r"^ +292\.5 ", text, re.MULTILINE)
    assert len(shown(state, "--metric", "power_w")) == 4
    assert "nothing there" in invoke("show", "--url", state / "elsewhere")
    assert "no such series" in invoke("show", "--state", state, "--metric", "no")
    with pytest.raises(ConfigError, match="--from"):
        invoke("show", "--state", state, "--from", "yesterday")


def test_compacting_changes_no_row(state: Path) -> None:
    assert counted(state) == (1536, 1536)
    assert "288 files with 1,728 rows are 144 now" in invoke("compact", "--state", state)
    assert counted(state) == (1536, 1536)
    assert [row["files"] for row in shown(state)] == [24, 48] * 2
    assert "nothing to compact" in invoke("compact", "--state", state)


def test_pruning_says_what_goes_and_only_that_goes(state: Path) -> None:
    days = [path.name for path in sorted((state / "archive" / "samples").iterdir())]
    assert "would delete" in invoke("prune", "--state", state, "--keep-days", 8, "--dry-run")
    assert len(shown(state)) == 4
    assert f"deleting {days[0].removeprefix('day=')}" in invoke("prune", "--state", state, "--keep-days", 8)
    assert {f"day={row['day']}" for row in shown(state)} == {days[1]}


def test_the_queries_of_the_guide_run(state: Path) -> None:
    text = GUIDE.read_text(encoding="utf-8")
    queries = re.findall(r"```sql\n(.*?)```", text, re.DOTALL)
    for query in queries:
        assert duckdb.sql(query.replace("var/archive", f"{state}/archive")).fetchall(), query
