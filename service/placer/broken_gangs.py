"""The facts of a running gang for the search for its recovery, and the action that the search leads to."""

from dataclasses import replace

import numpy as np

from fleetcast.placement.actions.action import ActionCost, ActionKind, ActionReason, JobAction, make_recovery_payer
from fleetcast.placement.machines.running_jobs import RunningJobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.next_attempt import make_next_attempt
from fleetcast.placement.queues.tree import ReclaimPolicy
from fleetcast.placement.recovery.replacement import BrokenGang, GangRecovery
from fleetcast.placement.recovery.steps import RecoveryStep, RecoveryTimes
from fleetcast.service.placer.reclaim import ADVICE, LASTS_MS, list_job_ranks

LOST, FORESEEN, SLOW = "lost", "foreseen", "slow"  # the causes for which a gang leaves nodes


def make_broken_gang(jobs: RunningJobs, row: int, view: ClusterView) -> BrokenGang:
    """Return a running job as a gang to recover. Its new nodes have the GPU model and the pool of its present ones."""
    ranks = list_job_ranks(view, row)
    rows = {view.inventory.row[rank.node] for rank in ranks}
    members = int(jobs.members[row]) or len(ranks)
    payer = make_recovery_payer(jobs.names[row], int(jobs.attempt[row]))
    request = make_next_attempt(jobs, row, members, rows, view, payer)
    return BrokenGang(request, ranks, int(jobs.gpus_per_member[row]))


def make_recovery_times(jobs: RunningJobs, row: int, policy: ReclaimPolicy) -> RecoveryTimes:
    """Return the times of one job, as far as they are known."""
    known = RecoveryTimes(grace_s=policy.grace_s)
    cost_s, restart_s = float(jobs.checkpoint_cost_s[row]), float(jobs.restart_s[row])
    return replace(
        known,
        checkpoint_s=known.checkpoint_s if np.isnan(cost_s) else cost_s,
        swap_s=known.swap_s if np.isnan(restart_s) else restart_s,
        restart_s=max(known.restart_s, 0.0 if np.isnan(restart_s) else restart_s),
    )


def find_cause(action: JobAction) -> str:
    """Return the cause of an action of recovery: LOST, FORESEEN or SLOW."""
    return action.reason.code.partition("_")[0]


def make_recovery_action(
    found: GangRecovery,
    gang: BrokenGang,
    jobs: RunningJobs,
    row: int,
    *,
    cause: str,
    p: float,
    times: RecoveryTimes,
    now_ms: int,
) -> JobAction:
    """Return the action of a step, as advice. Its numbers are the cost of each possible step, and the probability.

    cause: LOST, FORESEEN or SLOW. p: the probability that the nodes fail. If the whole gang moves, the action has no
    places: its next attempt gets them as any request does. So the action stays the same while other jobs come and go.
    """
    step, gpus = found.step, gang.gpus
    waits_s = times.free_after_s if step.step is RecoveryStep.WAIT else 0.0
    moves_all = step.step is RecoveryStep.ELSEWHERE
    numbers = {f"{name}_gpu_s": cost for name, cost in found.costs}
    concerned = gang.ranks if moves_all else (*found.lost, *found.leaving)
    others_gpu_s = max(0.0, step.cost_gpu_s - gpus * step.delay_s)
    shrinks = step.step is RecoveryStep.SHRINK
    return JobAction(
        kind=ActionKind.SHRINK if shrinks else ActionKind.REPLACE,
        job=jobs.names[row],
        attempt=int(jobs.attempt[row]),
        queue=jobs.leaf[row],
        gpus=float(sum(len(rank.gpus) for rank in concerned)),
        ranks=concerned,
        executor=ADVICE,
        by_ms=now_ms + LASTS_MS,
        reason=ActionReason(
            f"{cause}_{step.step}",
            numbers | {"p": p, "nodes": float(len({rank.node for rank in found.lost}))},
        ),
        cost=ActionCost(
            lost=0.0 if shrinks else others_gpu_s,
            slow=others_gpu_s if shrinks else 0.0,
            restart=gpus * (step.delay_s - waits_s),
            wait=gpus * waits_s,
        ),
        places=() if moves_all else found.places,
        pinned=() if moves_all or shrinks else found.pinned,
        grace_s=times.grace_s,
    )
