"""Advice on gangs whose nodes were lost or are likely to fail: one action for each gang, however many nodes.

Each pass judges anew. If more nodes fail, a new action with all of them takes the place of the old one. An action
that was not sent is withdrawn once its reason is gone. Nothing is proposed while reclaim is "off".
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.nodes import NodeState
from fleetcast.fleet.requests import Gang, PlacementRequest
from fleetcast.placement.actions.action import ActionCost, ActionKind, ActionReason, JobAction
from fleetcast.placement.actions.life import ActionRecord, ActionState
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import PREEMPTIBLE, RunningJobs
from fleetcast.placement.machines.view import Advice, ClusterView
from fleetcast.placement.plan.reclaiming import compute_job_costs
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.placement.recovery.foresight import compute_set_probability, should_act_early
from fleetcast.placement.recovery.replacement import BrokenGang, GangRecovery, find_recovery
from fleetcast.placement.recovery.spares import choose_spare_nodes
from fleetcast.placement.recovery.steps import RecoveryStep, RecoveryTimes
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.reclaim import ADVICE, LASTS_MS, list_job_ranks
from fleetcast.service.placer.view import ObservedFleet

Mask = NDArray[np.bool_]
MOST_GANGS = 16  # whose recovery one pass searches
RECOVERED = "its nodes are healthy, or the job has ended"
MORE_FAILED = "other nodes are concerned now"


class RecoveryAdvisor:
    """The writer of proposals to replace nodes under running gangs."""

    def __init__(self, control: ActionControl, queues: ServedQueues) -> None:
        self._control = control
        self._queues = queues

    def record_proposals(self, observed: ObservedFleet, options: Options) -> None:
        """Store what the gangs of a fleet need, and withdraw proposals whose reason is gone.

        The caller holds the ledger's transaction.
        """
        tree, now_ms = self._queues.tree, options.now_ms
        active = tree is not None and tree.policy.reclaim.mode != "off"
        before = {row.action.job: row for row in self._control.list_open() if row.action.kind is ActionKind.REPLACE}
        actions = []
        if tree is not None and active:
            spares = None if tree.spares is None else choose_spare_nodes(observed.view, tree.spares)
            actions = _list_actions(observed, options, tree.policy.reclaim, before, spares)
        jobs = {action.job: action for action in actions}
        for job, record in before.items():
            if record.state is ActionState.PROPOSED:
                wanted = jobs.get(job)
                if wanted is None:
                    self._control.withdraw(record.action_id, RECOVERED, now_ms)
                elif wanted.compute_wish() != record.action.compute_wish():
                    self._control.withdraw(record.action_id, MORE_FAILED, now_ms)
        if actions:
            self._control.propose(actions, now_ms)


def _list_actions(
    observed: ObservedFleet,
    options: Options,
    policy: ReclaimPolicy,
    before: dict[str, ActionRecord],
    spares: Mask | None,
) -> list[JobAction]:
    """Return one action for each gang with nodes that were lost, or that pay to be replaced early.

    before: job → its open action. spares: (n,) bool, nodes that are held ready.
    """
    view, jobs = observed.view, observed.jobs
    lost = view.state == NodeState.LOST
    likely = ~lost & (((view.advice == Advice.DRAIN) & (view.p_fail > 0)) | (view.p_fail >= 1))
    concerned = np.unique(view.holders[lost | likely])
    costs = compute_job_costs(jobs, options.now_ms)
    actions: list[JobAction] = []
    for row in concerned[(concerned >= 0) & (concerned < len(jobs))].tolist():
        if len(actions) == MOST_GANGS:
            break
        times = _make_times(jobs, row, policy)
        own = (view.holders == row).any(axis=1)
        failed, p = lost & own, 1.0
        if not failed.any():
            p = compute_set_probability(view.p_fail[likely & own])
            if not should_act_early(p, float(costs.lost[row]) / max(1, int(jobs.gpus[row])), times):
                continue
            failed = likely & own
        gang = make_broken_gang(jobs, row, view)
        known = before.get(jobs.names[row])
        if known is not None and _still_holds(known.action, gang, failed, view):
            actions.append(known.action)
            continue
        may_stop = (jobs.preemptible == PREEMPTIBLE) & (jobs.stops < policy.stops_a_day)
        stop_cost = np.full(len(view.jobs), np.inf)
        stop_cost[: len(jobs)] = np.where(may_stop, costs.total, np.inf)
        found = find_recovery(gang, view, failed | lost, stop_cost, options, times, spares)
        actions.append(_make_action(found, gang, jobs, row, p, times, options.now_ms))
    return actions


def make_broken_gang(jobs: RunningJobs, row: int, view: ClusterView) -> BrokenGang:
    """Return a running job as a gang to recover. The nodes of its members must have one GPU model."""
    ranks = list_job_ranks(view, jobs.names[row])
    gpu_rows = {view.inventory.row[rank.node] for rank in ranks}
    models = {int(view.inventory.gpu_model[at]) for at in gpu_rows}
    known = models.pop() if len(models) == 1 else -1
    members = int(jobs.members[row]) or len(ranks)
    sizes = (int(jobs.gang_min[row]), int(jobs.gang_desired[row]), int(jobs.gang_step[row]))
    request = PlacementRequest(
        request_id=f"recovery of {jobs.names[row]}"[:200],
        job=jobs.names[row],
        attempt=int(jobs.attempt[row]),
        gang=Gang(*sizes) if 0 < sizes[0] < sizes[1] else members,
        gpu_models=(view.inventory.gpu_models[known],) if known >= 0 else (),
    )
    return BrokenGang(request, ranks, int(jobs.gpus_per_member[row]))


def _make_times(jobs: RunningJobs, row: int, policy: ReclaimPolicy) -> RecoveryTimes:
    """Return the times of one job, as far as they are known."""
    known = RecoveryTimes(grace_s=policy.grace_s)
    cost_s, restart_s = float(jobs.checkpoint_cost_s[row]), float(jobs.restart_s[row])
    return replace(
        known,
        checkpoint_s=known.checkpoint_s if np.isnan(cost_s) else cost_s,
        swap_s=known.swap_s if np.isnan(restart_s) else restart_s,
        restart_s=max(known.restart_s, 0.0 if np.isnan(restart_s) else restart_s),
    )


def _still_holds(action: JobAction, gang: BrokenGang, failed: Mask, view: ClusterView) -> bool:
    """Return whether an action is for the same nodes, and its new places are still free."""
    row, names = view.inventory.row, set(np.array(view.topology.names)[failed].tolist())
    concerned = {rank.node for rank in gang.ranks} & names
    return (
        action.attempt == gang.request.attempt
        and {rank.node for rank in action.ranks} == concerned
        and all(
            place.node in row
            and bool(view.in_service[row[place.node]])
            and bool(view.free[row[place.node], list(place.gpus)].all())
            for place in action.places
        )
    )


def _make_action(
    found: GangRecovery,
    gang: BrokenGang,
    jobs: RunningJobs,
    row: int,
    p: float,
    times: RecoveryTimes,
    now_ms: int,
) -> JobAction:
    """Return the action of a step. Its numbers are the cost of each possible step, and the probability."""
    step, gpus = found.step, gang.gpus
    waits_s = times.free_after_s if step.step is RecoveryStep.WAIT else 0.0
    moves_all = step.step is RecoveryStep.ELSEWHERE
    numbers = {f"{name}_gpu_s": cost for name, cost in found.costs}
    concerned = gang.ranks if moves_all else found.lost
    others_gpu_s = max(0.0, step.cost_gpu_s - gpus * step.delay_s)
    shrinks = step.step is RecoveryStep.SHRINK
    return JobAction(
        kind=ActionKind.REPLACE,
        job=jobs.names[row],
        attempt=int(jobs.attempt[row]),
        queue=jobs.leaf[row],
        gpus=float(sum(len(rank.gpus) for rank in concerned)),
        ranks=concerned,
        executor=ADVICE,
        by_ms=now_ms + LASTS_MS,
        reason=ActionReason(
            ("lost" if p == 1.0 else "foreseen") + f"_{step.step}",
            numbers | {"p": p, "nodes": float(len({rank.node for rank in found.lost}))},
        ),
        cost=ActionCost(
            lost=0.0 if shrinks else others_gpu_s,
            slow=others_gpu_s if shrinks else 0.0,
            restart=gpus * (step.delay_s - waits_s),
            wait=gpus * waits_s,
        ),
        places=found.places,
        grace_s=times.grace_s,
    )
