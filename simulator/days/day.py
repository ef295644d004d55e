"""A simulation of one day of the fleet, event by event: jobs, faults and one scheduler.

It measures the GPU-hours that faults cost. The model is the same for all arms, except for what the scheduler
knows:

- A fault affects one GPU of a node, or the whole node. A job on this hardware works at 1 / slowdown. A job
  that the fault kills dies after the measured time (it stands still if the fault hangs it). It loses
  the work since its last checkpoint (every CHECKPOINT_S of work). It returns to the head of the queue,
  and needs RESTART_S to start up again. A job that is started on a GPU that is gone does not start up: it
  dies after LAUNCH_S.
- Every scheduler notices within DOWN_S that a whole node is gone. For other faults that kill, an
  operator drains the node OPERATOR_S after the first job that died there. A node that is only slow is
  never drained.
- RISK_BLIND knows free GPUs, drained and lost nodes. RISK_AWARE also knows the node's risk, from the
  measured delay after the fault's first symptom until CLEAR_S after the fault ended. A slow fault shows
  once a job runs on it. Neither arm touches a running job. In ACTING the job's owner does. Once the node is
  flagged, a hung job is restarted elsewhere at once. A slow job is checkpointed and moved when it has
  lost as much as a restart costs (ski rental).
- Lost GPU-hours = slowed and stalled work + work lost since a checkpoint + restarts + idle GPUs on
  avoided or drained nodes while jobs queue for them.
"""

import copy
import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import Topology
from fleetcast.placement.engine import decide
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.view import ClusterView, Inventory
from fleetcast.simulator.days.backfill import BackfilledJob, BackfillQueue
from fleetcast.simulator.days.traces import TraceJob, choose_gang_shape
from fleetcast.simulator.faults.detection import Sighting

CHECKPOINT_S = 1800.0
RESTART_S = 300.0
LAUNCH_S = 120.0
DOWN_S = 60.0
OPERATOR_S = 1800.0
CLEAR_S = 600.0
FALSE_P_SLOW = 0.6  # the risk that a falsely flagged node shows
RETRY_MS = 300_000
CHECK_INTERVAL_MS = 300_000  # how often idle GPUs are counted
GONE = frozenset({"gpu_off_bus", "node_lost"})
SHOWS_IDLE = frozenset({"gpu_off_bus", "node_lost", "ecc_storm", "ib_flap"})  # seen without a job on it


class Arm(StrEnum):
    """An arm of the comparison.

    It decides whether the scheduler knows the risk, and whether owners act on it.
    """

    RISK_BLIND = "risk_blind"
    RISK_AWARE = "ours"
    ACTING = "ours_acting"


@dataclass(frozen=True, slots=True, eq=False)
class DayFault:
    """A fault on `node` (row), on one GPU or on all (-1).

    sighting: the measurements of a similar fault.
    """

    node: int
    gpu: int
    start_ms: int
    end_ms: int
    sighting: Sighting


@dataclass(frozen=True, slots=True)
class FalseAlarm:
    """A benign decoy that flags a healthy node from `start_ms` to `end_ms`. `node`: row."""

    node: int
    start_ms: int
    end_ms: int


@dataclass(slots=True)
class Losses:
    """The lost GPU-hours by cause, and the number of killed jobs."""

    slowed: float = 0.0
    redone: float = 0.0
    restarts: float = 0.0
    idle: float = 0.0
    killed_jobs: int = 0

    @property
    def total(self) -> float:
        return self.slowed + self.redone + self.restarts + self.idle


@dataclass(slots=True)
class _Work:
    """The work of one running job. The job starts up for `startup_s`, then has `remaining_s` of work.

    `version`: events that were scheduled for an earlier version no longer apply.
    """

    row: BackfilledJob
    remaining_s: float
    last_ms: int
    startup_s: float = 0.0
    faults: list[DayFault] = field(default_factory=list)
    stalled: bool = False
    version: int = 0

    @property
    def slowdown(self) -> float:
        return max((fault.sighting.slowdown for fault in self.faults), default=1.0)


@dataclass(frozen=True, slots=True, eq=False)
class _Flag:
    """A flag on a node, with the risks that the scheduler assumes while it lasts."""

    node: int
    p_fail: float
    p_slow: float


Memo = dict[tuple[Any, ...], list[int] | None]


class DaySimulation:
    """The simulation of one day for one arm of the comparison.

    `cluster` is copied. `memo` may be shared between arms and seeds, because the same view leads to the
    same decision.
    """

    def __init__(
        self,
        cluster: BackfillQueue,
        topology: Topology,
        begin_ms: int,
        end_ms: int,
        *,
        arm: Arm,
        remaining_s: Callable[[BackfilledJob], float],
        memo: Memo,
    ) -> None:
        self.cluster = copy.deepcopy(cluster)
        self.cluster.chooser = self._choose_nodes
        self.end_ms = end_ms
        self.losses = Losses()
        self._view = _make_empty_view(topology)
        self._arm = arm
        self._memo = memo
        self._events: list[tuple[int, int, Callable[[int], None]]] = []
        self._order = 0
        self._active: dict[int, list[DayFault]] = {}
        self._flag_ms: dict[DayFault, int] = {}
        self._flags: list[_Flag] = []
        self._work = {name: _Work(row, remaining_s(row), begin_ms) for name, row in self.cluster.running.items()}
        self._restarting: dict[str, float] = {}  # job -> remaining seconds of its next attempt
        for work in self._work.values():
            self._schedule_end(work)
        self._schedule_action(begin_ms, self._add_idle_losses)

    def run(self, arrivals: Iterable[TraceJob], faults: Sequence[DayFault], alarms: Sequence[FalseAlarm]) -> Losses:
        """Simulate the day and return its losses."""
        for job in arrivals:
            self._schedule_action(job.submit_ms, partial(self._queue_job, job))
        for fault in faults:
            self._schedule_action(fault.start_ms, partial(self._begin_fault, fault))
        for alarm in alarms if self._sees_risk else ():
            flag = _Flag(alarm.node, 0.0, FALSE_P_SLOW)
            self._schedule_action(alarm.start_ms, partial(self._add_flag, flag, alarm.end_ms))
        while self._events and self._events[0][0] < self.end_ms:
            now_ms, _, act = heapq.heappop(self._events)
            act(now_ms)
            for row in self.cluster.start_ready_jobs(now_ms):
                self._begin_work(row, now_ms)
        for work in self._work.values():
            self._update_progress(work, self.end_ms)
        return self.losses

    @property
    def _sees_risk(self) -> bool:
        return self._arm is not Arm.RISK_BLIND

    def _queue_job(self, job: TraceJob, now_ms: int) -> None:
        self.cluster.queue.append(job)

    def _schedule_action(self, time_ms: int, act: Callable[[int], None]) -> None:
        heapq.heappush(self._events, (time_ms, self._order, act))
        self._order += 1

    # Jobs

    def _begin_work(self, row: BackfilledJob, now_ms: int) -> None:
        again = row.job.job in self._restarting
        remaining_s = self._restarting.pop(row.job.job, row.job.run_s)
        work = self._work[row.job.job] = _Work(row, remaining_s, now_ms, RESTART_S if again else 0.0)
        for node, gpus in row.held:
            for fault in self._active.get(node, ()):
                if fault.gpu < 0 or fault.gpu in gpus:
                    self._expose_job(work, fault, now_ms)
        self._schedule_end(work)

    def _update_progress(self, work: _Work, now_ms: int) -> None:
        """Account for the work since the last call, and for the GPU-hours lost to restarts and slowness."""
        dt_s = (now_ms - work.last_ms) / 1000
        work.last_ms = now_ms
        gpu_hours = work.row.job.gpus / 3600
        if work.stalled:
            self.losses.slowed += dt_s * gpu_hours
            return
        startup_s = min(dt_s, work.startup_s)
        work.startup_s -= startup_s
        self.losses.restarts += startup_s * gpu_hours
        worked_s = (dt_s - startup_s) / work.slowdown
        work.remaining_s -= worked_s
        self.losses.slowed += (dt_s - startup_s - worked_s) * gpu_hours

    def _schedule_end(self, work: _Work) -> None:
        work.version += 1
        if work.stalled:
            return
        end_ms = work.last_ms + round((work.startup_s + work.remaining_s * work.slowdown) * 1000)
        self._schedule_action(max(end_ms, work.last_ms), partial(self._end_job, work, work.version))

    def _end_job(self, work: _Work, version: int, now_ms: int) -> None:
        if version == work.version and self._is_running(work):
            self._update_progress(work, now_ms)
            del self._work[work.row.job.job]
            self.cluster.end_job(work.row.job.job)

    def _is_running(self, work: _Work) -> bool:
        return self._work.get(work.row.job.job) is work

    def _kill_job(self, work: _Work, fault: DayFault, now_ms: int) -> None:
        if not self._is_running(work) or now_ms >= fault.end_ms:
            return
        self._update_progress(work, now_ms)
        self.losses.killed_jobs += 1
        self._requeue_job(work, lost=True)
        self._schedule_action(now_ms + round(OPERATOR_S * 1000), partial(self._drain_node, fault))

    def _requeue_job(self, work: _Work, *, lost: bool) -> None:
        """Return a job to the head of the queue.

        lost: whether it must redo the work since its last checkpoint.
        """
        job = work.row.job
        redone_s = max(0.0, job.run_s - work.remaining_s) % CHECKPOINT_S if lost else 0.0
        self.losses.redone += redone_s * job.gpus / 3600
        del self._work[job.job]
        self.cluster.running.pop(job.job)
        self.cluster.pool.release(work.row.held)
        self._restarting[job.job] = work.remaining_s + redone_s
        self.cluster.queue.insert(0, job)

    # Faults

    def _begin_fault(self, fault: DayFault, now_ms: int) -> None:
        self._active.setdefault(fault.node, []).append(fault)
        self._schedule_action(fault.end_ms, partial(self._end_fault, fault))
        if fault.sighting.kind == "node_lost":
            self._schedule_action(now_ms + round(DOWN_S * 1000), partial(self._drain_node, fault))
        if fault.sighting.kind in SHOWS_IDLE:
            self._schedule_flag(fault, now_ms)
        for work in list(self._work.values()):
            if any(node == fault.node and (fault.gpu < 0 or fault.gpu in gpus) for node, gpus in work.row.held):
                self._update_progress(work, now_ms)
                self._expose_job(work, fault, now_ms)
                self._schedule_end(work)

    def _expose_job(self, work: _Work, fault: DayFault, now_ms: int) -> None:
        """Expose a job to a fault, which slows the job or will kill it."""
        work.faults.append(fault)
        self._schedule_flag(fault, now_ms)
        self._schedule_move(work, fault, now_ms)
        if fault.sighting.kills:
            work.stalled = work.stalled or fault.sighting.hangs
            comes_up = now_ms == fault.start_ms or fault.sighting.kind not in GONE
            dies_s = fault.sighting.kills_s if comes_up else LAUNCH_S
            self._schedule_action(now_ms + round(dies_s * 1000), partial(self._kill_job, work, fault))

    def _schedule_flag(self, fault: DayFault, now_ms: int) -> None:
        """Schedule the flag of a fault's node: the measured delay after the fault's first symptom.

        Only the first call for a fault has an effect.
        """
        sighting, until_ms = fault.sighting, fault.end_ms + round(CLEAR_S * 1000)
        if fault in self._flag_ms or not self._sees_risk or not math.isfinite(sighting.delay_s):
            return
        flag_ms = self._flag_ms[fault] = now_ms + round(sighting.delay_s * 1000)
        if flag_ms < until_ms:
            self._schedule_action(
                flag_ms, partial(self._add_flag, _Flag(fault.node, sighting.p_fail, sighting.p_slow), until_ms)
            )

    def _schedule_move(self, work: _Work, fault: DayFault, now_ms: int) -> None:
        """Schedule when the owner moves this job away, if owners act in this arm.

        A hung job is moved at once. A slow job is moved when its loss equals the cost of a restart.
        """
        sighting = fault.sighting
        if self._arm is not Arm.ACTING or fault not in self._flag_ms:
            return
        pays_ms = now_ms
        if not sighting.hangs:
            lost_share = 1 - 1 / sighting.slowdown
            if lost_share <= 0:
                return
            pays_ms += round(RESTART_S / lost_share * 1000)
        self._schedule_action(max(pays_ms, self._flag_ms[fault]), partial(self._move_job, work, fault))

    def _move_job(self, work: _Work, fault: DayFault, now_ms: int) -> None:
        """Stop a job so that it restarts on other GPUs, if there is room for it. Otherwise try again later."""
        if not self._is_running(work) or fault not in work.faults:
            return
        job, pool = work.row.job, self.cluster.pool
        pool.release(work.row.held)
        nodes = self._choose_nodes(job, pool.count)
        pool.reoccupy(work.row.held)
        if nodes is None or fault.node in nodes:
            self._schedule_action(now_ms + RETRY_MS, partial(self._move_job, work, fault))
            return
        self._update_progress(work, now_ms)
        self._requeue_job(work, lost=fault.sighting.hangs)

    def _end_fault(self, fault: DayFault, now_ms: int) -> None:
        self._active[fault.node].remove(fault)
        for work in list(self._work.values()):
            if fault in work.faults:
                self._update_progress(work, now_ms)
                work.faults.remove(fault)
                work.stalled = any(other.sighting.hangs for other in work.faults)
                self._schedule_end(work)

    def _add_flag(self, flag: "_Flag", until_ms: int, now_ms: int) -> None:
        self._flags.append(flag)
        self._update_node_risk(flag.node)
        self._schedule_action(until_ms, partial(self._remove_flag, flag))

    def _remove_flag(self, flag: "_Flag", now_ms: int) -> None:
        self._flags.remove(flag)
        self._update_node_risk(flag.node)

    def _update_node_risk(self, node: int) -> None:
        """Set the risk of a node to the highest risk among its flags, or to 0 without a flag."""
        here = [flag for flag in self._flags if flag.node == node]
        p_fail, p_slow = self._view.p_fail.copy(), self._view.p_slow.copy()
        p_fail[node] = max((flag.p_fail for flag in here), default=0.0)
        p_slow[node] = max((flag.p_slow for flag in here), default=0.0)
        self._view = replace(self._view, p_fail=p_fail, p_slow=p_slow)

    def _drain_node(self, fault: DayFault, now_ms: int) -> None:
        if fault in self._active.get(fault.node, ()):
            self._set_node_state(fault.node, NodeState.DRAINED)
            self._schedule_action(fault.end_ms, partial(self._undrain_node, fault.node))

    def _undrain_node(self, node: int, now_ms: int) -> None:
        self._set_node_state(node, NodeState.IN_SERVICE)

    def _set_node_state(self, node: int, state: NodeState) -> None:
        changed = self._view.state.copy()  # the view's memo made its arrays read-only
        changed[node] = state
        self._view = replace(self._view, state=changed)

    def _add_idle_losses(self, now_ms: int) -> None:
        """Add the GPU-hours of idle GPUs on avoided or drained nodes to the losses.

        If more GPUs are idle there than the queued jobs want, only the wanted number counts.
        """
        risk = np.fmax(self._view.p_fail, self._view.p_slow)
        out = (self._view.state != NodeState.IN_SERVICE) | (risk > 0)
        wanted = sum(job.gpus for job in self.cluster.queue)
        idle = min(int(self.cluster.pool.count[out].sum()), wanted)
        self.losses.idle += idle * CHECK_INTERVAL_MS / 3_600_000
        self._schedule_action(now_ms + CHECK_INTERVAL_MS, self._add_idle_losses)

    # Placement

    def _choose_nodes(self, job: TraceJob, count: NDArray[np.int64]) -> list[int] | None:
        """Choose nodes for a job with the product's own engine, which gets only the facts that this arm knows.

        count: (node,) the GPUs that the job may use on each node. Returns None if it does not fit.
        """
        free = self.cluster.pool.free
        if not np.array_equal(count, self.cluster.pool.count):
            free = free & (np.cumsum(free, axis=1) <= count[:, None])
        view = self._view
        key = (job.gpus, free.tobytes(), view.p_fail.tobytes(), view.p_slow.tobytes(), view.state.tobytes())
        if key not in self._memo:
            self._memo[key] = self._place_job(job, free)
        return self._memo[key]

    def _place_job(self, job: TraceJob, free: NDArray[np.bool_]) -> list[int] | None:
        members, each = choose_gang_shape(job.gpus, free.shape[1])
        request = PlacementRequest(request_id=job.job, gang=members, gpus_per_node=each)
        decision = decide(request, replace(self._view, milli=convert_to_milli(free)))
        rows = self._view.inventory.row
        return [rows[rank.node] for rank in decision.ranks] if decision.outcome == "placed" else None


def _make_empty_view(topology: Topology) -> ClusterView:
    """Return the view of a scheduler without telemetry, in which every node has the same risk."""
    nodes, width = len(topology), int(topology.gpus.max(initial=1))
    unknown = np.full(nodes, np.nan)
    return ClusterView(
        topology=topology,
        milli=np.zeros((nodes, width), np.int16),
        usable=np.arange(width)[None, :] < topology.gpus[:, None],
        state=np.full(nodes, NodeState.IN_SERVICE, np.int8),
        p_fail=np.zeros(nodes),
        p_slow=np.zeros(nodes),
        reason={},
        holders=np.full((nodes, width), -1, np.int32),
        jobs=(),
        free_cpus=unknown,
        free_host_memory_gib=unknown,
        inventory=Inventory.from_topology(topology),
    )
