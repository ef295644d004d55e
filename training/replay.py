"""The pipeline that serves, without its processes: samples and events in, evidence and scores out.

samples → rings → frames → signals → risk and stragglers, by the very code that serves. Whoever owns samples (a run on
disk, a simulator's pages) feeds it; what is not known at a moment is not seen.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from features.extract import Frames, extract
from features.store import WindowStore
from fleet.entities import Entities
from fleet.events import JobEvent, NodeEvent
from fleet.jobs import JobTable
from fleet.nodes import NodeTable
from fleet.samples import EntityKind, SampleBatch
from fleet.topology import Topology
from models.memory import RiskMemory
from models.score import Evidence, Fleet, Local, fleet_evidence, score_fleet, score_local


@dataclass(frozen=True, slots=True)
class Moment:
    """What the samples of one moment say, before jobs and node events are looked at."""

    frames: Frames
    local: Local


class Replay:
    """Watches a fleet, a round of samples at a time. `interval_s`: from round to round."""

    def __init__(self, topology: Topology, interval_s: float = 15.0) -> None:
        self.topology = topology
        self.entities = Entities()
        for name in topology.names:
            self.entities.node(name)
        self.store = WindowStore(self.entities, interval_s=interval_s)
        self.memory = RiskMemory(interval_s)
        self.jobs = JobTable()
        self.nodes = NodeTable()

    def take(
        self,
        batches: Iterable[SampleBatch],
        events: Iterable[JobEvent],
        now_ms: int,
        node_events: Iterable[NodeEvent] = (),
    ) -> Moment:
        """Take in one round of samples and the events since the last one."""
        for event in events:
            self.jobs.apply(event)
        for told in node_events:
            self.nodes.apply(told)
        kinds: dict[EntityKind, list[SampleBatch]] = {}
        for batch in batches:
            kinds.setdefault(batch.kind, []).append(batch)
        for parts in kinds.values():
            self.store.write(SampleBatch.concat(parts), now_ms)
        frames = extract(self.store, now_ms, self.topology.generation)
        return Moment(frames, score_local(frames, self.entities, self.topology, self.memory, now_ms))

    def evidence(self, moment: Moment, now_ms: int) -> Evidence:
        """All that speaks for or against every node; instead of `score`, not beside it."""
        running, nodes = self.jobs.running(), self.nodes.nodes
        return fleet_evidence([moment.local], running, nodes, self.topology, now_ms, self.memory)

    def score(self, moment: Moment, now_ms: int) -> Fleet:
        """Risk and stragglers, as they are served."""
        running, nodes = self.jobs.running(), self.nodes.nodes
        return score_fleet([moment.local], running, nodes, self.topology, now_ms, self.memory)
