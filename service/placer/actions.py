"""ActionControl: the one place through which actions on running jobs are proposed, sent and ended.

Each change is in the ledger before anybody can read it. Nothing here decides what to do to a job.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec

from fleetcast.fleet.clock import Clock, ClockWatch
from fleetcast.fleet.errors import ConflictError, UnknownEntity
from fleetcast.models.risk.foreseen import ForeseenRecord
from fleetcast.models.risk.record import Calibration
from fleetcast.placement.actions.action import ActionKind, JobAction, check_action
from fleetcast.placement.actions.breaker import BreakerCapacity, BreakerLimits, CircuitBreaker
from fleetcast.placement.actions.life import ActionRecord, ActionState, IllegalTransition, may_return
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.placement.plan.promised import SendingBounds
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.service.placer.charged_clock import STEP_MS
from fleetcast.service.placer.metrics import ActionMetrics

logger = logging.getLogger(__name__)

SWITCHES = "actions"  # the ledger's mark with the switches
FORESEEN_RECORD = "foreseen"  # the ledger's mark with the record of foreseen failures
PLACER = "placer"
PAUSED, RESUMED, OPENED, RESET = "actions_paused", "actions_resumed", "actions_stopped", "actions_reset"
MOST_OF_JOB = 20  # actions that `list_last_of` returns, and as many of each of these states:
SENT_BEFORE_END = (ActionState.SEEN, ActionState.REFUSED, ActionState.EXPIRED, ActionState.LATE)
RECENT_STOPS = 50  # from which `estimate_stop_s` learns
MOST_EXPIRED = 1000  # that are read at once
DONE = frozenset({ActionState.ACCEPTED, ActionState.SEEN})
TELEMETRY, SCHEDULER = "telemetry shows it", "the scheduler says so; no telemetry covers it"
OCCUPANCY = "the job holds the GPUs"


class SwitchState(msgspec.Struct, frozen=True):
    """The switches of actions, as stored in the ledger."""

    paused_ms: int | None = None
    paused_by: str = ""
    breaker: CircuitBreaker = CircuitBreaker()

    @property
    def stops_sending(self) -> bool:
        return self.paused_ms is not None or self.breaker.is_open


@dataclass(frozen=True, slots=True)
class Proposals:
    """The result of proposing actions.

    opened: the new ones. unchanged: those that were open already. declined: the others, each with the reason.
    """

    opened: Sequence[ActionRecord]
    unchanged: Sequence[ActionRecord]
    declined: Sequence[tuple[JobAction, str]]


class ActionControl:
    """The life of actions in one ledger.

    `find_capacity`: returns the GPUs that the circuit breaker's shares refer to.
    """

    def __init__(
        self,
        ledger: Ledger,
        clock: Clock,
        limits: BreakerLimits,
        find_capacity: Callable[[], BreakerCapacity],
        metrics: ActionMetrics,
    ) -> None:
        self._ledger = ledger
        self._table = ledger.actions
        self._limits = limits
        self._find_capacity = find_capacity
        self._clock_watch = ClockWatch(clock, STEP_MS)
        self._due_ms = 0  # by how much the clock was set, and nothing has moved yet
        self._postponed_ms: Counter[str] = Counter()  # id → by how much the clock was set since it was proposed
        self._inherited = frozenset(row.action_id for row in self._table.list_open())  # of an earlier process
        self._metrics = metrics

    # -- the switches

    @property
    def switches(self) -> SwitchState:
        stored = self._ledger.find_mark(SWITCHES)
        return SwitchState() if stored is None else msgspec.convert(stored, SwitchState)

    def _store_switches(self, switches: SwitchState) -> None:
        self._ledger.record_marks(**{SWITCHES: msgspec.to_builtins(switches)})

    def pause(self, now_ms: int, caller: str) -> SwitchState:
        """Send no further action until `resume`. Actions that were sent are still followed."""
        switches = self.switches
        if switches.paused_ms is not None:
            return switches
        return self._switch(
            msgspec.structs.replace(switches, paused_ms=now_ms, paused_by=caller),
            *(now_ms, caller, PAUSED, "no action is sent from now on"),
        )

    def resume(self, now_ms: int, caller: str) -> SwitchState:
        """Send actions again. An open circuit breaker stays open."""
        switches = self.switches
        if switches.paused_ms is None:
            return switches
        return self._switch(
            msgspec.structs.replace(switches, paused_ms=None, paused_by=""),
            *(now_ms, caller, RESUMED, "actions are sent again"),
        )

    def reset_breaker(self, now_ms: int, caller: str) -> SwitchState:
        """Close the circuit breaker. What was counted before counts no more."""
        switches = self.switches
        if not switches.breaker.is_open:
            return switches
        return self._switch(
            msgspec.structs.replace(switches, breaker=CircuitBreaker()),
            *(
                now_ms,
                caller,
                RESET,
                f"the circuit breaker is closed again; it was open because {switches.breaker.why}",
            ),
        )

    def _switch(self, switches: SwitchState, now_ms: int, caller: str, word: str, sentence: str) -> SwitchState:
        with self._ledger.transaction():
            self._store_switches(switches)
            self._ledger.record_audit_line("", now_ms, caller, word, sentence)
        return switches

    # -- reading

    def list_open(self) -> list[ActionRecord]:
        """Return the open actions, the oldest first."""
        self._apply_clock_step()
        return self._table.list_open()

    def get_action(self, action_id: str) -> ActionRecord:
        """Return an action. Raises UnknownEntity if there is none with this id."""
        record = self._table.find_action(action_id)
        if record is None:
            raise UnknownEntity(f"no action {action_id!r}")
        return record

    def find_open_action_of(self, job: str) -> ActionRecord | None:
        """Return the open action on a job, or None."""
        return self._table.find_open_action_of(job)

    def has_failed(self, kind: ActionKind, job: str, attempt: int) -> bool:
        """Return whether an executor refused an action of this kind on an attempt, or let it expire."""
        return any(
            row.action.kind is kind and row.action.attempt == attempt and not may_return(row)
            for row in self.list_last_of(job)
            if not row.is_open
        )

    def compute_by_ms(self, record: ActionRecord) -> int:
        """Return when an action expires in Unix ms. If the clock was set, it still has the rest of its time."""
        by_ms = self._postponed_ms[record.action_id]
        return record.action.by_ms + (max(0, by_ms) if record.action_id in self._inherited else by_ms)

    def make_foreseen_calibration(self) -> Calibration:
        """Return how often nodes failed after advice to replace them early."""
        return ForeseenRecord.load(self._ledger.find_mark(FORESEEN_RECORD)).make_calibration()

    def update_metrics(self, now_ms: int) -> None:
        """Set the metrics to the present state."""
        oldest_s: dict[str, float] = {}
        for record in self._table.list_open():
            sent_ms = record.find_time_ms(ActionState.SENT)
            if sent_ms is not None:
                age_s = (now_ms - sent_ms) / 1000
                oldest_s[record.action.executor] = max(age_s, oldest_s.get(record.action.executor, 0.0))
        switches = self.switches
        self._metrics.set_open(self._table.count_by_kind_and_state(), oldest_s)
        self._metrics.paused.set(switches.paused_ms is not None)
        self._metrics.breaker.set(switches.breaker.is_open)
        self._metrics.set_foreseen(self.make_foreseen_calibration())

    # -- the pass

    def propose(self, actions: Iterable[JobAction], now_ms: int, *, may_repeat: bool = False) -> Proposals:
        """Store actions as proposed. An action that is open already stays as it is.

        An action is declined if its job has another open action. Unless it may repeat, it is also declined if its
        executor has refused one with the same key or let it expire. Raises RequestError for amounts that no action
        can have.
        """
        self._apply_clock_step()
        opened, unchanged, declined = list[ActionRecord](), list[ActionRecord](), list[tuple[JobAction, str]]()
        with self._ledger.transaction():
            for action in actions:
                check_action(action)
                key, open_now = action.compute_key(), self._table.find_open_action_of(action.job)
                if open_now is not None:
                    if open_now.action.compute_key() == key:
                        unchanged.append(open_now)
                    else:
                        declined.append((action, f"action {open_now.action_id} on {action.job} is open"))
                    continue
                last = self._table.find_last_with_key(key)
                if last is not None and not may_repeat and not may_return(last):
                    declined.append((action, f"action {last.action_id} was {last.state} before: {last.why}"))
                    continue
                opened.append(self._table.insert(action, now_ms, PLACER))
                self._metrics.proposed.labels(action.kind, action.reason.code).inc()
        return Proposals(opened, unchanged, declined)

    def send(self, action_ids: Iterable[str], now_ms: int) -> list[ActionRecord]:
        """Let executors carry out a set of proposed actions. Returns those that are sent now: all, or none.

        Nothing is sent while actions are paused or the circuit breaker is open. A set beyond the breaker's limits
        opens it, and none of the set is sent.
        """
        self._apply_clock_step()
        switches, sent = self.switches, list[ActionRecord]()
        if switches.stops_sending:
            return sent
        records = [row for id_ in action_ids if (row := self.get_action(id_)).state is ActionState.PROPOSED]
        gpus: dict[str, float] = {}
        for action in (record.action for record in records if record.action.taken_gpus):
            gpus[action.queue] = gpus.get(action.queue, 0.0) + action.taken_gpus
        breaker = switches.breaker
        excess = breaker.explain_excess_of_set(gpus, now_ms, self._find_capacity(), self._limits)
        with self._ledger.transaction():
            for record in () if excess else records:
                breaker = breaker.count(record.action, now_ms)
                sent.append(self._table.enter(record, ActionState.SENT, now_ms, PLACER))
            if excess:
                logger.error("the circuit breaker of actions is open: %s; no action is sent until it is reset", excess)
                breaker = breaker.open(excess, now_ms)
                self._ledger.record_audit_line("", now_ms, PLACER, OPENED, f"the circuit breaker is open: {excess}")
            if breaker != switches.breaker:
                self._store_switches(msgspec.structs.replace(switches, breaker=breaker))
        return sent

    def explain_stop(self) -> str:
        """Return why no action is sent now, or "" if actions are sent."""
        switches = self.switches
        if switches.paused_ms is not None:
            return "actions are paused"
        return f"the circuit breaker is open: {switches.breaker.why}" if switches.breaker.is_open else ""

    def make_sending_bounds(self, policy: ReclaimPolicy) -> SendingBounds:
        """Return the bounds within which a pass may let executors stop jobs."""
        return SendingBounds(policy, self._find_capacity(), self._limits, self.explain_stop())

    def explain_excess(self, action: JobAction, now_ms: int) -> str:
        """Return why the circuit breaker would open if this action were sent now. Returns "" if it would not."""
        return self.switches.breaker.explain_excess(action, now_ms, self._find_capacity(), self._limits)

    def withdraw(self, action_id: str, why: str, now_ms: int, *, has_ended: bool = False) -> ActionRecord:
        """Withdraw an action whose reason went away. has_ended: its attempt runs no more.

        Raises IllegalTransition if an executor may have begun to carry it out, unless its attempt has ended.
        """
        record = self.get_action(action_id)
        if record.may_have_begun and not has_ended:
            raise IllegalTransition(f"action {action_id} is {record.state}: {record.action.executor} may have begun it")
        return self._table.enter(record, ActionState.WITHDRAWN, now_ms, PLACER, why)

    def record_seen(self, action_id: str, now_ms: int, evidence: str = TELEMETRY) -> ActionRecord:
        """Record that an action happened. After its end it is late.

        Raises IllegalTransition for an action that was not sent.
        """
        record = self.get_action(action_id)
        has_ended = record.was_sent and record.state in (ActionState.REFUSED, ActionState.EXPIRED, ActionState.LATE)
        state = ActionState.LATE if has_ended else ActionState.SEEN
        return self._table.enter(record, state, now_ms, PLACER, evidence)

    def record_contradiction(self, action_id: str, why: str, now_ms: int) -> ActionRecord:
        """Record that telemetry contradicts what an executor reported. The action counts as refused."""
        record = self._table.enter(self.get_action(action_id), ActionState.REFUSED, now_ms, PLACER, why)
        self._metrics.failed.labels(record.action.executor).inc()
        return record

    def expire(self, now_ms: int) -> list[ActionRecord]:
        """End the open actions whose time is over, and return them."""
        self._apply_clock_step()
        return self._expire_due(self._table.list_open(), now_ms)

    def _expire_due(self, records: Iterable[ActionRecord], now_ms: int) -> list[ActionRecord]:
        due = [record for record in records if record.is_open and self.compute_by_ms(record) <= now_ms]
        if not due:
            return []
        with self._ledger.transaction():
            ended = [self._table.enter(row, ActionState.EXPIRED, now_ms, PLACER, _explain_expiry(row)) for row in due]
        for record in ended:
            if record.was_sent:
                self._metrics.failed.labels(record.action.executor).inc()
        return ended

    def list_expired_after(self, changed: int) -> list[ActionRecord]:
        """Return the last actions that expired after an audit line, in order."""
        return self._table.read_after(changed, MOST_EXPIRED, state=ActionState.EXPIRED, newest=True)

    def list_last_of(self, job: str) -> list[ActionRecord]:
        """Return the last actions on a job, open or ended, in the order of their changes.

        However many proposals were withdrawn since, the last ones that happened or failed are among them.
        """
        rows = [
            row
            for state in (None, *SENT_BEFORE_END)
            for row in self._table.read_after(0, MOST_OF_JOB, state=state, job=job, newest=True)
        ]
        return sorted({row.action_id: row for row in rows}.values(), key=lambda row: row.changed)

    def estimate_stop_s(self, default_s: float) -> float:
        """Return the median seconds from sending a stop until it was seen, over the last ones."""
        seen = self._table.read_after(0, RECENT_STOPS, state=ActionState.SEEN, newest=True)
        stops = [record for record in seen if record.action.kind is ActionKind.PREEMPT]
        sent_ms = [(record.find_time_ms(ActionState.SENT), record.life[-1].time_ms) for record in stops]
        took_s = [max(0, seen_ms - since_ms) / 1000 for since_ms, seen_ms in sent_ms if since_ms is not None]
        return median(took_s) if took_s else default_s

    # -- executors

    def accept(self, action_id: str, job: str, attempt: int, now_ms: int, caller: str) -> ActionRecord:
        """Record that the executor carries out an action. A repeated call changes nothing.

        Raises ForeignAction if the action is not on this attempt, and IllegalTransition if it has ended or was
        not sent.
        """
        record = self._find_own_action(action_id, job, attempt, now_ms)
        if record.state in DONE:
            return record
        return self._table.enter(record, ActionState.ACCEPTED, now_ms, caller)

    def refuse(self, action_id: str, job: str, attempt: int, why: str, now_ms: int, caller: str) -> ActionRecord:
        """Record that the executor does not carry out an action. A repeated call changes nothing.

        Raises the same errors as `accept`.
        """
        record = self._find_own_action(action_id, job, attempt, now_ms)
        if record.state is ActionState.REFUSED:
            return record
        record = self._table.enter(record, ActionState.REFUSED, now_ms, caller, why)
        self._metrics.failed.labels(record.action.executor).inc()
        return record

    def _find_own_action(self, action_id: str, job: str, attempt: int, now_ms: int) -> ActionRecord:
        self._apply_clock_step()
        record = self.get_action(action_id)
        if (record.action.job, record.action.attempt) != (job, attempt):
            raise ForeignAction(f"action {action_id} is not on attempt {attempt} of {job}")
        return self.get_action(action_id) if self._expire_due([record], now_ms) else record

    def _apply_clock_step(self) -> None:
        """Move the deadlines of open actions and the breaker's hour if the clock was set."""
        self._due_ms += self._clock_watch.pop_clock_step_ms()
        if not self._due_ms:
            return
        with self._ledger.transaction():
            self._ledger.restore_after_rollback(self)
            by_ms, self._due_ms = self._due_ms, 0
            rows, switches = self._table.list_open(), self.switches
            self._postponed_ms = Counter({row.action_id: self._postponed_ms[row.action_id] + by_ms for row in rows})
            if switches.breaker.taken:
                self._store_switches(msgspec.structs.replace(switches, breaker=switches.breaker.shift(by_ms)))


class ForeignAction(ConflictError):
    """An error about an executor that replies to an action on another job or attempt."""


def _explain_expiry(record: ActionRecord) -> str:
    if not record.was_sent:
        return "it was not sent in time"
    said = "accepted it, but it" if record.state is ActionState.ACCEPTED else "did not answer, and it"
    return f"{record.action.executor} {said} was not seen to happen in time"


__all__ = [
    "OCCUPANCY",
    "SCHEDULER",
    "TELEMETRY",
    "ActionControl",
    "ForeignAction",
    "IllegalTransition",
    "Proposals",
    "SwitchState",
]
