"""Which run time orders the queue: a contest of the terms of the area on the queue's own last weeks.

Every week the jobs submitted in the last two are played through the plan once for each term, on a count of GPUs, with
the forecasts that were issued at their submission. The term with the least mean wait serves the next week, if it also
won the contest before and beats the serving one by a margin. Only outcomes known by then count; a job that still runs
counts with its age. At first users' limits serve where most jobs have one, else GPUs alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from placement.capacity import Capacity, CountAsk, Planned
from placement.order import DAY_S, RUN_TERMS, Order, RunTerm, area
from placement.replay import Replay, RowScheduler, Trace

PERIOD_S, WINDOW_S = 7 * DAY_S, 14 * DAY_S
MARGIN = 0.02
FEWEST_JOBS = 100


@dataclass(slots=True)
class Issued:
    """A job as of its submission; run_s: None until it has ended."""

    submit_s: float
    gpus: int
    limit_s: float | None
    forecast_s: float | None
    start_s: float | None = None
    run_s: float | None = None


@dataclass(slots=True)
class TermContest:
    """gpus: of the fleet. log: (when, the term that serves from then on, mean wait by term)."""

    gpus: int
    max_wait_s: float
    planned: Planned
    serving: RunTerm | None = None
    log: list[tuple[float, RunTerm, dict[RunTerm, float]]] = field(default_factory=list)
    _jobs: dict[int, Issued] = field(default_factory=dict)
    _due_s: float | None = None
    _limited: int = 0
    _won: RunTerm | None = None

    @property
    def term(self) -> RunTerm:
        """What orders now."""
        return self.serving or ("limit" if 2 * self._limited >= len(self._jobs) else "one")

    def issued(self, job: int, at: Issued) -> None:
        """Note a submission, with what was forecast then."""
        self._jobs[job] = at
        self._limited += at.limit_s is not None

    def started(self, job: int, now_s: float) -> None:
        if job in self._jobs:
            self._jobs[job].start_s = now_s

    def ended(self, job: int, now_s: float) -> None:
        known = self._jobs.get(job)
        if known is not None and known.start_s is not None:
            known.run_s = now_s - known.start_s

    def settle(self, now_s: float) -> bool:
        """Hold the contest where it is due; True where another term serves from now on."""
        if self._due_s is None:
            self._due_s = now_s + PERIOD_S
        if now_s < self._due_s:
            return False
        self._due_s = now_s + PERIOD_S
        self._forget(now_s - WINDOW_S)
        played = [_known(one, now_s) for one in self._jobs.values() if one.start_s is not None]
        if len(played) < FEWEST_JOBS:
            return False
        before = self.term
        waits = {term: self._mean_wait(term, played) for term in RUN_TERMS}
        best = min(RUN_TERMS, key=lambda term: waits[term])
        wins = waits[best] < (1 - MARGIN) * waits[before]
        self.serving = best if wins and best == self._won else before
        self._won = best
        self.log.append((now_s, self.serving, waits))
        return self.serving != before

    def _forget(self, since_s: float) -> None:
        self._jobs = {job: one for job, one in self._jobs.items() if one.submit_s >= since_s or one.start_s is None}
        self._limited = sum(one.limit_s is not None for one in self._jobs.values())

    def _mean_wait(self, term: RunTerm, jobs: Sequence[Issued]) -> float:
        limit_s = [one.limit_s for one in jobs]
        gpus, submit_s = [one.gpus for one in jobs], [one.submit_s for one in jobs]
        trace = Trace([], submit_s, [one.run_s or 1.0 for one in jobs], gpus, limit_s)
        asks = [CountAsk(one.gpus, one.limit_s) if one.gpus <= self.gpus else None for one in jobs]
        policy = Keyed([area(term, one.gpus, one.forecast_s, one.limit_s) for one in jobs])
        bound_s = Order("shortest", self.max_wait_s).bound_s()
        machine = Capacity(self.gpus, self.planned)
        start_s = Replay(trace, RowScheduler(submit_s, machine, policy, asks.__getitem__, bound_s)).play()
        return float(np.nanmean(start_s - np.array(submit_s)))


def _known(one: Issued, now_s: float) -> Issued:
    if one.run_s is not None:
        return one
    assert one.start_s is not None
    return Issued(one.submit_s, one.gpus, one.limit_s, one.forecast_s, one.start_s, max(1.0, now_s - one.start_s))


@dataclass(frozen=True, slots=True)
class Keyed:
    """A policy of keys that were known beforehand."""

    keys: Sequence[float]

    def key(self, job: int, now_s: float) -> float:
        return self.keys[job]

    def started(self, job: int, now_s: float) -> None:
        """Learns nothing."""

    def ended(self, job: int, now_s: float) -> None:
        """Learns nothing."""
