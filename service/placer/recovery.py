"""The replacement of nodes under a gang: nodes that were lost, are likely to fail, or slow it.

Each pass judges again. If more nodes fail, a new action for all of them replaces the old one, unless an executor may
have begun the old one. Nothing is proposed while reclaim is "off". In the mode "act" a replacement by spare or free
nodes, a shrink, and a replacement of lost nodes by those of other jobs are sent. All other steps are advice.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.models.risk.foreseen import ForeseenFailure, ForeseenRecord
from fleetcast.placement.actions.action import ActionKind, JobAction
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
from fleetcast.service.placer.promised_sets import FAILED, PromisedSets
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.reclaim import SENT_MS, ReclaimAdvisor, withdraw_proposals_of_jobs
from fleetcast.service.placer.view import ObservedFleet

Mask = NDArray[np.bool_]
MOST_GANGS = 16  # whose recovery one pass searches
MOST_TRIES = 2  # failed actions of one attempt; then only advice
RECOVERED = "its nodes are healthy, or the job has ended"
MORE_FAILED = "other nodes are concerned now"
OTHER_CAUSE = "its nodes are concerned for another cause now"
RUNS_AGAIN = "its next attempt runs"
NOT_SENT = "actions are no longer sent"
NOT_PROPOSED = "actions are no longer proposed"
SENT_NOW = "it is sent now"
LEAVES_SLOW_NODE = (RecoveryStep.SPARE, RecoveryStep.FREE)
CARRIED_OUT = tuple(f"_{step}" for step in (RecoveryStep.SPARE, RecoveryStep.FREE, RecoveryStep.SHRINK))


class RecoveryAdvisor:
    """The writer of actions that let gangs run without their lost nodes."""

    def __init__(self, queues: ServedQueues, advisor: ReclaimAdvisor, sets: PromisedSets) -> None:
        self._control: ActionControl = advisor.control
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
        overtaken = self._withdraw_overtaken(own, observed, policy, now_ms)
        own = [record for record in own if record.action.job not in overtaken]
        fleet = replace(observed, view=remove_jobs(observed.view, set(map(make_gang_hold_name, overtaken))))
        before = {record.action.job: record for record in own}
        search = _GangSearch(fleet, options, tree, before, self._borrowing)
        actions = search.list_actions()
        proposed = [record for record in own if not record.is_underway]
        self._withdraw_others(proposed, {action.job: action for action in actions}, now_ms)
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
        self._record_foresight(actions, fleet.view, now_ms)

    def _record_foresight(self, actions: Sequence[JobAction], view: ClusterView, now_ms: int) -> None:
        """Follow the advice on nodes that are likely to fail, and score the advice whose outcome is known."""
        record, horizon_s = ForeseenRecord.load(self._queues.ledger.find_mark(FORESEEN_RECORD)), view.risk_horizon_s
        foreseen = [action for action in actions if action.reason.code.startswith(FORESEEN)]
        if not (record.waiting or foreseen):
            return
        names = np.array(view.topology.names)
        lost, away = view.state == NodeState.LOST, view.state != NodeState.IN_SERVICE
        changed = record.score_due(set(names[lost].tolist()), set(names[away].tolist()), now_ms)
        for action in foreseen:
            held = (view.holders == view.jobs.index(action.job)).any(axis=1)
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
            if not (has_finished or record.may_have_begun) and is_overtaken(record.action, observed.view):
                why = MORE_FAILED
            waits = record.is_underway and not record.was_sent
            if waits and not why:
                why = NOT_SENT if policy.mode != "act" else self._explain_end_of_wait(record, observed)
            if record.is_underway and why:
                self._borrowing.withdraw(record, why, now_ms, has_ended=has_finished)
                overtaken.add(record.action.job)
            elif waits:
                self._borrowing.send_due(record, observed, now_ms)
        return overtaken

    def _explain_end_of_wait(self, record: ActionRecord, observed: ObservedFleet) -> str:
        """Return why a replacement no longer waits for the nodes of other jobs, or ""."""
        view, action = observed.view, record.action
        if (action.job, action.attempt) not in observed.seen:
            return RUNS_AGAIN if action.job in view.jobs else self._borrowing.explain_failure(record)
        rows = [row for rank in action.ranks if (row := view.inventory.row.get(rank.node, -1)) >= 0]
        if not (view.state[rows] == NodeState.LOST).any():
            return RECOVERED
        return self._borrowing.explain_failure(record)

    def _withdraw_others(self, proposed: Sequence[ActionRecord], present: dict[str, JobAction], now_ms: int) -> None:
        """Withdraw proposals that are not repeated for the same cause. present: job → its present action."""
        for record in proposed:
            action = present.get(record.action.job)
            if action is None:
                self._control.withdraw(record.action_id, RECOVERED, now_ms)
            elif action.compute_key() != record.action.compute_key():
                self._control.withdraw(record.action_id, MORE_FAILED, now_ms)
            elif find_cause(action) != find_cause(record.action):
                self._control.withdraw(record.action_id, OTHER_CAUSE, now_ms)

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


def is_overtaken(action: JobAction, view: ClusterView) -> bool:
    """Return whether more nodes of a job were lost than an action replaces, or one of its new places is away."""
    row, leaving = view.inventory.row, {rank.node for rank in action.ranks}
    job = view.jobs.index(action.job) if action.job in view.jobs else -1
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


class _GangSearch:
    """The search for what each gang of a fleet needs. before: job → its open action.

    ready: job → the proposal by which other jobs leave nodes to it now.
    """

    def __init__(
        self,
        fleet: ObservedFleet,
        options: Options,
        tree: QueueTree,
        before: dict[str, ActionRecord],
        borrowing: NodeBorrowing,
    ) -> None:
        self._fleet, self._borrowing = fleet, borrowing
        self.ready: dict[str, ReclaimProposal] = {}
        self._view, self._jobs, self._options = fleet.view, fleet.jobs, options
        self._policy, self._before = tree.policy.reclaim, before
        self._spares = None if tree.spares is None else choose_spare_nodes(fleet.view, tree.spares)
        self._costs = compute_job_costs(fleet.jobs, fleet.view, options.now_ms)

    @cached_property
    def _borrowing_pass(self) -> BorrowingPass | None:
        return self._borrowing.begin_pass(self._fleet, self._options)

    def list_actions(self) -> list[JobAction]:
        """Return one action for each gang with nodes that were lost, that slow it, or that pay to be replaced early.

        A gang whose action was sent has none. No two actions get the same GPUs.
        """
        view = self._view
        lost = view.state == NodeState.LOST
        likely = mask_likely_to_fail(view)
        concerned = {*np.unique(view.holders[lost | likely]).tolist()}
        concerned |= {row for row, node in enumerate(self._jobs.slow_node) if node}
        actions: list[JobAction] = []
        for row in sorted(row for row in concerned if 0 <= row < len(self._jobs)):
            if len(actions) == MOST_GANGS:
                break
            known = self._before.get(self._jobs.names[row])
            action = None if known is not None and known.is_underway else self._make_action(row, lost, likely, known)
            if action is not None:
                actions.append(action)
                if action.places:
                    self._view = add_placements(self._view, [Hold(make_gang_hold_name(action.job), action.places)])
        return actions

    def _make_action(self, row: int, lost: Mask, likely: Mask, known: ActionRecord | None) -> JobAction | None:
        """Return the action for one job, or None if it needs none. known: its open action."""
        view, jobs = self._view, self._jobs
        times = make_recovery_times(jobs, row, self._policy)
        own = (view.holders == row).any(axis=1)
        cause, failed, p = LOST, lost & own, 1.0
        if not failed.any():
            cause, failed = FORESEEN, likely & own
            p = compute_set_probability(view.p_fail[failed])
            if not should_act_early(p, float(self._costs.lost[row]) / max(1, int(jobs.gpus[row])), times):
                slow = view.inventory.row.get(jobs.slow_node[row], -1)
                cause, failed = SLOW, own & (np.arange(len(view)) == slow)
        if not failed.any():
            return None
        gang = make_broken_gang(jobs, row, view)
        is_same = known is not None and (known.action.attempt, find_cause(known.action)) == (jobs.attempt[row], cause)
        if known is not None and is_same and _still_holds(known.action, failed, view):
            return known.action
        passing = self._borrowing_pass if cause != SLOW else None
        nodes = {view.topology.names[at] for at in np.flatnonzero(failed).tolist()}
        borrow = None if passing is None else passing.make_search(row, view, nodes)
        found = find_recovery(gang, view, failed | lost, self._options, times, self._spares, borrow)
        if passing is not None and found.step.step is RecoveryStep.BORROW:
            proposal = passing.choose(jobs.names[row])
            if proposal is not None and cause == LOST:
                self.ready[jobs.names[row]] = proposal
        if cause == SLOW and found.step.step not in LEAVES_SLOW_NODE:
            return None
        action = make_recovery_action(
            found, gang, jobs, row, cause=cause, p=p, times=times, now_ms=self._options.now_ms
        )
        gone = sum(len(rank.gpus) for rank in action.ranks if lost[view.inventory.row[rank.node]])
        return msgspec.structs.replace(action, lost_gpus=float(gone))


def _still_holds(action: JobAction, failed: Mask, view: ClusterView) -> bool:
    """Return whether an action is for the same nodes, and it has new places that are still free.

    failed: (n,) bool, the failed nodes of its job.
    """
    row, leaving = view.inventory.row, {rank.node for rank in action.ranks}
    is_same = set(np.array(view.topology.names)[failed].tolist()) == leaving
    return (
        is_same
        and bool(action.places)
        and all(
            place.node in row
            and bool(view.in_service[row[place.node]])
            and bool(view.free[row[place.node], list(place.gpus)].all())
            for place in action.places
        )
    )
