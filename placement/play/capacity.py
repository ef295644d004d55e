"""A machine that is only a count of GPUs, on which months of a queue are played in a minute.

In the plan, a running job holds its GPUs until its planned end. An overdue job gets a new planned
end. There is no topology, so a job fits if enough GPUs are free. The pass over it
(`fleetcast.placement.play.backfill`) follows the same rules as that of the real fleet.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import NamedTuple

from fleetcast.placement.play.rows import RowEntry


class CountAsk(NamedTuple):
    """The number of GPUs that a job needs, and its time limit. The limit is None if unknown."""

    gpus: int
    limit_s: float | None


Planned = Callable[[CountAsk, float], float]
"""How long a job should run in all, when it has run for so many seconds: more than that."""


class Capacity:
    """A machine that is only a count of GPUs, without nodes.

    `set_clock` begins a new pass and drops the claim of the last one.
    """

    def __init__(self, gpus: int, planned: Planned, backfills: bool = True) -> None:
        """Create an idle machine.

        planned: function that returns the planned run time of an ask that has run for some seconds.
        backfills: if False, no job may pass the head.
        """
        self.gpus = gpus
        self.free = gpus
        self.started: list[RowEntry] = []  # since `at`
        self._planned, self._backfills = planned, backfills
        self._now_s = 0.0
        self._ends: list[tuple[float, int]] = []  # planned end, number of the job
        self._held: dict[int, tuple[CountAsk, float, float]] = {}  # ask, start, planned end
        self._shadow: tuple[float, int] | None = None  # when the head should start, GPUs that it leaves then

    def set_clock(self, now_s: float) -> None:
        self._now_s, self._shadow = now_s, None
        self.started.clear()

    def fits(self, ask: CountAsk) -> bool:
        return ask.gpus <= self.free

    def start(self, ask: CountAsk, item: RowEntry) -> bool:
        end_s = self._now_s + self._planned(ask, 0.0)
        if ask.gpus > self.free or not self._claim_without_delaying_head(ask.gpus, end_s):
            return False
        self.free -= ask.gpus
        self._held[item.number] = ask, self._now_s, end_s
        insort(self._ends, (end_s, item.number))
        self.started.append(item)
        return True

    def _claim_without_delaying_head(self, gpus: int, end_s: float) -> bool:
        if self._shadow is None:
            return True
        shadow_s, spare = self._shadow
        if end_s > shadow_s:
            if gpus > spare:
                return False
            self._shadow = shadow_s, spare - gpus
        return True

    def claim(self, ask: CountAsk, item: RowEntry) -> bool:
        if ask.gpus > self.gpus:
            return False
        self._extend_overdue_jobs()
        free, shadow_s = self.free, self._now_s
        for end_s, number in self._ends:
            if free >= ask.gpus:
                break
            free, shadow_s = free + self._held[number][0].gpus, end_s
        self._shadow = (shadow_s, free - ask.gpus) if self._backfills else (self._now_s, 0)
        return True

    def _extend_overdue_jobs(self) -> None:
        """Plan new ends for jobs that are past their planned ends."""
        while self._ends and self._ends[0][0] <= self._now_s:
            _, number = self._ends.pop(0)
            ask, begun_s, _ = self._held[number]
            end_s = begun_s + max(self._planned(ask, self._now_s - begun_s), self._now_s - begun_s + 1)
            self._held[number] = ask, begun_s, end_s
            insort(self._ends, (end_s, number))

    def end_job(self, number: int) -> None:
        """Release the GPUs of a job."""
        ask, _, end_s = self._held.pop(number)
        del self._ends[bisect_left(self._ends, (end_s, number))]
        self.free += ask.gpus
