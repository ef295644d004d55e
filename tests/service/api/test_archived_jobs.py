"""A job that ended and left the board is told from the archive; 404 only where that has nothing of it."""

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import SourceError
from fleetcast.fleet.events import Failed, Finished, JobEvent, Queued, Started, Step, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive, ArchiveLimits
from fleetcast.ingest.archive.compact import compact, find_compaction_runs
from fleetcast.ingest.archive.files import ArchiveFiles
from fleetcast.service.api.app import create_app
from fleetcast.service.api.archived_jobs import (
    AT_ONCE,
    MOST_WAITING,
    ArchivedJobs,
    ArchiveSearchResult,
    find_archived_attempt,
)
from fleetcast.service.board.board import BoardWriter
from fleetcast.service.config import ApiConfig, ArchiveConfig
from tests.service.api_world import NOW_MS, Client, config, publish, sections

HOUR_MS, DAY_MS = 3_600_000, 86_400_000
RANKS = (RankPlacement(0, "n1", (0, 1)), RankPlacement(1, "n2", (0, 1)))


def life(job: str, end_ms: int, attempt: int = 1, hours: int = 3, **failed: Any) -> list[JobEvent]:
    """Submitted, queued, started, many steps, and its end."""
    who: dict[str, Any] = {"job": job, "attempt": attempt}
    begin_ms = end_ms - hours * HOUR_MS
    steps = [Step(**who, sequence=10 + n, time_ms=begin_ms + n, step=n, duration_s=1.0) for n in range(50)]
    end: JobEvent = Finished(**who, sequence=1000, time_ms=end_ms)
    if failed:
        end = Failed(**who, sequence=1000, time_ms=end_ms, **failed)
    submitted = Submitted(**who, sequence=1, time_ms=begin_ms, user="ada", queue="train", gang=2, gpus_per_node=2)
    started = Started(**who, sequence=3, time_ms=begin_ms + 2, ranks=RANKS)
    return [submitted, Queued(**who, sequence=2, time_ms=begin_ms + 1, reason="x"), started, *steps, end]


def archived(folder: Path, events: Sequence[JobEvent], writer: str = "0") -> ArchiveFiles:
    files = ArchiveFiles(str(folder / "archive"))
    archive = Archive(files, Entities(), writer=writer, limits=ArchiveLimits())
    for event in events:
        archive.add_event(event)
    archive.prepare_flush(Topology.build([]), NOW_MS)()
    archive.close()
    return files


def ask(folder: Path, job: str, **archive: Any) -> tuple[int, dict[str, Any]]:
    publish(folder)
    made = msgspec.structs.replace(config(folder), archive=ArchiveConfig(**archive))
    with Client(create_app(made, ManualClock(NOW_MS))) as client:
        response = client.get(f"/v1/jobs/{job}")
        return response.status_code, response.json()


def test_a_job_that_only_labels_told_of_is_told_from_the_archive(tmp_path: Path) -> None:
    old = [msgspec.structs.replace(event, sequence=event.sequence - 2**32) for event in life("ml/a", NOW_MS - DAY_MS)]
    archived(tmp_path, old)
    status, body = ask(tmp_path, "ml/a")
    assert (status, body.get("state"), body.get("source")) == (200, "finished", "archive")


def test_a_job_that_left_the_board_is_told_from_the_archive(tmp_path: Path) -> None:
    old = life("team/old", NOW_MS - 5 * DAY_MS, category="hardware", node="n2", message="fell off")
    archived(tmp_path, [*old, *life("other", NOW_MS - 2 * HOUR_MS)])
    status, body = ask(tmp_path, "team/old")
    assert status == 200
    wanted = {"job": "team/old", "attempt": 1, "state": "failed", "user": "ada", "queue": "train", "gpus": 4}
    wanted |= {"source": "archive", "ended_ms": NOW_MS - 5 * DAY_MS, "nodes": ["n1", "n2"], "remaining_s": None}
    assert {key: body[key] for key in wanted} == wanted
    assert body["failure"]["category"] == "hardware"
    assert [row["rank"] for row in body["placement"]] == [0, 1]
    assert [event["type"] for event in body["events"]] == ["submitted", "queued", "started", "failed"]
    assert body["reasons"]["remaining_s"] == "it is over"


def test_the_latest_attempt_counts_whatever_days_and_files_it_is_in(tmp_path: Path) -> None:
    first = life("j", NOW_MS - 9 * DAY_MS, category="user")
    second = life("j", NOW_MS - 7 * DAY_MS, attempt=2, hours=60)
    files = archived(tmp_path, first)
    archived(tmp_path, second)
    for run in find_compaction_runs(files, "0", NOW_MS, most_rows=1_000_000):
        compact(files, run)
    found = find_archived_attempt(files, "j", 30.0)
    assert found.attempt is not None
    assert (found.attempt.attempt, found.attempt.state, found.attempt.run_s) == (2, "finished", 60 * 3600 - 0.002)


@pytest.mark.parametrize(
    ("archive", "why"),
    [
        ({}, "and the archive has no event of it"),
        ({"enabled": False}, "archive.enabled = false"),
        ({"look_s": 0.0}, "archive.look_s = 0, so"),
    ],
)
def test_one_that_is_nowhere_is_not_found_with_where_was_looked(
    tmp_path: Path, archive: dict[str, Any], why: str
) -> None:
    archived(tmp_path, life("other", NOW_MS - DAY_MS))
    status, body = ask(tmp_path, "nobody", **archive)
    assert status == 404
    assert why in body["detail"]


def test_a_replica_says_whom_to_ask(tmp_path: Path) -> None:
    made = msgspec.structs.replace(config(tmp_path), api=ApiConfig(board="http://127.0.0.1:9"))
    BoardWriter(made.board).publish(sections(), NOW_MS)
    with Client(create_app(made, ManualClock(NOW_MS))) as client:
        response = client.get("/v1/jobs/gone")
    assert response.status_code == 404
    assert "http://127.0.0.1:9 has one to ask" in response.json()["detail"]


def test_an_archive_that_cannot_be_read_is_no_404(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(ArchiveFiles, "list_days", broken)
    status, body = ask(tmp_path, "j")
    assert (status, "the archive cannot be read" in body["detail"]) == (503, True)


def test_the_look_ends_when_its_time_is_over_and_says_how_far_it_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = archived(tmp_path, [*life("a", NOW_MS - DAY_MS, hours=1), *life("b", NOW_MS - 3 * DAY_MS, hours=1)])
    moments = iter(range(100))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(moments)))
    found = find_archived_attempt(files, "b", 2.5)
    assert found.attempt is None
    assert found.stopped_ms is not None
    assert NOW_MS - 3 * DAY_MS <= found.stopped_ms < NOW_MS - DAY_MS
    assert find_archived_attempt(files, "b", 50.0) != ArchiveSearchResult()


def test_no_more_than_a_few_look_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that nobody has are cheap to ask for, and dear to look for."""
    running, most, go = [0], [0], threading.Event()

    def slow(*_: object) -> ArchiveSearchResult:
        running[0] += 1
        most[0] = max(most[0], running[0])
        go.wait(30)
        running[0] -= 1
        return ArchiveSearchResult()

    monkeypatch.setattr("fleetcast.service.api.archived_jobs.find_archived_attempt", slow)

    async def scenario() -> int:
        jobs = ArchivedJobs(config(tmp_path))
        work = [asyncio.create_task(jobs.find_job(str(number))) for number in range(MOST_WAITING + 5)]
        while running[0] < AT_ONCE:
            await asyncio.sleep(0.01)
        go.set()
        answers = await asyncio.gather(*work, return_exceptions=True)
        return sum(isinstance(answer, SourceError) for answer in answers)

    assert asyncio.run(scenario()) == 5
    assert most[0] <= AT_ONCE
