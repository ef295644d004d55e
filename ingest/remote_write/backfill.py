"""Backfill: it imports the samples of a Prometheus into the archive, hour by hour, each hour once.

    for each window    names of known metrics ─ ranges of each ─ series of the catalogue ─ archive ─ done, on disk

An interrupted run repeats its window. The archive looks every row up, so each sample is stored once.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from fleetcast.clients.prometheus import MatrixRow, TooManySamples
from fleetcast.fleet import files
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.pages.exporters import ExporterResolver, list_readable_names
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.remote_write.request import WriteRequest
from fleetcast.ingest.source import Batch

UNAME = "node_uname_info"  # names hosts: first in each window
SHORTEST_MS = 60_000

Window = tuple[int, int]  # from, up to but not with; Unix milliseconds


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """The input of a run: a span of time, label matchers and a step.

    first_ms, end_ms: Unix ms. match: such as `cluster="a"`, or empty. step_ms: 0 for samples as recorded.
    """

    url: str
    first_ms: int
    end_ms: int
    match: str = ""
    step_ms: int = 0
    window_ms: int = 3_600_000

    @property
    def key(self) -> str:
        """The key under which progress is stored, so that a later run can continue. It does not depend on the span."""
        return hashlib.sha256(repr((self.url, self.match, self.step_ms)).encode()).hexdigest()[:16]

    def list_windows(self) -> list[Window]:
        """Return the windows of `window_ms` that cover the span, cut to the span."""
        starts = range(self.first_ms // self.window_ms * self.window_ms, self.end_ms, self.window_ms)
        return [(max(start, self.first_ms), min(start + self.window_ms, self.end_ms)) for start in starts]

    def make_selector(self, name: str) -> str:
        """Return the PromQL selector of a metric name, or of several names joined by `|`."""
        matchers = f'__name__{"=~" if "|" in name else "="}"{name}"' + (f",{self.match}" if self.match else "")
        return f"{{{matchers}}}"


class Progress:
    """The windows that are done, in a file that is replaced after each window.

    A state folder has one such file, with a row for each key of a request.
    """

    def __init__(self, path: Path, key: str) -> None:
        """Read the windows that are done from the file. key: the key of the request.

        Raises OSError, or ValueError if the file has another format.
        """
        self._path = path
        self._key = key
        rows: dict[str, list[Window]] = {}
        if path.exists():
            rows = msgspec.json.decode(path.read_bytes(), type=dict[str, list[Window]])
        self._rows = rows
        self._done = merge_windows(rows.get(key, []))

    def is_done(self, window: Window) -> bool:
        return any(first <= window[0] and window[1] <= end for first, end in self._done)

    def mark_done(self, window: Window) -> None:
        """Record a window as done, and return once the record is on disk."""
        self._done = merge_windows([*self._done, window])
        self._path.parent.mkdir(parents=True, exist_ok=True)
        files.replace_file(self._path, [msgspec.json.encode({**self._rows, self._key: self._done})], "progress")


def merge_windows(windows: Iterable[Window]) -> list[Window]:
    """Return the union of windows, in order. Windows that touch become one.

    >>> merge_windows([(5, 9), (0, 3), (3, 4), (8, 10)])
    [(0, 4), (5, 10)]
    """
    found: list[Window] = []
    for first, end in sorted(windows):
        if found and first <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((first, end))
    return found


class RangeClient(Protocol):
    """The part of a Prometheus client that backfill uses.

    See fleetcast.clients.prometheus.PrometheusClient.
    """

    def list_metric_names(self, match: str, first_ms: int, end_ms: int) -> list[str]: ...

    def fetch_recorded_samples(self, selector: str, first_ms: int, end_ms: int) -> list[MatrixRow]: ...

    def fetch_resampled_samples(self, selector: str, first_ms: int, end_ms: int, step_ms: int) -> list[MatrixRow]: ...


@dataclass(slots=True)
class BackfillCounts:
    """Counts of what a backfill run has read."""

    samples: int = 0
    skipped: int = 0  # windows that were done before
    bad: Counter[str] = field(default_factory=Counter)


class PrometheusBackfill:
    """An importer of a Prometheus' samples into an archive. Its calls block.

    No other writer may use `archive` at the same time.
    """

    def __init__(self, client: RangeClient, archive: Archive, entities: Entities, topology: Topology) -> None:
        self.taken = BackfillCounts()
        self._client = client
        self._archive = archive
        self._topology = topology
        resolver = ExporterResolver(entities)
        self._decoder = WriteDecoder(resolver, machines=resolver.inventory.machines)

    def run(self, wish: BackfillRequest, progress: Progress, now_ms: int) -> Iterator[Window]:
        """Yield each window once it is done. Raises SourceError, ConfigError or OSError.

        After an error, the next run continues at the window that failed.
        """
        for window in wish.list_windows():
            if progress.is_done(window):
                self.taken.skipped += 1
            else:
                self._import_window(wish, window, now_ms)
                self._flush(now_ms)
                progress.mark_done(window)
            yield window

    def _import_window(self, wish: BackfillRequest, window: Window, now_ms: int) -> None:
        selector = f"{{{wish.match}}}" if wish.match else '{__name__!=""}'
        for name in find_known_names(self._client.list_metric_names(selector, *window)):
            for rows in self._fetch_rows(wish, name, window):
                batch = self._decoder.decode_request(make_write_request(rows), window[1])
                self.taken.samples += len(batch)
                self.taken.bad.update(error.reason for error in batch.bad)
                self._archive_batch(batch)
                if self._archive.is_due:
                    self._flush(now_ms)

    def _fetch_rows(self, wish: BackfillRequest, name: str, window: Window) -> Iterator[list[MatrixRow]]:
        """Yield the rows of one metric in a window. A window with too many samples is halved.

        name: one metric name, or several joined by `|`.
        """
        first, end = window
        selector = wish.make_selector(name)
        try:
            if wish.step_ms:
                yield self._client.fetch_resampled_samples(selector, first, end, wish.step_ms)
            else:
                yield self._client.fetch_recorded_samples(selector, first, end)
        except TooManySamples:
            half = first + (end - first) // 2 // SHORTEST_MS * SHORTEST_MS
            if half <= first:
                raise
            yield from self._fetch_rows(wish, name, (first, half))
            yield from self._fetch_rows(wish, name, (half, end))

    def _archive_batch(self, batch: Batch) -> None:
        for samples in batch.samples:
            self._archive.add(samples, np.zeros(len(samples), np.bool_))

    def _flush(self, now_ms: int) -> None:
        self._archive.prepare_flush(self._topology, now_ms)()


def find_known_names(names: Sequence[str]) -> list[str]:
    """Return the metric names that may belong to a series of the catalogue.

    The metric that names hosts comes first. See `list_readable_names`.
    """
    return [*([UNAME] if UNAME in names else []), *list_readable_names(names)]


def make_write_request(rows: Sequence[MatrixRow]) -> WriteRequest:
    """Convert the rows of an answer into a remote-write request of version 2.0.

    The decoder of remote writes then resolves the series.
    """
    symbols: dict[str, int] = {}
    refs: list[int] = []
    ends = []
    for row in rows:
        refs += [symbols.setdefault(word, len(symbols)) for pair in sorted(row.metric.items()) for word in pair]
        ends.append(len(refs))
    counts = np.array([len(row.values) for row in rows], np.intp)
    points = np.array([point for row in rows for point in row.values], np.float64).reshape(-1, 2)
    end = np.array(ends, np.intp)
    return WriteRequest(
        np.repeat(np.arange(len(rows)), counts),
        np.rint(points[:, 0] * 1000).astype(np.int64),
        np.ascontiguousarray(points[:, 1]),
        [],
        [symbol.encode() for symbol in symbols],
        np.array(refs, np.uint32),
        np.concatenate([[0], end[:-1]]).astype(np.intp) if len(end) else end,
        end,
    )
