"""One job attempt from the view of its owner's launcher.

It tracks remaining work, steps, phases and checkpoints. It also makes the events that the launcher sends.
"""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, TypeVar, get_args

from fleetcast.fleet.events import (
    Checkpoint,
    Failed,
    FailureCategory,
    Finished,
    JobEvent,
    Phase,
    PhaseName,
    Preempted,
    Queued,
    Resized,
    Started,
    Step,
    StepParts,
    Submitted,
)
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.simulator.days.traces import TraceJob
from fleetcast.simulator.hardware.workload import FLOPS_PER_TOKEN_GPU, WorkloadProfile

GANG_GPUS = 8  # from this size on a job reports its steps
STEP_EVERY_MS = 30_000
MAX_EARLIER_CHECKPOINTS = 3  # of a job that ran before
FLOPS_LABEL = "flops_per_token"
SPEEDUP = 0.9  # a gang of n members runs at n to this power
NOISE_RATIO = 1.02  # a step this much longer than usual is not yet slow

PHASES = frozenset(get_args(PhaseName))

Event = TypeVar("Event", bound=JobEvent)


@dataclass(slots=True)
class LiveJob:
    """One attempt of a live job.

    `remaining_s`: run time still to do. `safe_s`: run time still to do after a restart from the last checkpoint.
    `broken_ms`: when a node under it was lost, 0 if its nodes are there. A broken job does no work.
    """

    job: TraceJob
    profile: WorkloadProfile
    remaining_s: float
    safe_s: float
    attempt: int = 1
    sequence: int = 0
    ranks: tuple[RankPlacement, ...] = ()
    priority: int = 0
    last_ms: int = 0
    step: float = 0.0
    next_step_ms: int = 0
    phase: str = ""
    broken_ms: int = 0
    has_moved: bool = False  # whether it has continued on other ranks

    @property
    def name(self) -> str:
        return self.job.job

    @property
    def request_id(self) -> str:
        """The id of the placement request: the job's name.

        From the second attempt on, the number of the attempt is appended.
        """
        return self.name if self.attempt == 1 else f"{self.name}.{self.attempt}"

    @property
    def gpus(self) -> int:
        return sum(len(rank.gpus) for rank in self.ranks) or self.job.gpus

    def make_next_event(self, kind: type[Event], time_ms: int, **fields: Any) -> Event:
        """Make the next event of this attempt, and advance the sequence."""
        event = kind(job=self.name, attempt=self.attempt, sequence=self.sequence, time_ms=time_ms, **fields)
        self.sequence += 1
        return event

    def make_submission_events(self, now_ms: int, gpus_per_node: int) -> tuple[JobEvent, ...]:
        """Make the first events of an attempt: `submitted` and `queued`."""
        shape = self._make_shape_fields(gpus_per_node) | self.make_submission_facts()
        return self.make_next_event(Submitted, now_ms, **shape), self.make_next_event(
            Queued, now_ms, reason="waits for GPUs"
        )

    def make_request(self, gpus_per_node: int) -> PlacementRequest:
        """Return the placement request for the product's queue."""
        shape = self._make_shape_fields(gpus_per_node)
        return PlacementRequest(request_id=self.request_id, job=self.name, attempt=self.attempt, **shape)

    def make_submission_facts(self) -> dict[str, Any]:
        """Return the fields of `submitted` that a trainer states about its model and its checkpoints."""
        facts: dict[str, Any] = {}
        if self.reports_steps and self.profile.trains:
            facts["labels"] = {FLOPS_LABEL: f"{FLOPS_PER_TOKEN_GPU * self.job.gpus:.4g}"}
        if self.profile.checkpoint_s:
            facts["checkpoint_cost_s"] = round(self.profile.checkpoint_s, 1)
        return facts

    @property
    def reports_steps(self) -> bool:
        return self.gpus >= GANG_GPUS

    def _make_shape_fields(self, gpus_per_node: int) -> dict[str, Any]:
        members, each = self.job.compute_gang_shape(gpus_per_node)
        return {
            "queue": self.job.queue,
            "user": self.job.user,
            "class_": self.job.class_,
            "gang": self.job.gang or members,
            "gpus_per_node": each,
            "pool": self.job.pool,
            "priority": self.priority,
        }

    def start_on_ranks(self, ranks: tuple[RankPlacement, ...], now_ms: int) -> JobEvent:
        self.ranks, self.last_ms, self.next_step_ms = ranks, now_ms, now_ms + STEP_EVERY_MS
        return self.make_next_event(Started, now_ms, ranks=ranks)

    def advance_work(self, phase: str, step_s: float, now_ms: int) -> int | None:
        """Do the work since the last call. Returns the job's end in Unix ms, or None if it is not done.

        step_s: the present length of a step. `nan`: the job loads. `inf`: it hangs and does no work. Slow steps
        slow only steady work and the warm-up.
        """
        dt_s = (now_ms - self.last_ms) / 1000
        self.last_ms = now_ms
        if step_s == inf:
            return None
        ratio = step_s / self.profile.step_s if phase in ("steady", "warmup") and isfinite(step_s) else 1.0
        slowed = ratio if ratio > NOISE_RATIO else 1.0
        if phase in ("steady", "warmup") and isfinite(step_s):
            self.step += dt_s / step_s
        self.remaining_s -= dt_s / slowed
        return now_ms + int(self.remaining_s * slowed * 1000) if self.remaining_s <= 0 else None

    def make_past_checkpoints(self, started_ms: int, now_ms: int) -> list[JobEvent]:
        """Make the events of the job's last checkpoints before `now_ms`."""
        spans = self.profile.find_past_checkpoints(started_ms, now_ms, MAX_EARLIER_CHECKPOINTS)
        edges = [edge for begin_ms, end_ms in spans for edge in (("begin", begin_ms), ("end", end_ms))]
        return [self.make_next_event(Checkpoint, time_ms, edge=edge) for edge, time_ms in edges]

    def make_due_events(self, phase: str, step_s: float, now_ms: int, parts: StepParts | None = None) -> list[JobEvent]:
        """Make the phase, checkpoint and step events that are due. parts: the parts of a step now."""
        events: list[JobEvent] = []
        if phase and phase != self.phase:
            events += self._change_phase(phase, now_ms)
        steps = self.reports_steps and isfinite(step_s)
        if steps and (now_ms >= self.next_step_ms or (events and phase == "checkpoint")):
            self.next_step_ms = now_ms + STEP_EVERY_MS
            about: dict[str, Any] = {"step": int(self.step), "duration_s": round(step_s, 4)}
            if self.profile.trains:
                speed = (self.gpus / self.job.gpus) ** SPEEDUP  # the batch follows the size, so the step time stays
                about |= {"tokens": round(self.profile.tokens_per_step * speed), "parts": parts}
            events.append(self.make_next_event(Step, now_ms, **about))
        return events

    def _change_phase(self, phase: str, now_ms: int) -> list[JobEvent]:
        before, self.phase = self.phase, phase
        events: list[JobEvent] = []
        if phase in PHASES:
            events.append(self.make_next_event(Phase, now_ms, name=phase))
        if phase == "checkpoint":
            events.append(self.make_next_event(Checkpoint, now_ms, edge="begin"))
        if before == "checkpoint":
            self.safe_s = self.remaining_s
            events.append(self.make_next_event(Checkpoint, now_ms, edge="end"))
        return events

    def begin_checkpoint(self, now_ms: int) -> list[JobEvent]:
        """Make the event of a checkpoint that begins now. There is none if one is being written."""
        return [] if self.phase == "checkpoint" else [self.make_next_event(Checkpoint, now_ms, edge="begin")]

    def end_checkpoint(self, now_ms: int) -> JobEvent:
        """Save the work up to now, and make the event of a whole checkpoint."""
        self.phase, self.safe_s = "", self.remaining_s
        return self.make_next_event(Checkpoint, now_ms, edge="end")

    def resize_on_ranks(self, ranks: tuple[RankPlacement, ...], pause_s: float, now_ms: int) -> JobEvent:
        """Continue on other ranks from the last checkpoint, after a pause. Fewer GPUs make the rest longer."""
        before = self.gpus
        self.ranks, self.phase, self.broken_ms, self.has_moved = ranks, "", 0, True
        self.remaining_s = self.safe_s = self.safe_s * (before / self.gpus) ** SPEEDUP + pause_s
        return self.make_next_event(Resized, now_ms, ranks=ranks)

    def make_preempted_event(self, by: str, time_ms: int) -> JobEvent:
        return self.make_next_event(Preempted, time_ms, by=by, reason="an action of the placer")

    def make_finished_event(self, time_ms: int) -> JobEvent:
        return self.make_next_event(Finished, time_ms)

    def make_failed_event(self, category: FailureCategory, node: str, message: str, time_ms: int) -> JobEvent:
        return self.make_next_event(Failed, time_ms, category=category, node=node, message=message)

    def make_next_attempt(self) -> "LiveJob":
        """Return the next attempt of the job, which must redo the work since the last checkpoint."""
        return LiveJob(
            self.job,
            self.profile,
            remaining_s=self.safe_s,
            safe_s=self.safe_s,
            attempt=self.attempt + 1,
            priority=self.priority,
        )
