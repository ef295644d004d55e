"""The pipeline's own metrics, for `/v1/ingestion`, the console's header and Prometheus."""

import contextlib
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from fleetcast.fleet import files
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.service.answers.fleet import Ingestion, Quantiles
from fleetcast.service.exposition import Page
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.guarded_source import GuardedSource
from fleetcast.service.pipeline.state import Counts
from fleetcast.service.pipeline.tick import Tick


class PipelineMetrics:
    """The times of ticks, the rates, and the lag of a pipeline.

    The lag is the wall-clock time from a batch's arrival until a board with this batch is published, in ms.
    """

    def __init__(self) -> None:
        self.ticks = 0
        self.rates = Rates()
        self._tick_ms: deque[float] = deque(maxlen=600)
        self._lag_ms: deque[float] = deque(maxlen=2000)
        self._arrived: list[float] = []

    def record_arrival(self) -> None:
        self._arrived.append(time.monotonic())

    def pop_arrivals(self) -> list[float]:
        """Return the arrival times of batches since the last call, and clear them.

        The tick that includes these batches passes the times to `record_tick`.
        """
        arrived, self._arrived = self._arrived, []
        return arrived

    def record_tick(self, took_ms: float, arrived: Sequence[float]) -> None:
        """Record that a board was published.

        took_ms: duration of the tick. arrived: monotonic arrival times of the batches on the board.
        """
        self.ticks += 1
        self._tick_ms.append(took_ms)
        self._lag_ms.extend((time.monotonic() - moment) * 1000 for moment in arrived)

    def make_ingestion_document(self, now_ms: int, counts: Counts, sources: Sequence[GuardedSource]) -> Ingestion:
        """Return the document of `/v1/ingestion`."""
        health = [row for source in sources for row in source.health()]
        return Ingestion(
            as_of_ms=now_ms,
            sources=health,
            samples_per_s=self.rates.samples_per_s,
            events_per_s=self.rates.events_per_s,
            newest_sample_ms=counts.newest_sample_ms or None,
            bad_records=dict(counts.bad),
            bad_examples=dict(counts.bad_examples),
            bad_total=sum(counts.bad.values()),
            samples_total=counts.samples,
            late_total=counts.late,
            events_total=counts.events,
            duplicates_total=counts.duplicates,
            noted=dict(counts.noted),
            targets={state: _sum_target_counts(health, f"targets_{state}") for state in ("up", "down")},
            ticks=self.ticks,
            tick_ms=compute_percentiles(self._tick_ms),
            lag_ms=compute_percentiles(self._lag_ms),
        )


class Rates:
    """The rates of samples and events in each fleet second, over about the last minute."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, int, int]] = deque()
        self.samples_per_s = 0.0
        self.events_per_s = 0.0

    def record(self, now_ms: int, samples: int, events: int) -> None:
        if self._points and now_ms < self._points[-1][0]:  # the clock was set back
            self._points.clear()
        self._points.append((now_ms, samples, events))
        while len(self._points) > 2 and self._points[0][0] < now_ms - 60_000:
            self._points.popleft()
        first_ms, first_samples, first_events = self._points[0]
        seconds = (now_ms - first_ms) / 1000
        if seconds > 0:
            self.samples_per_s = round((samples - first_samples) / seconds, 1)
            self.events_per_s = round((events - first_events) / seconds, 2)


class PipelinePage(Capability):
    """The metrics page of the pipeline process: CPU, memory, inbox backlog, and disk."""

    def __init__(self, folder: Path, sources: Sequence[GuardedSource]) -> None:
        self._folder, self._sources = folder, sources
        self._registry = CollectorRegistry()
        ProcessCollector(namespace="fleetcast_pipeline", registry=self._registry)

    def make_page(self, tick: Tick) -> bytes:
        page = Page()
        backlog_bytes = sum(source.backlog_bytes() for source in self._sources if source.name == InboxSource.name)
        page.add_number(
            "inbox_backlog_bytes", "Accepted records on disk that the pipeline has not read.", backlog_bytes
        )
        page.add_number(
            "snapshot_timestamp_seconds", "When state was last saved, in wall time.", self._find_newest_snapshot_s()
        )
        total, free = files.read_usage_bytes(self._folder)
        page.add_number("state_disk_size_bytes", "Size of the disk that holds the state folder.", total)
        page.add_number("state_disk_free_bytes", "What is free there.", free)
        return page.encode() + generate_latest(self._registry)

    def _find_newest_snapshot_s(self) -> float | None:
        """Return when the newest snapshot was finished, in Unix seconds, or None without a snapshot.

        A thread may write and delete snapshots meanwhile.
        """
        times = []
        for path in (self._folder / "snapshot").glob("[0-9]*/state.arrays"):
            with contextlib.suppress(FileNotFoundError):
                times.append(path.stat().st_mtime)
        return max(times, default=None)


def compute_percentiles(values: Sequence[float] | deque[float]) -> Quantiles:
    """Return p50 and p99 in the unit of the values. Both are None if there are no values."""
    if not values:
        return {"p50": None, "p99": None}
    p50, p99 = np.percentile(np.fromiter(values, np.float64), (50, 99))
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}


def _sum_target_counts(rows: Sequence[Mapping[str, object]], key: str) -> int:
    """Return the sum of a count of targets over all rows. key: the name of the count.

    A plugin may put any value there, so values that are not numbers are skipped.
    """
    counts = [row.get(key) for row in rows]
    return sum(int(count) for count in counts if isinstance(count, int | float))
