"""The users of a simulated fleet. Their jobs arrive, make steps, write checkpoints, die of faults and restart.

Each job has whole nodes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import (
    Checkpoint,
    Failed,
    FailureCategory,
    Finished,
    JobClass,
    JobEvent,
    Phase,
    PhaseName,
    Started,
    Step,
    StepParts,
    Submitted,
)
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.simulator.faults.fault_file import JobsTable
from fleetcast.simulator.hardware.cluster import MemberStep, SimulatedFleet
from fleetcast.simulator.hardware.workload import WorkloadProfile, draw_profile

TOKENS_PER_STEP = 4_194_304
SEQUENCE_LENGTH = 4096.0
LENGTH_JITTER = 0.02  # of the mean length of a rank's sequences, when all is even

Event = TypeVar("Event", bound=JobEvent)


@dataclass(slots=True)
class Tenancy:
    """One attempt of a user's job.

    `safe_s`: seconds of work that a restart from the last checkpoint still has to do.
    """

    name: str
    size: int
    class_: JobClass
    profile: WorkloadProfile
    remaining_s: float
    safe_s: float
    attempt: int = 1
    sequence: int = 0
    phase: str = ""
    step: float = 0.0
    reported_ms: int = 0
    ranks: tuple[RankPlacement, ...] = ()

    def make_next_event(self, kind: type[Event], time_ms: int, **fields: Any) -> Event:
        event = kind(job=self.name, attempt=self.attempt, sequence=self.sequence, time_ms=time_ms, **fields)
        self.sequence += 1
        return event


@dataclass(slots=True)
class Tenants:
    """A generator of jobs that fills the fleet. The caller advances it after the fleet itself."""

    fleet: SimulatedFleet
    table: JobsTable
    rng: np.random.Generator
    step_s: float = 15.0
    running: dict[str, Tenancy] = field(default_factory=dict)
    waiting: list[tuple[int, Tenancy]] = field(default_factory=list)  # (not before, attempt)
    last_ms: int | None = None
    _began: int = 0
    _next: Tenancy | None = None
    _shown_ms: dict[int, int] = field(default_factory=dict)  # node row -> since when its fault is plain to see

    def advance_jobs(self, now_ms: int) -> list[JobEvent]:
        """Process failures, ends and starts of jobs until `now_ms`. Returns the events that the jobs report."""
        dt_s = 0.0 if self.last_ms is None else (now_ms - self.last_ms) / 1000
        first, self.last_ms = self.last_ms is None, now_ms
        events: list[JobEvent] = []
        for job, category, node, message in self.fleet.pop_failed_jobs():
            events += self._fail_job(self.running.pop(job), category, node, message, now_ms)
        for tenancy in list(self.running.values()):
            events += self._advance_job(tenancy, now_ms, dt_s)
        return events + self._fill_free_nodes(now_ms, first)

    def find_job_on_gpu(self, node: int, unit: int) -> str | None:
        """Return the job on a GPU of a node, or None. unit: -1 for any GPU of the node."""
        cells = self.fleet.gangs.slot[node] if unit < 0 else self.fleet.gangs.slot[node, unit : unit + 1]
        held = cells[cells > 0]
        return self.fleet.gangs.by_slot[int(held[0])].job if len(held) else None

    def _fail_job(self, tenancy: Tenancy, category: str, node: str, message: str, now_ms: int) -> list[JobEvent]:
        fields = {"category": cast(FailureCategory, category), "node": node, "message": message}
        event = tenancy.make_next_event(Failed, now_ms, **fields)
        again = replace(
            tenancy,
            attempt=tenancy.attempt + 1,
            sequence=0,
            phase="",
            remaining_s=tenancy.safe_s,
            ranks=(),
        )
        self.waiting.append((now_ms + int(self.table.restart_s * 1000), again))
        return [event]

    def _advance_job(self, tenancy: Tenancy, now_ms: int, dt_s: float) -> list[JobEvent]:
        events = self._change_phase(tenancy, now_ms)
        members = self.fleet.draw_member_steps(tenancy.name)
        if members and tenancy.phase in ("steady", "warmup"):
            step_s = members[0].compute_s + members[0].communication_s
            tenancy.step += dt_s / step_s
            tenancy.remaining_s -= dt_s * min(1.0, tenancy.profile.step_s / step_s)
        elif members or tenancy.phase in ("init", "loading"):
            tenancy.remaining_s -= dt_s
        if tenancy.remaining_s <= 0:
            self.fleet.stop_job(tenancy.name, now_ms)
            del self.running[tenancy.name]
            return [*events, tenancy.make_next_event(Finished, now_ms)]
        every_ms = self.table.step_every_s * 1000
        if members and every_ms and tenancy.class_ == "training" and now_ms - tenancy.reported_ms >= every_ms:
            tenancy.reported_ms = now_ms
            events += self._make_step_events(tenancy, members, now_ms)
        return events

    def _make_step_events(self, tenancy: Tenancy, members: Iterable[MemberStep], now_ms: int) -> Iterable[JobEvent]:
        """Yield a step event of each rank. A rank's time grows with the length of its sequences."""
        for member in members:
            length = SEQUENCE_LENGTH * member.load * (1 + LENGTH_JITTER * self.rng.standard_normal())
            total_s = member.compute_s + member.communication_s + member.data_s
            yield tenancy.make_next_event(
                Step,
                now_ms,
                step=int(tenancy.step),
                rank=member.rank,
                duration_s=round(total_s, 4),
                parts=StepParts(
                    compute=round(member.compute_s, 4),
                    communication=round(member.communication_s, 4),
                    data=round(member.data_s, 4),
                ),
                tokens=TOKENS_PER_STEP,
                sequence_length=round(length, 1),
            )

    def _change_phase(self, tenancy: Tenancy, now_ms: int) -> list[JobEvent]:
        phase, before = self.fleet.get_phase(tenancy.name), tenancy.phase
        if phase == before:
            return []
        tenancy.phase = phase
        events: list[JobEvent] = [tenancy.make_next_event(Phase, now_ms, name=cast(PhaseName, phase))]
        if before == "checkpoint":
            tenancy.safe_s = tenancy.remaining_s
        for at, edge in ((before, "end"), (phase, "begin")):
            if at == "checkpoint":
                events.append(tenancy.make_next_event(Checkpoint, now_ms, edge=cast(Literal["begin", "end"], edge)))
        return events

    # Starting

    def _fill_free_nodes(self, now_ms: int, first: bool) -> list[JobEvent]:
        events: list[JobEvent] = []
        free = self._find_free_nodes(now_ms)
        for due in [due for due in self.waiting if due[0] <= now_ms]:
            if due[1].size <= len(free):
                self.waiting.remove(due)
                free = self._start_job(due[1], free, now_ms, events)
        while self.table.sizes:
            self._next = self._next or self._draw_job()
            if self._next.size > len(free):
                return events
            if not first and self.rng.random() > self._compute_start_chance():
                return events
            free = self._start_job(self._next, free, now_ms, events)
            self._next = None
        return events

    def _compute_start_chance(self) -> float:
        """Return the probability that a job is submitted within one step.

        This probability keeps nodes free for `gap_s` on average.
        """
        return 1.0 if self.table.gap_s <= 0 else min(1.0, self.step_s / self.table.gap_s)

    def _start_job(
        self, tenancy: Tenancy, free: NDArray[np.int64], now_ms: int, events: list[JobEvent]
    ) -> NDArray[np.int64]:
        """Start a job on nodes that are as near to each other as possible.

        Returns the rows of the remaining nodes.

        Adds its events to `events`.
        """
        spans = free[tenancy.size - 1 :] - free[: len(free) - tenancy.size + 1]
        begin = int(np.argmin(spans))
        rows = free[begin : begin + tenancy.size]
        gpus = self.fleet.spec.gpus
        every = tuple(range(gpus))
        ranks = tuple(RankPlacement(rank, self.fleet.names[row], every) for rank, row in enumerate(rows.tolist()))
        tenancy.ranks, tenancy.reported_ms = ranks, now_ms
        self.fleet.start_job(tenancy.name, tenancy.attempt, ranks, tenancy.profile, now_ms)
        self.running[tenancy.name] = tenancy
        gang = Gang(len(ranks), len(ranks))
        fields = {"class_": tenancy.class_, "gang": gang, "gpus_per_node": gpus, "name": tenancy.profile.kind}
        events.append(tenancy.make_next_event(Submitted, now_ms, **fields))
        events.append(tenancy.make_next_event(Started, now_ms, ranks=ranks))
        return np.setdiff1d(free, rows)

    def _find_free_nodes(self, now_ms: int) -> NDArray[np.int64]:
        """Return the rows of nodes without a job that show no fault.

        A node with a visible fault is avoided only once it has shown the fault for `avoid_s`.
        """
        wrong = {
            row.node for row in self.fleet.faults.list_incidents() if not row.benign and row.visible_ms is not None
        }
        self._shown_ms = {node: self._shown_ms.get(node, now_ms) for node in wrong}
        shunned = [node for node, since in self._shown_ms.items() if now_ms - since >= self.table.avoid_s * 1000]
        down = self.fleet.effects.page_down.all(axis=1) | ~self.fleet.effects.present.all(axis=1)
        free = (self.fleet.gangs.slot == 0).all(axis=1) & ~down
        free[shunned] = False
        return np.flatnonzero(free)

    def _draw_job(self) -> Tenancy:
        table, self._began = self.table, self._began + 1
        weights = np.array(table.weights) / sum(table.weights)
        size = min(int(self.rng.choice(table.sizes, p=weights)), self.fleet.spec.nodes)
        class_ = self._draw_class(size)
        profile = draw_profile(self.rng, size * self.fleet.spec.gpus, class_)
        run_s = float(table.median_s * self.rng.lognormal(0.0, table.sigma))
        return Tenancy(f"job-{self._began:05d}", size, class_, profile, run_s, run_s)

    def _draw_class(self, size: int) -> JobClass:
        draw = self.rng.random()
        if size > 1 or draw >= self.table.inference_share + self.table.interactive_share:
            return "training"
        return "inference" if draw < self.table.inference_share else "interactive"
