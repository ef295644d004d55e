"""The writer of the archive in a running pipeline. It works in threads, one flush at a time.

    every snapshot     the writer takes the waiting rows at the moment when the positions are read, and
                       has written them before the snapshot is published
    in between         a flush begins when a quarter of `archive.buffer_bytes` waits
    full               sources wait until a flush has succeeded, so nothing is lost and the buffer stays bounded
    every ten minutes  closed hours are compacted, and days beyond `archive.keep_days` are deleted

Flushes continue while a snapshot is written and while hours are merged, because a large fleet fills the
buffer within seconds.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Callable

from fleetcast.fleet.clock import Clock
from fleetcast.ingest.archive.archive import Archive, ArchiveHealth, ArchiveLimits
from fleetcast.ingest.archive.compact import delete_days, find_compaction_runs, list_old_days, write_merged_file
from fleetcast.ingest.archive.files import DAY_MS, ArchiveFiles, format_day
from fleetcast.ingest.shares import Share
from fleetcast.service.config import Config
from fleetcast.service.pipeline.state import FleetState
from fleetcast.service.thread_work import run_in_thread

logger = logging.getLogger(__name__)

REST_WALL_S = 0.05  # from the moment a flush is due to its begin: rows that come meanwhile go into the same files
RETRY_WALL_S = (1.0, 30.0)
TIDY_S, TIDY_WALL_S = 600.0, 5.0  # fleet time, and at least so much wall time
CLOSED_MS = 600_000  # an hour is compacted this long after its end
RECENT_DAYS = 3  # of those, hours are compacted


class ArchiveWriter:
    """The background writer of one pipeline's archive. It does nothing if the archive is disabled.

    `saved_ms`: when the restored state was saved, in Unix ms, or 0 if no state was restored.
    """

    def __init__(self, config: Config, state: FleetState, clock: Clock, share: Share, saved_ms: int) -> None:
        self.still = asyncio.Lock()  # who holds it, flushes
        self.archive: Archive | None = None
        self._state, self._clock = state, clock
        self._config = config.archive
        self._held = 0  # sources that wait for room
        self._is_due, self._has_written = asyncio.Event(), asyncio.Event()
        if config.archive.enabled:
            limits = ArchiveLimits(config.archive.buffer_bytes, config.archive.file_rows, config.archive.keep_days)
            files = ArchiveFiles(config.archive_url)
            writer = str(share.instance)
            self.archive = Archive(
                files, state.entities, writer=writer, limits=limits, saved_ms=saved_ms, when_due=self._is_due.set
            )
        state.archive = self.archive

    @property
    def is_full(self) -> bool:
        return self.archive is not None and self.archive.is_full

    @property
    def delays_sources(self) -> bool:
        """True if the archive's buffer is full, or if a source still waits for room in it."""
        return self.is_full or self._held > 0

    async def wait_for_room(self) -> None:
        """Wait until the archive's buffer has room for another batch."""
        if self.is_full:
            await self._wait_for_flush()

    async def _wait_for_flush(self) -> None:
        began = time.monotonic()
        logger.warning("the archive has %s waiting: a source is held up", _describe_size(self.archive))
        self._held += 1
        try:
            while self.is_full:
                self._has_written.clear()
                await self._has_written.wait()
        finally:
            self._held -= 1
        logger.info("the archive has room again after %.1f s", time.monotonic() - began)

    def prepare_flush(self) -> Callable[[], None]:
        """Take the waiting rows, and return a function that writes them in a thread.

        The caller must hold the lock `still`.
        """
        if self.archive is None:
            return _do_nothing
        return self.archive.prepare_flush(self._state.topology, self._clock.now_ms())

    def health(self) -> ArchiveHealth | None:
        """Return the archive's part of `/v1/ingestion`, or None if the archive is disabled."""
        return None if self.archive is None else self.archive.health()

    def close(self) -> None:
        if self.archive is not None:
            self.archive.close()

    async def flush(self) -> None:
        """Write the waiting rows. If this raises OSError, the rows still wait."""
        async with self.still:
            await self.run_flush(self.prepare_flush())

    async def run_flush(self, flush: Callable[[], None]) -> None:
        """Run a flush from `prepare_flush` in a thread, then wake the sources that wait for room.

        The caller must hold the lock `still`.
        """
        try:
            await run_in_thread(flush)
        finally:
            self._has_written.set()
            if self.archive is not None and self.archive.is_due:
                self._is_due.set()

    async def flush_forever(self) -> None:
        """Flush whenever enough rows wait. After an error, retry at growing intervals."""
        retry_s = RETRY_WALL_S[0]
        while self.archive is not None:
            await self._is_due.wait()
            await asyncio.sleep(REST_WALL_S)
            self._is_due.clear()
            if not self.archive.is_due:  # a snapshot has written the rows
                continue
            try:
                await self.flush()
                retry_s = RETRY_WALL_S[0]
            except OSError as error:
                what = "sources wait" if self.is_full else "rows wait in memory"
                logger.error("cannot write the archive: %s; %s, trying again in %.0f s", error, what, retry_s)
                await asyncio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_WALL_S[1])

    async def compact_archive_forever(self) -> None:
        while self.archive is not None:
            await asyncio.sleep(max(TIDY_WALL_S, self._clock.convert_to_wall_s(TIDY_S)))
            try:
                with self.archive.files.convert_to_os_error():
                    await self.compact_and_prune(self.archive)
            except OSError as error:
                logger.error("cannot tidy the archive: %s; all rows stay as they are", error)

    async def compact_and_prune(self, archive: Archive) -> None:
        """Compact the closed hours of the last days, and delete days beyond `archive.keep_days`.

        This does nothing until the pipeline owns the archive's files. Raises OSError.
        """
        if not archive.has_claimed_name:
            return
        now_ms = self._clock.now_ms()
        days = [format_day(now_ms - age * DAY_MS) for age in range(RECENT_DAYS)]
        most = self._config.file_rows
        find = functools.partial(
            find_compaction_runs, archive.files, archive.writer, now_ms - CLOSED_MS, most_rows=most, days=days
        )
        for run in await run_in_thread(find):
            try:
                ready = await run_in_thread(functools.partial(write_merged_file, archive.files, run))
                async with self.still:  # a flush looks rows up in the files that go now
                    await run_in_thread(functools.partial(archive.files.replace_superseded_files, ready))
            except (OSError, ValueError) as error:  # a full disk, or a page of a file that is damaged
                logger.error("cannot compact %s: %s; its rows stay as they are", run.names[0].path, error)
        if self._config.keep_days:
            old = await run_in_thread(functools.partial(list_old_days, archive.files, now_ms, self._config.keep_days))
            await run_in_thread(functools.partial(delete_days, archive.files, old, _log_pruned_day))


def _log_pruned_day(day: str) -> None:
    logger.info("archive: %s is older than archive.keep_days and was deleted", day)


def _describe_size(archive: Archive | None) -> str:
    return f"{0 if archive is None else archive.nbytes / 2**20:.0f} MiB"


def _do_nothing() -> None:
    """Do nothing, as the flush of a disabled archive."""
