"""The ends of an inbox's segments, and the event records after a given position."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fleetcast.fleet import files
from fleetcast.ingest.inbox.inbox import WRITES
from fleetcast.ingest.inbox.segments import (
    HEADER,
    Record,
    RecordKind,
    find_next_record,
    list_segments,
    parse_position,
    read_segment,
)

End = Mapping[str, tuple[int, int]]  # writer -> (segment number, offset)


def find_inbox_end(folder: Path) -> End:
    """Return, for each writer of events, the end of its newest segment as (segment number, offset).

    Every acknowledged event lies before these ends.
    """
    newest = {writer: rows[-1] for writer, rows in _find_event_segments(folder).items()}
    return {writer: (number, files.read_size_bytes(path)) for writer, (number, path) in newest.items()}


def find_oldest_segments(folder: Path) -> Mapping[str, int]:
    """Return the number of the oldest segment of each writer of events. Earlier ones were deleted."""
    return {writer: rows[0][0] for writer, rows in _find_event_segments(folder).items()}


def find_first_unread(folder: Path, position: Mapping[str, Any]) -> End:
    """Return, for each writer of events, the place of the first whole record after `position`.

    A place is (segment number, offset). Writers without such a record are left out.
    """
    found: dict[str, tuple[int, int]] = {}
    for writer, row, path, offset in _find_unread_segments(folder, position):
        if writer not in found and (at := find_next_record(path, offset)) is not None:
            found[writer] = (row, at)
    return found


def has_passed_end(unread: End, end: End) -> bool:
    """Return whether all records before `end` have been read. unread: the result of `find_first_unread()`.

    A deleted segment counts as read, because a snapshot covers it.
    """
    return all(unread.get(writer, at) >= at for writer, at in end.items())


def list_unread_event_types(folder: Path, position: Mapping[str, Any], job: str, attempt: int) -> list[str]:
    """Return the types of an attempt's events that `position` has not passed.

    These events are acknowledged, but not yet on a board.
    """
    return [head.type for head in _read_event_heads(folder, position) if (head.job, head.attempt) == (job, attempt)]


class _Head(msgspec.Struct):
    """The fields that identify the attempt and type of an event. A node event has no job."""

    job: str = ""
    attempt: int = 1
    type: str = ""


_decode_head = msgspec.json.Decoder(_Head).decode


def _read_event_heads(folder: Path, position: Mapping[str, Any]) -> Iterator[_Head]:
    for record in _read_unread_records(folder, position):
        if record.kind == RecordKind.EVENT:
            with contextlib.suppress(msgspec.MsgspecError):  # the pipeline counts what is no event
                yield _decode_head(record.payload)


def _read_unread_records(folder: Path, position: Mapping[str, Any]) -> Iterator[Record]:
    """Yield the whole records in the segments of events that `position` has not passed."""
    for _, _, path, at in _find_unread_segments(folder, position):
        with contextlib.suppress(FileNotFoundError):  # pruned meanwhile: a snapshot covers it
            end = -1
            while at != end:
                end = at
                records, at, _ = read_segment(path, end, sealed=True)
                yield from records


def _find_unread_segments(folder: Path, position: Mapping[str, Any]) -> Iterator[tuple[str, int, Path, int]]:
    """Yield the segments of events that `position` has not passed completely.

    Each is (writer, number, path, offset at which the unread part begins).
    """
    reached = {writer: (number, offset) for (writer, number), offset in parse_position(position)}
    for writer, rows in _find_event_segments(folder).items():
        number, offset = reached.get(writer, (0, 0))
        if number > rows[-1][0]:  # the folder was emptied and numbering began anew, as a reader takes it
            number = offset = 0
        for row, path in rows:
            if row >= number:
                yield writer, row, path, offset if row == number else len(HEADER)


def _find_event_segments(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    return {writer: rows for writer, rows in list_segments(folder).items() if not writer.startswith(WRITES)}
