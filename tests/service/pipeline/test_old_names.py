"""State with the names of snapshot version 3: a start loads it whole, and the next save has the present names.

`tests/data/state-v3.zip` holds the snapshot and the board of the first of two pipelines, and the board of the other.
A job ran with steps and a checkpoint, one ended, one waits, and eight are at rest. Two nodes belong to the other
pipeline.
"""

import asyncio
import zipfile
import zlib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from fleetcast.features.arrays_file import read_arrays
from fleetcast.fleet.jobs import FIELDS
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.label_jobs import LabelJobs
from fleetcast.models.risk.state import RiskState
from fleetcast.service.answers.jobs import RunningJobRow
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline import old_names
from fleetcast.service.pipeline.job_files import _read_rows
from fleetcast.service.pipeline.reports import read_pipeline_report
from fleetcast.service.pipeline.run_times.record import RunTimeRecord
from fleetcast.service.pipeline.snapshot import SNAPSHOT_VERSION, SavedState, Snapshot
from fleetcast.service.pipeline.stateful import NEW_PARTS
from fleetcast.service.placer import charging
from fleetcast.service.weather import read_job_outlooks

STATE = Path(__file__).parents[2] / "data" / "state-v3.zip"
START_MS = 1_789_000_000_000
NOW_MS = START_MS + 111_000
CHECKPOINT_MS = START_MS + 57_000


@pytest.fixture
def site(tmp_path: Path) -> Path:
    with zipfile.ZipFile(STATE) as file:
        file.extractall(tmp_path)
    return tmp_path


def load(site: Path) -> SavedState:
    topology = Topology.build([NodeSpec(name, 2, "H100") for name in ("n0", "n1", "n2")])
    return Snapshot(site / "snapshot").restore(Config(), topology, NOW_MS)


def board(folder: Path) -> Board:
    latest = BoardReader(folder).latest()
    assert latest is not None
    return latest


def test_a_snapshot_of_the_version_before_is_loaded_with_its_values(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = load(site)
    assert saved.number == 1
    assert "cannot be used" not in caplog.text
    assert sorted(saved.state.jobs.resting) == [f"old-{number}" for number in range(8)]
    gang = saved.state.jobs.attempts["gang", 1]
    assert (gang.reported_steps, gang.last_sign_ms) == (24, START_MS + 115_000)
    assert {row.reported_steps for row in saved.state.jobs if row.job in saved.state.jobs.resting} == {0}
    assert saved.state.jobs.attempts["waits", 1].state == "queued"
    risk = saved.parts[RiskState]
    assert (risk.record.predicted[0, 0], risk.shadow.predicted[0, 0]) == (2.5, 0.5)
    assert risk.rate.dump()[0]["telemetry_ms"]["n0"] == (START_MS + 6000, NOW_MS)
    assert saved.parts[LabelJobs].dump()[0]["explained"] == ["gang"]
    assert {job for job, _ in saved.parts[RunTimeRecord].issued} == {"gang", "gang2", "waits"}


def test_no_part_and_no_field_of_it_is_lost(site: Path) -> None:
    saved = load(site)
    for name, (about, arrays) in saved.parts.dump({}).items():
        if name in NEW_PARTS:
            continue
        stored = read_arrays(site / "snapshot" / "1" / f"{old_names.FILES.get(name, name)}.arrays")[1]
        then = old_names.rename_fields(
            name, (msgspec.msgpack.decode(stored.pop("about").tobytes(), strict=False), stored)
        )
        assert make_plain(about) == make_plain(then[0]), name
        assert sorted(arrays) == sorted(then[1]), name
        for array, values in arrays.items():
            np.testing.assert_array_equal(values, then[1][array], err_msg=f"{name} {array}")


def make_plain(value: Any) -> Any:
    """Return the value as JSON has it, so that tuples equal lists and NaN equals NaN."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=lambda number: number.item()))


def test_each_field_of_a_stored_attempt_has_its_place(site: Path) -> None:
    rows = _read_rows(site / "snapshot" / "1" / "jobs" / "000001.jobs")
    for row in rows:
        data = old_names.rename_attempts(row.attempts, row.resting)
        attempts = msgspec.msgpack.decode(zlib.decompress(data) if row.resting else data)
        assert {name for attempt in attempts for name in attempt} <= set(FIELDS), row.job


def test_the_next_save_has_the_present_names_and_loads_alike(site: Path) -> None:
    saved = load(site)
    asyncio.run(Snapshot(site / "snapshot").save(saved))
    folder = site / "snapshot" / "2"
    assert read_arrays(folder / "state.arrays")[0]["version"] == SNAPSHOT_VERSION
    names = {path.name for path in folder.iterdir()}
    assert {"forecaster.arrays", "run_times.arrays"} <= names
    assert not {"desk.arrays", "told.arrays"} & names
    again = load(site)
    assert again.number == 2
    assert sorted(again.state.jobs, key=str) == sorted(saved.state.jobs, key=str)


def test_a_board_of_the_version_before_states_checkpoints_and_newest_samples(site: Path) -> None:
    first = board(site / "board")
    (row,) = charging._running_rows(first.raw("jobs.running"))
    assert (row.job, row.checkpoint_ms) == ("gang", CHECKPOINT_MS)
    ended = b'[{"job":"j","attempt":1,"gpus":1,"started_ms":1,"kept_ms":7,"ended_ms":9,"outcome":"failed"}]'
    assert [row.checkpoint_ms for row in charging._ended_rows(ended)] == [7]
    assert read_job_outlooks(first)["gang"].checkpoint_ms == CHECKPOINT_MS
    local = read_pipeline_report(board(site / "pipeline-1" / "board")).local
    assert local.nodes == ("n0", "n1", "n2")
    assert local.newest_sample_ms.tolist() == [[0, START_MS + 105_000, START_MS + 105_000]] * 2


def test_a_row_is_written_under_the_present_name() -> None:
    row = RunningJobRow("j", 1, 1, START_MS, checkpoint_ms=CHECKPOINT_MS)
    data = msgspec.json.encode(row)
    assert b'"checkpoint_ms":1789000057000' in data
    assert b"kept_ms" not in data
    assert msgspec.json.decode(data, type=RunningJobRow) == row
