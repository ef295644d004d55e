"""The durable inbox: it writes and fsyncs every pushed record in a segment before it acknowledges it.

One process appends to a segment, and any number of processes read it. Three rules make a crash harmless:

1. A writer starts a new segment, so a torn tail is never overwritten. A lock keeps two processes from using
   one name.
2. After a failed write, the segment is truncated to its last whole record. A failed fsync removes its
   records and ends the segment. The kernel may have marked their pages clean, and then no later fsync shows
   whether they are on disk. Nothing is acknowledged.
3. A reader waits for the rest of a torn record in a writer's newest segment. In any other segment it counts
   the record as torn and continues.

Delivery is at-least-once: a record whose write was refused may still be read. Events are idempotent
downstream.
"""

import asyncio
import contextlib
import errno
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fleetcast.fleet import files
from fleetcast.fleet.errors import RecordError, SourceError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.file_changes import APPENDED, FileChanges
from fleetcast.ingest.inbox.records import decode_records
from fleetcast.ingest.inbox.segments import (
    HEADER,
    Record,
    RecordKind,
    count_misnamed_folders,
    count_retained_bytes,
    delete_read_segments,
    encode_records,
    find_last_segment_number,
    format_segment_name,
    list_segments,
    parse_position,
    read_revision,
    read_segment,
    scan_records,
)
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.source import Batch, Source

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 64 * 2**20
AREA = "inbox"  # of failpoints
WRITES = "writes"  # how the writer is called whose segments hold samples alone


@dataclass(frozen=True, slots=True)
class Position:
    """The end of an append: everything before `offset` of `segment` is on disk."""

    segment: str
    offset: int


@dataclass(slots=True)
class _Append:
    """One caller's records that wait to be written."""

    records: Sequence[bytes]
    kind: int
    received_ms: int
    done: "asyncio.Future[Position]"


class InboxWriter:
    """The writing side of an inbox, for one process and one event loop. A thread writes the records.

    Appends during a commit share the next fsync. The first append creates the folder. So the process
    can start even if the disk is full or read-only. It then refuses records until it can write to the
    disk.
    """

    def __init__(self, folder: Path, name: str, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        if not name or set(name) & set("-/\0"):
            raise ValueError(f"inbox writer name {name!r}: expected some characters, none of them '-' or '/'")
        self.folder = folder
        self.segment_bytes = segment_bytes
        self.name = name
        self._give_back: Callable[[], None] | None = None  # the name
        self._number = 0
        self._file: files.File | None = None
        self._path = folder
        self._offset = 0
        self._waiting: list[_Append] = []
        self._commits: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="inbox")
        self.appended = 0
        self.syncs = 0

    async def append(self, records: Sequence[bytes], received_ms: int, kind: int = RecordKind.EVENT) -> Position:
        """Append records, and return once they are on disk.

        Raises SourceError if they cannot be written. In this case nothing is acknowledged.
        """
        done: asyncio.Future[Position] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Append(records, kind, received_ms, done))
        if self._commits is None or self._commits.done():
            self._commits = asyncio.ensure_future(self._commit_waiting_records())
        return await done

    async def _commit_waiting_records(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                position = await loop.run_in_executor(self._thread, self._commit_batch, batch)
            except OSError as error:
                logger.error("inbox %s: %s, refused %d appends", self.name, error, len(batch))
                why = error.strerror or str(error)
                _reject_batch(batch, SourceError(f"cannot write the inbox: {why}; nothing was stored"))
            except Exception as error:
                _reject_batch(batch, error)
                raise
            else:
                for append in batch:
                    if not append.done.done():
                        append.done.set_result(position)

    def _commit_batch(self, batch: Sequence[_Append]) -> Position:
        """Write and fsync a batch, in the writer's thread. Raises OSError."""
        blobs = [blob for row in batch for blob in encode_records(row.kind, row.received_ms, row.records)]
        file = self._open_next_segment() if self._file is None or self._offset >= self.segment_bytes else self._file
        try:
            written = file.write(b"".join(blobs))
        except files.ShortWrite as short:
            self._truncate_to_whole_records(file, blobs, short.written)
            if short.errno == errno.EFBIG:  # no room in this file, there may be some in the next
                self._end_segment()
            raise
        try:
            file.sync()
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(self._offset)
            self._end_segment()
            raise
        self._offset += written
        self.appended += len(blobs)
        self.syncs += 1
        return Position(self._path.name, self._offset)

    def _truncate_to_whole_records(self, file: files.File, blobs: Sequence[bytes], written: int) -> None:
        """Truncate the segment to whole records after a short write.

        The whole records stay, because a reader may already have read them.
        """
        whole = 0
        for blob in blobs:
            if whole + len(blob) > written:
                break
            whole += len(blob)
        try:
            file.truncate(self._offset + whole)
            self._offset += whole
        except OSError:
            self._end_segment()

    def _open_next_segment(self) -> files.File:
        """Create the next segment, fsync its name, and return its file."""
        if self._give_back is None:
            self._open_folder()
        path = self.folder / format_segment_name(self.name, self._number + 1)
        try:
            file = files.create_append_only_file(path, AREA)
        except FileExistsError:  # one that could neither be begun nor taken away
            self._number += 1
            raise
        try:
            file.write(HEADER)
            file.sync()
            files.sync_folder(self.folder, AREA)
        except OSError:
            file.close()
            path.unlink()
            raise
        self._end_segment()
        self._number += 1  # not before: a number that is missing reads as a segment that was lost
        self._file, self._path, self._offset = file, path, len(HEADER)
        return file

    def _open_folder(self) -> None:
        """Create the folder, reserve a writer's name in it, and continue after the last segment of that name."""
        files.make_folder(self.folder, AREA)
        self.name, self._give_back = _claim_name(self.folder, self.name)
        self._number = find_last_segment_number(self.folder, self.name)

    def _end_segment(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    async def close(self) -> None:
        """Wait for running commits, then close the file and release the name. May be called twice."""
        if self._commits is not None:
            await self._commits
        self._thread.shutdown(wait=True)
        self._end_segment()
        if self._give_back is not None:
            self._give_back()
            self._give_back = None


def _reject_batch(batch: Sequence[_Append], error: Exception) -> None:
    for append in batch:
        if not append.done.done():
            append.done.set_exception(error)


def _claim_name(folder: Path, name: str) -> tuple[str, Callable[[], None]]:
    """Reserve a writer's name that no living process holds (name, name.1, …).

    Returns the name and the function that releases it. Raises ValueError if 1000 processes hold such names.
    """
    for number in range(1000):
        own = name if number == 0 else f"{name}.{number}"
        try:
            return own, files.lock(folder / f"{own}.lock")
        except BlockingIOError:
            continue
    raise ValueError(f"inbox writer name {name!r}: 1000 processes hold it")


class Backlog:
    """The number of bytes that wait in an inbox, with an upper bound.

    It reads the folder at most once per second.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder = folder
        self.most_bytes = most_bytes
        self._measured = -1.0
        self._bytes = 0

    def refuse_if_full(self) -> None:
        """Raise SourceError if more bytes wait than the bound allows.

        The senders then send their records again.
        """
        now = time.monotonic()
        if now > self._measured + 1.0 or self._measured < 0:
            self._measured, self._bytes = now, count_retained_bytes(self.folder)
        if self._bytes > self.most_bytes:
            held = f"{self._bytes:,} bytes wait in the inbox, at most {self.most_bytes:,} may"
            raise SourceError(f"{held}; nothing was stored, send it again", retry_after_s=5.0)


class InboxSource(Source):
    """A source that reads the segments of all writers as they grow.

    Its position is segment name → offset. For each writer, it names the segment that is being read.
    """

    name = "inbox"

    def __init__(self, folder: Path, *, poll_s: float = 0.025, writes: WriteDecoder | None = None) -> None:
        """Create a reader.

        poll_s: the least wall time between two wake-ups. writes: the decoder of remote writes, if there are any.
        """
        self.folder = folder
        self._changes = FileChanges({folder: APPENDED}, poll_s)
        self.writes = writes
        self.torn = 0
        self.read = 0
        self._at: dict[str, tuple[int, int]] = {}  # writer -> (segment number, offset)
        self._ready: deque[Batch] = deque()
        self._rates: deque[tuple[float, int]] = deque(maxlen=64)
        self._closed = False

    async def next(self) -> Batch:
        while not self._closed:
            records, bad = self._read_new_records()
            if records or bad:
                batch = decode_records(records, bad, self.writes)
                self._rates.append((time.monotonic(), len(batch)))
                return batch
            await self._changes.wait()
        raise StopAsyncIteration

    def position(self) -> dict[str, Any]:
        return {format_segment_name(writer, number): offset for writer, (number, offset) in self._at.items()}

    def seek(self, position: Mapping[str, Any]) -> None:
        self._at = {writer: (number, int(offset)) for (writer, number), offset in parse_position(position)}

    def begins(self) -> bool:
        """Return whether no segment has been deleted yet: the first segment of each writer still exists."""
        return all(rows[0][0] == 1 for rows in list_segments(self.folder).values())

    def prune(self, position: Mapping[str, Any]) -> int:
        """Delete the segments that `position` has passed, and return their number. A snapshot holds `position`."""
        return delete_read_segments(self.folder, position)

    def health(self) -> dict[str, Any]:
        """Return the source's row of the ingestion document.

        `lag_s` is 0 if nothing waits. Otherwise it is None, because the source does not know the age of unread records.
        """
        recent = [row for row in self._rates if row[0] > time.monotonic() - 60.0]
        span_s = time.monotonic() - recent[0][0] if len(recent) > 1 else 0.0
        rate = sum(count for _, count in recent) / span_s if span_s > 0 else 0.0
        waiting = self.backlog_bytes()
        return {
            "name": self.name,
            "kind": "inbox",
            "rate_per_s": round(rate, 2),
            "lag_s": 0.0 if not waiting else None,
            "backlog_bytes": waiting,
            "bad": self.torn,
            "up": True,
            "noted": {} if self.writes is None else dict(self.writes.noted),
            "folders_in_the_way": count_misnamed_folders(self.folder),
        }

    def models(self) -> dict[str, str]:
        """Return node → GPU model, from the labels of remote writes."""
        return {} if self.writes is None else self.writes.models()

    def backlog_bytes(self) -> int:
        """Return the number of bytes on disk that have not been read yet."""
        total = 0
        for writer, rows in list_segments(self.folder).items():
            number, offset = self._at.get(writer, (0, 0))
            sizes = [(row, files.read_size_bytes(path)) for row, path in rows if row >= number]
            total += sum(max(0, size - (offset if row == number else len(HEADER))) for row, size in sizes)
        return total

    async def close(self) -> None:
        self._closed = True
        self._changes.close()

    def _read_new_records(self) -> tuple[list[Record], list[RecordError]]:
        """Read about a megabyte from each writer that has unread records. Return the records and the errors."""
        records: list[Record] = []
        bad: list[RecordError] = []
        for writer, rows in sorted(list_segments(self.folder).items()):
            number, offset = self._at.get(writer, (0, 0))
            if number > rows[-1][0]:  # the folder was emptied and numbering began anew
                number = 0
            for place, (row, path) in enumerate(rows):
                if row < number:
                    continue
                offset = max(offset if row == number else 0, len(HEADER))
                sealed = place + 1 < len(rows)  # listed before we read: nobody writes to it any more
                fresh, offset, torn = read_segment(path, offset, sealed)
                records += fresh
                number = row
                if torn is not None:
                    self.torn += 1
                    bad.append(torn)
                if fresh or torn or not sealed:
                    break
            if number:
                self._at[writer] = (number, offset)
        self.read += len(records)
        return records, bad


def read_newest_events(folder: Path, most: int) -> Iterator[JobEvent | NodeEvent]:
    """Yield the newest events on disk, oldest first: at least `most`, or all of them if there are fewer.

    After a start, a receiver uses them to recognise events that it accepted before.
    """
    events = [rows for writer, rows in list_segments(folder).items() if not writer.startswith(WRITES)]
    rows = [path for segments in events for _, path in segments]
    taken: list[list[Record]] = []
    for _, path in sorted(((_read_modified_ns(path), path) for path in rows), reverse=True):
        try:
            files.sync_folder(path, AREA)  # its writer may have been killed before: a retry would be lost with it
            data = path.read_bytes()
        except OSError:  # pruned meanwhile, or not on disk for certain: it is written again
            continue
        records, _ = scan_records(data[len(HEADER) :], read_revision(data))
        taken.append([record for record in records if record.kind == RecordKind.EVENT])
        if sum(map(len, taken)) >= most:
            break
    for records in reversed(taken):
        batch = decode_records(records)
        yield from batch.events
        yield from batch.node_events


def _read_modified_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
