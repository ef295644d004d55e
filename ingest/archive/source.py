"""The source "history": it delivers a span of the archive again, in order of time (docs/archive.md).

A batch holds `step_ms` of all blocks or of one. A thread reads ahead. Metrics that are no longer in the
catalogue are dropped.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import NODE_OWNED, Entities
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.archive.files import DATASETS, ArchiveFiles
from fleetcast.ingest.archive.read import ArchiveSpan, read_events, read_samples
from fleetcast.ingest.archive.rows import (
    KINDS,
    ArchiveRows,
    NameLookups,
    make_metric_columns,
    make_row_lookup,
    pack_series,
)
from fleetcast.ingest.node_names import find_or_register_node
from fleetcast.ingest.source import Batch, Source, read_options
from fleetcast.ingest.tally import RecordTally

Event = JobEvent | NodeEvent

WINDOW_MS = 600_000
RETRY_S = 5.0


class HistoryOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options of the source `history`.

    `url`: as in [archive]. Times are Unix ms, and the span ends before `to_ms`. `block`: empty means all
    blocks.
    """

    url: str
    from_ms: int
    to_ms: int
    block: str = ""
    step_ms: int = 15_000
    name: str = "history"


@dataclass(slots=True)
class _Window:
    """At most ten minutes of the archive, ordered by time."""

    rows: ArchiveRows
    events: list[Event]
    bad: list[RecordError]
    steps: deque[int] = field(default_factory=deque)  # the beginnings that have something, oldest first


class ArchiveSource(Source):
    """A source that reads a span of the archive as fast as its reader consumes it.

    Its position is the time of the next step.
    """

    def __init__(self, entities: Entities, clock: Clock, options: dict[str, Any]) -> None:
        self.options = read_options("history", options, HistoryOptions)
        if not (self.options.from_ms < self.options.to_ms and 1 <= self.options.step_ms <= WINDOW_MS):
            raise ConfigError(
                f"pipeline.sources history: from_ms {self.options.from_ms}, to_ms {self.options.to_ms}, step_ms "
                f"{self.options.step_ms}: from_ms must be before to_ms, and step_ms lie in 1..{WINDOW_MS}"
            )
        self.name = self.options.name
        self._files = ArchiveFiles(self.options.url)
        self._entities = entities
        self._catalogue = {kind: _find_catalogue_rows(columns) for kind, columns in make_metric_columns().items()}
        self._at_ms = self.options.from_ms
        self._window: _Window | None = None
        self._bad = 0

    async def next(self) -> Batch:
        while True:
            if self._at_ms >= self.options.to_ms:
                raise StopAsyncIteration
            end_ms = min((self._at_ms // WINDOW_MS + 1) * WINDOW_MS, self.options.to_ms)
            if self._window is None:
                self._window = await self._read_window(ArchiveSpan(self._at_ms, end_ms, self.options.block or None))
            if not self._window.steps:
                self._at_ms, self._window = await self._find_next_time(end_ms), None
                continue
            step_ms = self._window.steps.popleft()
            self._at_ms = min(step_ms + self.options.step_ms, end_ms)
            batch = self._make_batch(self._window, step_ms, self._at_ms)
            if not self._window.steps:
                self._at_ms, self._window = end_ms, None
            return batch

    def position(self) -> dict[str, Any]:
        return {"at_ms": self._at_ms}

    def seek(self, position: dict[str, Any]) -> None:
        self._at_ms = max(self.options.from_ms, int(position.get("at_ms", 0)))
        self._window = None

    async def close(self) -> None:
        self._window = None

    def health(self) -> dict[str, Any]:
        left_s = max(0, self.options.to_ms - self._at_ms) / 1000
        return {"name": self.name, "kind": "history", "rate_per_s": None, "lag_s": left_s, "bad": self._bad, "up": 1}

    async def _read_window(self, span: ArchiveSpan) -> _Window:
        known = Entities()  # the loop's own tables are not for a thread
        try:
            rows, events, bad = await asyncio.to_thread(self._read_samples_and_events, span, known)
        except OSError as error:
            raise SourceError(f"cannot read the archive {self.options.url}: {error}", RETRY_S) from None
        rows, refused = self._renumber_entities(rows, known)
        bad = [*bad, *refused]
        self._bad += len(bad)
        steps = set(np.unique(self._floor_to_step(rows.time_ms)).tolist())
        steps |= {self._floor_to_step(np.int64(event.time_ms)).item() for event in events}
        return _Window(rows, events, bad, deque(sorted(steps)))

    async def _find_next_time(self, after_ms: int) -> int:
        """Return the earliest time from `after_ms` on at which the archive may have rows, in Unix ms.

        A span may be empty for months, and reading it window by window would be slow.
        """
        span = ArchiveSpan(after_ms, self.options.to_ms, self.options.block or None)
        names = [
            name for dataset in DATASETS for name in await asyncio.to_thread(span.list_files, self._files, dataset)
        ]
        return max(after_ms, min((name.first_ms for name in names), default=self.options.to_ms))

    def _renumber_entities(self, rows: ArchiveRows, known: Entities) -> tuple[ArchiveRows, list[RecordError]]:
        """Return the rows with this process's entity rows, and an error for each refused name.

        A name is refused if it is invalid or if there is no room for it.
        """
        kinds, entity, refused = rows.kind, rows.entity, list[RecordError]()
        for number, kind in enumerate(KINDS):
            own = np.array([self._find_own_row(kind, name, refused) for name in known[kind].names], np.int32)
            at = np.flatnonzero(kinds == number)
            entity[at] = own[entity[at]]
        rows = replace(rows, series=pack_series(kinds, rows.metric, entity))
        return (rows.select(entity >= 0) if refused else rows), refused

    def _find_own_row(self, kind: EntityKind, name: str, refused: list[RecordError]) -> int:
        """Return this process's row of an archived entity, or -1 if its name is refused.

        Adds the error of a refused name to `refused`.
        """
        try:
            if kind is not EntityKind.NODE and kind not in NODE_OWNED:
                return self._entities[kind].add(name)
            stated, *parts = name.split("/")
            node = find_or_register_node(stated, self._entities)
            return self._entities.add_to_node(kind, node, *parts) if parts else self._entities.find_or_add_node(node)
        except RecordError as error:
            refused.append(error.with_traceback(None))
            return -1

    def _read_samples_and_events(
        self, span: ArchiveSpan, known: Entities
    ) -> tuple[ArchiveRows, list[Event], list[RecordError]]:
        rows = read_samples(self._files, span, NameLookups(make_row_lookup(known)))
        return rows.select(np.argsort(rows.time_ms, kind="stable")), *read_events(self._files, span)

    def _floor_to_step(self, time_ms: Any) -> Any:
        """Return the beginning of the step that contains each time.

        The first step begins at the present position.
        """
        return np.maximum(time_ms // self.options.step_ms * self.options.step_ms, self._at_ms)

    def _make_batch(self, window: _Window, first_ms: int, end_ms: int) -> Batch:
        first, end = np.searchsorted(window.rows.time_ms, (first_ms, end_ms)).tolist()
        rows = window.rows.select(slice(first, end))
        samples, unread = [], 0
        kinds, metrics, entity = rows.kind, rows.metric, rows.entity
        for number in np.unique(kinds).tolist():
            kind, at = KINDS[number], np.flatnonzero(kinds == number)
            metric = self._catalogue[kind][metrics[at]]
            known = metric >= 0
            part = SampleBatch(kind, metric, entity[at], rows.time_ms[at], rows.value[at])
            samples.append(part if known.all() else part.select_samples(known))
            unread += len(part) - int(np.count_nonzero(known))
        events = [event for event in window.events if first_ms <= event.time_ms < end_ms]
        bad, window.bad = window.bad, []
        return Batch(
            samples=tuple(samples),
            events=tuple(event for event in events if not isinstance(event, NodeEvent)),
            node_events=tuple(event for event in events if isinstance(event, NodeEvent)),
            bad=tuple(bad),
            tally=RecordTally(sum(map(len, samples)) + len(events), len(bad), {}, unread),
        )


def _find_catalogue_rows(columns: Any) -> Any:
    """Return (METRIC_NAMES row,) int16, the row in a kind's catalogue, -1 if the kind lacks the metric.

    columns: (catalogue row,) the index in METRIC_NAMES.
    """
    rows = np.full(sum(len(metrics) for metrics in METRICS.values()) + 1, -1, np.int16)
    rows[columns] = np.arange(len(columns))
    return rows
