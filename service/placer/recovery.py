"""The replacement of nodes under a gang: nodes that were lost, are likely to fail, or slow it.

Each pass judges again. If more nodes fail, a new action for all of them replaces the old one, unless an executor may
have begun the old one. Nothing is proposed while reclaim is "off". In the mode "act" a replacement by spare or free
nodes, a shrink, and a replacement of lost nodes by those of other jobs are sent. All other steps are advice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import RankPlacement
from fleetcast.models.risk.foreseen import ForeseenFailure, ForeseenRecord
from fleetcast.placement.actions.action import ActionKind, JobAction, check_action
from fleetcast.placement.actions.life import ActionRecord
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import PROTECTED
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import Advice, ClusterView
from fleetcast.placement.plan.promised import SendingBounds, make_gang_hold_name
from fleetcast.placement.plan.reclaiming import ReclaimProposal, compute_job_costs
from fleetcast.placement.plan.timeline import Hold, add_placements
from fleetcast.placement.queues.tree import QueueTree, ReclaimPolicy
from fleetcast.placement.recovery.foresight import compute_set_probability, should_act_early
from fleetcast.placement.recovery.replacement import find_recovery
from fleetcast.placement.recovery.spares import choose_spare_nodes
from fleetcast.placement.recovery.steps import RecoveryStep
from fleetcast.service.placer.actions import FORESEEN_RECORD, ActionControl
from fleetcast.service.placer.borrowing import BorrowingPass, NodeBorrowing
from fleetcast.service.placer.broken_gangs import (
    FORESEEN,
    LOST,
    SLOW,
    find_cause,
    make_broken_gang,
    make_recovery_action,
    make_recovery_times,
)
from fleetcast.service.placer.failures import ACTIONS, Failures
from fleetcast.service.placer.promised_sets import FAILED, PromisedSets
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.reclaim import SENT_MS, ReclaimAdvisor, withdraw_proposals_of_jobs
from fleetcast.service.placer.view import ObservedFleet

Mask = NDArray[np.bool_]
MOST_GANGS = 16  # whose recovery one pass searches
MOST_TRIES = 2  # failed actions of one attempt; then only advice
RECOVERED = "its nodes are healthy, or the job has ended"
OTHERS_FAILED = "other nodes are concerned now"
HAS_ROOM = "it has room elsewhere now"
OTHER_CAUSE = "its nodes are concerned for another cause now"
RUNS_AGAIN = "its next attempt runs"
NOT_SENT = "actions are no longer sent"
NOT_PROPOSED = "actions are no longer proposed"
SENT_NOW = "it is sent now"
LEAVES_SLOW_NODE = (RecoveryStep.SPARE, RecoveryStep.FREE)
WAITS = f"_{RecoveryStep.WAIT}"
CARRIED_OUT = tuple(f"_{step}" for step in (RecoveryStep.SPARE, RecoveryStep.FREE, RecoveryStep.SHRINK))


class RecoveryAdvisor:
    """The writer of actions that let gangs run without their lost nodes."""

    def __init__(self, queues: ServedQueues, advisor: ReclaimAdvisor, sets: PromisedSets, failures: Failures) -> None:
        self._control: ActionControl = advisor.control
        self._failures = failures
        self._queues = queues
        self._executors = advisor.executors
        self._borrowing = NodeBorrowing(queues, advisor, sets)

    def record_actions(self, observed: ObservedFleet, options: Options) -> None:
        """Store and send what the gangs of a fleet need, and withdraw proposals whose reason is gone.

        The caller holds the ledger's transaction.
        """
        tree, now_ms = self._queues.tree, options.now_ms
        own = [record for record in self._control.list_open() if is_of_recovery(record.action)]
        if tree is None or tree.policy.reclaim.mode == "off":
            for record in own:
                if not record.was_sent:
                    self._borrowing.withdraw(record, NOT_PROPOSED, now_ms)
            return
        policy = tree.policy.reclaim
        self._borrowing.record_losses(observed, now_ms)
        overtaken = self._withdraw_overtaken(own, observed, policy, now_ms)
        own = [record for record in own if record.action.job not in overtaken]
        fleet = replace(observed, view=remove_jobs(observed.view, set(map(make_gang_hold_name, overtaken))))
        before = {record.action.job: record for record in own}
        search = _GangSearch(fleet, options, tree, before, self._borrowing, self._failures)
        actions = search.list_actions()
        proposed = [record for record in own if not record.is_underway]
        judged = [record for record in proposed if record.action.job not in search.unsearched]
        self._withdraw_others(judged, {action.job: action for action in actions}, now_ms)
        due = [
            action
            for action in actions
            if action.reason.code.endswith(CARRIED_OUT) or action.job in search.ready
            if self._may_send(action, fleet, policy, now_ms)
        ]
        self._control.propose([action for action in actions if action not in due], now_ms, may_repeat=True)
        for action in due:
            self._withdraw_advice(action.job, now_ms)
            if action.job in search.ready:
                self._borrowing.send(action, search.ready[action.job], fleet, policy, now_ms)
            else:
                self._send(action, now_ms)
        self._record_foresight(actions, fleet, now_ms)

    def _record_foresight(self, actions: Sequence[JobAction], fleet: ObservedFleet, now_ms: int) -> None:
        """Follow the advice on nodes that are likely to fail, and score the advice whose outcome is known."""
        view = fleet.view
        record, horizon_s = ForeseenRecord.load(self._queues.ledger.find_mark(FORESEEN_RECORD)), view.risk_horizon_s
        foreseen = [action for action in actions if action.reason.code.startswith(FORESEEN)]
        if not (record.waiting or foreseen):
            return
        names = np.array(view.topology.names)
        lost, away = view.state == NodeState.LOST, view.state != NodeState.IN_SERVICE
        changed = record.score_due(set(names[lost].tolist()), set(names[away].tolist()), now_ms)
        for action in foreseen:
            held = (view.holders == fleet.jobs.row[action.job]).any(axis=1)
            nodes, p = tuple(names[held & mask_likely_to_fail(view)].tolist()), action.reason.numbers["p"]
            if nodes:
                failure = ForeseenFailure(action.job, action.attempt, nodes, p, horizon_s, now_ms)
                changed |= record.record_advice(failure)
        if changed:
            self._queues.ledger.record_marks(**{FORESEEN_RECORD: msgspec.to_builtins(record)})

    def _withdraw_overtaken(
        self, own: Sequence[ActionRecord], observed: ObservedFleet, policy: ReclaimPolicy, now_ms: int
    ) -> set[str]:
        """Withdraw actions whose job has finished, or that no executor has begun and that no longer suit.

        Send each other action whose nodes all jobs have left. Returns the jobs of the withdrawn actions.
        """
        overtaken = set[str]()
        for record in own:
            has_finished = (record.action.job, record.action.attempt) in observed.finished
            why = RECOVERED if has_finished else ""
            if not (has_finished or record.may_have_begun) and is_overtaken(record.action, observed):
                why = OTHERS_FAILED
            waits = record.is_underway and not record.was_sent
            if waits and not why:
                why = NOT_SENT if policy.mode != "act" else self._explain_end_of_wait(record, observed)
            if record.is_underway and why:
                self._borrowing.withdraw(record, why, now_ms, has_ended=has_finished)
                overtaken.add(record.action.job)
            elif waits and self._borrowing.is_due(record, observed):
                self._control.send([record.action_id], now_ms)
        return overtaken

    def _explain_end_of_wait(self, record: ActionRecord, observed: ObservedFleet) -> str:
        """Return why a replacement no longer waits for the nodes of other jobs, or "".

        If only some of the lost nodes are back once it is due, the gang stays on those: it gets fewer new nodes.
        """
        view, action = observed.view, record.action
        if (action.job, action.attempt) not in observed.seen:
            return RUNS_AGAIN if action.job in view.jobs else self._borrowing.explain_failure(record)
        rows = [row for rank in action.ranks if (row := view.inventory.row.get(rank.node, -1)) >= 0]
        lost = view.state[rows] == NodeState.LOST
        if not lost.any():
            return RECOVERED
        if not lost.all() and self._borrowing.is_due(record, observed):
            return OTHERS_FAILED
        return self._borrowing.explain_failure(record)

    def _withdraw_others(self, proposed: Sequence[ActionRecord], present: dict[str, JobAction], now_ms: int) -> None:
        """Withdraw proposals that are not repeated for the same cause. present: job → its present action."""
        for record in proposed:
            action = present.get(record.action.job)
            if action is None:
                self._control.withdraw(record.action_id, RECOVERED, now_ms)
            elif action.compute_key() != record.action.compute_key():
                self._control.withdraw(record.action_id, OTHERS_FAILED, now_ms)
            elif find_cause(action) != find_cause(record.action):
                self._control.withdraw(record.action_id, OTHER_CAUSE, now_ms)
            elif record.action.reason.code.endswith(WAITS) and not action.reason.code.endswith(WAITS):
                self._control.withdraw(record.action_id, HAS_ROOM, now_ms)

    def _may_send(self, action: JobAction, fleet: ObservedFleet, policy: ReclaimPolicy, now_ms: int) -> bool:
        """Return whether an action is sent, and not only advised."""
        return (
            policy.mode == "act"
            and fleet.jobs.preemptible[fleet.jobs.row[action.job]] != PROTECTED
            and self._executors.find_executor(action.kind, action.job, now_ms) != ""
            and self._may_try(action)
            and is_within_bounds(action, self._control.make_sending_bounds(policy), now_ms)
        )

    def _may_try(self, action: JobAction) -> bool:
        """Return whether an action may be sent after those before on its job. A slow node is left once per job."""
        last = [row for row in self._control.list_last_of(action.job) if row.was_sent and is_of_recovery(row.action)]
        if action.reason.code.startswith(SLOW):
            return not any(row.action.reason.code.startswith(SLOW) for row in last)
        failed = [row for row in last if row.state in FAILED]
        if any(row.action.compute_key() == action.compute_key() for row in failed):
            return False
        return sum(row.action.attempt == action.attempt for row in failed) < MOST_TRIES

    def _withdraw_advice(self, job: str, now_ms: int) -> None:
        withdraw_proposals_of_jobs(self._control, {job}, SENT_NOW, now_ms)

    def _send(self, action: JobAction, now_ms: int) -> None:
        executor = self._executors.find_executor(action.kind, action.job, now_ms)
        by_ms = now_ms + round(1000 * action.grace_s) + SENT_MS
        sent = msgspec.structs.replace(action, executor=executor, by_ms=by_ms)
        found = self._control.propose([sent], now_ms, may_repeat=True)
        self._control.send([record.action_id for record in found.opened], now_ms)


def is_of_recovery(action: JobAction) -> bool:
    """Return whether recovery proposed an action."""
    return action.kind is ActionKind.REPLACE or (action.kind is ActionKind.SHRINK and not action.payer)


def is_overtaken(action: JobAction, observed: ObservedFleet) -> bool:
    """Return whether more nodes of a job were lost than an action replaces, or one of its new places is away."""
    view, job = observed.view, observed.find_holder(action.job)
    row, leaving = view.inventory.row, {rank.node for rank in action.ranks}
    lost = (view.state == NodeState.LOST) & (view.holders == job).any(axis=1) & (job >= 0)
    return not {view.topology.names[at] for at in np.flatnonzero(lost).tolist()} <= leaving or not all(
        place.node in row and bool(view.in_service[row[place.node]]) for place in action.places
    )


def is_within_bounds(action: JobAction, bounds: SendingBounds, now_ms: int) -> bool:
    """Return whether an action may be sent: now, in its queue, and as far as an hour's limits allow it alone."""
    advice = bounds.explain_advice({action.job: action.queue})
    return not advice and not bounds.explain_bound({action.queue: action.taken_gpus}, now_ms)


def mask_likely_to_fail(view: ClusterView) -> Mask:
    """Return (n,) whether a node that is not lost is advised to be drained, or is sure to fail."""
    is_advised = (view.advice == Advice.DRAIN) & (view.p_fail > 0)
    return np.asarray((view.state != NodeState.LOST) & (is_advised | (view.p_fail >= 1)))


@dataclass(frozen=True, slots=True)
class _Concern:
    """A gang with nodes that it should leave. rows: (k,) those nodes. p: the probability that they fail.

    known: its open action, if that was for the same attempt and cause.
    """

    row: int
    cause: str
    rows: NDArray[np.int64]
    p: float
    known: JobAction | None


class _GangSearch:
    """The search for what each gang of a fleet needs. before: job → its open action.

    ready: job → the proposal by which other jobs leave nodes to it now. unsearched: gangs that a pass did not reach, or
    whose search failed.
    """

    def __init__(
        self,
        fleet: ObservedFleet,
        options: Options,
        tree: QueueTree,
        before: dict[str, ActionRecord],
        borrowing: NodeBorrowing,
        failures: Failures,
    ) -> None:
        self._fleet, self._borrowing, self._failures = fleet, borrowing, failures
        self.ready: dict[str, ReclaimProposal] = {}
        self.unsearched: set[str] = set()
        self._view, self._jobs, self._options = fleet.view, fleet.jobs, options
        self._policy, self._before = tree.policy.reclaim, before
        self._lost, self._likely = fleet.view.state == NodeState.LOST, mask_likely_to_fail(fleet.view)
        self._spares = None if tree.spares is None else choose_spare_nodes(fleet.view, tree.spares)
        self._costs = compute_job_costs(fleet.jobs, fleet.view, options.now_ms)

    @cached_property
    def _borrowing_pass(self) -> BorrowingPass | None:
        return self._borrowing.begin_pass(self._fleet, self._options)

    def list_actions(self) -> list[JobAction]:
        """Return one action for each gang with nodes that were lost, that slow it, or that pay to be replaced early.

        A gang whose action was sent has none. No two actions get the same GPUs. Gangs that lost nodes come first. Among
        equal ones, a gang that already has an action keeps its places before another gang gets new ones. A search that
        fails leaves only its own gang as it is.
        """
        concerns = [*self._list_concerns()]
        concerns.sort(key=lambda found: (found.cause != LOST, not self._still_holds(found), found.row))
        actions: list[JobAction] = []
        for at, concern in enumerate(concerns):
            if len(actions) == MOST_GANGS:
                self.unsearched |= {self._jobs.names[left.row] for left in concerns[at:]}
                break
            self.unsearched.add(job := self._jobs.names[concern.row])
            with self._failures.contain(ACTIONS):
                action, places = self._make_action(concern)
                if action is not None:
                    check_action(action)
                    actions.append(action)
                if places:
                    self._view = add_placements(self._view, [Hold(make_gang_hold_name(job), places)])
                self.unsearched.remove(job)
        return actions

    def _list_concerns(self) -> Iterator[_Concern]:
        view, jobs = self._view, self._jobs
        failing = np.flatnonzero(self._lost | self._likely)
        concerned = {*np.unique(view.holders[failing]).tolist()}
        concerned |= {row for row, node in enumerate(jobs.slow_node) if node}
        for row in sorted(row for row in concerned if 0 <= row < len(jobs)):
            if jobs.row[jobs.names[row]] != row:
                continue  # a later attempt of the job runs
            record = self._before.get(jobs.names[row])
            if record is not None and record.is_underway:
                continue
            cause, rows, p = self._find_failed(row, failing[(view.holders[failing] == row).any(axis=1)])
            if len(rows):
                known = None if record is None else record.action
                is_same = known is not None and (known.attempt, find_cause(known)) == (jobs.attempt[row], cause)
                yield _Concern(row, cause, rows, p, known if is_same else None)

    def _find_failed(self, row: int, failing: NDArray[np.int64]) -> tuple[str, NDArray[np.int64], float]:
        """Return the cause for which a gang leaves nodes, these nodes, and the probability that they fail.

        failing: its nodes that were lost or are likely to fail.
        """
        view, jobs = self._view, self._jobs
        lost, likely = failing[self._lost[failing]], failing[self._likely[failing]]
        if len(lost):
            return LOST, lost, 1.0
        p, times = compute_set_probability(view.p_fail[likely]), make_recovery_times(jobs, row, self._policy)
        if should_act_early(p, float(self._costs.lost[row]) / max(1, int(jobs.gpus[row])), times):
            return FORESEEN, likely, p
        slow = np.array([view.inventory.row.get(jobs.slow_node[row], -1)])
        return SLOW, slow[(slow >= 0) & (view.holders[slow] == row).any(axis=1)], p

    def _make_action(self, concern: _Concern) -> tuple[JobAction | None, Sequence[RankPlacement]]:
        """Return the action for one gang, or None if it needs none, and the places that no other gang may get."""
        if concern.known is not None and self._still_holds(concern):
            return concern.known, concern.known.places
        view, jobs, row, cause = self._view, self._jobs, concern.row, concern.cause
        gang, times = make_broken_gang(jobs, row, view), make_recovery_times(jobs, row, self._policy)
        passing = self._borrowing_pass if cause != SLOW else None
        nodes = {view.topology.names[at] for at in concern.rows.tolist()}
        borrow = None if passing is None else passing.make_search(row, view, nodes)
        failed = self._lost.copy()
        failed[concern.rows] = True
        found = find_recovery(gang, view, failed, self._options, times, self._spares, borrow)
        if passing is not None and found.step.step is RecoveryStep.BORROW:
            proposal = passing.choose(jobs.names[row])
            if proposal is not None and cause == LOST:
                self.ready[jobs.names[row]] = proposal
        if cause == SLOW and found.step.step not in LEAVES_SLOW_NODE:
            return None, ()
        action = make_recovery_action(
            found, gang, jobs, row, cause=cause, p=concern.p, times=times, now_ms=self._options.now_ms
        )
        gone = sum(len(rank.gpus) for rank in action.ranks if self._lost[view.inventory.row[rank.node]])
        return msgspec.structs.replace(action, lost_gpus=float(gone)), found.places

    def _still_holds(self, concern: _Concern) -> bool:
        """Return whether a gang's open action is for the same nodes, and it has new places that are still free."""
        action, view = concern.known, self._view
        if action is None or not action.places:
            return False
        row = view.inventory.row
        leaving = {rank.node for rank in action.ranks}
        return {view.topology.names[at] for at in concern.rows.tolist()} == leaving and all(
            place.node in row
            and bool(view.in_service[row[place.node]])
            and bool(view.free[row[place.node], list(place.gpus)].all())
            for place in action.places
        )
