"""The attempt of a job, made from its events. Neither their order nor repeated events change the result.

The event with the highest `sequence` decides each field.
"""

from dataclasses import dataclass, field, fields
from functools import cached_property

from fleetcast.fleet.checkpoint_edges import CheckpointEdges, fold_edge
from fleetcast.fleet.events import (
    Checkpoint,
    Failed,
    Finished,
    JobEvent,
    NodeLost,
    Phase,
    Preempted,
    Queued,
    Resized,
    Started,
    Step,
    Submitted,
)
from fleetcast.fleet.job_steps import RankSteps, fold_step
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.fleet.sequences import SeenSequences, add_newest_event
from fleetcast.fleet.tellers import UNSEEN_START, Teller, find_fact_origin, update_rank_place

EndEvent = Finished | Failed | Preempted
SIGNS_OF_LIFE = (Phase, Step, Checkpoint)
OUTCOMES = {Finished: "finished", Failed: "failed", Preempted: "preempted"}

MAX_EVENTS = 20
MAX_EVALUATIONS = 17


@dataclass(slots=True)
class JobAttempt:
    """One attempt of one job. `*_ms` fields are None until their event has arrived."""

    job: str
    attempt: int
    seen: SeenSequences = field(default_factory=SeenSequences)
    submission: Submitted | None = None
    queued_reason: str = ""
    is_blocked: bool = False  # by its latest `queued` event: it may not start, whatever is free
    queued_ms: int | None = None  # time of the latest `queued` event
    started_ms: int | None = None
    ranks: tuple[RankPlacement, ...] = ()
    nodes: tuple[str, ...] = ()
    placed_ms: int | None = None  # since when it is on these: its start, or its last resize
    phase: str = ""
    phase_since_ms: int | None = None
    steps: list[Step] = field(default_factory=list)  # one a step, by time
    rank_steps: RankSteps = field(default_factory=dict)  # of the newest steps that ranks reported
    reported_steps: int = 0
    checkpoints: list[CheckpointEdges] = field(default_factory=list)  # by time
    evaluations: list[Phase] = field(default_factory=list)  # their beginnings, from rank 0 or without a rank
    lost_nodes: dict[str, str] = field(default_factory=dict)
    ended_ms: int | None = None
    superseded_ms: int | None = None  # when the next attempt started: this one holds nothing any more
    outcome: str = ""  # finished | failed | preempted
    failure: Failed | None = None
    silent_end: EndEvent | None = None  # the last end that silence implied, also while a later step withdraws it
    events: list[JobEvent] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)  # field group -> sequence of its last writer
    last_sign_ms: int = 0  # time of the newest step, phase or checkpoint
    placed_by: dict[int, int] = field(default_factory=dict)  # rank -> sequence of the event that implied its place
    is_exempt: bool = False  # placed by Fleetcast itself: it counts for no limit

    @property
    def submitted_ms(self) -> int | None:
        return self.submission.time_ms if self.submission else None

    @property
    def over_ms(self) -> int | None:
        """The time at which the attempt was over: its end or, without an end event, the start of a later attempt.

        None while the attempt waits or runs.
        """
        return self.superseded_ms if self.ended_ms is None else self.ended_ms

    @property
    def state(self) -> str:
        """The attempt's state: queued, promised, blocked, running, or how it ended.

        It is also "failed" if a later attempt started and no event states the outcome.
        """
        if self.over_ms is not None:
            return self.outcome or "failed"
        if self.started_ms is not None:
            return "running"
        if self.ranks and self.source == "queue":
            return "promised"
        return "blocked" if self.is_blocked else "queued"

    @property
    def eligible_ms(self) -> int | None:
        """The time at which the attempt began to wait for resources.

        This is its submission or, if it was blocked first, its release.
        None without a submission, and while it is blocked.
        """
        if self.is_blocked or self.submission is None:
            return None
        was_blocked = "blocked" in self.written
        return max(self.submission.time_ms, self.queued_ms or 0) if was_blocked else self.submission.time_ms

    @property
    def source(self) -> Teller:
        """The origin of this attempt's events."""
        return find_fact_origin(self.written, self.submission)

    @property
    def has_unseen_start(self) -> bool:
        """True if no source observed the start. The run time is then unknown."""
        return self.submission is not None and self.submission.labels.items() >= UNSEEN_START.items()

    @property
    def is_shown(self) -> bool:
        """True if enough is known to list the attempt: it was submitted, is running, or is over."""
        return self.submission is not None or self.started_ms is not None or self.over_ms is not None

    @property
    def class_(self) -> str:
        return self.submission.class_ if self.submission else "training"

    @property
    def queue(self) -> str:
        return (self.submission.queue if self.submission else "") or "default"

    @property
    def queues(self) -> tuple[str, ...]:
        """All queues in which the attempt waits. Once it runs, only the queue in which it started."""
        several = self.submission.queues if self.submission and self.started_ms is None else ()
        return several or (self.queue,)

    @property
    def tasks(self) -> int:
        """The number of attempts that wait under this name.

        It is 1, or the number of those tasks of an array that have no names of their own yet.
        """
        return self.submission.tasks if self.submission and self.started_ms is None else 1

    @property
    def gpus(self) -> int:
        """The number of GPUs that the attempt holds or, before its start, asks for."""
        if self.ranks and any(rank.gpus for rank in self.ranks):
            return sum(len(rank.gpus) for rank in self.ranks)
        per_node = self.submission.gpus_per_node if self.submission else 1
        members = len(self.ranks) or len(self.nodes)
        if members:
            return members * per_node
        gang = self.submission.gang if self.submission else 1
        return (gang.desired if isinstance(gang, Gang) else gang) * per_node * self.tasks

    @property
    def hosts(self) -> tuple[str, ...]:
        """The nodes on which the attempt runs, each once, in rank order."""
        return tuple(dict.fromkeys(rank.node for rank in self.ranks)) or self.nodes

    @property
    def run_s(self) -> float | None:
        """Seconds from start to end. None while it runs, or if a clock was set back in between."""
        if self.started_ms is None or self.ended_ms is None or self.ends_before_start:
            return None
        return (self.ended_ms - self.started_ms) / 1000

    @property
    def ends_before_start(self) -> bool:
        """Return whether the attempt's end lies before its start because a clock was set back.

        The run time is then unknown.
        """
        return self.started_ms is not None and self.ended_ms is not None and self.ended_ms < self.started_ms

    def _record_if_newest(self, group: str, event: JobEvent) -> bool:
        last = self.written.get(group)
        if last is not None and event.sequence < last:
            return False
        self.written[group] = event.sequence
        return True

    def fold(self, event: JobEvent) -> bool:
        """Apply one event. Return False if it is a duplicate."""
        if not self.seen.add(event.sequence):
            return False
        add_newest_event(self.events, event, MAX_EVENTS)
        if isinstance(event, SIGNS_OF_LIFE):
            self._infer_start_and_place(event)
        match event:
            case Step():  # by far the most events
                if not self._has_reported_end:
                    self.reported_steps += 1
                    fold_step(self.steps, self.rank_steps, event)
            case Submitted():
                if self._record_if_newest("submission", event):
                    self.submission = event
            case Queued():
                if event.blocked:
                    self.written["blocked"] = max(event.sequence, self.written.get("blocked", event.sequence))
                if self._record_if_newest("queued", event):
                    self.queued_reason, self.is_blocked, self.queued_ms = event.reason, event.blocked, event.time_ms
            case Started():
                if self._record_if_newest("started", event):
                    self.started_ms = event.time_ms
                    self._apply_silent_end()
                if self._record_if_newest("placement", event):
                    self._set_place(event)
            case Resized():
                if self._record_if_newest("placement", event):
                    self._set_place(event)
            case Phase():
                if not event.rank and self._record_if_newest("phase", event):
                    self.phase, self.phase_since_ms = event.name, event.time_ms
                if event.name == "evaluation" and not event.rank and not self._has_reported_end:
                    add_newest_event(self.evaluations, event, MAX_EVALUATIONS)
            case Checkpoint():
                if not self._has_reported_end:
                    fold_edge(self.checkpoints, event)
            case NodeLost():
                if self._record_if_newest(f"lost {event.node}", event):
                    self.lost_nodes[event.node] = event.reason
            case Finished() | Failed() | Preempted():
                if self._record_if_newest("end", event):
                    self.silent_end = event if event.sequence < 0 else None
                    self._set_end(event)
                    self._apply_silent_end()
        return True

    def _infer_start_and_place(self, event: Phase | Step | Checkpoint) -> None:
        """Record a sign of life. Infer the start and the place from it until events state them.

        Every inferred value depends on the set of events alone, not on their order. The start is the earliest
        time of a sign of life. The place of each rank comes from its event with the highest sequence. If the end
        was inferred from silence, a later sign of life withdraws it.
        """
        self.last_sign_ms = max(self.last_sign_ms, event.time_ms)
        if "started" not in self.written:
            self.started_ms = event.time_ms if self.started_ms is None else min(event.time_ms, self.started_ms)
        if "end" in self.written:
            self._apply_silent_end()
        if not isinstance(event, Checkpoint) and event.node and "placement" not in self.written:
            rank = event.rank or 0
            if event.sequence >= self.placed_by.get(rank, event.sequence):
                self.placed_by[rank] = event.sequence
                self.ranks = update_rank_place(self.ranks, event)

    def _set_place(self, event: Started | Resized) -> None:
        self.ranks, self.nodes, self.placed_ms = event.ranks, event.nodes, event.time_ms
        self.placed_by.clear()

    @property
    def _has_reported_end(self) -> bool:
        """Return whether an event reported the end. If not, silence or labels implied it."""
        return self.written.get("end", -1) >= 0

    def _apply_silent_end(self) -> None:
        """Apply or withdraw an end that silence implied. Drop the steps after a reported end.

        Only running jobs need steps. A sign of life after a silent end withdraws it, unless labels implied
        the start as well, because such labels begin a new attempt.
        """
        if self._has_reported_end:
            self.steps.clear()
            self.rank_steps.clear()
            self.reported_steps = 0
            self.checkpoints.clear()
            self.evaluations.clear()
        elif self.silent_end is None and isinstance(self.failure, Failed):
            self.silent_end = self.failure  # a snapshot of a version that stored no silent end
        if self.silent_end is not None:
            start = self.written.get("started")
            alive_ms = self.last_sign_ms if start is None else max(self.last_sign_ms, self.started_ms or 0)
            is_by_labels = start is not None and start < 0
            stands = is_by_labels or alive_ms <= self.silent_end.time_ms
            self._set_end(self.silent_end if stands else None)

    def _set_end(self, end: EndEvent | None) -> None:
        self.ended_ms = None if end is None else end.time_ms
        self.failure = end if isinstance(end, Failed) else None
        self.outcome = "" if end is None else OUTCOMES[type(end)]

    def copy(self) -> "JobAttempt":
        """Return a copy that does not change with this attempt."""
        copied = {
            "seen": self.seen.copy(),
            "steps": list(self.steps),
            "rank_steps": {number: gang.copy() for number, gang in self.rank_steps.items()},
            "checkpoints": list(self.checkpoints),
            "evaluations": list(self.evaluations),
            "lost_nodes": dict(self.lost_nodes),
            "events": list(self.events),
            "written": dict(self.written),
            "placed_by": dict(self.placed_by),
        }
        return AttemptCopy(**{name: getattr(self, name) for name in FIELDS} | copied)


FIELDS = tuple(row.name for row in fields(JobAttempt))


class AttemptCopy(JobAttempt):
    """A copy of an attempt at one moment. It never changes, so each property is computed only once."""

    @cached_property
    def state(self) -> str:
        return super().state

    @cached_property
    def source(self) -> Teller:
        return super().source

    @cached_property
    def eligible_ms(self) -> int | None:
        return super().eligible_ms

    @cached_property
    def queue(self) -> str:
        return super().queue

    @cached_property
    def class_(self) -> str:
        return super().class_

    @cached_property
    def gpus(self) -> int:
        return super().gpus

    @cached_property
    def hosts(self) -> tuple[str, ...]:
        return super().hosts
