"""The collector of a tick's inputs. It runs in the event loop, without an await."""

from collections.abc import Mapping, Sequence

from fleetcast.features.mig import find_mig_instances
from fleetcast.features.serving import list_served_instances
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.service.answers.fleet import BoardMeta, Ingestion, Warming
from fleetcast.service.config import Config
from fleetcast.service.listening import SourcesListening
from fleetcast.service.pipeline.archive_writer import ArchiveWriter
from fleetcast.service.pipeline.guarded_source import (
    GuardedSource,
    describe_unreadable_inbox,
    merge_bound_gpus,
    merge_gpu_models,
    merge_source_nodes,
)
from fleetcast.service.pipeline.metrics import PipelineMetrics
from fleetcast.service.pipeline.occupancy import UNKNOWN, names_wrong_gpus
from fleetcast.service.pipeline.other_pipelines import OtherPipelines
from fleetcast.service.pipeline.run_times.record import Attempt, RunTimeRecord
from fleetcast.service.pipeline.snapshot import SavedState
from fleetcast.service.pipeline.state import EventView
from fleetcast.service.pipeline.tick import TickInputs
from fleetcast.service.pipeline.tick_memory import TickCache

WARM_S = 1800


class InputCollector:
    """The collector of a tick's inputs.

    others: the other pipelines. It is None except in the first pipeline.
    """

    def __init__(
        self,
        config: Config,
        clock: Clock,
        saved: SavedState,
        sources: Sequence[GuardedSource],
        archive_writer: ArchiveWriter,
        others: OtherPipelines | None,
        metrics: PipelineMetrics,
    ) -> None:
        self._config, self._saved, self._sources = config, saved, sources
        self._archive_writer, self._others, self._metrics = archive_writer, others, metrics
        self._listening = SourcesListening([source.name for source in sources if source.reports_jobs], clock)
        self._gpu_models: dict[str, str] = {}  # by node
        self._looked_up: dict[Attempt, Sequence[RankPlacement]] = {}
        self._memory = TickCache()

    def refresh_topology(self) -> None:
        """Register the nodes, GPUs and models that telemetry and schedulers report, in all pipelines."""
        state, gpus = self._saved.state, dict[str, int]()
        self._gpu_models = merge_gpu_models(self._sources)
        if self._others:
            self._others.poll()
            state.register_nodes(self._others.list_node_names())
            self._gpu_models, gpus = {**self._others.merge_gpu_models(), **self._gpu_models}, self._others.count_gpus()
        state.refresh_topology(self._gpu_models, gpus, merge_source_nodes(self._sources))

    def apply_label_jobs(self, now_ms: int) -> None:
        """Apply events for the jobs that GPU labels name, and fail silent attempts.

        Only the first pipeline applies events. The others do nothing here.
        """
        if self._others is not None:
            self._saved.state.apply_label_jobs(self._others.list_label_holds(), now_ms)

    def collect_inputs(self, now_ms: int) -> TickInputs:
        state, ingestion = self._saved.state, self._make_ingestion(now_ms)
        open_requests = state.promises.list_open_requests() if state.promises is not None else ()
        events = state.copy_events(now_ms)
        return TickInputs(
            now_ms=now_ms,
            topology=state.topology,
            entities=state.entities,
            frames=state.watch.extract_frames(state.topology, now_ms),
            gpu_rows=state.find_gpu_rows(),
            events=events,
            interval_s=self._config.scrape.interval_s,
            open_requests=open_requests,
            given=self._find_given_gpus(events),
            windows=state.promises.read_windows() if state.promises is not None and self._config.placer.queues else (),
            places_unheard=self._config.placer.unheard == "ignore",
            gpu_models=self._gpu_models,
            has_exporters=bool(self._config.scrape.targets),
            served=list_served_instances(state.store, now_ms),
            mig=find_mig_instances(state.store, now_ms),
            run_times=self._saved.parts[RunTimeRecord].issued,
            bound=merge_bound_gpus(self._sources),
            labelled=[] if self._others is not None else state.labelled.list_current_holds(now_ms),
            inbox=dict(*[source.position() for source in self._sources if source.name == InboxSource.name]),
            meta=self._make_meta(now_ms),
            ingestion=ingestion,
            listening=self._listening.update_statements(ingestion.sources, now_ms),
        )

    def _find_given_gpus(self, events: EventView) -> Mapping[Attempt, Sequence[RankPlacement]]:
        """Return attempt → the GPUs that our placer gave it, if its events name wrong GPUs or none.

        The ledger is read once for each such attempt.
        """
        state = self._saved.state
        if state.promises is None:
            return {}
        of = events.placements, state.topology
        wrong = self._memory.get_or_make("wrong", of, lambda: _find_wrong_attempts(events.running, of[1]))
        self._looked_up = {key: self._looked_up[key] for key in wrong if key in self._looked_up}
        for key in wrong:
            if key not in self._looked_up:
                ranks = state.promises.find_ranks(*key)
                if state.promises.unreadable:
                    break
                self._looked_up[key] = ranks
        return {key: ranks for key, ranks in self._looked_up.items() if ranks}

    def _make_meta(self, now_ms: int) -> BoardMeta:
        have_s = (now_ms - self._saved.began_ms) / 1000
        unknown = describe_unreadable_inbox(self._sources) if self._saved.occupancy_known else UNKNOWN
        return BoardMeta(
            fleet=self._config.fleet.name,
            generation=self._saved.state.topology.generation,
            now_ms=now_ms,
            speed=self._config.clock.speed,
            tick_s=self._config.pipeline.tick_s,
            occupancy_known=not unknown,
            occupancy_unknown=unknown,
            models={"risk": "", "demand": "gate", "straggler": "peers"},
            warming=Warming(round(have_s), WARM_S) if have_s < WARM_S else None,
            stale_after_s=self._config.compute_stale_after_s(self._config.make_clock()),
        )

    def _make_ingestion(self, now_ms: int) -> Ingestion:
        state, metrics = self._saved.state, self._metrics
        metrics.rates.record(now_ms, state.counts.samples, state.counts.events)
        found = metrics.make_ingestion_document(now_ms, state.counts, self._sources)
        found.archive, found.limits = self._archive_writer.health(), state.count_used_limits()
        found.labels = state.labelled.count_gpus()
        return self._others.merge_ingestion(found) if self._others else found


def _find_wrong_attempts(running: Sequence[JobAttempt], topology: Topology) -> list[Attempt]:
    """Return the running attempts whose events name wrong GPUs or none."""
    node_gpus = {node.name: node.gpus for node in topology.nodes}
    return [(row.job, row.attempt) for row in running if names_wrong_gpus(row, node_gpus)]
