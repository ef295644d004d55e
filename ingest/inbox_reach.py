"""How far an inbox goes, and what of it a position has not passed: what a process asks that reads it through another.

An end is taken in bytes, at no cost. What lies before it counts only where a whole record is found, at the time when
a position is compared with it: the tail of a writer that was killed is never read by anybody.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet import files
from ingest.inbox import WRITES
from ingest.segments import HEADER, next_record, places, segments_of

End = Mapping[str, tuple[int, int]]  # writer -> (segment number, offset)


def inbox_end(folder: Path) -> End:
    """Where the newest segment of each writer of events ends now: every acknowledged event lies before it."""
    newest = {writer: rows[-1] for writer, rows in _of_events(folder).items()}
    return {writer: (number, files.size_bytes(path)) for writer, (number, path) in newest.items()}


def inbox_first(folder: Path) -> Mapping[str, int]:
    """The oldest segment of each writer of events: what lay before it was pruned."""
    return {writer: rows[0][0] for writer, rows in _of_events(folder).items()}


def unread(folder: Path, position: Mapping[str, Any]) -> End:
    """Where the first whole record lies that `position` has not passed; writers that have none are left out."""
    reached = {writer: (number, offset) for (writer, number), offset in places(position)}
    found = {}
    for writer, rows in _of_events(folder).items():
        number, offset = reached.get(writer, (0, 0))
        if number > rows[-1][0]:  # the folder was emptied and numbering began anew, as a reader takes it
            number = offset = 0
        for row, path in rows:
            at = None if row < number else next_record(path, offset if row == number else len(HEADER))
            if at is not None:
                found[writer] = (row, at)
                break
    return found


def covers(unread: End, end: End) -> bool:
    """Whether nothing that is unread lies before `end`. A segment that is gone was read: a snapshot covers it."""
    return all(unread.get(writer, at) >= at for writer, at in end.items())


def _of_events(folder: Path) -> dict[str, list[tuple[int, Path]]]:
    return {writer: rows for writer, rows in segments_of(folder).items() if not writer.startswith(WRITES)}
