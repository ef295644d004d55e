"""The search of the archive for jobs that are no longer on the board.

It reads the archived events backwards from the newest day. It stops at its time limit, or at the
submission of the latest attempt. It skips the events of steps: they are the most frequent, and none of
them says how a job ended.
"""

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass
from typing import IO

from fleetcast.fleet.errors import RecordError, SourceError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.ingest.archive.files import HOUR_MS, ArchiveFiles, drop_superseded_files, parse_day_ms
from fleetcast.ingest.archive.read import RETRIES, log_damaged_file
from fleetcast.ingest.inbox.job_events import NO_FUTURE_LIMIT_MS, decode_event
from fleetcast.service.config import Config

AT_ONCE, MOST_WAITING = 2, 16  # look-ups of one api process
MOST_EVENTS = 20_000  # of one job; a job with more is told by its newest


@dataclass(frozen=True, slots=True)
class ArchiveSearchResult:
    """The result of a search in the archive: the latest attempt, or None if there is none.

    stopped_ms: the time down to which events were read before the time limit, in Unix ms. None if the
    search was complete.
    """

    attempt: JobAttempt | None = None
    stopped_ms: int | None = None


class ArchivedJobs:
    """The archive searches of one api process. A few run at once, in threads."""

    def __init__(self, config: Config) -> None:
        self.enabled = config.archive.enabled and config.archive.look_s > 0
        self._url = config.archive_url
        self._limit_s = config.archive.look_s
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0

    async def find_job(self, job: str) -> ArchiveSearchResult:
        """Find a job in the archive. Raises SourceError if the archive is unreadable or too many searches wait."""
        if self._waiting >= MOST_WAITING:
            raise SourceError(f"{self._waiting} look-ups in the archive wait: ask again", retry_after_s=self._limit_s)
        self._waiting += 1
        try:
            async with self._gate:
                return await asyncio.to_thread(self._search_archive, job)
        finally:
            self._waiting -= 1

    def _search_archive(self, job: str) -> ArchiveSearchResult:
        files = ArchiveFiles(self._url)
        try:
            with files.convert_to_os_error():
                return find_archived_attempt(files, job, self._limit_s)
        except OSError as error:
            raise SourceError(f"the archive cannot be read: {error}", retry_after_s=5.0) from None


def find_archived_attempt(files: ArchiveFiles, job: str, limit_s: float) -> ArchiveSearchResult:
    """Find the latest attempt of a job. This blocks. Raises OSError.

    No further file is opened once `limit_s` seconds have passed.
    """
    until_s, table = time.monotonic() + limit_s, JobTable()
    for day in reversed(files.list_days("events")):
        hours = {name.hour for name in files.list_files("events", [day])}
        for hour in sorted(hours, reverse=True):
            if time.monotonic() >= until_s or table.position >= MOST_EVENTS:
                return ArchiveSearchResult(table.get(job), parse_day_ms(day) + (hour + 1) * HOUR_MS)
            _apply_events(table, _read_events(files, day, hour, job))
            latest = table.get(job)
            if latest is not None and latest.submission is not None:
                return ArchiveSearchResult(latest)
    return ArchiveSearchResult(table.get(job))


def _read_events(files: ArchiveFiles, day: str, hour: int, job: str) -> list[str]:
    """Read the events of a job from one hour's files, as JSON texts without events of steps.

    Compaction may replace files during the read. If it does, all files are read again.
    """
    for attempt in itertools.count(1):
        found: list[str] = []
        try:
            for name in drop_superseded_files(name for name in files.list_files("events", [day]) if name.hour == hour):
                with log_damaged_file(name), files.open(name) as file:
                    found += _read_job_events(file, job)
            return found
        except FileNotFoundError:
            if attempt == RETRIES:
                raise
    raise AssertionError("there is no last try")


def _read_job_events(file: IO[bytes], job: str) -> list[str]:
    import pyarrow.parquet as pq

    filters = [("of", "==", "job"), ("name", "==", job), ("type", "!=", "step")]
    texts: list[str] = pq.read_table(file, columns=["event"], filters=filters, use_threads=False)["event"].to_pylist()
    return texts


def _apply_events(table: JobTable, texts: list[str]) -> None:
    for text in texts:
        with contextlib.suppress(RecordError):  # of a later version, say: the others tell what they can
            event = decode_event(text.encode(), 0, NO_FUTURE_LIMIT_MS, archived=True)
            if not isinstance(event, NodeEvent):
                table.apply(event)
