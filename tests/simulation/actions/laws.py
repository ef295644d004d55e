"""The laws of actions, checked after each step against the ledger that is on disk.

given once       a job that starts on its placement finds no other job at work on these GPUs
lives            an action enters only states that may follow, and its earlier states never change
begun            an action that an agent has accepted is withdrawn only because its attempt has ended
seen             an action that is seen has freed its GPUs in truth
ends             an action that was sent ends in the first whole pass after its time
not twice        a job has one open action, and a wish that failed after it was sent is never sent again
not forgotten    what was acknowledged before a kill is there after it
to the payer     what an action frees goes to its payer alone, until the action's time is over
to the gang      the new and the healthy nodes of a gang go to nobody else, until its action has ended. They are held
                 from the sending of the action, or of the stops that free nodes for it
with its payer   jobs that leave nodes to a gang are sent together with the replacement that follows them
fair             a queue that gives to another one's guarantee still holds its own once all its stops have happened,
                 and the stopped jobs that fit elsewhere run again
ids              two actions have one wish only if they say the same
within bounds    between two resets, no hour takes more GPUs of healthy nodes than the shares of the circuit breaker
paused           nothing is sent while actions are paused, or while the circuit breaker is open
chain            the audit trail verifies

`GrowthLaws` has those of gangs that grow, and `RecoveryLaws` those of gangs that leave nodes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fleetcast.placement.actions.action import RECOVERY, STOPPING, ActionKind
from fleetcast.placement.actions.breaker import NO_LIMIT, BreakerLimits
from fleetcast.placement.actions.life import FOLLOWED_BY, ActionRecord, ActionState
from fleetcast.placement.ledger.ledger import Intent
from tests.service.placer_world import GPUS
from tests.simulation.actions.fleet import FleetJob, format_node
from tests.simulation.actions.growth_laws import GrowthLaws
from tests.simulation.actions.recovery_laws import RecoveryLaws
from tests.simulation.oracle import Broken

GUARANTEED = {"owed": 64, "lender": 64}  # GPUs
HOUR_MS = 3_600_000
SLACK_MS = 3000  # clocks are set by parts of a second, which nobody makes up for
Gpu = tuple[str, int]


@dataclass(slots=True)
class SentAction:
    """An action that was sent. steady_ms: when. gpus_of_queue, of_fleet: the capacities at that time."""

    record: ActionRecord
    steady_ms: int
    until_steady_ms: int
    taken: int  # GPUs that it takes on nodes which are not lost


@dataclass(slots=True)
class ActionLaws:
    """The record of what the ledger has shown so far. `check` compares it with what it shows now."""

    limits: BreakerLimits
    fleet_gpus: float
    known: dict[str, ActionRecord] = field(default_factory=dict)
    sent: dict[str, SentAction] = field(default_factory=dict)
    intents: set[str] = field(default_factory=set)
    inherited: frozenset[str] = frozenset()  # promises of a ledger that an earlier version made
    held: Mapping[str, int] = field(default_factory=dict)  # queue → GPUs that it holds or was promised
    running: frozenset[tuple[str, int]] = frozenset()  # job and attempt, on the board of the pass
    working: set[tuple[str, int]] = field(default_factory=set)  # those whose GPUs work in truth, whatever they report
    jobs: Mapping[str, FleetJob] = field(default_factory=dict)  # those that run, in truth
    lost: frozenset[str] = frozenset()  # nodes, on the board of the pass
    users_of: Mapping[str, set[str]] = field(default_factory=dict)  # job → nodes that work for it in truth
    reset_steady_ms: int = -1
    wishes: dict[str, object] = field(default_factory=dict)
    growth: GrowthLaws = field(default_factory=GrowthLaws)
    recovery: RecoveryLaws = field(default_factory=RecoveryLaws)
    checks: int = 0

    def check_actions(self, rows: Iterable[ActionRecord], steady_ms: int, now_ms: int, may_send: bool) -> None:
        """Check the actions of the ledger. rows: all that changed since the last call."""
        stops = set[str]()
        for row in rows:
            self.checks += 1
            before = self.known.get(row.action_id)
            life = before.life if before else ()
            if row.life[: len(life)] != life:
                raise Broken("lives", f"{row.action_id} was {life} and is {row.life}")
            for first, second in zip(row.life, row.life[1:], strict=False):
                if second.state not in FOLLOWED_BY.get(first.state, ()):
                    raise Broken("lives", f"{row.action_id} went from {first.state} to {second.state}")
            was_accepted = row.find_time_ms(ActionState.ACCEPTED) is not None
            job = self.jobs.get(row.action.job)
            if row.state is ActionState.WITHDRAWN and was_accepted and job and job.attempt == row.action.attempt:
                raise Broken("begun", f"{row.action_id} is withdrawn after {job.name} accepted it: {row.why}")
            if row.state is ActionState.SEEN and self._still_works(row):
                raise Broken("seen", f"{row.action_id} is seen, and the GPUs of {row.action.job} still work")
            self.known[row.action_id] = row
            self._check_id(row)
            self.growth.check_change(row, self.jobs)
            if row.action.after and row.state is ActionState.PROPOSED:
                self.recovery.check_borrowing(row, [self.known.get(action_id) for action_id in row.action.after])
            if row.was_sent and row.action_id not in self.sent:
                self._record_sending(row, steady_ms, now_ms, may_send)
                stops |= {row.action_id} if row.action.payer.startswith(RECOVERY) else set()
        if orphans := stops.difference(*(row.action.after for row in self.known.values())):
            raise Broken("with its payer", f"{min(orphans)} was sent, and no replacement follows it")

    def _still_works(self, row: ActionRecord) -> bool:
        """Return whether a job works in truth on GPUs that an action frees."""
        action = row.action
        if action.kind is ActionKind.PREEMPT:
            return (action.job, action.attempt) in self.working
        users = self.users_of.get(action.job, frozenset())
        return any(rank.node in users for rank in action.ranks)

    def _record_sending(self, row: ActionRecord, steady_ms: int, now_ms: int, may_send: bool) -> None:
        if not may_send:
            raise Broken("paused", f"{row.action_id} was sent all the same")
        self._check_fairness(row)
        self.growth.check_sending(row, now_ms)
        self.recovery.check_sending(row)
        wish = row.action_id.rpartition("-")[0]
        for action_id, sent in self.sent.items():
            last = self.known[action_id]
            if action_id.rpartition("-")[0] == wish and last.state not in (ActionState.SEEN, ActionState.WITHDRAWN):
                raise Broken("not twice", f"{row.action_id} was sent after {action_id}, which is {last.state}")
            if sent.record.action.job == row.action.job and last.is_open:
                raise Broken("not twice", f"{row.action_id} was sent while {action_id} on the same job is open")
        taken = sum(len(rank.gpus) for rank in row.action.ranks if rank.node not in self.lost)
        self.sent[row.action_id] = SentAction(row, steady_ms, steady_ms + row.action.by_ms - now_ms, taken)
        self._check_bounds(row, steady_ms)

    def _check_id(self, row: ActionRecord) -> None:
        action = row.action
        said = action.kind, action.job, action.attempt, action.ranks, action.places, action.payer
        wish = row.action_id.rpartition("-")[0]
        if self.wishes.setdefault(wish, said) != said:
            raise Broken("ids", f"{row.action_id} is {said}, and its wish was {self.wishes[wish]}")

    def _check_fairness(self, row: ActionRecord) -> None:
        """Check that the queue of a stopped job keeps its guarantee, with the stopped jobs that fit elsewhere again."""
        if row.action.reason.code != "guarantee":
            return
        queue, stopping, shrinking = row.action.queue, 0, 0
        for known in self.known.values():
            if known.is_open and known.was_sent and known.action.queue == queue and known.action.kind in STOPPING:
                leaving = GPUS * self._count_left_nodes(known)
                stopping += leaving if known.action.kind is ActionKind.PREEMPT else 0
                shrinking += leaving if known.action.kind is ActionKind.SHRINK else 0
        used = {node for job in self.jobs.values() for node in job.nodes}
        idle_lost = GPUS * len(self.lost - {format_node(node) for node in used})
        free = self.fleet_gpus - idle_lost - sum(self.held.values()) + stopping + shrinking
        left = self.held.get(queue, 0) - stopping - shrinking + min(stopping, max(free, 0.0))
        if left < GUARANTEED.get(queue, 0):
            raise Broken("fair", f"{row.action_id} leaves {queue} {left:g} GPUs")

    def _count_left_nodes(self, row: ActionRecord) -> int:
        """Return how many nodes of an action its attempt still uses. An agent may have left them unseen."""
        job = self.jobs.get(row.action.job)
        if job is None or job.attempt != row.action.attempt:
            return 0
        return len({rank.node for rank in row.action.ranks} & {format_node(node) for node in job.nodes})

    def _check_bounds(self, row: ActionRecord, steady_ms: int) -> None:
        since_ms = max(steady_ms - HOUR_MS + SLACK_MS, self.reset_steady_ms)
        recent = [
            sent.taken
            for sent in self.sent.values()
            if sent.steady_ms > since_ms and sent.record.action.kind in STOPPING
        ]
        if self.limits.fleet_share < NO_LIMIT and sum(recent) > self.limits.fleet_share * self.fleet_gpus + 1e-6:
            raise Broken("within bounds", f"{sum(recent):g} GPUs within an hour, with {row.action_id}")

    def check_ends(self, open_now: Iterable[ActionRecord], steady_ms: int) -> None:
        """Check that actions which were sent have ended when their time is over.

        The clock was never set, and a whole pass has just been made.
        """
        for row in open_now:
            if row.action_id in self.sent and steady_ms > self.sent[row.action_id].until_steady_ms + SLACK_MS:
                raise Broken("ends", f"{row.action_id} is still {row.state} after its time")

    def check_restart(self, rows: Mapping[str, ActionRecord]) -> None:
        """Check that a ledger that was opened again has everything that was acknowledged."""
        for action_id, before in self.known.items():
            now = rows.get(action_id)
            if now is None or now.life[: len(before.life)] != before.life:
                raise Broken("not forgotten", f"{action_id} was {before.state}, and after a restart it is {now}")

    def check_intents(self, intents: Sequence[Intent], waiting: set[str], steady_ms: int) -> None:
        """Check where new promises lie. waiting: requests whose owners still want GPUs."""
        held: dict[Gpu, str] = {}
        for intent in intents:
            if intent.request_id in self.inherited:
                continue
            gpus = {(rank.node, gpu) for rank in intent.ranks for gpu in rank.gpus}
            for gpu in gpus:
                if gpu in held:
                    raise Broken("given once", f"{gpu} is promised to {held[gpu]} and to {intent.request_id}")
                held[gpu] = intent.request_id
            if intent.request_id not in self.intents:
                self.intents.add(intent.request_id)
                self._check_payer(intent.request_id, gpus, waiting, steady_ms)
                self._check_gangs(intent, gpus, {row.job for row in intents})

    def _check_payer(self, request_id: str, gpus: set[Gpu], waiting: set[str], steady_ms: int) -> None:
        for sent in self.sent.values():
            action, state = sent.record.action, self.known[sent.record.action_id].state
            if action.payer in ("", request_id) or action.payer not in waiting or steady_ms >= sent.until_steady_ms:
                continue
            if state not in (ActionState.SENT, ActionState.ACCEPTED, ActionState.SEEN):
                continue
            freed = {(rank.node, gpu) for rank in action.ranks for gpu in rank.gpus}
            if freed & gpus:
                raise Broken("to the payer", f"{request_id} got what {sent.record.action_id} frees for {action.payer}")

    def _check_gangs(self, intent: Intent, gpus: set[Gpu], placed: set[str]) -> None:
        """Check what is held for gangs. A gang whose next attempt was placed needs it no more. placed: jobs."""
        for record in [row for row in self.known.values() if row.is_open and row.is_underway]:
            action = record.action
            if action.payer or action.job in placed:
                continue
            held = {(rank.node, gpu) for rank in (*action.places, *action.pinned) for gpu in rank.gpus}
            if held & gpus:
                raise Broken("to the gang", f"{intent.request_id} got what {record.action_id} holds")
