"""The durable inbox: acknowledged means on disk, read once in order, and a torn tail hurts nothing."""

import asyncio
import errno
import json
import os
import struct
from pathlib import Path

import msgspec
import pytest

from fleetcast.fleet.errors import RecordError, SourceError
from fleetcast.fleet.events import Submitted
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter, read_newest_events
from fleetcast.ingest.inbox.records import decode_records, encode_refusals
from fleetcast.ingest.inbox.segments import HEADER, Record, RecordKind, encode_record, list_segments, scan_records
from fleetcast.ingest.source import Batch

NOW_MS = 1_760_000_000_000


def record(sequence: int, job: str = "a") -> bytes:
    return json.dumps({"job": job, "sequence": sequence, "time_ms": NOW_MS, "type": "finished"}).encode()


def append(folder: Path, *sequences: int, name: str = "api", segment_bytes: int = 2**20) -> None:
    """Each sequence in an append of its own, by a writer that is then closed."""

    async def write() -> None:
        writer = InboxWriter(folder, name, segment_bytes=segment_bytes)
        for sequence in sequences:
            await writer.append([record(sequence)], NOW_MS)
        await writer.close()

    asyncio.run(write())


def drain(source: InboxSource) -> Batch:
    """Everything there is now."""

    async def read() -> Batch:
        parts = []
        while True:
            waiting = asyncio.ensure_future(source.next())
            await asyncio.sleep(0)  # it reads what there is before it waits
            if not waiting.done():
                waiting.cancel()
                return Batch.merge(parts) if parts else Batch()
            parts.append(waiting.result())

    return asyncio.run(read())


def sequences(batch: Batch) -> list[int]:
    return [event.sequence for event in batch.events]


def segment_files(folder: Path) -> list[Path]:
    return [path for rows in list_segments(folder).values() for _, path in rows]


def test_what_was_appended_is_read_in_order(tmp_path: Path) -> None:
    append(tmp_path, 1, 2, 3)
    assert sequences(drain(InboxSource(tmp_path))) == [1, 2, 3]


def test_a_reader_waits_for_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    source = InboxSource(tmp_path / "inbox")
    assert sequences(drain(source)) == []
    append(tmp_path / "inbox", 1)
    assert sequences(drain(source)) == [1]


def test_a_reader_wakes_up_for_what_is_appended_while_it_waits(tmp_path: Path) -> None:
    async def run() -> list[int]:
        writer, source = InboxWriter(tmp_path, "api"), InboxSource(tmp_path, poll_s=0.001)
        waiting = asyncio.ensure_future(source.next())
        await asyncio.sleep(0.005)
        await writer.append([record(1)], NOW_MS)
        batch = await waiting
        await writer.close()
        return sequences(batch)

    assert asyncio.run(run()) == [1]


def test_concurrent_callers_share_one_sync(tmp_path: Path) -> None:
    async def run() -> tuple[int, int]:
        writer = InboxWriter(tmp_path, "api")
        await asyncio.gather(*(writer.append([record(n)], NOW_MS) for n in range(100)))
        await writer.close()
        return writer.appended, writer.syncs

    appended, syncs = asyncio.run(run())
    assert appended == 100
    assert syncs <= 3
    assert sorted(sequences(drain(InboxSource(tmp_path)))) == list(range(100))


def test_a_segment_is_followed_by_the_next_when_it_is_full(tmp_path: Path) -> None:
    append(tmp_path, *range(1, 6), segment_bytes=150)
    assert len(segment_files(tmp_path)) >= 2
    assert sequences(drain(InboxSource(tmp_path))) == [1, 2, 3, 4, 5]


def test_reading_goes_on_at_the_position_that_was_kept(tmp_path: Path) -> None:
    append(tmp_path, 1, 2)
    first = InboxSource(tmp_path)
    drain(first)
    kept = json.loads(json.dumps(first.position()))
    append(tmp_path, 3)
    second = InboxSource(tmp_path)
    second.seek(kept)
    assert sequences(drain(second)) == [3]


def test_an_empty_position_is_the_beginning(tmp_path: Path) -> None:
    append(tmp_path, 1)
    source = InboxSource(tmp_path)
    source.seek({})
    assert sequences(drain(source)) == [1]


def test_a_torn_tail_of_the_newest_segment_is_waited_for(tmp_path: Path) -> None:
    append(tmp_path, 1)
    (segment,) = segment_files(tmp_path)
    whole = encode_record(RecordKind.EVENT, NOW_MS, record(2))
    with open(segment, "ab") as file:
        file.write(whole[:20])
    source = InboxSource(tmp_path)
    batch = drain(source)
    assert sequences(batch) == [1]
    assert batch.bad == ()
    with open(segment, "ab") as file:
        file.write(whole[20:])
    assert sequences(drain(source)) == [2]


def test_a_torn_tail_is_counted_and_passed_once_its_writer_began_anew(tmp_path: Path) -> None:
    append(tmp_path, 1)
    (segment,) = segment_files(tmp_path)
    with open(segment, "ab") as file:
        file.write(encode_record(RecordKind.EVENT, NOW_MS, record(2))[:-3])
    source = InboxSource(tmp_path)
    drain(source)
    append(tmp_path, 3)
    batch = drain(source)
    assert sequences(batch) == [3]
    assert [error.reason for error in batch.bad] == ["torn"]
    assert source.torn == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_a_flipped_bit_costs_the_record_it_is_in(tmp_path: Path, sealed: bool) -> None:
    append(tmp_path, 1, 2, 3)
    (segment,) = segment_files(tmp_path)
    blob = encode_record(RecordKind.EVENT, NOW_MS, record(2))
    for bit in range(0, len(blob) * 8, 61):
        data = bytearray(segment.read_bytes())
        data[len(HEADER) + len(blob) + bit // 8] ^= 1 << bit % 8
        folder = tmp_path / f"{bit}"
        folder.mkdir()
        (folder / segment.name).write_bytes(data)
        if sealed:
            append(folder, 4)
        batch = drain(InboxSource(folder))
        assert sequences(batch) == [1, 3, 4][: 3 if sealed else 2]
        assert [error.reason for error in batch.bad] == ["torn"]


def test_damage_larger_than_a_read_is_passed(tmp_path: Path) -> None:
    append(tmp_path, 1)
    (segment,) = segment_files(tmp_path)
    blob = encode_record(RecordKind.EVENT, NOW_MS, record(2))
    noise = bytes(range(256)) * 2**13
    segment.write_bytes(segment.read_bytes() + noise + blob + b"\0" * 2**21 + blob)
    batch = drain(InboxSource(tmp_path))
    assert sequences(batch) == [1, 2, 2]
    assert [error.reason for error in batch.bad] == ["torn", "torn"]


def test_a_foreign_file_in_the_folder_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "api-000000000001.seg").write_bytes(b"something else entirely")
    (tmp_path / "notes.txt").write_text("hello")
    append(tmp_path, 1)
    batch = drain(InboxSource(tmp_path))
    assert sequences(batch) == [1]
    assert [error.reason for error in batch.bad] == ["torn"]


def test_every_cut_of_a_segment_gives_its_whole_records() -> None:
    blobs = [encode_record(RecordKind.EVENT, NOW_MS, record(n)) for n in range(3)]
    data = b"".join(blobs)
    for cut in range(len(data) + 1):
        records, taken = scan_records(data[:cut])
        assert taken == sum(len(blob) for blob in blobs[: len(records)])
        assert taken <= cut
        assert cut - taken < len(blobs[0])


def test_false_in_a_segment_of_the_time_of_the_default_is_not_said(tmp_path: Path) -> None:
    said = {"job": "a", "time_ms": NOW_MS, "type": "submitted", "preemptible": False}
    for number, header in enumerate((struct.pack("<8sII", b"FLEETINB", 1, 0), HEADER), 1):
        event = msgspec.json.encode({**said, "sequence": number})
        (tmp_path / f"api-{number:012d}.seg").write_bytes(header + encode_record(RecordKind.EVENT, NOW_MS, event))
    batch = drain(InboxSource(tmp_path))
    assert [event.preemptible for event in batch.events if isinstance(event, Submitted)] == [None, False]
    newest = [event for event in read_newest_events(tmp_path, 10) if isinstance(event, Submitted)]
    assert {event.sequence: event.preemptible for event in newest} == {1: None, 2: False}


def test_two_writers_of_one_name_get_segments_of_their_own(tmp_path: Path) -> None:
    async def run() -> set[str]:
        first, second = InboxWriter(tmp_path, "api"), InboxWriter(tmp_path, "api")
        await first.append([record(1)], NOW_MS)
        await second.append([record(2)], NOW_MS)
        await first.append([record(3)], NOW_MS)
        await first.close()
        await second.close()
        return {first.name, second.name}

    assert asyncio.run(run()) == {"api", "api.1"}
    assert sorted(sequences(drain(InboxSource(tmp_path)))) == [1, 2, 3]


def test_pruning_deletes_what_a_position_has_passed_and_keeps_the_newest(tmp_path: Path) -> None:
    append(tmp_path, 1)
    append(tmp_path, 2)
    source = InboxSource(tmp_path)
    drain(source)
    assert source.prune({}) == 0
    assert source.prune(source.position()) == 1
    append(tmp_path, 3)
    assert sequences(drain(source)) == [3]
    assert sorted(path.name[-5] for path in segment_files(tmp_path)) == ["2", "3"]


def test_an_inbox_knows_whether_it_still_holds_its_beginning(tmp_path: Path) -> None:
    source = InboxSource(tmp_path)
    assert source.begins()
    append(tmp_path, 1, name="api")
    append(tmp_path, 2, name="api")
    append(tmp_path, 3, name="other")
    drain(source)
    assert source.begins()
    source.prune(source.position())
    assert not source.begins()


def test_an_emptied_folder_is_read_from_its_new_beginning(tmp_path: Path) -> None:
    append(tmp_path, 1)
    append(tmp_path, 2)
    source = InboxSource(tmp_path)
    drain(source)
    for path in segment_files(tmp_path):
        path.unlink()
    append(tmp_path, 3)
    assert sequences(drain(source)) == [3]


def test_a_disk_that_was_full_at_first_leaves_no_number_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that is missing would read as a segment that was lost, and nothing would be placed."""
    real_write = os.write

    def full(file: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        monkeypatch.setattr(os, "write", full)
        for number in (1, 2):
            with pytest.raises(SourceError, match="No space left on device"):
                await writer.append([record(number)], NOW_MS)
        monkeypatch.setattr(os, "write", real_write)
        await writer.append([record(3)], NOW_MS)
        await writer.close()

    asyncio.run(run())
    source = InboxSource(tmp_path)
    assert source.begins()
    assert sequences(drain(source)) == [3]


def test_a_full_disk_is_told_and_what_follows_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write

    def half(file: int, data: bytes) -> int:
        if len(data) > 40:
            return real_write(file, data[:30])
        raise OSError(errno.ENOSPC, "No space left on device")

    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        await writer.append([record(1)], NOW_MS)
        monkeypatch.setattr(os, "write", half)
        with pytest.raises(SourceError, match="No space left on device"):
            await writer.append([record(2)], NOW_MS)
        monkeypatch.setattr(os, "write", real_write)
        await writer.append([record(3)], NOW_MS)
        await writer.close()

    asyncio.run(run())
    batch = drain(InboxSource(tmp_path))
    assert sequences(batch) == [1, 3]
    assert batch.bad == ()


def test_records_whose_sync_failed_are_taken_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts later would find them, although no later sync tells whether they are on disk."""
    real_sync, source = os.fdatasync, InboxSource(tmp_path)

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        await writer.append([record(1)], NOW_MS)
        monkeypatch.setattr(os, "fdatasync", fail)
        with pytest.raises(SourceError, match="Input/output error"):
            await writer.append([record(2)], NOW_MS)
        monkeypatch.setattr(os, "fdatasync", real_sync)
        assert [event.sequence for event in read_newest_events(tmp_path, 100)] == [1]
        await writer.append([record(3)], NOW_MS)
        await writer.close()

    asyncio.run(run())
    batch = drain(source)
    assert sequences(batch) == [1, 3]
    assert batch.bad == ()


def test_a_reader_that_was_ahead_of_a_failed_sync_goes_on(tmp_path: Path) -> None:
    append(tmp_path, 1, 2)
    source = InboxSource(tmp_path)
    assert sequences(drain(source)) == [1, 2]
    os.truncate(segment_files(tmp_path)[0], len(HEADER) + len(encode_record(RecordKind.EVENT, NOW_MS, record(1))))
    append(tmp_path, 3)
    batch = drain(source)
    assert sequences(batch) == [3]
    assert batch.bad == ()


def test_a_file_that_may_not_grow_is_followed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write

    def limited(file: int, data: bytes) -> int:
        if os.fstat(file).st_size > 100:
            raise OSError(errno.EFBIG, "File too large")
        return real_write(file, data)

    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        monkeypatch.setattr(os, "write", limited)
        await writer.append([record(1)], NOW_MS)
        with pytest.raises(SourceError, match="File too large"):
            await writer.append([record(2)], NOW_MS)
        await writer.append([record(3)], NOW_MS)
        await writer.close()

    asyncio.run(run())
    assert len(segment_files(tmp_path)) == 2
    assert sequences(drain(InboxSource(tmp_path))) == [1, 3]


def test_a_folder_that_cannot_be_written_refuses_records_until_it_can(tmp_path: Path) -> None:
    folder = tmp_path / "inbox"
    folder.write_text("in the way")

    async def run() -> None:
        writer = InboxWriter(folder, "api")
        with pytest.raises(SourceError, match="nothing was stored"):
            await writer.append([record(1)], NOW_MS)
        folder.unlink()
        await writer.append([record(2)], NOW_MS)
        await writer.close()

    asyncio.run(run())
    assert sequences(drain(InboxSource(folder))) == [2]


def test_a_failed_sync_ends_the_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        await writer.append([record(0)], NOW_MS)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            with pytest.raises(SourceError, match="Input/output"):
                await writer.append([record(1)], NOW_MS)
        await writer.append([record(2)], NOW_MS)
        await writer.close()

    asyncio.run(run())
    assert len(segment_files(tmp_path)) == 2
    assert sequences(drain(InboxSource(tmp_path)))[-1] == 2


def test_refusals_arrive_as_bad_records_by_reason(tmp_path: Path) -> None:
    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        errors = [RecordError("future", "61 s"), RecordError("future", "62 s"), RecordError("not_json", "x")]
        await writer.append([encode_refusals(errors)], NOW_MS, RecordKind.REFUSED)
        await writer.append([b"nonsense"], NOW_MS, RecordKind.REFUSED)
        await writer.close()

    asyncio.run(run())
    batch = drain(InboxSource(tmp_path))
    assert [error.reason for error in batch.bad] == ["future", "future", "not_json", "not_json"]


def test_the_newest_events_on_disk_are_what_a_receiver_has_seen(tmp_path: Path) -> None:
    append(tmp_path, 1, 2)
    append(tmp_path, 3)
    assert [event.sequence for event in read_newest_events(tmp_path, 1000)] == [1, 2, 3]
    assert [event.sequence for event in read_newest_events(tmp_path, 1)] == [3]


def test_a_record_larger_than_one_read_comes_through(tmp_path: Path) -> None:
    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        await writer.append([record(1, "j") + b" " * 2**20 * 2], NOW_MS, RecordKind.EVENT)
        await writer.append([record(2)], NOW_MS)
        await writer.close()

    asyncio.run(run())
    batch = drain(InboxSource(tmp_path))
    assert sequences(batch) == [2]
    assert [error.reason for error in batch.bad] == ["record_too_large"]


def test_health_counts_what_waits(tmp_path: Path) -> None:
    append(tmp_path, 1)
    source = InboxSource(tmp_path)
    assert source.health()["backlog_bytes"] == len(encode_record(RecordKind.EVENT, NOW_MS, record(1)))
    drain(source)
    assert source.health()["backlog_bytes"] == 0
    assert len(HEADER) == 16


def test_refusals_of_a_foreign_writer_are_bounded() -> None:
    def errors(payload: bytes) -> list[str]:
        return [error.reason for error in decode_records([Record(RecordKind.REFUSED, 0, payload)]).bad]

    assert errors(b'{"reasons": {"a": 2, "b": -1, "c": 1}}') == ["a", "a", "c"]
    assert len(errors(b'{"reasons": {"a": 150000, "b": 150000, "c": 150000}}')) == 200_000
    for payload in (b'{"reasons": {"a": 1e400}}', b"[" * 100_000, b"{}", b'{"reasons": {"a": Infinity}}'):
        assert errors(payload) == ["not_json"]


@pytest.mark.parametrize("number", [1, 2, 7])
def test_a_folder_named_like_a_segment_is_passed_and_said_once(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one with the newest number: the segment before it may still grow."""
    append(tmp_path, 1)
    source = InboxSource(tmp_path)
    if number > 1:
        assert sequences(drain(source)) == [1]
        (tmp_path / f"api-{number:012d}.seg").mkdir()
    else:
        (tmp_path / "writes-000000000001.seg").mkdir()
        assert sequences(drain(source)) == [1]
    with next(tmp_path.glob("api-*1.seg")).open("ab") as segment:
        segment.write(encode_record(RecordKind.EVENT, NOW_MS, record(2)))
    assert sequences(drain(source)) == [2]
    append(tmp_path, 3)
    assert sequences(drain(source)) == [3]
    assert [event.sequence for event in read_newest_events(tmp_path, 10)] == [1, 2, 3]
    assert (source.health()["folders_in_the_way"], source.torn) == (1, 0)
    assert source.prune(source.position()) == 1
    assert caplog.text.count("is a folder and no segment") == 1


def test_what_cannot_be_synced_at_the_start_is_not_known_for_a_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        writer = InboxWriter(tmp_path, "api")
        await writer.append([record(1)], NOW_MS)
        await writer.close()

    def fail(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    asyncio.run(run())
    assert len(list(read_newest_events(tmp_path, 10))) == 1
    monkeypatch.setattr(os, "fsync", fail)
    assert list(read_newest_events(tmp_path, 10)) == []
