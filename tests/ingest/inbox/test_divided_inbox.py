"""The inbox that several pipelines read: nothing goes before all have it, and nothing is skipped."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.checks import check_source
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.inbox.divided import DividedInbox, read_marks
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter
from fleetcast.ingest.inbox.segments import list_segments
from fleetcast.ingest.shares import Share

NOW_MS = 1_789_000_000_000


def event(number: int) -> bytes:
    return msgspec.json.encode(
        {"job": f"j{number}", "attempt": 1, "sequence": 1, "time_ms": NOW_MS, "type": "submitted"}
    )


def write(folder: Path, segments: int) -> None:
    """As many segments, one event each."""

    async def append() -> None:
        writer = InboxWriter(folder, "api", segment_bytes=1)
        for number in range(segments):
            await writer.append([event(number)], NOW_MS)
        await writer.close()

    asyncio.run(append())


def divided(folder: Path, instance: int = 0, instances: int = 1) -> DividedInbox:
    return DividedInbox(InboxSource(folder), Entities(), Share(instance, instances))


def read_all(source: DividedInbox, position: dict[str, Any] | None = None) -> list[str]:
    async def read() -> list[str]:
        jobs: list[str] = []
        if position is not None:
            source.seek(position)
        while not jobs or source.backlog_bytes():
            batch = await source.next()
            jobs += [row.job for row in batch.events]
            if not source.backlog_bytes():
                return jobs
        return jobs

    return asyncio.run(asyncio.wait_for(read(), 60))


def numbers(folder: Path) -> list[int]:
    return [number for number, _ in list_segments(folder).get("api", [])]


def test_it_is_a_source(tmp_path: Path) -> None:
    write(tmp_path, 4)
    check_source(lambda: divided(tmp_path), 1)


def test_events_are_the_first_pipelines_and_everybody_gets_on(tmp_path: Path) -> None:
    write(tmp_path, 3)
    assert read_all(divided(tmp_path, 0, 2)) == ["j0", "j1", "j2"]
    second = divided(tmp_path, 1, 2)
    assert read_all(second) == []
    assert second.backlog_bytes() == 0


def test_a_segment_goes_when_all_have_passed_it(tmp_path: Path) -> None:
    write(tmp_path, 5)
    first, second = divided(tmp_path, 0, 2), divided(tmp_path, 1, 2)
    read_all(first)
    assert first.prune(first.position()) == 0
    assert numbers(tmp_path) == [1, 2, 3, 4, 5]
    assert second.prune({"api-000000000003.seg": 20}) == 2
    assert numbers(tmp_path) == [3, 4, 5]
    assert second.prune({"api-000000000005.seg": 20}) == 2


def test_where_their_number_was_changed_each_begins_at_what_is_left(tmp_path: Path) -> None:
    write(tmp_path, 4)
    divided(tmp_path).prune({"api-000000000002.seg": 16})
    first = divided(tmp_path, 0, 2)
    assert read_all(first, {"api-000000000004.seg": 16}) == ["j1", "j2", "j3"]
    first.prune(first.position())
    assert numbers(tmp_path) == [2, 3, 4]  # the second one may come later
    second = divided(tmp_path, 1, 2)
    second.seek({})
    read_all(second)
    assert second.prune(second.position()) == 2
    assert read_all(divided(tmp_path, 0, 2), {"api-000000000003.seg": 20}) == ["j3"]


def test_marks_of_pipelines_that_are_no_more_go_with_the_first_prune(tmp_path: Path) -> None:
    write(tmp_path, 4)
    for number, at in enumerate((4, 2)):
        divided(tmp_path, number, 2).prune({f"api-00000000000{at}.seg": 16})
    alone = divided(tmp_path)
    assert read_all(alone, {"api-000000000004.seg": 16}) == ["j1", "j2", "j3"]
    alone.prune(alone.position())
    assert [(mark.instance, mark.instances) for mark in read_marks(tmp_path)] == [(0, 1)]
    assert numbers(tmp_path) == [4]


def test_a_mark_that_cannot_be_read_keeps_the_inbox(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 3)
    divided(tmp_path, 1, 2).prune({"api-000000000003.seg": 16})
    (tmp_path / "read.1").write_bytes(b"{")
    first = divided(tmp_path, 0, 2)
    assert first.prune({"api-000000000003.seg": 16}) == 0
    assert "cannot be read" in caplog.text
