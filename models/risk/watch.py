"""FleetWatch: all steps from samples and events to evidence and scores.

The service uses a FleetWatch, and so does all code that evaluates the service.

samples ── WindowStore ── Frames ── score_own_nodes ── LocalEvidence ─┐
events ─── JobFold, EndedJobs, NodeTable ── FoldedEvents ─────────────┴─ score_fleet ── ScoredFleet
"""

from collections.abc import Iterable, Sequence
from typing import Self

from fleetcast.features.ended_jobs import EndedJobs
from fleetcast.features.extract import Frames, extract_frames
from fleetcast.features.job_fold import JobFold
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeTable
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.samples import SampleBatch
from fleetcast.fleet.topology import Topology
from fleetcast.models.risk.local import LocalEvidence, score_own_nodes
from fleetcast.models.risk.node_risk import RiskFit
from fleetcast.models.risk.score import (
    Evidence,
    FleetMoment,
    FoldedEvents,
    ScoredFleet,
    collect_fleet_evidence,
    score_fleet,
)
from fleetcast.models.risk.site_risk import SiteRisk
from fleetcast.models.risk.state import RiskState


class FleetWatch:
    """The state of a fleet: its telemetry, jobs, nodes, and the state of the rules.

    fit: None for the shipped coefficients. site: a site's own fit. shadow: a fit that is scored and
    does not serve. `score_local`, `collect_evidence` and `score` change only `memory`. So a thread may call
    these methods on fixed frames while more samples arrive.
    """

    def __init__(self, store: WindowStore) -> None:
        self.store = store
        self.fold = JobFold()
        self.ended = EndedJobs()
        self.nodes = NodeTable()
        self._placements = RunningPlaces(())
        self.memory = RiskState(store.span.interval_ms / 1000)
        self.fit: RiskFit | None = None
        self.site: SiteRisk | None = None
        self.shadow: SiteRisk | None = None

    @classmethod
    def from_topology(cls, topology: Topology, interval_s: float = 15.0) -> Self:
        """Build an empty watch with the node rows of `topology`. interval_s: seconds between scrapes."""
        entities = Entities()
        for name in topology.names:
            entities.find_or_add_node(name)
        return cls(WindowStore(entities, interval_s=interval_s))

    @property
    def entities(self) -> Entities:
        return self.store.entities

    def apply_batch(
        self,
        samples: Iterable[SampleBatch],
        events: Iterable[JobEvent],
        now_ms: int,
        node_events: Iterable[NodeEvent] = (),
    ) -> None:
        """Apply the samples and events that arrived since the last call, in order.

        The names of their entities must already be in `entities`.
        """
        for batch in SampleBatch.merge_by_kind(samples):
            self.store.write(batch, now_ms)
        for event in events:
            self.apply_event(event, now_ms)
        for node_event in node_events:
            self.nodes.apply(node_event)

    def apply_event(self, event: JobEvent, now_ms: int) -> list[JobAttempt]:
        """Apply one event, and return the attempts that it changed (see `JobFold.apply`)."""
        changed = self.fold.apply(event, now_ms)
        self.ended.record(changed, now_ms)
        return changed

    def find_placements(self, running: Sequence[JobAttempt]) -> RunningPlaces:
        """Return the places where these attempts run.

        The result is the same object as in the last call until an attempt starts, ends or moves.
        """
        self._placements = RunningPlaces.from_running(running, self._placements)
        return self._placements

    def extract_frames(self, topology: Topology, now_ms: int) -> Frames:
        """Return the features of every entity at `now_ms`."""
        return extract_frames(self.store, now_ms, topology.generation)

    def make_folded_events(self, now_ms: int) -> FoldedEvents:
        """Return the state of jobs and nodes that follows from the events so far.

        The next event changes the returned object.
        """
        running, ended = self.fold.jobs.list_running(), self.ended.list_recent(now_ms)
        return FoldedEvents(
            running=running, ended=ended, nodes=self.nodes.nodes, remembered=self.find_placements(running)
        )

    def score_local(self, frames: Frames, topology: Topology, now_ms: int) -> LocalEvidence:
        """Return this process's evidence about the nodes that it has telemetry of.

        Call this only once for each `frames`, because each call updates the state of the rules.
        """
        return score_own_nodes(frames, self.entities, topology, self.memory, now_ms)

    def make_moment(self, frames: Frames, topology: Topology, now_ms: int) -> FleetMoment:
        """Return the input for the scores at `now_ms`. This process must have the telemetry of all nodes."""
        return FleetMoment(
            now_ms, topology, [self.score_local(frames, topology, now_ms)], self.make_folded_events(now_ms)
        )

    def collect_evidence(self, moment: FleetMoment) -> Evidence:
        """Return the evidence for or against every node. Call either this or `score`, never both."""
        return collect_fleet_evidence(moment, self.memory)

    def score(self, moment: FleetMoment) -> ScoredFleet:
        """Return the risk and the stragglers of the fleet."""
        return score_fleet(moment, self.memory, self.fit, self.site, self.shadow)
