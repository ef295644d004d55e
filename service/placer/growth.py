"""The advice to let elastic gangs grow on GPUs that a pass left free."""

import numpy as np
from numpy.typing import NDArray

from fleetcast.placement.actions.action import ActionCost, ActionKind, ActionReason, JobAction
from fleetcast.placement.actions.life import ActionState
from fleetcast.placement.elastic.grow import propose_growth
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RUN_LEVELS
from fleetcast.placement.plan.queue import Plan
from fleetcast.placement.plan.turns import QueueTurns
from fleetcast.placement.queues.tree import ANY
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.queues import ServedQueues
from fleetcast.service.placer.reclaim import ADVICE, LASTS_MS
from fleetcast.service.placer.view import ObservedFleet

MEDIAN = RUN_LEVELS.index(0.5)


class GrowthAdvisor:
    """The writer of proposals to grow gangs. Nobody carries them out yet."""

    def __init__(self, control: ActionControl, queues: ServedQueues) -> None:
        self._control = control
        self._queues = queues

    def record_growth(self, planned: Plan | None, turns: QueueTurns, observed: ObservedFleet, now_ms: int) -> None:
        """Store which gangs should grow on GPUs that a pass left free, and withdraw such proposals of earlier passes.

        planned: None if no request waits. turns: with all that the pass has placed.
        """
        tree = self._queues.tree
        actions: list[JobAction] = []
        if tree is not None and tree.policy.reclaim.mode != "off":
            actions = make_growth_actions(planned, turns, observed, now_ms)
        wishes = {action.compute_wish() for action in actions}
        opened = [row for row in self._control.list_open() if row.action.kind is ActionKind.GROW]
        for record in opened:
            if record.state is ActionState.PROPOSED and record.action.compute_wish() not in wishes:
                self._control.withdraw(record.action_id, "the last pass does not propose it", now_ms)
        if actions:
            self._control.propose(actions, now_ms)


def make_growth_actions(
    planned: Plan | None, turns: QueueTurns, observed: ObservedFleet, now_ms: int
) -> list[JobAction]:
    """Return one action for each gang that should grow.

    planned: the last pass over the fleet `observed`, None if no request waits. turns: the queues after that pass.
    """
    jobs = observed.jobs
    if not (jobs.gang_desired > jobs.gang_min).any():
        return []
    view, waiting = observed.view, []
    if planned is not None:
        view = planned.view if planned.reservation is None else planned.reservation.subtract_from_view(planned.view)
        waiting = [wait.entry.request for wait in planned.waiting]
    standing = turns.standing

    def may_hold(job: str, gpus: int) -> bool:
        leaf = jobs.leaf[jobs.row[job]]
        return standing is None or standing.find_refusing_queue(leaf, {ANY: float(gpus)}) is None

    left_s = estimate_remaining_s(observed, now_ms)
    return [
        JobAction(
            kind=ActionKind.GROW,
            job=growth.job,
            attempt=int(jobs.attempt[jobs.row[growth.job]]),
            queue=jobs.leaf[jobs.row[growth.job]],
            gpus=float(growth.gpus),
            ranks=(),
            places=growth.places,
            executor=ADVICE,
            by_ms=now_ms + LASTS_MS,
            reason=ActionReason("idle"),
            cost=ActionCost(restart=growth.cost_gpu_s, gain=-growth.gain_gpu_s),
        )
        for growth in propose_growth(view, jobs, left_s, waiting, Options(now_ms=now_ms), may_hold)
    ]


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
