"""The thinking part of a pass over the queue. It reads what nobody changes, so it may run in a thread."""

from collections.abc import Sequence
from dataclasses import dataclass

from placement.options import Options
from placement.queue import Plan, Waiting, plan
from placement.start_time import start_times
from service.placer_view import Observed

START_TIMES_EVERY_S = 30.0

StartTimes = dict[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Estimates:
    """Start times of the first entries; made anew now and then, and when another entry is first."""

    at_ms: int = -(10**18)
    head: str | None = None
    starts: StartTimes | None = None

    def are_due(self, head: str | None, now_ms: int) -> bool:
        return head != self.head or now_ms - self.at_ms >= START_TIMES_EVERY_S * 1000


@dataclass(frozen=True, slots=True)
class QueuePass:
    """What a pass works on."""

    queue: Sequence[Waiting]
    observed: Observed
    options: Options
    estimates: Estimates

    def think(self) -> tuple[Plan, Estimates]:
        """Who is to be placed where, and when the others will start: dearer than the pass, so not each time."""
        observed, options = self.observed, self.options
        planned = plan(self.queue, observed.view, observed.running, observed.run_times, options)
        waiting = [wait.entry for wait in planned.waiting]
        head = waiting[0].request.request_id if waiting else None
        if not self.estimates.are_due(head, options.now_ms):
            return planned, self.estimates
        starts = start_times(waiting, planned.view, planned.running, observed.run_times, options)
        return planned, Estimates(options.now_ms, head, starts)
