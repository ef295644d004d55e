"""Advice on running jobs to stop: each pass proposes actions for the head of the queue, and records them.

In the mode "advise" nobody carries them out. An action is withdrawn as soon as a pass no longer proposes it.
"""

import numpy as np

from fleetcast.fleet.requests import WHOLE_GPU, RankPlacement
from fleetcast.placement.actions.action import ActionCost, ActionKind, ActionReason, JobAction, RejectedSet
from fleetcast.placement.actions.life import ActionState
from fleetcast.placement.machines.slots import list_held_parts
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.reclaiming import ReclaimInput, ReclaimProposal
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.placement.reclaim.eligibility import Eligibility
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.view import ObservedFleet

ADVICE = "advice"  # the executor of actions that nobody carries out
LASTS_MS = 3_600_000  # a proposal that no pass has withdrawn by then expires
REASONS = {Eligibility.RECLAIM: "guarantee", Eligibility.PREEMPT: "class"}
SURPLUS = "surplus"  # the reason for members above the minimum of a gang, where no guarantee and no class counts
REJECTED = 3  # sets of jobs that the search did not choose, stored with an action


class ReclaimAdvisor:
    """The writer of proposals to stop jobs. `proposal`: the result of the last pass."""

    def __init__(self, control: ActionControl, queues: ServedQueues) -> None:
        self._control = control
        self._queues = queues
        self.proposal: ReclaimProposal | None = None

    def make_input(self, observed: ObservedFleet) -> ReclaimInput | None:
        """Return the facts for the next pass, or None if the queues' policy lets it propose nothing."""
        tree = self._queues.tree
        if tree is None or tree.policy.reclaim.mode == "off":
            return None
        return ReclaimInput(tree.policy.reclaim, tree, observed.jobs)

    def record_proposal(self, proposal: ReclaimProposal | None, observed: ObservedFleet, now_ms: int) -> None:
        """Store what a pass proposes, and withdraw the proposals of earlier passes that it does not repeat.

        The caller holds the ledger's transaction.
        """
        self.proposal = proposal
        self._control.expire(now_ms)
        tree = self._queues.tree
        actions = make_actions(proposal, observed, tree.policy.reclaim, now_ms) if tree and proposal else []
        wishes = {action.compute_wish() for action in actions}
        self._withdraw_others(wishes, "the last pass does not propose it", now_ms)
        if actions:
            self._control.propose(actions, now_ms)

    def withdraw_all(self, why: str, now_ms: int) -> None:
        """Withdraw all proposals."""
        self.proposal = None
        self._withdraw_others(set(), why, now_ms)

    def _withdraw_others(self, wishes: set[str], why: str, now_ms: int) -> None:
        for record in self._control.list_open():
            if record.action.kind is ActionKind.REPLACE:
                continue
            if record.state is ActionState.PROPOSED and record.action.compute_wish() not in wishes:
                self._control.withdraw(record.action_id, why, now_ms)

    def describe_proposal(self, request_id: str) -> str:
        """Describe what the last pass would stop for a request, or why it would stop nothing.

        Returns "" if the pass did not search for jobs to stop for it.
        """
        proposal = self.proposal
        return proposal.sentence if proposal and proposal.request.request_id == request_id else ""


def make_actions(
    proposal: ReclaimProposal, observed: ObservedFleet, policy: ReclaimPolicy, now_ms: int
) -> list[JobAction]:
    """Return one action for each job that a proposal would stop or shrink."""
    found, costs = proposal.victims, proposal.costs
    if found is None or costs is None:
        return []
    jobs = observed.jobs
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
            executor=ADVICE,
            by_ms=now_ms + LASTS_MS,
            reason=ActionReason(REASONS.get(shrink.kind, SURPLUS), numbers),
            cost=ActionCost(restart=shrink.cost_gpu_s),
            payer=proposal.request.request_id,
            grace_s=policy.grace_s,
        )
        for shrink in proposal.shrinks
    ]
    for name, kind in zip(found.chosen.jobs, proposal.kinds, strict=True):
        row = jobs.row[name]
        terms = float(costs.lost[row]), float(costs.restart[row]), float(costs.wait[row])
        actions.append(
            JobAction(
                kind=ActionKind.PREEMPT,
                job=name,
                attempt=int(jobs.attempt[row]),
                queue=jobs.leaf[row],
                gpus=float(jobs.gpus[row]),
                ranks=list_job_ranks(observed.view, name),
                executor=ADVICE,
                by_ms=now_ms + LASTS_MS,
                reason=ActionReason(REASONS[kind], numbers),
                cost=ActionCost(lost=terms[0], restart=terms[1], wait=terms[2]),
                payer=proposal.request.request_id,
                grace_s=policy.grace_s,
                rejected=rejected,
            )
        )
    return actions


def list_job_ranks(view: ClusterView, job: str) -> tuple[RankPlacement, ...]:
    """Return the GPUs that a job of the view holds: one rank for the whole GPUs of a node, and one for each part."""
    parts = list_held_parts(view.holders, view.parts)
    own = parts.job == view.jobs.index(job)
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
