"""The state of a pipeline, and the one function that changes it.

    Batch ── apply ──> rings (WindowStore), jobs (JobFold), nodes (NodeTable), topology

`FleetState.apply` ignores older samples and repeated events. So a replay that overlaps a snapshot ends in
the same state.
"""

import logging
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.features.ended_jobs import ENDED_RETENTION_MS, MOST_ENDED
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import Failed, JobEvent, NodeEvent, NodeLost, Phase, Resized, Started, Step
from fleetcast.fleet.jobs import EndEvent, JobAttempt
from fleetcast.fleet.nodes import MAX_SOURCES_PER_NODE, NodeRecord
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.archive.archive import Archive
from fleetcast.ingest.inbox.job_events import MAX_COUNT
from fleetcast.ingest.label_jobs import LabelHold, LabelJobs, LabelledGpus
from fleetcast.ingest.node_names import find_known_name, find_or_register_node
from fleetcast.ingest.source import Batch
from fleetcast.models.risk.score import FoldedEvents
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.placement.ledger.promised import PromiseReader
from fleetcast.service.config import LimitsConfig
from fleetcast.service.pipeline.inventory import FleetInventory

Named = TypeVar("Named", NodeEvent, NodeLost, Failed, RankPlacement, Phase, Step)

logger = logging.getLogger(__name__)

PAST_MS = 300_000  # an event that is told so late is of the past
RESTS_AFTER_MS = 2 * ENDED_RETENTION_MS
SILENT_JOB_MS = 1_800_000  # longer than compiling, loading and checkpoints take as a rule
MOST_RESTING = 1_000_000  # jobs; their names and a few hundred bytes each
MAX_BAD_SAMPLES = 20
MAX_REASONS = 200  # senders may tell reasons of their own; the rest are "other"


@dataclass(slots=True)
class Counts:
    """Counts of the records that have arrived since the process started."""

    samples: int = 0
    late: int = 0
    events: int = 0
    past_events: int = 0  # of jobs, among them: told of long after they happened
    newest_event_ms: int = 0  # of jobs, by their own time
    duplicates: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    bad_examples: dict[str, str] = field(default_factory=dict)
    newest_sample_ms: int = 0
    noted: Counter[str] = field(default_factory=Counter)  # what is neither good nor bad


@dataclass(frozen=True, slots=True, kw_only=True)
class EventView(FoldedEvents):
    """The state of jobs and nodes after all events up to `position`.

    It consists of copies. They do not change when more events arrive.
    """

    queued: Sequence[JobAttempt]  # wait for resources
    blocked: Sequence[JobAttempt] = ()  # may not start yet, whatever is free
    durations: Mapping[str, Any]  # of finished jobs, by size
    position: int


class FleetState:
    """The state of one pipeline. Only the task that owns it may write to it."""

    def __init__(
        self, entities: Entities, store: WindowStore, topology: Topology, limits: LimitsConfig | None = None
    ) -> None:
        self.entities = entities
        self.limits = limits or LimitsConfig()
        self._named = len(topology)
        placed = {node.name: node.gpus for node in topology.nodes}
        entities.set_limits(placed, self.limits.unknown_nodes, self.limits.unknown_gpus)
        self.watch = FleetWatch(store)
        self.store, self.fold, self.nodes, self.memory = store, self.watch.fold, self.watch.nodes, self.watch.memory
        self.jobs, self.demand, self.runs = self.fold.jobs, self.fold.demand, self.fold.runs
        self.topology = align_topology(topology, entities)
        self.counts = Counts()
        self.archive: Archive | None = None  # gets what is accepted
        self.promises: PromiseReader | None = None  # of the placer; its attempts pass every limit
        self.labelled, self.label_jobs = LabelledGpus(entities), LabelJobs()
        self._first_seen_ms: dict[
            tuple[str, int], int
        ] = {}  # when something came in of an attempt that nobody said started
        self._listens_ms: int | None = None
        self._copies: dict[tuple[str, int], JobAttempt] = {}  # of live attempts that have not changed since
        self._ended_copies: dict[tuple[str, int], JobAttempt] = {}  # the same for recently ended attempts
        # the running, the queued and the blocked ones; None: an attempt has changed since
        self._live_copies: list[list[JobAttempt]] | None = None
        self._placed: tuple[list[JobAttempt], RunningPlaces | None] = [], None  # running copies, and their places
        self._node_copies: dict[str, NodeRecord] = {}
        self._devices_learnt = 0
        self._inventory = FleetInventory(entities, topology)
        self._alias_changes = 0
        self._gpu_rows: tuple[tuple[int, int], NDArray[np.int32]] = ((-1, -1), np.zeros((0, 1), np.int32))

    def apply(self, batch: Batch, now_ms: int) -> list[NodeEvent]:
        """Apply a batch. Returns its new node events, which may be hard signals."""
        counts = self.counts
        for samples in batch.samples:
            written = self.store.write(samples, now_ms)
            counts.samples += written.applied
            counts.late += written.late
            if self.archive is not None and written.taken is not None:
                self.archive.add(written.taken, written.sure)
            for reason, count in (("future", written.future), ("not_finite", written.not_finite)):
                if count:
                    counts.bad[reason] += count
            for error in written.implausible:
                self._count_bad_record(error)
            if len(samples):
                newest = int(samples.time_ms.max())
                if newest <= now_ms + self.store.span.future_ms:
                    counts.newest_sample_ms = max(counts.newest_sample_ms, newest)
        for sight in batch.labels:
            self.labelled.apply_labels(sight)
        for event in batch.events:
            is_placed = self._is_placed(event)
            if not (is_placed or self._has_room(event, batch.is_acknowledged)):
                live = f"{self.jobs.live:,} jobs wait or run, limits.live_jobs are"
                self._count_bad_record(
                    RecordError("too_many_jobs", f"{live} {self.limits.live_jobs:,}: {event.job[:80]!r}")
                )
                continue
            event = self._apply_fleet_names(event)
            changed = self.watch.apply_event(event, now_ms)
            if not changed:
                counts.duplicates += 1
                continue
            if is_placed:
                self.jobs.exempt_attempt(changed[0], self.limits.live_jobs)
            counts.events += 1
            counts.past_events += event.time_ms < now_ms - PAST_MS
            counts.newest_event_ms = max(counts.newest_event_ms, event.time_ms)
            if "started" not in changed[0].written:
                self._first_seen_ms[event.job, event.attempt] = now_ms
            if not changed[0].is_shown:
                counts.noted["unknown_job"] += 1
            if changed[0].ends_before_start and isinstance(event, Started | EndEvent):
                self._count_bad_record(_make_end_order_error(changed[0]))
            if self.archive is not None:
                self.archive.add_event(event)
            for attempt in changed:
                self._forget_copy(attempt)
        for error in batch.bad:
            self._count_bad_record(error)
        return self._apply_node_events(batch.node_events)

    def _has_room(self, event: JobEvent, is_acknowledged: bool) -> bool:
        """Return whether there is room for the event's job. An acknowledged event always has room.

        The api acknowledges only events within its own limits.
        """
        return is_acknowledged or self.jobs.has_room(event, self.limits.live_jobs)

    def _is_placed(self, event: JobEvent) -> bool:
        """Return whether the placer has placed the event's attempt.

        Only the first event of an attempt and its start are checked. For other events, the result is False.
        """
        attempt = self.jobs.attempts.get((event.job, event.attempt))
        if self.promises is None or (attempt is not None and (attempt.is_exempt or not isinstance(event, Started))):
            return False
        return self.promises.admits(event.job, event.attempt)

    def apply_label_jobs(self, others: Iterable[LabelHold], now_ms: int) -> None:
        """Apply events for the jobs that GPU labels name, and fail attempts that have long been silent.

        others: the holders of GPUs in labels that other pipelines read.
        """
        holds = [*self.labelled.list_current_holds(now_ms), *others]
        events = [*self.label_jobs.make_events(holds, self.jobs, now_ms), *self._fail_silent_attempts(now_ms)]
        if events:
            self.apply(Batch(events=tuple(events)), now_ms)

    def _fail_silent_attempts(self, now_ms: int) -> list[Failed]:
        """Return an end for each attempt that only its own training loop reported and that has long been silent.

        A later step revives such an attempt. Only silence while this process runs counts. These ends have
        sequence numbers below 0, so every reported end overrides them.
        """
        if self._listens_ms is None:
            self._listens_ms = now_ms
        alone = {
            (row.job, row.attempt): row
            for row in self.jobs.list_running()
            if row.submission is None and row.source == "sdk"
        }
        self._first_seen_ms = {key: self._first_seen_ms.get(key, self._listens_ms) for key in alone}
        why = f"its training loop reported nothing for {SILENT_JOB_MS // 60_000} minutes"
        return [
            Failed(
                job=row.job,
                attempt=row.attempt,
                sequence=row.last_sign_ms - MAX_COUNT,
                time_ms=row.last_sign_ms,
                category="unknown",
                message=why,
            )
            for key, row in alone.items()
            if now_ms - self._first_seen_ms[key] >= SILENT_JOB_MS
        ]

    def _apply_node_events(self, events: Sequence[NodeEvent]) -> list[NodeEvent]:
        """Apply node events under the fleet's names of their nodes, and return the new events."""
        fresh = []
        for stated in events:
            try:
                event = self._add_gpu_to_event(_rename_node(stated, find_or_register_node(stated.node, self.entities)))
            except RecordError as error:
                self._count_bad_record(error)
                continue
            if not self.nodes.has_room(event):
                many = f"{event.node[:80]} is reported by {MAX_SOURCES_PER_NODE} sources already: {event.source[:80]!r}"
                self._count_bad_record(RecordError("too_many_sources", many))
            elif self.nodes.apply(event) is None:
                self.counts.duplicates += 1
            else:
                fresh.append(event)
                if self.archive is not None:
                    self.archive.add_event(event)
                self._node_copies.pop(event.node, None)
        self.counts.events += len(fresh)
        return fresh

    def _add_gpu_to_event(self, event: NodeEvent) -> NodeEvent:
        """Return the event with the GPU of its device, if an exporter has named that GPU."""
        if not event.device or event.gpu is not None:
            return event
        gpu = self.entities.devices.find_gpu(event.node, event.device)
        return event if gpu is None else msgspec.structs.replace(event, gpu=gpu)

    def _add_gpus_to_events(self) -> None:
        """Add GPUs to earlier node events, if exporters have named the events' devices since."""
        devices = self.entities.devices
        if devices.learnt == self._devices_learnt:
            return
        self._devices_learnt = devices.learnt
        for name, record in self.nodes.nodes.items():
            if any(self._add_gpu_to_event(event) is not event for event in record.standing.values()):
                record.events[:] = map(self._add_gpu_to_event, record.events)
                record.standing = {key: self._add_gpu_to_event(event) for key, event in record.standing.items()}
                self._node_copies.pop(name, None)

    def copy_events(self, now_ms: int) -> EventView:
        """Copy jobs and nodes, so that a thread can use them while more events arrive."""
        if self._live_copies is None:
            jobs = self.jobs
            rows = (jobs.list_running(), jobs.list_queued(), jobs.list_blocked())
            self._copies, self._live_copies = _copy_attempts(self._copies, rows)
        running, queued, blocked = self._live_copies
        self._ended_copies, (ended,) = _copy_attempts(self._ended_copies, (self.watch.ended.list_recent(now_ms),))
        self._add_gpus_to_events()
        for name, record in self.nodes.nodes.items():
            if name not in self._node_copies:
                self._node_copies[name] = record.copy()
        position = self.jobs.position + self.nodes.position
        return EventView(
            running=running,
            queued=queued,
            blocked=blocked,
            ended=ended,
            nodes=dict(self._node_copies),
            durations=self.demand.compute_duration_quantiles(),
            position=position,
            remembered=self._find_placements(running),
        )

    def _forget_copy(self, attempt: JobAttempt) -> None:
        key = attempt.job, attempt.attempt
        self._copies.pop(key, None)
        self._ended_copies.pop(key, None)
        self._live_copies = None

    def _find_placements(self, running: list[JobAttempt]) -> RunningPlaces:
        """Return the places of copied attempts. Nothing changes a copy, so the same copies have the same places."""
        before, placements = self._placed
        if running is before and placements is not None:
            return placements
        if placements is None or len(running) != len(before) or not all(map(operator.is_, running, before)):
            placements = self.watch.find_placements(running)
        self._placed = running, placements
        return placements

    def pack_old_jobs(self, now_ms: int, history_days: int) -> None:
        """Pack jobs that ended long ago, and drop those older than `history_days`.

        This bounds both job tables.
        """
        self._live_copies = None  # an attempt waits again once the later attempts of its job are dropped
        self.fold.pack_old_attempts(now_ms - RESTS_AFTER_MS, now_ms - history_days * 86_400_000, MOST_ENDED)
        if forgotten := self.jobs.drop_oldest_jobs(MOST_RESTING):
            logger.warning("forgot %d jobs at rest before their time: the limit is %d", forgotten, MOST_RESTING)

    def count_used_limits(self) -> dict[str, dict[str, int]]:
        """Return limit → how much of it is in use (`used`), and its maximum (`most`)."""
        unknown = len(self.entities[EntityKind.NODE]) - self._named - len(self.entities.listed)
        return {
            "live_jobs": {"used": self.jobs.live, "most": self.limits.live_jobs},
            "unknown_nodes": {"used": unknown, "most": self.limits.unknown_nodes},
            "unknown_gpus": {"used": self._count_unknown_gpus(), "most": self.limits.unknown_gpus},
        }

    def _count_unknown_gpus(self) -> int:
        room = self.entities.room
        return 0 if room is None else room.used[EntityKind.GPU]

    def _count_bad_record(self, error: RecordError) -> None:
        counts = self.counts
        is_shown = error.reason in counts.bad or len(counts.bad) < MAX_REASONS
        counts.bad[error.reason if is_shown else "other"] += error.count
        if len(counts.bad_examples) < MAX_BAD_SAMPLES or error.reason in counts.bad_examples:
            counts.bad_examples[error.reason] = error.detail[:200]

    def _apply_fleet_names(self, event: JobEvent) -> JobEvent:
        """Return the event with the fleet's names of its nodes. A launcher may spell them in another way."""
        match event:
            case Started() | Resized():
                named = {*event.nodes, *(rank.node for rank in event.ranks)}
                names = {name: self._find_fleet_name(name) for name in named}
                if all(name == known for name, known in names.items()):
                    return event
                ranks = tuple(_rename_node(rank, names[rank.node]) for rank in event.ranks)
                return msgspec.structs.replace(event, ranks=ranks, nodes=tuple(names[node] for node in event.nodes))
            case NodeLost():
                return _rename_node(event, self._find_fleet_name(event.node))
            case Phase() if event.node:
                return _rename_node(event, self._find_fleet_name(event.node))
            case Step() if event.node:
                return _rename_node(event, self._find_fleet_name(event.node))
            case Failed():
                return _rename_node(event, self._find_fleet_name(event.node))
        return event

    def _find_fleet_name(self, name: str) -> str:
        return find_known_name(name, self.entities[EntityKind.NODE])

    def register_nodes(self, names: Iterable[str]) -> None:
        """Register nodes that other pipelines have observed, as long as there is room.

        Each of the other pipelines applies its own limit on nodes.
        """
        nodes = self.entities[EntityKind.NODE]
        for name in names:
            if len(nodes) >= self.entities.most_nodes:
                return
            self.entities.find_or_add_node(name)

    def refresh_topology(
        self,
        models: Mapping[str, str],
        gpus: Mapping[str, int] | None = None,
        stated: Mapping[str, NodeSpec] | None = None,
    ) -> None:
        """Register the nodes that telemetry and schedulers report, as `FleetInventory.refresh` does."""
        self.topology = self._inventory.refresh(self.topology, models, gpus, stated)
        for error in self._inventory.faults:
            self._count_bad_record(error)
        self._inventory.faults.clear()
        nodes = self.entities[EntityKind.NODE]
        if nodes.alias_changes != self._alias_changes:
            self._alias_changes = nodes.alias_changes
            for attempt in self.jobs.rename_nodes(nodes.resolve_name):
                self._forget_copy(attempt)

    def find_gpu_rows(self) -> NDArray[np.int32]:
        """Return the row of each node's GPUs in Entities[GPU]: (n, g) int32.

        A row is -1 if no exporter has reported the GPU yet.
        """
        table = self.entities[EntityKind.GPU]
        key = (len(table) + table.moves, self.topology.generation)
        if self._gpu_rows[0] == key:
            return self._gpu_rows[1]
        width = max(1, int(self.topology.gpus.max(initial=1)))
        rows = np.full((len(self.topology), width), -1, np.int32)
        for row, (name, node) in enumerate(zip(table.names, table.node.tolist(), strict=True)):
            index = int(name.rpartition("/")[2]) if name.rpartition("/")[2].isdigit() else width
            if index < width and 0 <= node < len(rows):
                rows[node, index] = row
        self._gpu_rows = (key, rows)
        return rows


def _copy_attempts(
    known: Mapping[tuple[str, int], JobAttempt], tables: Sequence[Sequence[JobAttempt]]
) -> tuple[dict[tuple[str, int], JobAttempt], list[list[JobAttempt]]]:
    """Copy the attempts of each table, except those with a known copy. Returns all copies by attempt, and by table."""
    copies: dict[tuple[str, int], JobAttempt] = {}
    made = []
    for rows in tables:
        keys = [(row.job, row.attempt) for row in rows]
        made.append([known.get(key) or row.copy() for key, row in zip(keys, rows, strict=True)])
        copies.update(zip(keys, made[-1], strict=True))
    return copies, made


def _make_end_order_error(attempt: JobAttempt) -> RecordError:
    """Make the error for an attempt that ended before it started.

    The end counts, but no forecast learns from its run time.
    """
    seconds = ((attempt.started_ms or 0) - (attempt.ended_ms or 0)) / 1000
    where = f"job {attempt.job[:80]!r}, attempt {attempt.attempt}"
    return RecordError(
        "ends_before_start", f"{where}: it ends {seconds:,.0f} s before it starts, so its run time is unknown"
    )


def _rename_node(event: Named, node: str) -> Named:
    return event if event.node == node else msgspec.structs.replace(event, node=node)


def align_topology(topology: Topology, entities: Entities) -> Topology:
    """Return the topology in the order of the node table.

    The rows of known nodes come first, because a snapshot fixed them. New nodes follow.
    """
    specs = dict(zip(topology.names, topology.nodes, strict=True))
    for name in topology.names:
        entities.find_or_add_node(name)
    names = entities[EntityKind.NODE].names
    nodes = [specs.get(name, NodeSpec(name)) for name in names]
    placed = [name in specs for name in names]
    return Topology.build(nodes, placed=placed, generation=topology.generation, hosts=topology.hosts)
