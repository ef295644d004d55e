"""The published scores of the whole fleet.

They are risk, occupancy, jobs and the topology, and the pipeline's report on itself.
"""

from dataclasses import replace
from pathlib import Path

from msgspec import structs

from fleetcast.ingest.shares import OwnNodeFilter, Share
from fleetcast.models.risk.hazard import load_history
from fleetcast.models.risk.local import LocalEvidence
from fleetcast.models.risk.node_risk import load_risk_fit
from fleetcast.models.risk.score import FleetMoment
from fleetcast.models.versions.registry import Registry
from fleetcast.service.board.board import Section
from fleetcast.service.config import Config
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.fleet_metrics import make_fleet_page
from fleetcast.service.pipeline.other_pipelines import OtherPipelines
from fleetcast.service.pipeline.publish import encode, make_fleet_document, make_score_sections, make_topology_sections
from fleetcast.service.pipeline.served_risk import ServedRisk
from fleetcast.service.pipeline.site_metrics import make_site_page
from fleetcast.service.pipeline.snapshot import SavedState
from fleetcast.service.pipeline.tick import Tick, TickInputs
from fleetcast.service.pipeline.tick_memory import TickCache
from fleetcast.service.pipeline.unknown_use import UnknownUse


class FleetScores(Capability):
    """The capability that publishes a tick's scores. It also publishes the topology after each change."""

    def __init__(self) -> None:
        self._generation = -1

    def make_sections(self, tick: Tick) -> list[Section]:
        found = make_score_sections(tick)
        if tick.topology.generation != self._generation:
            found += make_topology_sections(tick.topology, tick.now_ms)
            self._generation = tick.topology.generation
        meta = structs.replace(tick.meta, models={**tick.meta.models, "risk": tick.fleet.risk.model})
        documents = {"meta": meta, "doc.ingestion": tick.ingestion, "doc.fleet": make_fleet_document(tick)}
        return [*found, *(Section(name, encode(body), tick.now_ms) for name, body in documents.items())]

    def make_page(self, tick: Tick) -> bytes:
        return make_fleet_page(tick) + make_site_page(tick)


class FleetScorer:
    """The part of a pipeline that scores nodes and jobs at each tick.

    While it runs, no other code may change the state of the risk rules.
    """

    def __init__(self, config: Config, saved: SavedState, share: Share) -> None:
        self._watch, self._share = saved.state.watch, share
        self._use, self._memory = saved.parts[UnknownUse], TickCache()
        self._own_rows = OwnNodeFilter(share, saved.state.entities)
        self._risk = ServedRisk(Registry(config.models_folder), self._watch)
        if config.pipeline.models:
            self._watch.fit = load_risk_fit(Path(config.pipeline.models))
            self._watch.memory.faults.prior = load_history(Path(config.pipeline.models))

    def compute_local_evidence(self, inputs: TickInputs) -> LocalEvidence:
        """Return the evidence about this pipeline's own nodes."""
        found = self._watch.score_local(inputs.frames, inputs.topology, inputs.now_ms)
        return (
            found
            if self._share.instances == 1
            else replace(found, own=self._own_rows.find_own_nodes()[: len(found.nodes)])
        )

    def score_tick(self, inputs: TickInputs, local: LocalEvidence, others: OtherPipelines) -> Tick:
        """Score a tick from the evidence and the readings of all pipelines."""
        self._risk.refresh()
        inputs, evidence = others.join_readings(inputs, local)
        moment = FleetMoment(inputs.now_ms, inputs.topology, evidence, inputs.events)
        return Tick.from_inputs(inputs, self._watch.score(moment), self._use, self._memory)
