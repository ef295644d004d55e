"""A filter for events that no archive file holds yet.

The job table passes each event on once, so an event later than all files at the start is new. Any other
event is looked up in the files of its hour. An event that is more than an hour late is looked up as well,
because the job table forgets old identities. Some sources, such as a poll of Kubernetes, stamp events when
they observe them. After a crash they repeat events with another time, so the events of the last hour are
read as well.
"""

from collections.abc import Iterator, Sequence
from typing import IO

from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.ingest.archive.files import HOUR_MS, ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan, find_newest_ms, read_each_file
from fleetcast.ingest.inbox.job_events import NO_FUTURE_LIMIT_MS, Identity, identify_event

Event = JobEvent | NodeEvent

IDENTITY = ["of", "name", "attempt", "source", "sequence"]


class KnownEvents:
    """The events that the files of one archive hold.

    `saved_ms`: when the restored state was saved, 0 for none.
    """

    def __init__(self, files: ArchiveFiles, saved_ms: int) -> None:
        self._files = files
        self._saved_ms = saved_ms
        self._newest_ms: int | None = None  # events up to here may be in files; None: nobody has looked yet
        self._recent: set[Identity] | None = None  # those of the files since the snapshot

    def forget_newest_time(self) -> None:
        """Forget the newest time in the files.

        Call it after a failed flush, which may have written some of its files.
        """
        self._newest_ms = None

    def filter_new_events(self, events: Sequence[Event], now_ms: int) -> list[Event]:
        """Return the events that no file holds, each once. Raises OSError."""
        if not events:
            return []
        newest_there_ms, recent = self._read_recent_identities()
        sure_after_ms = max(newest_there_ms, now_ms - HOUR_MS)
        hours: dict[int, list[Event]] = {}
        for event in events:
            hours.setdefault(event.time_ms // HOUR_MS, []).append(event)
        taken: set[Identity] = set()
        new = []
        for same in hours.values():
            there = self._find_stored_events([event.time_ms for event in same if event.time_ms <= sure_after_ms])
            for event in same:
                who = identify_event(event)
                if who not in there and who not in recent and who not in taken:
                    taken.add(who)
                    new.append(event)
        return new

    def _find_stored_events(self, times_ms: Sequence[int]) -> set[Identity]:
        """Return the identities of the stored events between the first and the last of `times_ms`."""
        return read_identities(self._files, ArchiveSpan(min(times_ms), max(times_ms) + 1)) if times_ms else set()

    def _read_recent_identities(self) -> tuple[int, set[Identity]]:
        if self._newest_ms is None:
            newest_there_ms = find_newest_ms(self._files, "events")
            if self._recent is None:
                since_ms = max(self._saved_ms, newest_there_ms - HOUR_MS)
                self._recent = read_identities(self._files, ArchiveSpan(since_ms, NO_FUTURE_LIMIT_MS))
            self._newest_ms = newest_there_ms
        return self._newest_ms, self._recent or set()


def read_identities(files: ArchiveFiles, span: ArchiveSpan) -> set[Identity]:
    """Return the identities of the archived events of a span. Raises OSError.

    When the function returns, the files that hold these events are certain to be on disk.
    """
    import pyarrow.parquet as pq

    def read(file: IO[bytes]) -> list[Identity]:
        table = pq.read_table(file, columns=IDENTITY, filters=span.filters, use_threads=False)
        return list(_join_identity_columns(column.to_pylist() for column in table.columns))

    found = list(read_each_file(files, span, "events", read))
    files.sync_file_names(name for name, _ in found)
    return {one for _, same in found for one in same}


def _join_identity_columns(columns: Iterator[list[object]]) -> Iterator[Identity]:
    for of, name, attempt, source, sequence in zip(*columns, strict=True):
        yield of, name, attempt if of == "job" else source, sequence
