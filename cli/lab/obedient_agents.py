"""The agents of the jobs of a waiting fleet: each accepts an action, writes a checkpoint, and stops its job."""

from collections.abc import Sequence

from fleetcast.placement.actions.action import ActionKind
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.executors import ExecutorChoice
from fleetcast.simulator.agents import CHECKPOINT_S
from fleetcast.simulator.live_job import LiveJob


class ObedientAgents:
    """The agents of all running jobs. stops: how many jobs they have stopped. payers: the requests they stopped for."""

    def __init__(self, control: ActionControl, executors: ExecutorChoice) -> None:
        self._control = control
        self._executors = executors
        self._due_ms: dict[str, int] = {}  # action → when its job has written a checkpoint
        self.stops = 0
        self.payers: set[str] = set()

    def carry_out_stops(self, running: Sequence[LiveJob], now_ms: int) -> list[LiveJob]:
        """Accept the new stops of these jobs. Returns the jobs that have written a checkpoint and stop now."""
        jobs, stopped = {(live.name, live.attempt): live for live in running}, []
        for live in running:
            self._executors.record_agent(live.name, now_ms)
        for record in self._control.list_open():
            action, id_ = record.action, record.action_id
            own = jobs.get((action.job, action.attempt))
            if own is None or not record.was_sent or action.kind is not ActionKind.PREEMPT:
                continue
            if id_ not in self._due_ms:
                self._control.accept(id_, action.job, action.attempt, now_ms, action.job)
                checkpoint_s = min(own.profile.checkpoint_s or CHECKPOINT_S, action.grace_s)
                self._due_ms[id_] = now_ms + round(1000 * checkpoint_s)
            elif self._due_ms[id_] <= now_ms:
                stopped.append(own)
                self.payers.add(action.payer)
        self.stops += len(stopped)
        return stopped
