"""The archive: every accepted sample and event, once, in Parquet files that any tool reads.

    event loop: collect rows in order of arrival ─ thread: sort ─ drop rows that are in files ─ write files

Rows wait in memory until a snapshot flushes them. The snapshot is valid only after its rows are on disk.
After a crash, sources deliver again all records that came after the last valid snapshot. A row is written
only if no file holds its series and time, or its event's identity. Rows that the window store or job table
accepted, and that are later than all files at the start, are new. All others are looked up in the files of
their hour. If a flush fails, the archive keeps its rows, and the next flush looks all of them up.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, Topology
from fleetcast.ingest.archive.events import Event, KnownEvents
from fleetcast.ingest.archive.files import (
    DAY_MS,
    HOUR_MS,
    UNPLACED,
    ArchiveFiles,
    Dataset,
    FileName,
    drop_superseded_files,
    format_day,
)
from fleetcast.ingest.archive.read import find_newest_ms, log_damaged_file
from fleetcast.ingest.archive.rows import (
    KINDS,
    ArchiveRows,
    NameLookups,
    decode_samples,
    encode_events,
    encode_samples,
    make_metric_columns,
    make_sort_keys,
    pack_series,
    sort_unique_rows,
)
from fleetcast.ingest.inbox.job_events import YEAR_2000_MS

logger = logging.getLogger(__name__)

BYTES_A_ROW = 23
BYTES_AN_EVENT = 600  # about; with its strings


@dataclass(frozen=True, slots=True)
class ArchiveLimits:
    """The limits of an archive's memory, file size and age.

    `buffer_bytes`: the most bytes that may wait in memory. A flush is due once a quarter of these wait.
    `file_rows`: the most rows of a compacted file. `keep_days`: the age at which days are deleted, 0 for never.
    """

    buffer_bytes: int = 134_217_728
    file_rows: int = 8_000_000
    keep_days: int = 90  # 0: for ever


@dataclass(slots=True)
class ArchiveHealth:
    """Counts of the rows and files that an archive has written since the process began.

    `failing`: the reason why the last flush failed, empty if it succeeded.
    """

    rows: int = 0
    events: int = 0
    files: int = 0
    bytes: int = 0
    repeats: int = 0
    too_old: int = 0
    waiting_bytes: int = 0
    full: bool = False
    failing: str = ""


@dataclass(slots=True)
class _WaitingRows:
    """Rows in memory that wait for a flush.

    `batches`: each batch with an (n,) bool array, which is true for samples that are certain to be new.
    """

    batches: list[tuple[SampleBatch, NDArray[np.bool_]]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    nbytes: int = 0


class Archive:
    """The writer of an archive.

    The event loop calls all methods. Only a prepared flush runs in a thread.
    writer: this writer's unique part of file names. saved_ms: when the restored state was saved, 0 for none.
    when_due: called after each added batch or event while a flush is due.
    """

    def __init__(
        self,
        files: ArchiveFiles,
        entities: Entities,
        *,
        writer: str = "0",
        limits: ArchiveLimits | None = None,
        saved_ms: int = 0,
        when_due: Callable[[], object] = lambda: None,
    ) -> None:
        self.files = files
        self._when_due = when_due
        self.limits = limits or ArchiveLimits()
        self.counts = ArchiveHealth()
        self.writer = writer
        self._entities = entities
        self._series = {kind: pack_series(KINDS.index(kind), at, 0) for kind, at in make_metric_columns().items()}
        self._number = -1
        self._swap = threading.Lock()  # a flush that fails puts its rows back, in its thread
        self._waiting = _WaitingRows()
        self._writing = 0  # bytes that were handed over, and are not on disk
        self._doubt_ms: int | None = None  # rows up to here may be on disk; None: nobody has looked yet
        self._known_events = KnownEvents(files, saved_ms)
        self._give_back: Callable[[], None] | None = None  # the writer's name

    # -- in the loop ----------------------------------------------------------------------------------------------

    def add(self, batch: SampleBatch, sure: NDArray[np.bool_]) -> None:
        """Add accepted samples. sure: (n,) bool, true for samples that are certain to be new."""
        if len(batch):
            with self._swap:
                self._waiting.batches.append((batch, sure))
                self._waiting.nbytes += len(batch) * BYTES_A_ROW
            if self.is_due:
                self._when_due()

    def add_event(self, event: Event) -> None:
        """Add an event that is new."""
        with self._swap:
            self._waiting.events.append(event)
            self._waiting.nbytes += BYTES_AN_EVENT
        if self.is_due:
            self._when_due()

    @property
    def nbytes(self) -> int:
        """The number of bytes in memory that are not on disk yet."""
        return self._waiting.nbytes + self._writing

    @property
    def is_due(self) -> bool:
        """True if enough bytes wait to flush them before the next snapshot."""
        return self._waiting.nbytes > self.limits.buffer_bytes // 4

    @property
    def is_full(self) -> bool:
        """True if the memory limit is reached. The pipeline then stops reading its sources."""
        return self.nbytes > self.limits.buffer_bytes

    @property
    def has_claimed_name(self) -> bool:
        """True if the archive has reserved its writer's name, as its first flush does.

        From then on, no other process can use the name, and the archive finishes the files that a crash
        interrupted.
        """
        return self._give_back is not None

    def close(self) -> None:
        """Release the writer's name. Rows that wait are not written."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def health(self) -> ArchiveHealth:
        return replace(self.counts, waiting_bytes=self.nbytes, full=self.is_full)

    def prepare_flush(self, topology: Topology, now_ms: int) -> Callable[[], None]:
        """Return a function that writes all waiting rows.

        Run it in a thread, and only one such function at a time. If it raises OSError, the rows wait again.
        """
        self._number = max(self._number + 1, time.time_ns() // 1_000_000)
        with self._swap:
            taken, self._waiting = self._waiting, _WaitingRows()
            self._writing = taken.nbytes
        flush = _Flush(self._number, now_ms, _Blocks(topology, {kind: self._entities[kind].node for kind in KINDS}))
        oldest_ms = now_ms - self.limits.keep_days * DAY_MS if self.limits.keep_days else YEAR_2000_MS

        def write() -> None:
            try:
                with self.files.convert_to_os_error():
                    self._write_rows(taken, flush, oldest_ms)
            except Exception as error:
                self._restore_rows(taken, error)
                raise
            self._writing, self.counts.failing = 0, ""

        return write

    def _restore_rows(self, taken: _WaitingRows, error: Exception) -> None:
        """Put the rows of a failed flush back into memory.

        The flush may have written some of its files, so the next flush looks all rows up.
        """
        doubtful = [(batch, np.zeros(len(batch), np.bool_)) for batch, _ in taken.batches]
        with self._swap:
            now = self._waiting
            self._waiting = _WaitingRows(doubtful + now.batches, taken.events + now.events, taken.nbytes + now.nbytes)
            self._writing, self._doubt_ms = 0, None
        self._known_events.forget_newest_time()
        self.counts.failing = f"{type(error).__name__}: {error}"

    # -- in a thread ----------------------------------------------------------------------------------------------

    def _write_rows(self, taken: _WaitingRows, flush: "_Flush", oldest_ms: int) -> None:
        doubt_ms = self._prepare_files()
        for hour_ms, rows, sure in _split_by_hour(taken.batches, self._series, doubt_ms):
            if hour_ms + HOUR_MS <= oldest_ms:
                self.counts.too_old += len(rows)
            else:
                self._write_hour(hour_ms, rows, sure, flush)
        self._write_events(taken.events, flush, oldest_ms)

    def _prepare_files(self) -> int:
        """Prepare the files for a flush, and return the newest sample time in them, in Unix ms.

        The first flush also claims the writer's name. The first flush, and each one after a failure, finishes
        leftover files and reads the newest time from the files.
        """
        if self._give_back is None:
            self._give_back = self.files.claim_writer_name(self.writer)
        if self._doubt_ms is None:
            self.files.finish_ready_files(self.writer)
            self._doubt_ms = find_newest_ms(self.files)
        return self._doubt_ms

    def _write_hour(self, hour_ms: int, rows: ArchiveRows, sure: NDArray[np.bool_], flush: "_Flush") -> None:
        was = len(rows)
        rows, order = sort_unique_rows(rows, hour_ms)
        there = [name for name in self.files.list_files("samples", [format_day(hour_ms)]) if name.first_ms == hour_ms]
        unknown = np.flatnonzero(~sure[order]) if there and not sure.all() else order[:0]
        if len(unknown):
            blocks = flush.blocks.find_block_names(rows.select(unknown))
            restarted = int(rows.time_ms[unknown].min()) <= (self._doubt_ms or 0)  # another topology may hold now
            among = [name for name in drop_superseded_files(there) if restarted or name.block in blocks]
            repeated = unknown[self._find_stored_rows(rows.select(unknown), hour_ms, among)]
            rows = rows.select(np.delete(np.arange(len(rows)), repeated))
        self.counts.repeats += was - len(rows)
        for block, part in flush.blocks.split_by_block(rows):
            name = _choose_part_name(("samples", block, self.writer), hour_ms, flush.number, there)
            self._write_file(name, encode_samples(part, {kind: self._entities[kind].names for kind in KINDS}))
            self.counts.rows += len(part)

    def _find_stored_rows(self, rows: ArchiveRows, hour_ms: int, names: Sequence[FileName]) -> NDArray[np.bool_]:
        """Return (n,) bool, true for rows whose series and time are in one of these files.

        The names of files with such rows are synced first, so that the rows are certain to be on disk.
        """
        span = [("time_ms", ">=", int(rows.time_ms.min())), ("time_ms", "<=", int(rows.time_ms.max()))]
        wanted = make_sort_keys(rows, hour_ms)
        words = NameLookups(lambda kind, entity: self._entities[kind].find_row(entity))
        found = np.zeros(len(rows), np.bool_)
        for name in names:
            with log_damaged_file(name), self.files.open(name) as file:
                here = np.isin(wanted, make_sort_keys(decode_samples(file, words, span), hour_ms))
                if here.any():
                    self.files.sync_file_names([name])
                found |= here
        return found

    def _write_events(self, events: Sequence[Event], flush: "_Flush", oldest_ms: int) -> None:
        young = [event for event in events if event.time_ms >= oldest_ms]
        new = self._known_events.filter_new_events(young, flush.now_ms)
        self.counts.too_old += len(events) - len(young)
        self.counts.repeats += len(young) - len(new)
        hours: dict[int, list[Event]] = {}
        for event in new:
            hours.setdefault(event.time_ms // HOUR_MS * HOUR_MS, []).append(event)
        for hour_ms, same in hours.items():
            there = [
                name for name in self.files.list_files("events", [format_day(hour_ms)]) if name.first_ms == hour_ms
            ]
            self._write_file(
                _choose_part_name(("events", "", self.writer), hour_ms, flush.number, there), encode_events(same)
            )
            self.counts.events += len(same)

    def _write_file(self, name: FileName, data: Any) -> None:
        self.files.write_file(name, data)
        self.counts.files += 1
        self.counts.bytes += len(data)


class _Blocks:
    """The topology blocks of archived rows, as they were when a flush began.

    A thread uses it, so its arrays must not change while the event loop goes on.
    """

    def __init__(self, topology: Topology, owners: dict[EntityKind, NDArray[np.int32]]) -> None:
        self._names = topology.domain_names[Level.BLOCK]
        self._domain = np.append(topology.domain[Level.BLOCK], -1).astype(np.int16)  # the last one is nowhere
        self._owners = owners

    def find_blocks(self, rows: ArchiveRows) -> NDArray[np.int16]:
        """Return (n,) int16, the index of each row's block, or -1 if the topology does not contain its node."""
        block = np.full(len(rows), -1, np.int16)
        starts, entities = rows.find_kind_starts(), rows.entity
        for kind, first, end in zip(KINDS, starts[:-1], starts[1:], strict=True):
            if first < end:
                node = self._owners[kind][entities[first:end]]
                known = (node >= 0) & (node < len(self._domain) - 1)
                block[first:end] = self._domain[np.where(known, node, len(self._domain) - 1)]
        return block

    def find_block_names(self, rows: ArchiveRows) -> set[str]:
        return (
            {self._get_block_name(block) for block in np.unique(self.find_blocks(rows)).tolist()}
            if self._names
            else {UNPLACED}
        )

    def split_by_block(self, rows: ArchiveRows) -> Iterator[tuple[str, ArchiveRows]]:
        """Yield (block name, rows) for each block. The rows stay in order."""
        if not self._names:
            yield from [(UNPLACED, rows)] if len(rows) else []
            return
        block = self.find_blocks(rows)
        order = np.argsort(block, kind="stable")
        edges = np.flatnonzero(np.diff(block[order], prepend=-2, append=-2)).tolist()
        for first, end in pairwise(edges):
            yield self._get_block_name(int(block[order[first]])), rows.select(order[first:end])

    def _get_block_name(self, block: int) -> str:
        return self._names[block] if block >= 0 else UNPLACED


@dataclass(frozen=True, slots=True)
class _Flush:
    number: int
    now_ms: int
    blocks: _Blocks


def _split_by_hour(
    batches: Sequence[tuple[SampleBatch, NDArray[np.bool_]]],
    series: dict[EntityKind, NDArray[np.int64]],
    doubt_ms: int,
) -> Iterator[tuple[int, ArchiveRows, NDArray[np.bool_]]]:
    """Yield (start of the hour in Unix ms, rows, sure) for each hour, with the rows in order of arrival.

    sure: (n,) bool, true for rows that are certain to be new. series: kind → (catalogue row,) int64, the number of
    each metric's first series. doubt_ms: rows up to this time are not certain to be new.
    """
    if not batches:
        return
    ends = np.cumsum([len(batch) for batch, _ in batches]).tolist()
    numbers = np.empty(ends[-1], np.int64)
    for (batch, _), end in zip(batches, ends, strict=True):
        part = numbers[end - len(batch) : end]
        np.take(series[batch.kind], batch.metric, out=part, mode="clip")  # any other mode copies `out`
        part += batch.entity
    rows = ArchiveRows(
        numbers,
        np.concatenate([batch.time_ms for batch, _ in batches]),
        np.concatenate([batch.value for batch, _ in batches]),
    )
    sure = np.concatenate([known for _, known in batches])
    oldest_ms, newest_ms = int(rows.time_ms.min()), int(rows.time_ms.max())
    if oldest_ms <= doubt_ms:
        sure &= rows.time_ms > doubt_ms
    first, last = oldest_ms // HOUR_MS, newest_ms // HOUR_MS
    if first == last:
        yield first * HOUR_MS, rows, sure
        return
    hour = rows.time_ms // HOUR_MS
    for one in np.unique(hour).tolist():
        at = np.flatnonzero(hour == one)
        yield one * HOUR_MS, rows.select(at), sure[at]


def _choose_part_name(keys: tuple[Dataset, str, str], hour_ms: int, number: int, there: Sequence[FileName]) -> FileName:
    """Return a name for a part, with a number above the numbers of all existing files.

    So no compacted file supersedes the part, even if the clock was set back.
    """
    dataset, block, writer = keys
    ends = [name.last for name in there if (name.block, name.writer) == (block, writer)]
    number = max([number, *(end + 1 for end in ends)])
    return FileName(dataset, format_day(hour_ms), block, hour_ms // HOUR_MS % 24, writer, number, number)
