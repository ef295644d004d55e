"""FleetState: everything a pipeline knows, and the one function that changes it.

    Batch ── apply ──> rings (WindowStore), jobs (JobTable, DemandSeries), nodes (NodeTable), topology, counters

`apply` is idempotent: the store takes only newer samples, the tables only unseen events. So a replay that overlaps a
snapshot ends in the same state.
"""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from features.demand_series import DemandSeries
from features.store import WindowStore
from fleet.entities import Entities
from fleet.events import NodeEvent
from fleet.jobs import JobTable, NodeTable
from fleet.samples import EntityKind
from fleet.topology import NodeSpec, Topology
from ingest.source import Batch

BAD_SAMPLES_KEPT = 20


@dataclass(slots=True)
class Counts:
    """What was taken in since the process began."""

    samples: int = 0
    late: int = 0
    events: int = 0
    duplicates: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    bad_examples: dict[str, str] = field(default_factory=dict)
    newest_sample_ms: int = 0


class FleetState:
    """Owned by one task of one pipeline; nothing else writes here."""

    def __init__(self, entities: Entities, store: WindowStore, topology: Topology) -> None:
        self.entities = entities
        self.store = store
        self.topology = align(topology, entities)
        self.jobs = JobTable()
        self.nodes = NodeTable()
        self.demand = DemandSeries()
        self.counts = Counts()
        self._gpu_rows_seen = 0
        self._gpu_rows: tuple[tuple[int, int], NDArray[np.int32]] = ((-1, -1), np.zeros((0, 1), np.int32))

    def apply(self, batch: Batch, now_ms: int) -> list[NodeEvent]:
        """Take a batch in; returns the node events that were new (hard signals among them)."""
        counts = self.counts
        for samples in batch.samples:
            written = self.store.write(samples, now_ms)
            counts.samples += written.applied
            counts.late += written.late
            for reason, count in (("future", written.future), ("not_finite", written.not_finite)):
                if count:
                    counts.bad[reason] += count
            if len(samples):
                newest = int(samples.time_ms.max())
                if newest <= now_ms + 60_000:
                    counts.newest_sample_ms = max(counts.newest_sample_ms, newest)
        for event in batch.events:
            attempt = self.jobs.apply(event)
            if attempt is None:
                counts.duplicates += 1
                continue
            counts.events += 1
            self.demand.update(attempt)
        fresh = [event for event in batch.node_events if self.nodes.apply(event) is not None]
        counts.events += len(fresh)
        for news in fresh:
            self.entities.node(news.node)
        for error in batch.bad:
            counts.bad[error.reason] += 1
            if len(counts.bad_examples) < BAD_SAMPLES_KEPT or error.reason in counts.bad_examples:
                counts.bad_examples[error.reason] = error.detail[:200]
        return fresh

    def refresh_topology(self, models: dict[str, str]) -> None:
        """Register nodes and GPU counts that only telemetry or events told us of. `models`: node -> GPU model."""
        nodes = self.entities[EntityKind.NODE]
        if len(nodes) > len(self.topology):
            self.topology = self.topology.with_unplaced(nodes.names[len(self.topology) :])
        if len(self.entities[EntityKind.GPU]) > self._gpu_rows_seen or len(nodes) != len(self.topology):
            self._gpu_rows_seen = len(self.entities[EntityKind.GPU])
            learnt = {
                name: count
                for name, count in self._observed_gpus().items()
                if self.topology.gpus[nodes.row(name) or 0] == 0
            }
            if learnt:
                self.topology = self.topology.with_gpus(learnt, models)

    def _observed_gpus(self) -> dict[str, int]:
        counts: dict[str, int] = {}
        for name in self.entities[EntityKind.GPU].names:
            node, _, index = name.rpartition("/")
            if index.isdigit():
                counts[node] = max(counts.get(node, 0), int(index) + 1)
        return counts

    def gpu_rows(self) -> NDArray[np.int32]:
        """(n, g) row in Entities[GPU] of each node's GPU indices, -1 where none was ever seen."""
        table = self.entities[EntityKind.GPU]
        key = (len(table), self.topology.generation)
        if self._gpu_rows[0] == key:
            return self._gpu_rows[1]
        width = max(1, int(self.topology.gpus.max(initial=1)))
        rows = np.full((len(self.topology), width), -1, np.int32)
        for row, (name, node) in enumerate(zip(table.names, table.node.tolist(), strict=True)):
            index = int(name.rpartition("/")[2]) if name.rpartition("/")[2].isdigit() else width
            if index < width and node < len(rows):
                rows[node, index] = row
        self._gpu_rows = (key, rows)
        return rows


def align(topology: Topology, entities: Entities) -> Topology:
    """The topology in the order of the node table: known rows first (a snapshot fixed them), new nodes after."""
    specs = dict(zip(topology.names, topology.nodes, strict=True))
    for name in topology.names:
        entities.node(name)
    names = entities[EntityKind.NODE].names
    nodes = [specs.get(name, NodeSpec(name)) for name in names]
    return Topology.build(nodes, placed=[name in specs for name in names], generation=topology.generation)
