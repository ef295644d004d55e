"""A tick: its inputs (TickInputs), and the inputs with the scored fleet (Tick).

All answers of the API are made from a Tick.
"""

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.extract import Frames
from fleetcast.features.serving import ServedInstance
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.held_gpus import count_wanted_milli, has_gpu_parts
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import WHOLE_GPU, RankPlacement
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.label_jobs import LabelHold
from fleetcast.models.risk.gpu_signals import MISSED_SCRAPES
from fleetcast.models.risk.node_risk import compute_published_risk, compute_usual_risk
from fleetcast.models.risk.node_signals import NODE_SILENT_S
from fleetcast.models.risk.score import ScoredFleet
from fleetcast.placement.ledger.promised import OpenRequest
from fleetcast.placement.machines.view import Hearing, mask_placeable_nodes
from fleetcast.placement.queues.tree import Window
from fleetcast.service.answers.fleet import BoardMeta, Ingestion
from fleetcast.service.answers.risk import StateName
from fleetcast.service.board.gpu_use import NO_HOLDER, Occupant, classify_gpu_use
from fleetcast.service.listening import ListeningStatement
from fleetcast.service.pipeline import documents
from fleetcast.service.pipeline.attempt_columns import AttemptColumns
from fleetcast.service.pipeline.occupancy import Occupancy, count_milli_by_node
from fleetcast.service.pipeline.open_requests import OpenView, drop_held_promises
from fleetcast.service.pipeline.run_times.record import Attempt, IssuedRunTime
from fleetcast.service.pipeline.state import EventView
from fleetcast.service.pipeline.tick_memory import TickCache
from fleetcast.service.pipeline.unknown_use import UnknownUse
from fleetcast.service.pipeline.withheld_nodes import WithheldNodes

SILENT_INTERVALS = 3.0
RECENT_MS = 3_600_000


def find_whole_job(job: str, jobs: Container[str]) -> str:
    """Return the job in `jobs` with this name, or the job whose name is a prefix of this name.

    Returns "" if there is none. For example, `ml/set-workers` is a part of `ml/set`.

    >>> find_whole_job("ml/set-workers", {"ml/set"}), find_whole_job("ml/settle", {"ml/set"})
    ('ml/set', '')
    """
    names = [job, *(job[:at] for at, letter in enumerate(job) if letter == "-")]
    return next((name for name in names if name in jobs), "")


@dataclass(frozen=True)
class TickInputs:
    """All inputs of a tick at one moment. A thread may use them, because only `entities` changes.

    `entities` only grows.
    """

    now_ms: int
    topology: Topology
    entities: Entities
    frames: Frames
    gpu_rows: NDArray[np.int32]  # (n, g) row of `frames.gpu`, -1 never heard
    events: EventView
    interval_s: float
    meta: BoardMeta  # as before the scores
    ingestion: Ingestion
    served: Sequence[ServedInstance] = ()
    mig: Mapping[str, Mapping[str, float | None]] = field(default_factory=dict)  # GPU -> MIG instance -> GiB
    run_times: Mapping[Attempt, IssuedRunTime] = field(default_factory=dict)
    inbox: Mapping[str, int] = field(default_factory=dict)  # segment -> offset up to which `events` are folded
    gpu_models: Mapping[str, str] = field(default_factory=dict)  # by node, from telemetry
    listening: Mapping[str, ListeningStatement] = field(default_factory=dict)  # by source that reports starts of jobs
    has_exporters: bool = False  # exporters are configured, or another source of GPU samples
    places_unheard: bool = False  # hosts without telemetry count as heard, as configured
    open_requests: Sequence[OpenRequest] = ()  # of the placer's ledger: who waits there, and what it has promised
    given: Mapping[Attempt, Sequence[RankPlacement]] = field(default_factory=dict)  # as in `occupancy.observe`
    windows: Sequence[Window] = ()  # of the file of queues that the placer serves
    bound: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # job → node → GPUs, as in `Source.bound`
    labelled: Sequence[LabelHold] = ()  # who holds GPUs, as labels say: of a pipeline that reports to the first


@dataclass(frozen=True)
class Tick(TickInputs):
    """The inputs of one tick, and the scores computed from them.

    Values with several readers are computed once, at their first use.
    """

    fleet: ScoredFleet = field(kw_only=True)
    use: UnknownUse = field(default_factory=UnknownUse, kw_only=True)  # takes the tick in when `unknown_use` is asked
    memory: TickCache = field(default_factory=TickCache, kw_only=True)

    @classmethod
    def from_inputs(cls, inputs: TickInputs, fleet: ScoredFleet, use: UnknownUse, memory: TickCache) -> "Tick":
        return cls(**vars(inputs), fleet=fleet, use=use, memory=memory)

    @cached_property
    def rows(self) -> dict[str, int]:
        """Node name → row."""
        names = self.topology.names
        return self.memory.get_or_make("rows", (self.topology,), lambda: {name: row for row, name in enumerate(names)})

    @cached_property
    def node_gpus(self) -> dict[str, int]:
        """Node name → number of its GPUs."""
        names, gpus = self.topology.names, self.topology.gpus
        return self.memory.get_or_make("gpus", (self.topology,), lambda: dict(zip(names, gpus.tolist(), strict=True)))

    @cached_property
    def node_state(self) -> NDArray[np.int8]:
        """The NodeState of each node by its node events: (n,) int8."""
        state = np.full(len(self.topology), NodeState.IN_SERVICE, np.int8)
        for name, record in self.events.nodes.items():
            if name in self.rows:
                state[self.rows[name]] = record.state
        return state

    @cached_property
    def usual_risk(self) -> NDArray[np.float64]:
        """The fault probabilities of an ordinary node of this fleet: (kind, horizon), at least the published ones."""
        return np.maximum(compute_published_risk(), compute_usual_risk(self.fleet.risk.values))

    @cached_property
    def flagged(self) -> NDArray[np.bool_]:
        """The nodes whose recommended action is more than watching: (n,) bool."""
        return documents.find_flagged_nodes(self.fleet.risk, len(self.topology))

    @cached_property
    def state_codes(self) -> NDArray[np.int8]:
        """The index of each node's state in `documents.STATES`: (n,) int8."""
        up = documents.find_answering_nodes(self.frames.node, self.frames.gpu, self.gpu_rows, len(self.topology))
        return documents.compute_state_codes(self.node_state, self.flagged, up)

    @cached_property
    def hearing(self) -> NDArray[np.int8]:
        """The Hearing of each node, which says how current its GPU telemetry is: (n,) int8."""
        age_s = np.nan_to_num(self.read_gpu_feature("age_s"), nan=np.inf)
        youngest_s = np.where(self.gpu_exists, age_s, np.inf).min(axis=1, initial=np.inf)
        has_reported = np.isfinite(youngest_s)
        if not (self.has_exporters or has_reported.any()):
            return np.full(len(self.topology), Hearing.UNCONFIRMED, np.int8)
        up = documents.find_answering_nodes(self.frames.node, self.frames.gpu, self.gpu_rows, len(self.topology))
        limit_s = np.where(
            up <= 0, MISSED_SCRAPES * self.interval_s, max(NODE_SILENT_S, SILENT_INTERVALS * self.interval_s)
        )
        cases = (self.topology.gpus <= 0, ~has_reported, youngest_s > limit_s)
        found = np.select(cases, (Hearing.UNCONFIRMED, Hearing.UNHEARD, Hearing.STALE), Hearing.FRESH)
        return found.astype(np.int8)

    @cached_property
    def is_placeable(self) -> NDArray[np.bool_]:
        """The nodes on which jobs may be placed: (n,) bool."""
        return mask_placeable_nodes(self.node_state, None if self.places_unheard else self.hearing)

    @cached_property
    def states(self) -> list[StateName]:
        """The state of each node, in the words of the API: (n,)."""
        return [documents.STATES[code] for code in self.state_codes.tolist()]

    @cached_property
    def occupancy(self) -> Occupancy:
        names, running = self.topology.names, {row.job for row in self.events.running}
        given_back = self.memory.occupancy.find_freed_gpus(running)
        works = self.use.find_active_gpus(names, self.frames.gpu, self.gpu_rows, self.now_ms, given_back)
        given = self.events.running, self.events.placements, self.topology, self.rows, works, self.given
        return self.memory.occupancy.get_occupancy(*given)

    @cached_property
    def sizes(self) -> dict[tuple[str, int], int]:
        """Attempt → number of GPUs that it holds, for running attempts whose events state another number."""
        running = self.events.running
        return {(running[at].job, running[at].attempt): gpus for at, gpus in self.occupancy.sizes.items()}

    @cached_property
    def held_milli(self) -> dict[tuple[str, int], int]:
        """Attempt → thousandths of GPUs that it holds, for running attempts whose events state another amount."""
        of = self.events.placements, self.occupancy, self.held_by_node
        return self.memory.get_or_make("held milli", of, self._compute_held_milli)

    def _compute_held_milli(self) -> dict[tuple[str, int], int]:
        differ = {*self.occupancy.sizes, *self.occupancy.parts[:, 0].tolist()}
        return {
            (row.job, row.attempt): milli
            for number, (row, held) in enumerate(zip(self.events.running, self.held_by_node, strict=True))
            if (number in differ or has_gpu_parts(row)) and (milli := sum(held.values())) != count_wanted_milli(row)
        }

    @cached_property
    def displaced(self) -> Set[tuple[str, int]]:
        """The running attempts that hold fewer GPUs than they state, because other attempts hold their GPUs."""
        return {(row.job, row.attempt) for row in map(self.events.running.__getitem__, self.occupancy.displaced)}

    @cached_property
    def held_by_node(self) -> list[dict[str, int]]:
        """For each running attempt, node → thousandths of GPUs that it holds there."""
        of = self.occupancy, self.topology
        return self.memory.get_or_make("held", of, lambda: count_milli_by_node(of[0], self.events.running, of[1]))

    @cached_property
    def held(self) -> NDArray[np.bool_]:
        """The GPUs that a job holds: (n, g) bool."""
        return self.occupancy.holder >= 0

    @cached_property
    def unknown_use(self) -> NDArray[np.bool_]:
        """The GPUs in use without a known job: (n, g) bool.

        Telemetry shows the GPU busy, or its node lends it to another scheduler, or pods hold it before their job
        starts.
        """
        found = self.use.update_verdicts(self.topology.names, self.frames.gpu, self.gpu_rows, self.held, self.now_ms)
        return (found & self.gpu_exists) | self._choose_lent_gpus(found)

    def _choose_lent_gpus(self, at_work: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Choose the GPUs that are lent or bound: (n, g) bool.

        A lent GPU belongs to another scheduler. A bound GPU is held by pods of a job that has not started. The
        node's facts state only how many there are. Busy GPUs are chosen first, then others without a job.
        """
        lent, counts = np.zeros_like(at_work), self.topology.lent_gpus + self.bound_gpus
        for row in np.flatnonzero(counts).tolist():
            free = np.flatnonzero(self.gpu_exists[row] & ~self.held[row] & (self.promise[row] == NO_HOLDER))
            ordered = free[np.argsort(~at_work[row, free], kind="stable")]
            lent[row, ordered[: counts[row]]] = True
        return lent

    @cached_property
    def bound_gpus(self) -> NDArray[np.int64]:
        """The number of GPUs on each node that parts of a job hold before the job starts: (n,) int64.

        GPUs that the job already holds do not count. It may hold some by a promise, by its own steps, or because
        exporters' labels name the job after one of its parts.
        """
        found = np.zeros(len(self.topology), np.int64)
        if not self.bound:
            return found
        held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for attempt, on_nodes in zip(self.events.running, self.held_by_node, strict=True):
            if "started" not in attempt.written or attempt.source == "labels":
                whole = find_whole_job(attempt.job, self.bound)
                held[whole].update({node: milli // WHOLE_GPU for node, milli in on_nodes.items()} if whole else {})
        promised = {row.job for row in self.open.promised}
        for job, places in self.bound.items():
            for node, gpus in places.items() if job not in promised else ():
                if (row := self.rows.get(node)) is not None:
                    found[row] += max(0, gpus - held[job][node])
        return found

    @property
    def are_jobs_known(self) -> bool:
        """Return whether every source of jobs has answered once.

        Before that, busy GPUs may belong to jobs that are not known yet.
        """
        return all(stated.until_ms > 0 for stated in self.listening.values())

    @cached_property
    def open(self) -> OpenView:
        """The waiting and promised requests, from events and from our own queue, each once."""
        return OpenView.from_requests(drop_held_promises(self.open_requests, self.held, self.rows), self.events)

    @cached_property
    def running_columns(self) -> AttemptColumns:
        """The columns of the running attempts, in their order."""
        running = self.events.running
        return self.memory.get_or_make("columns", (running,), lambda: AttemptColumns.from_attempts(running))

    @cached_property
    def recent_waits_s(self) -> dict[tuple[str, str], NDArray[np.float64]]:
        """Queue and class → the seconds that each attempt that started within the last hour had waited."""
        found: dict[tuple[str, str], NDArray[np.float64]] = {}
        for columns in (self.running_columns, AttemptColumns.from_attempts(self.events.ended)):
            for key, waits_s in columns.group_waits_since(self.now_ms - RECENT_MS).items():
                found[key] = np.concatenate([found[key], waits_s]) if key in found else waits_s
        return found

    @property
    def queued_gpus(self) -> int:
        """The number of GPUs that waiting jobs request, each job once. Parts of GPUs add up."""
        return ceil(sum(map(count_wanted_milli, self.open.waiting)) / WHOLE_GPU)

    @cached_property
    def blocked(self) -> list[JobAttempt]:
        """The attempts without an open request that may not start yet, even if GPUs are free."""
        open_jobs = {row.job for row in self.open.requested}
        return [row for row in self.events.blocked if row.job not in open_jobs]

    @cached_property
    def promise(self) -> NDArray[np.int32]:
        """The request that each GPU is promised to: (n, g) int32 index in `open.requests`, or NO_HOLDER."""
        found, width = np.full(self.gpu_rows.shape, NO_HOLDER, np.int32), self.gpu_rows.shape[1]
        for number, request in enumerate(self.open.requests):
            for rank in request.ranks:
                if (row := self.rows.get(rank.node)) is not None:
                    found[row][[gpu for gpu in rank.gpus if gpu < width]] = number  # the node may have lost some
        return found

    @cached_property
    def withheld_nodes(self) -> WithheldNodes:
        """The nodes that a window or a reservation withholds now."""
        return WithheldNodes.from_records(self.topology, self.node_state, self.events.nodes, self.windows, self.now_ms)

    @cached_property
    def gpu_use(self) -> NDArray[np.int8]:
        """The Occupant of each GPU: (n, g) int8."""
        use = classify_gpu_use(self.occupancy.holder, self.promise, self.unknown_use, self.withheld_nodes.use)
        return np.where(self.gpu_exists, use, np.int8(Occupant.NOTHING))

    @cached_property
    def gpu_exists(self) -> NDArray[np.bool_]:
        """The GPUs that exist: (n, g) bool."""
        return np.arange(self.gpu_rows.shape[1])[None, :] < self.topology.gpus[:, None]

    @cached_property
    def usable(self) -> NDArray[np.bool_]:
        """The GPUs that exist and have not vanished from their exporters' pages: (n, g) bool."""
        silent = np.nan_to_num(self.read_gpu_feature("silent_s")) > SILENT_INTERVALS * self.interval_s
        return self.gpu_exists & ~silent

    def read_gpu_feature(self, feature: str, nodes: "slice | NDArray[np.intp]" = slice(None)) -> NDArray[np.float64]:
        """Return the last fresh value of a feature of each GPU: (nodes, g) float64, NaN if unknown.

        Raises KeyError if there is no such feature.
        """
        gpu, rows = self.frames.gpu, self.gpu_rows[nodes]
        if not len(gpu.values):
            return np.full(rows.shape, np.nan)
        known = (rows >= 0) & (rows < len(gpu.values))
        return np.where(known, gpu.column(feature)[np.where(known, rows, 0)].astype(np.float64), np.nan)
