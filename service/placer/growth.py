"""The growth of elastic gangs on GPUs that a pass left free.

In the mode "advise" nobody carries a growth out. In the mode "act" the placer sends it to the job's executor, and holds
the GPUs for the job until the action ends (`fleetcast.service.placer.growth_holds`). Growth stops no process, so the
circuit breaker does not count it. But nothing is sent while the breaker is open or actions are paused.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.placement.actions.action import ActionCost, ActionKind, ActionReason, JobAction
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.elastic.grow import GangGrowth, find_fitting, fits_on_gpus, propose_growth
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RUN_LEVELS
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.promised import make_gang_hold_name
from fleetcast.placement.plan.queue import Plan
from fleetcast.placement.plan.timeline import Hold, add_placements
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.placement.queues.standing import QueueStanding
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.service.placer.action_follow import mask_ranks
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.executors import ExecutorChoice
from fleetcast.service.placer.growth_holds import count_places, list_growths
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.reclaim import ADVICE, LASTS_MS, SENT_MS
from fleetcast.service.placer.view import ObservedFleet

MEDIAN = RUN_LEVELS.index(0.5)
WANTED = "a request waits for the GPUs"
OVER_LIMIT = "its queue may hold no more"


class AfterPass(NamedTuple):
    """The state that a pass leaves.

    observed: the fleet, without what the pass placed and reserved, and without growth that may be withdrawn.
    turns: the queues then. standing: what they hold, None without a tree. waiting: the requests that wait.
    """

    observed: ObservedFleet
    turns: QueueTurns
    standing: QueueStanding | None
    waiting: Sequence[PlacementRequest]
    options: Options

    @classmethod
    def make(cls, planned: Plan | None, turns: QueueTurns, observed: ObservedFleet, options: Options) -> "AfterPass":
        """Return the state after a pass over the fleet `observed`. planned: None if no request waits.

        turns: with all that the pass has placed.
        """
        if planned is None:
            return cls(observed, turns, turns.standing, (), options)
        waiting = [wait.entry.request for wait in planned.waiting]
        return cls(replace(observed, view=planned.make_unclaimed_view()), turns, turns.standing, waiting, options)

    def may_hold(self, growths: Sequence[GangGrowth]) -> bool:
        """Return whether the queues may hold the GPUs of all these growths."""
        if self.standing is None:
            return True
        standing, jobs = self.standing.copy(), self.observed.jobs
        for growth in growths:
            leaf, amounts = jobs.leaf[jobs.row[growth.job]], count_places(growth.places, self.observed.view)
            if standing.find_refusing_queue(leaf, amounts) is not None:
                return False
            standing.add_held(leaf, amounts)
        return True

    def explain_end(self, record: ActionRecord, blockers: Sequence[PlacementRequest]) -> str:
        """Return why a growth that was sent should be withdrawn, or "". blockers: waiting requests that fit."""
        view, action = self.observed.view, record.action
        gpus = mask_ranks(view, action.places)
        if not view.free[gpus].all() or not view.is_open[gpus.any(axis=1)].all():
            return "its GPUs are no longer free"
        if fits_on_gpus(blockers, view, gpus, self.options):
            return WANTED
        if self.standing is not None and self.standing.find_refusing_queue(
            action.queue, count_places(action.places, view)
        ):
            return OVER_LIMIT
        return ""

    def hold(self, record: ActionRecord) -> "AfterPass":
        """Return the state in which the GPUs of a growth are held for its job."""
        standing = self.standing
        if standing is not None:
            standing = standing.copy()
            standing.add_held(record.action.queue, count_places(record.action.places, self.observed.view))
        hold = Hold(make_gang_hold_name(record.action.job), record.action.places)
        view = add_placements(self.observed.view, [hold])
        return self._replace(observed=replace(self.observed, view=view), standing=standing)


class GrowthAdvisor:
    """The part of the placer that proposes growth, sends it, and withdraws it for requests."""

    def __init__(self, control: ActionControl, queues: ServedQueues, executors: ExecutorChoice) -> None:
        self._control = control
        self._queues = queues
        self._executors = executors
        self._failed: set[tuple[str, int]] = set()  # running attempts that were asked to grow and did not

    @property
    def _policy(self) -> ReclaimPolicy | None:
        """The policy of the queues, or None if no gang may be advised to grow."""
        tree = self._queues.tree
        return None if tree is None or tree.policy.reclaim.mode == "off" else tree.policy.reclaim

    def list_withdrawable(self) -> Sequence[ActionRecord]:
        """Return the growths that were sent and may still be withdrawn for a request."""
        return list_growths(self._queues.ledger).withdrawable

    def make_way(
        self,
        growths: Sequence[ActionRecord],
        placed: Iterable[Decision],
        standing: QueueStanding | None,
        view: ClusterView,
        now_ms: int,
    ) -> None:
        """Withdraw growths whose GPUs requests get, or whose queue may hold no more with these requests.

        standing: what the queues hold with the requests and without the growths. The caller holds the ledger's
        transaction.
        """
        if not growths:
            return
        given = {(rank.node, gpu) for decision in placed for rank in decision.ranks for gpu in rank.gpus}
        standing = None if standing is None else standing.copy()
        for record in growths:
            queue, amounts = record.action.queue, count_places(record.action.places, view)
            if not given.isdisjoint((place.node, gpu) for place in record.action.places for gpu in place.gpus):
                self._control.withdraw(record.action_id, WANTED, now_ms)
            elif standing is not None and standing.find_refusing_queue(queue, amounts):
                self._control.withdraw(record.action_id, OVER_LIMIT, now_ms)
            elif standing is not None:
                standing.add_held(queue, amounts)

    def record_growth(self, planned: Plan | None, turns: QueueTurns, observed: ObservedFleet, options: Options) -> None:
        """Store which gangs should grow on GPUs that a pass left free, and send what the policy lets executors do.

        Proposals of earlier passes and growth that no agent has accepted end if the state no longer suits them.
        planned: None if no request waits. turns: with all that the pass has placed.
        """
        policy, jobs, sent, now_ms = self._policy, observed.jobs, self.list_withdrawable(), options.now_ms
        with self._queues.ledger.transaction():
            if policy is None or policy.mode != "act":
                for record in sent:
                    self._control.withdraw(record.action_id, "actions are no longer sent", now_ms)
                sent = ()
            actions: list[JobAction] = []
            if policy is not None and (sent or (jobs.gang_desired > jobs.gang_min).any()):
                after = self._review_sent(sent, AfterPass.make(planned, turns, observed, options))
                actions = self._make_actions(self._find_growths(after, policy), observed, policy, now_ms)
            self._replace_proposals(actions, policy, now_ms)

    def _review_sent(self, sent: Sequence[ActionRecord], after: AfterPass) -> AfterPass:
        """Withdraw growth that no longer suits, and return the state in which the rest is held."""
        blockers = find_fitting(after.observed.view, after.waiting, after.options) if sent else ()
        for record in sent:
            why = after.explain_end(record, blockers)
            if why:
                self._control.withdraw(record.action_id, why, after.options.now_ms)
            else:
                after = after.hold(record)
        return after

    def _find_growths(self, after: AfterPass, policy: ReclaimPolicy) -> tuple[GangGrowth, ...]:
        """Return the growths of gangs that may grow. A gang that failed to grow is not asked again in its attempt."""
        jobs, now_ms = after.observed.jobs, after.options.now_ms
        self._failed &= after.observed.seen
        left_s = estimate_remaining_s(after.observed, now_ms)
        for row in np.flatnonzero(~np.isnan(left_s)).tolist():
            if not self._may_grow(jobs.names[row], int(jobs.attempt[row]), policy, now_ms):
                left_s[row] = np.nan
        while True:
            state = after.observed.view, jobs, left_s, after.waiting, after.options
            dwell_ms = round(1000 * policy.dwell_s)
            found = propose_growth(*state, after.may_hold, after.turns.limit_to_quota, dwell_ms)
            rows = [jobs.row[growth.job] for growth in found]
            failed = [row for row in rows if self._has_failed(jobs.names[row], int(jobs.attempt[row]))]
            if not failed:
                return found
            left_s[failed] = np.nan

    def _may_grow(self, job: str, attempt: int, policy: ReclaimPolicy, now_ms: int) -> bool:
        if (job, attempt) in self._failed:
            return False
        record = self._control.find_open_action_of(job)
        if record is not None and not _is_proposed_growth(record):
            return False
        return policy.mode != "act" or bool(self._executors.find_executor(ActionKind.GROW, job, now_ms))

    def _has_failed(self, job: str, attempt: int) -> bool:
        if self._control.has_failed(ActionKind.GROW, job, attempt):
            self._failed.add((job, attempt))
            return True
        return False

    def _make_actions(
        self, growths: Sequence[GangGrowth], observed: ObservedFleet, policy: ReclaimPolicy, now_ms: int
    ) -> list[JobAction]:
        jobs, actions = observed.jobs, []
        for growth in growths:
            row = jobs.row[growth.job]
            lasts_ms = round(1000 * policy.grace_s) + SENT_MS if self._sends(jobs.leaf[row], policy) else LASTS_MS
            executor = ADVICE
            if policy.mode == "act":
                executor = self._executors.find_executor(ActionKind.GROW, growth.job, now_ms)
            actions.append(
                JobAction(
                    kind=ActionKind.GROW,
                    job=growth.job,
                    attempt=int(jobs.attempt[row]),
                    queue=jobs.leaf[row],
                    gpus=float(growth.gpus),
                    ranks=(),
                    places=growth.places,
                    executor=executor,
                    by_ms=now_ms + lasts_ms,
                    reason=ActionReason("idle"),
                    cost=ActionCost(restart=growth.cost_gpu_s, gain=-growth.gain_gpu_s),
                    grace_s=policy.grace_s,
                )
            )
        return actions

    def _sends(self, leaf: str, policy: ReclaimPolicy) -> bool:
        """Return whether growth of a job of this queue is sent now."""
        return policy.mode == "act" and policy.may_act_in(leaf) and not self._control.explain_stop()

    def _replace_proposals(self, actions: Sequence[JobAction], policy: ReclaimPolicy | None, now_ms: int) -> None:
        """Withdraw the proposals that the last pass does not repeat, store the new ones, and send those that may be."""
        sends = {action.job for action in actions if policy is not None and self._sends(action.queue, policy)}
        repeated = {(action.compute_key(), action.executor) for action in actions if action.job not in sends}
        for record in self._control.list_open():
            key = record.action.compute_key(), record.action.executor
            if _is_proposed_growth(record) and key not in repeated:
                again = "proposes it again" if record.action.job in sends else "does not propose it"
                self._control.withdraw(record.action_id, f"the last pass {again}", now_ms)
        for record in self._control.propose(actions, now_ms).opened if actions else ():
            if record.action.job in sends:
                self._control.send([record.action_id], now_ms)


def _is_proposed_growth(record: ActionRecord) -> bool:
    return record.action.kind is ActionKind.GROW and record.state is ActionState.PROPOSED


def estimate_remaining_s(observed: ObservedFleet, now_ms: int) -> NDArray[np.float64]:
    """Return (rows,) the median remaining run time of elastic jobs, NaN for all others and for unknown starts."""
    jobs = observed.jobs
    found = np.full(len(jobs), np.nan)
    for row in np.flatnonzero((jobs.gang_desired > jobs.gang_min) & (jobs.started_ms >= 0)).tolist():
        known_s, age_s = float(jobs.remaining_s[row, MEDIAN]), max(0.0, (now_ms - int(jobs.started_ms[row])) / 1000)
        limit_s = None if np.isnan(jobs.limit_s[row]) else float(jobs.limit_s[row])
        total_s = observed.run_times.estimate_run_s(int(jobs.gpus[row]), 0.5, age_s=age_s, limit_s=limit_s)
        found[row] = total_s - age_s if np.isnan(known_s) else known_s
    return found
