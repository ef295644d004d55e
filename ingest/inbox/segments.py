"""The format of inbox segments, and readers of a folder of segments.

    folder/api-000000000007.seg     segments of the writer "api", numbered from 1, never reused
    header (16 bytes)               b"FLEETINB", version uint32, revision uint32
    record                          payload length uint32, crc32 uint32, kind uint8, received_ms int64, payload

The version names the format. Readers of the same version ignore the revision, which says what the payloads mean:

0   `"preemptible": false` in an event is the default written out: its owner has not said
1   it is the owner's word: the job may not be stopped

The checksum covers kind, received_ms and payload, and so reveals a torn record. After damage, the reader
searches for the head of the next whole record: a kind and a time before the year 2527. No JSON text can
contain such bytes.
"""

import logging
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from fleetcast.fleet import files
from fleetcast.fleet.errors import RecordError

logger = logging.getLogger(__name__)

MAGIC = b"FLEETINB"
VERSION = 1
REVISION = 1
HEADER = struct.pack("<8sII", MAGIC, VERSION, REVISION)
_record_head = struct.Struct("<IIBq")  # payload length, crc32 of the rest, kind, received_ms
_sealed_part = struct.Struct("<Bq")
_kind_and_time = re.compile(rb"[\x01-\x0f](?=.{5}[\x00-\x0f]\x00\x00)", re.DOTALL)
_before_kind = 8  # bytes
READ_BYTES = 2**20
MAX_PAYLOAD_BYTES = 2**26
SUFFIX = ".seg"
_reported: set[str] = set()  # folders that were in the way


class RecordKind(IntEnum):
    """The kind of an inbox record's payload.

    EVENT: one event. REFUSED: refusal counts, {"reasons": {reason: count}, "examples": {reason: detail}}.
    WRITE, WRITE_V2: a remote-write body as received, of version 1.0 or 2.0.
    """

    EVENT = 1
    REFUSED = 2
    WRITE = 3
    WRITE_V2 = 4


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a segment. revision: that of its segment."""

    kind: int
    received_ms: int
    payload: bytes
    revision: int = REVISION


def encode_record(kind: int, received_ms: int, payload: bytes) -> bytes:
    return encode_records(kind, received_ms, (payload,))[0]


def encode_records(kind: int, received_ms: int, payloads: Iterable[bytes]) -> list[bytes]:
    """Encode records of one kind that arrived at the same time, each as bytes."""
    sealed, crc32, pack = zlib.crc32(_sealed_part.pack(kind, received_ms)), zlib.crc32, _record_head.pack
    return [pack(len(payload), crc32(payload, sealed), kind, received_ms) + payload for payload in payloads]


def read_revision(header: bytes) -> int:
    """Return the revision of a segment from its header."""
    return int.from_bytes(header[12:16], "little")


def scan_records(data: bytes, revision: int = REVISION) -> tuple[list[Record], int]:
    """Return the whole records at the beginning of `data`, and the number of bytes that they fill.

    The bytes after them are torn or have not arrived yet. revision: that of the segment.
    """
    records, at = [], 0
    while at + _record_head.size <= len(data):
        length, crc, kind, received_ms = _record_head.unpack_from(data, at)
        begin = at + _record_head.size
        payload = data[begin : begin + length]
        if len(payload) < length or length > MAX_PAYLOAD_BYTES:
            break
        if zlib.crc32(payload, zlib.crc32(_sealed_part.pack(kind, received_ms))) != crc:
            break
        records.append(Record(kind, received_ms, payload, revision))
        at = begin + length
    return records, at


def find_record(data: bytes, begin: int) -> int | None:
    """Return the index at which the first whole record at or after `begin` starts, or None."""
    for match in _kind_and_time.finditer(data, begin + _before_kind):
        at = match.start() - _before_kind
        (length,) = struct.unpack_from("<I", data, at)
        if scan_records(data[at : at + _record_head.size + length])[0]:
            return at
    return None


def list_segments(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    """Return writer → (number, path) of its segments, in order of age.

    A folder with the name of a segment is skipped. The log reports it once.
    """
    found: dict[str, list[tuple[int, Path]]] = {}
    for writer, number, path in _list_segment_names(folder):
        if not path.is_dir():
            found.setdefault(writer, []).append((number, path))
        elif str(path) not in _reported:
            _reported.add(str(path))
            logger.error("%s is a folder and no segment of the inbox: passing it, move it away", path)
    for rows in found.values():
        rows.sort()
    return found


def count_misnamed_folders(folder: Path) -> int:
    """Return the number of folders that have the name of a segment."""
    return sum(path.is_dir() for _, _, path in _list_segment_names(folder))


def find_last_segment_number(folder: Path, writer: str) -> int:
    """Return the highest number among this writer's files and folders, or 0 if it has none."""
    return max((number for name, number, _ in _list_segment_names(folder) if name == writer), default=0)


def _list_segment_names(folder: Path) -> Iterator[tuple[str, int, Path]]:
    """Yield (writer, number, path) of each file or folder with the name of a segment."""
    for name in files.list_names(folder):
        writer, dash, number = name.removesuffix(SUFFIX).rpartition("-")
        if dash and name.endswith(SUFFIX) and number.isdecimal():
            yield writer, int(number), folder / name


def _parse_segment_name(segment: str) -> tuple[str, int]:
    writer, _, number = segment.removesuffix(SUFFIX).rpartition("-")
    return writer, int(number) if number.isdecimal() else 0


def read_segment(path: Path, offset: int, sealed: bool) -> tuple[list[Record], int, RecordError | None]:
    """Read the next whole records of a segment from `offset` on, at least one if there is any.

    Returns the records, the new offset, and an error if bytes were skipped, otherwise None. sealed: no process
    writes to the segment any more.
    """
    size = files.read_size_bytes(path)
    if size <= offset:
        return [], offset, None
    with path.open("rb") as file:
        header = file.read(len(HEADER))
        if not header.startswith(HEADER[:12]):
            bad = RecordError("torn", f"{path.name} is not an inbox segment")
            return ([], size, bad) if sealed else ([], offset, None)
        file.seek(offset)
        data = file.read(READ_BYTES)
        records, taken = scan_records(data, read_revision(header))
        if not records and size - offset > len(data):  # a record larger than one read
            data += file.read()
            records, taken = scan_records(data, read_revision(header))
    if records:
        return records, offset + taken, None
    skipped = find_record(data, 1)
    if skipped is None and not sealed:
        return [], offset, None
    skipped = skipped or len(data)
    return [], offset + skipped, RecordError("torn", f"{path.name}: {skipped} bytes at {offset} are no whole record")


def find_next_record(path: Path, offset: int) -> int | None:
    """Return the offset at which the first whole record at or after `offset` starts.

    Returns None if there is none or the file no longer exists.
    """
    try:
        with path.open("rb") as file:
            if not file.read(len(HEADER)).startswith(HEADER[:12]):
                return None
            begin = max(offset, len(HEADER))
            file.seek(begin)
            head = file.read(_record_head.size)
            if len(head) < _record_head.size:
                return None
            payload_bytes = min(_record_head.unpack(head)[0], MAX_PAYLOAD_BYTES)
            data = head + file.read(payload_bytes)
            if scan_records(data)[0]:
                return begin
            found = find_record(data + file.read(), 1)
            return None if found is None else begin + found
    except FileNotFoundError:
        return None


def count_retained_bytes(folder: Path) -> int:
    """Return the size in bytes of all segments on disk.

    These segments are unread, or not yet covered by two snapshots.
    """
    return sum(files.read_size_bytes(path) for rows in list_segments(folder).values() for _, path in rows)


def format_segment_name(writer: str, number: int) -> str:
    return f"{writer}-{number:012d}{SUFFIX}"


def parse_position(position: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], int]]:
    return ((_parse_segment_name(segment), int(offset)) for segment, offset in position.items())


KEEP_LOCK = "backup.lock"  # in the inbox: while a backup holds it, no segment is deleted


def delete_read_segments(folder: Path, position: Mapping[str, Any]) -> int:
    """Delete the segments that `position` has passed, and return their number.

    The newest segment of each writer stays, because the next segment takes its number from it. Nothing
    is deleted while a backup copies the inbox. A later call then deletes those segments.
    """
    if _is_backed_up(folder):
        return 0
    reached = dict(key for key, _ in parse_position(position))
    deleted = 0
    for writer, rows in list_segments(folder).items():
        for number, path in rows[:-1]:
            if number < reached.get(writer, 0):
                path.unlink(missing_ok=True)
                deleted += 1
    return deleted


def _is_backed_up(folder: Path) -> bool:
    """Return whether a living process holds the inbox's backup lock."""
    if not (folder / KEEP_LOCK).exists():
        return False
    try:
        files.lock(folder / KEEP_LOCK)()
    except BlockingIOError:
        return True
    except OSError as error:
        logger.warning("%s: %s; segments are deleted as if no backup ran", folder / KEEP_LOCK, error.strerror)
    return False
