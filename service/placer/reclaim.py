"""The proposals to stop running jobs: each pass makes them for the head of the queue.

In the mode "advise" no executor gets them. In the mode "act" a pass's whole set is sent to executors, or none of it.
An action that was not sent is withdrawn as soon as a pass no longer proposes it.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np
from msgspec import structs

from fleetcast.fleet.requests import WHOLE_GPU, RankPlacement
from fleetcast.placement.actions.action import AGENTS, ActionCost, ActionKind, ActionReason, JobAction, RejectedSet
from fleetcast.placement.actions.life import ActionState
from fleetcast.placement.machines.slots import list_held_parts
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.reclaiming import ReclaimInput, ReclaimProposal
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.placement.reclaim.cost import StopCosts
from fleetcast.placement.reclaim.eligibility import Eligibility
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.executors import ExecutorChoice
from fleetcast.service.placer.promised_sets import PromisedSet, PromisedSets
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.view import ObservedFleet

ADVICE = "advice"  # in place of an executor: the action is only advice
LASTS_MS = 3_600_000  # a proposal that no pass has withdrawn by then expires
SENT_MS = 600_000  # beyond the grace: an action that was sent expires by then
REASONS = {Eligibility.RECLAIM: "guarantee", Eligibility.PREEMPT: "class"}
SURPLUS = "surplus"  # the reason for members above the minimum of a gang, where no guarantee and no class counts
REJECTED = 3  # sets of jobs that the search did not choose, stored with an action


class ReclaimAdvisor:
    """The writer of proposals to stop jobs. `proposal`: the result of the last pass."""

    def __init__(
        self, control: ActionControl, queues: ServedQueues, executors: ExecutorChoice, sets: PromisedSets
    ) -> None:
        self._control = control
        self._queues = queues
        self._executors = executors
        self._sets = sets
        self.proposal: ReclaimProposal | None = None

    def make_input(self, observed: ObservedFleet, now_ms: int) -> ReclaimInput | None:
        """Return the facts for the next pass, or None if the queues' policy lets it propose nothing."""
        tree = self._queues.tree
        if tree is None or tree.policy.reclaim.mode == "off":
            return None
        sent = [record.action for record in self._control.list_open() if record.is_underway]
        barred = {action.job: Eligibility.IN_ACTION for action in sent}
        rigid, savers = set(barred), set[str]()
        policy, sets = tree.policy.reclaim, self._sets.list_followed(now_ms)
        if policy.mode == "act":
            for job in observed.jobs.names:
                executor = self._executors.find_executor(ActionKind.PREEMPT, job, now_ms)
                if executor == AGENTS:
                    savers.add(job)
                if not executor and job not in barred:
                    barred[job] = Eligibility.NO_EXECUTOR
                if not self._executors.find_executor(ActionKind.SHRINK, job, now_ms):
                    rigid.add(job)
        return ReclaimInput(
            policy,
            tree,
            observed.jobs,
            leaving=find_leaving_shares(sent, observed),
            barred=barred,
            failed={found.row.payer: frozenset(found.row.failed) for found in sets},
            exhausted=frozenset(found.row.payer for found in sets if found.is_exhausted),
            rigid=frozenset(rigid),
            clock_steps_ms=self._queues.time.queue_steps_ms,
            savers=frozenset(savers),
            bounds=self._control.make_sending_bounds(policy),
        )

    def record_proposal(
        self, proposal: ReclaimProposal | None, observed: ObservedFleet, now_ms: int, is_current: bool = True
    ) -> None:
        """Store what a pass proposes, and withdraw the proposals of earlier passes that it does not repeat.

        If the pass says so, the whole set is sent. is_current: the fleet has not changed since the pass began.
        Otherwise nothing is sent, and the next pass decides again. The caller holds the ledger's transaction.
        """
        self._queues.ledger.restore_after_rollback(self)
        self.proposal = proposal
        self._control.expire(now_ms)
        tree = self._queues.tree
        if tree is not None and proposal is not None and proposal.sends:
            if is_current:
                self._send_set(proposal, observed, tree.policy.reclaim, now_ms)
            return
        actions = (
            make_actions(proposal, observed, tree.policy.reclaim, now_ms, self.find_executor)
            if tree and proposal
            else []
        )
        keys = {action.compute_key() for action in actions}
        self._withdraw_others(keys, "the last pass does not propose it", now_ms)
        if actions:
            self._withdraw_others_of_jobs(actions, now_ms)
            self._control.propose(actions, now_ms)

    def find_executor(self, kind: ActionKind, job: str, now_ms: int) -> str:
        """Return the executor that would carry out an action on a job, or ADVICE if none would."""
        tree = self._queues.tree
        acts = tree is not None and tree.policy.reclaim.mode == "act"
        return (self._executors.find_executor(kind, job, now_ms) if acts else "") or ADVICE

    def _send_set(self, proposal: ReclaimProposal, observed: ObservedFleet, policy: ReclaimPolicy, now_ms: int) -> None:
        """Send the actions of a proposal, all or none, and promise what they free to its request."""
        assert proposal.victims is not None
        self._withdraw_others(set(), "the last pass proposes it again", now_ms)
        payer, by_ms = proposal.request.request_id, now_ms + round(1000 * policy.grace_s) + SENT_MS
        actions = make_actions(proposal, observed, policy, now_ms, self.find_executor, by_ms)
        self._withdraw_others_of_jobs(actions, now_ms)
        found = self._control.propose(actions, now_ms)
        ids = [record.action_id for record in found.opened]
        why = "" if not found.declined else found.declined[0][1]
        if not why and not self._control.send(ids, now_ms) and ids:
            why = self._control.explain_stop()
        if why:
            self.proposal = replace(proposal, sends=False, sentence=f"stops no job: {why}")
            self._withdraw_others(set(), why, now_ms)
            return
        before = next((row for row in self._sets.list_followed(now_ms) if row.row.payer == payer), None)
        open_before = [] if before is None else [row for row in before.records if not before.has_failed(row)]
        self._sets.write(
            PromisedSet(
                payer,
                proposal.victims.decision.ranks,
                (*(row.action_id for row in open_before if before and before.is_live), *ids),
                by_ms,
                1 if before is None else before.row.number + 1,
                () if before is None else before.row.failed,
            )
        )

    def withdraw_all(self, why: str, now_ms: int) -> None:
        """Withdraw all proposals."""
        self.proposal = None
        self._withdraw_others(set(), why, now_ms)

    @property
    def executors(self) -> ExecutorChoice:
        """The choice of the executors of its actions."""
        return self._executors

    @property
    def control(self) -> ActionControl:
        """The life of the actions that it proposes."""
        return self._control

    def _withdraw_others(self, keys: set[str], why: str, now_ms: int) -> None:
        for record in self._control.list_open():
            if not record.action.payer:  # growth and recovery withdraw theirs
                continue
            if record.state is ActionState.PROPOSED and record.action.compute_key() not in keys:
                self._control.withdraw(record.action_id, why, now_ms)

    def _withdraw_others_of_jobs(self, actions: Sequence[JobAction], now_ms: int) -> None:
        """Withdraw the proposals of growth and recovery on jobs that should stop: a job has one open action."""
        withdraw_proposals_of_jobs(
            self._control,
            {action.job for action in actions},
            "the job should make room for a request instead",
            now_ms,
            of_others=True,
        )

    def describe_proposal(self, request_id: str) -> str:
        """Describe what the last pass would stop for a request, or why it would stop nothing.

        Returns "" if the pass did not search for jobs to stop for it.
        """
        proposal = self.proposal
        return proposal.sentence if proposal and proposal.request.request_id == request_id else ""


def withdraw_proposals_of_jobs(
    control: ActionControl, jobs: Collection[str], why: str, now_ms: int, *, of_others: bool = False
) -> None:
    """Withdraw the proposals on these jobs, which should stop, because a job has at most one open action.

    A replacement that waits for stops is not withdrawn. of_others: withdraw only the proposals of growth and recovery.
    """
    for record in control.list_open():
        is_advice = record.state is ActionState.PROPOSED and not record.is_underway
        if is_advice and record.action.job in jobs and not (of_others and record.action.payer):
            control.withdraw(record.action_id, why, now_ms)


def make_actions(
    proposal: ReclaimProposal,
    observed: ObservedFleet,
    policy: ReclaimPolicy,
    now_ms: int,
    find_executor: Callable[[ActionKind, str, int], str],
    by_ms: int | None = None,
) -> list[JobAction]:
    """Return one action for each job that a proposal would stop or shrink. by_ms: by default in an hour."""
    found, costs = proposal.victims, proposal.costs
    if found is None or costs is None:
        return []
    jobs = observed.jobs
    by_ms = now_ms + LASTS_MS if by_ms is None else by_ms
    rejected = tuple(
        RejectedSet(
            jobs=lost.jobs,
            gpus=float(sum(jobs.gpus[jobs.row[name]] for name in lost.jobs)),
            cost_gpu_s=lost.cost_gpu_s,
        )
        for lost in found.lost[:REJECTED]
    )
    numbers = {"set_gpu_s": found.chosen.cost_gpu_s, "bound_gpu_s": found.bound_gpu_s}
    actions = [
        JobAction(
            kind=ActionKind.SHRINK,
            job=shrink.job,
            attempt=int(jobs.attempt[jobs.row[shrink.job]]),
            queue=jobs.leaf[jobs.row[shrink.job]],
            gpus=float(shrink.gpus),
            ranks=shrink.ranks,
            executor=find_executor(ActionKind.SHRINK, shrink.job, now_ms),
            by_ms=by_ms,
            reason=ActionReason(REASONS.get(shrink.kind, SURPLUS), numbers),
            cost=ActionCost(restart=shrink.cost_gpu_s),
            payer=proposal.request.request_id,
            grace_s=policy.grace_s,
        )
        for shrink in proposal.shrinks
    ]
    for name, kind in zip(found.chosen.jobs, proposal.kinds, strict=True):
        stop = make_whole_job_action(
            ActionKind.PREEMPT,
            name,
            observed,
            costs,
            reason=ActionReason(REASONS[kind], numbers),
            payer=proposal.request.request_id,
            executor=find_executor(ActionKind.PREEMPT, name, now_ms),
            by_ms=by_ms,
        )
        actions.append(structs.replace(stop, grace_s=policy.grace_s, rejected=rejected))
    return actions


def make_whole_job_action(
    kind: ActionKind,
    name: str,
    observed: ObservedFleet,
    costs: StopCosts,
    *,
    reason: ActionReason,
    payer: str,
    executor: str,
    by_ms: int,
) -> JobAction:
    """Return an action on all ranks of a running job, with the cost of stopping it. by_ms: Unix ms."""
    jobs, row = observed.jobs, observed.jobs.row[name]
    return JobAction(
        kind=kind,
        job=name,
        attempt=int(jobs.attempt[row]),
        queue=jobs.leaf[row],
        gpus=float(jobs.gpus[row]),
        ranks=list_job_ranks(observed.view, row),
        executor=executor,
        by_ms=by_ms,
        reason=reason,
        cost=ActionCost(lost=float(costs.lost[row]), restart=float(costs.restart[row])),
        payer=payer,
    )


def find_leaving_shares(sent: Sequence[JobAction], observed: ObservedFleet) -> dict[str, float]:
    """Return job → the share of its GPUs that it was asked to give up, and that it still holds.

    sent: the open actions that were sent.
    """
    found = {}
    for action in sent:
        if (action.job, action.attempt) in observed.seen and action.job in observed.view.jobs:
            if action.kind is ActionKind.PREEMPT:
                found[action.job] = 1.0
            elif action.kind is ActionKind.SHRINK:
                found[action.job] = _compute_held_share(action, observed)
    return found


def _compute_held_share(action: JobAction, observed: ObservedFleet) -> float:
    """Return the share of a job's GPUs that are among the ranks of an action."""
    asked = {(rank.node, gpu) for rank in action.ranks for gpu in rank.gpus}
    ranks = list_job_ranks(observed.view, observed.find_holder(action.job))
    held = [(rank.node, gpu, rank.milli) for rank in ranks for gpu in rank.gpus]
    return sum(milli for node, gpu, milli in held if (node, gpu) in asked) / max(1, sum(row[2] for row in held))


def list_job_ranks(view: ClusterView, job: int) -> tuple[RankPlacement, ...]:
    """Return the GPUs that a job of the view holds: one rank for the whole GPUs of a node, and one for each part.

    job: its index in the view, because two attempts of one name may run.
    """
    parts = list_held_parts(view.holders, view.parts)
    own = parts.job == job
    rows, gpus = np.divmod(parts.gpu[own], view.holders.shape[1])
    whole: dict[int, list[int]] = {}
    shared: list[tuple[int, int, int]] = []
    for row, gpu, milli in zip(rows.tolist(), gpus.tolist(), parts.milli[own].tolist(), strict=True):
        if milli == WHOLE_GPU:
            whole.setdefault(row, []).append(gpu)
        else:
            shared.append((row, gpu, milli))
    names = view.topology.names
    found = [RankPlacement(rank, names[row], tuple(held)) for rank, (row, held) in enumerate(sorted(whole.items()))]
    for row, gpu, milli in sorted(shared):
        found.append(RankPlacement(len(found), names[row], (gpu,), milli))
    return tuple(found)
