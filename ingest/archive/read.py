"""Readers of the archive: its files, samples and events in a span of time."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.ingest.archive.files import (
    DAY_MS,
    HOUR_MS,
    ArchiveFiles,
    Dataset,
    FileName,
    drop_superseded_files,
    parse_day_ms,
)
from fleetcast.ingest.archive.rows import ArchiveRows, NameLookups, decode_samples
from fleetcast.ingest.inbox.job_events import NO_FUTURE_LIMIT_MS, decode_event

logger = logging.getLogger(__name__)

NOTHING_MS = -1
RETRIES = 5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArchiveSpan:
    """A span of archived time, in Unix ms. It includes `first_ms` and excludes `end_ms`.

    block: only this block, or None for all.
    """

    first_ms: int
    end_ms: int
    block: str | None = None

    def list_files(self, files: ArchiveFiles, dataset: Dataset) -> list[FileName]:
        """Return the files that may hold rows of the span, without superseded ones."""
        days = [
            day
            for day in files.list_days(dataset)
            if parse_day_ms(day) < self.end_ms and parse_day_ms(day) + DAY_MS > self.first_ms
        ]
        return [
            name
            for name in drop_superseded_files(files.list_files(dataset, days))
            if name.first_ms < self.end_ms
            and name.first_ms + HOUR_MS > self.first_ms
            and self.block in (None, name.block)
        ]

    @property
    def filters(self) -> list[tuple[str, str, Any]]:
        """The span as filters in pyarrow's form."""
        return [("time_ms", ">=", self.first_ms), ("time_ms", "<", self.end_ms)]


@contextlib.contextmanager
def log_damaged_file(name: FileName) -> Iterator[None]:
    """Log and suppress errors that show that the file is damaged, while the context is open.

    Errors of the operating system are raised.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        logger.error("archive: %s is damaged, its rows cannot be read: %s", name.path, error)


def read_each_file(
    files: ArchiveFiles, span: ArchiveSpan, dataset: Dataset, read: Callable[[IO[bytes]], T]
) -> Iterator[tuple[FileName, T]]:
    """Yield (file name, result of `read`) for each file of a span, without superseded ones.

    If compaction replaces a file at the same time, all files are read again. Raises OSError.
    """
    for attempt in range(RETRIES):
        answers = []
        try:
            for name in span.list_files(files, dataset):
                with log_damaged_file(name), files.open(name) as file:
                    answers.append((name, read(file)))
        except FileNotFoundError:
            if attempt == RETRIES - 1:
                raise
            continue
        yield from answers
        return


def read_samples(
    files: ArchiveFiles, span: ArchiveSpan, words: NameLookups, also: Sequence[tuple[str, str, Any]] = ()
) -> ArchiveRows:
    """Read the samples of a span, unordered.

    also: further filters on kind, metric, entity or value.
    """
    filters = [*span.filters, *also]
    parts = [
        rows for _, rows in read_each_file(files, span, "samples", lambda file: decode_samples(file, words, filters))
    ]
    return ArchiveRows.concat(parts) if parts else ArchiveRows.empty()


def read_events(files: ArchiveFiles, span: ArchiveSpan) -> tuple[list[JobEvent | NodeEvent], list[RecordError]]:
    """Return the job and node events of a span, ordered by time, and an error for each unreadable event."""
    import pyarrow.parquet as pq

    def read(file: IO[bytes]) -> list[tuple[int, str]]:
        table = pq.read_table(file, columns=["time_ms", "event"], filters=span.filters, use_threads=False)
        return list(zip(table["time_ms"].to_pylist(), table["event"].to_pylist(), strict=True))

    events: list[JobEvent | NodeEvent] = []
    bad: list[RecordError] = []
    rows = [row for _, same in read_each_file(files, span, "events", read) for row in same]
    for time_ms, text in sorted(rows, key=lambda row: row[0]):
        try:
            events.append(decode_event(text.encode(), time_ms, NO_FUTURE_LIMIT_MS, archived=True))
        except RecordError as error:
            bad.append(error)
    return events, bad


def find_newest_ms(files: ArchiveFiles, dataset: Dataset = "samples") -> int:
    """Return the time of the newest row in Unix ms, or NOTHING_MS if there is none.

    A damaged file counts as if its newest row were at the end of its hour.
    """
    import pyarrow.parquet as pq

    for day in reversed(files.list_days(dataset)):
        names = drop_superseded_files(files.list_files(dataset, [day]))
        newest = max((name.hour for name in names), default=-1)
        times = []
        for name in names:
            if name.hour == newest:
                latest_ms = name.first_ms + HOUR_MS
                with log_damaged_file(name), files.open(name) as file:
                    latest_ms = _read_largest_time(pq.read_metadata(file))
                times.append(latest_ms)
        if times:
            return max(times)
    return NOTHING_MS


def _read_largest_time(footer: Any) -> int:
    column = footer.schema.names.index("time_ms")
    groups = (footer.row_group(group).column(column).statistics for group in range(footer.num_row_groups))
    return max((int(statistics.max) for statistics in groups), default=NOTHING_MS)
