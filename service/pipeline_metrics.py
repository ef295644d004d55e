"""The metrics of the pipeline's process."""

import contextlib
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest

from fleet import files
from service.exposition import Page


class PipelinePage:
    """What the pipeline's process tells of itself: CPU and memory, how far the inbox is read, its disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._registry = CollectorRegistry()
        ProcessCollector(namespace="fleetcast_pipeline", registry=self._registry)

    def encode(self, backlog_bytes: int) -> bytes:
        """backlog_bytes: of the inbox, not read yet."""
        page = Page()
        page.number("inbox_backlog_bytes", "Accepted records on disk that the pipeline has not read.", backlog_bytes)
        page.number("snapshot_timestamp_seconds", "When state was last saved, in wall time.", self._saved_s())
        total, free = files.usage_bytes(self._folder)
        page.number("state_disk_size_bytes", "Size of the disk that holds the state folder.", total)
        page.number("state_disk_free_bytes", "What is free there.", free)
        return page.encode() + generate_latest(self._registry)

    def _saved_s(self) -> float | None:
        """When the newest snapshot was finished; they come and go in a thread meanwhile."""
        times = []
        for path in (self._folder / "snapshot").glob("[0-9]*/state.arrays"):
            with contextlib.suppress(FileNotFoundError):
                times.append(path.stat().st_mtime)
        return max(times, default=None)
