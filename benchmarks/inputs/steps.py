"""Step events applied to the job table, and then the pace of every job, as a tick computes it.

Each job's ranks report each step with its parts. Between two ticks a job reports `events_a_job`
events. Then its pace is computed once. One process, one core, no HTTP (the case `events` includes
HTTP). The size of a fleet does not matter here.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import measure
from fleetcast.fleet.events import Started, Step, StepParts
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.requests import RankPlacement
from fleetcast.models.stragglers.steps import StepPace, measure_pace

# jobs, ranks that report, events a job and tick
CASES = {"whole_job": (100, 1, 200), "every_rank": (100, 8, 200), "large_gang": (1, 1024, 20 * 1024)}
REPEATS = 3
STEP_MS = 500


def run(sizes: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """Measure how fast step events are applied. Yields one record for each case."""
    for name, (jobs, ranks, events) in CASES.items():
        fleet = _ReportingJobs(jobs, ranks, events)
        size = {"jobs": jobs, "ranks": ranks, "events_a_job": events}
        yield measure("steps", name, size, fleet.apply_tick, "events/s", repeats=REPEATS)


class _ReportingJobs:
    """A set of jobs that report their steps, and the table to which the steps are applied."""

    def __init__(self, jobs: int, ranks: int, events: int) -> None:
        self.table = JobTable()
        self.paces: dict[str, StepPace] = {}
        self.ranks, self.events, self.made = ranks, events, 0
        self.names = [f"train-{number}" for number in range(jobs)]
        self.noise = np.random.default_rng(0).normal(1.0, 0.01, 4096)
        for name in self.names:
            placed = tuple(RankPlacement(rank, f"{name}-n{rank}") for rank in range(ranks))
            self.table.apply(Started(job=name, sequence=0, time_ms=0, ranks=placed))
        self._ticks = [
            self._make_tick_events() for _ in range(REPEATS + 1)
        ]  # made beforehand: only their use is measured

    def apply_tick(self) -> int:
        """Apply the events since the last tick, then compute the pace of every job.

        Returns the number of events.
        """
        events = self._ticks.pop(0)
        for event in events:
            self.table.apply(event)
        for name in self.names:
            attempt = self.table.get(name)
            assert attempt is not None
            self.paces[name] = measure_pace(attempt, self.paces.get(name))
        assert all(pace.expected_s for pace in self.paces.values())
        return len(events)

    def _make_tick_events(self) -> list[Step]:
        """Return the events of the next tick, in the order of their steps."""
        steps = self.events // self.ranks
        made = []
        for number in range(self.made, self.made + steps):
            for row, name in enumerate(self.names):
                duration_s = STEP_MS / 1000 * float(self.noise[(number + 7 * row) % len(self.noise)])
                for rank in range(self.ranks):
                    made.append(self._make_step(name, number, rank, duration_s))
        self.made += steps
        return made

    def _make_step(self, name: str, number: int, rank: int, duration_s: float) -> Step:
        return Step(
            job=name,
            sequence=((rank + 1) << 32) + number,  # as the client library counts
            time_ms=(number + 1) * STEP_MS,
            step=number,
            rank=rank if self.ranks > 1 else None,
            duration_s=duration_s,
            parts=StepParts(compute=0.7 * duration_s, communication=0.3 * duration_s),
        )
