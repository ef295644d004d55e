"""Contribution: what an attempt adds to the demand series, and the scopes that it counts in."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from fleet.jobs import JobAttempt

Key = tuple[str, int]  # job, attempt
Edge = tuple[int, int, int, int, int]  # time_ms, arriving, arriving_jobs, running, queued
EVERYTHING = "all"
OTHER = "other"


class DemandScope(NamedTuple):
    """Whose demand: EVERYTHING where it is not divided."""

    pool: str = EVERYTHING
    class_: str = EVERYTHING
    group: str = EVERYTHING

    @property
    def kind(self) -> str:
        """pool, class or group: which bound it counts against."""
        return "group" if self.group != EVERYTHING else "class" if self.class_ != EVERYTHING else "pool"


@dataclass(frozen=True, slots=True)
class Contribution:
    """What an attempt adds. Times are None where the attempt has not come so far; "" is an unknown class or group."""

    pool: str
    gpus: int
    arrives: bool
    submitted_ms: int | None
    started_ms: int | None
    ended_ms: int | None
    class_: str = ""
    group: str = ""
    others: tuple[str, ...] = ()  # further pools that it waits in; "all" counts it once
    jobs: int = 1

    def row(self) -> tuple[Any, ...]:
        """Its fields, in order."""
        times = (self.submitted_ms, self.started_ms, self.ended_ms)
        return self.pool, self.gpus, self.arrives, *times, self.class_, self.group, self.others, self.jobs

    def edges(self) -> list[Edge]:
        """Changes as (time_ms, arriving, arriving_jobs, running, queued)."""
        gpus, submitted, started, ended = self.gpus, self.submitted_ms, self.started_ms, self.ended_ms
        arrival = submitted if submitted is not None else started
        assert arrival is not None, "no contribution without an arrival"
        waits = gpus if submitted is not None else 0
        edges = [(arrival, gpus * self.arrives, self.jobs * self.arrives, 0, waits)]
        if started is not None:
            edges.append((max(started, arrival), 0, 0, gpus, -waits))
            if ended is not None:
                edges.append((max(ended, started, arrival), 0, 0, -gpus, 0))
        elif ended is not None:
            edges.append((max(ended, arrival), 0, 0, 0, -waits))
        return edges

    def scopes(self) -> tuple[DemandScope, ...]:
        """Those that it counts in, where there is room for them."""
        return _scopes((self.pool, *self.others), self.class_, self.group)


@lru_cache(maxsize=4096)
def _scopes(pools: tuple[str, ...], class_: str, group: str) -> tuple[DemandScope, ...]:
    found = []
    for each in dict.fromkeys((*pools, EVERYTHING)):
        found.append(DemandScope(each))
        if class_:
            found.append(DemandScope(each, class_))
        if group not in ("", EVERYTHING, OTHER):
            found.append(DemandScope(each, group=group))
    return tuple(found)


def edges_between(old: Contribution, new: Contribution) -> Iterator[tuple[int, Edge]]:
    """Yield (sign, edge) of what changes from old to new. An attempt that goes on keeps the edges that it has."""
    before, after = old.edges(), new.edges()
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    yield from ((-1, edge) for edge in before[same:])
    yield from ((1, edge) for edge in after[same:])


def contribution(attempt: JobAttempt) -> Contribution | None:
    """What an attempt adds to the series; None when it is no demand for GPUs, or its arrival is not known yet."""
    gpus, told = attempt.gpus, attempt.submission
    if gpus <= 0 or (attempt.eligible_ms is None and attempt.started_ms is None):
        return None
    if attempt.tasks != 1 and attempt.over_ms is not None:
        return None  # it stood for tasks that count by their own names now
    return Contribution(
        attempt.queue,
        gpus,
        attempt.attempt <= 1 and not attempt.has_unseen_start,
        attempt.eligible_ms,
        attempt.started_ms,
        attempt.over_ms,
        attempt.class_,
        (told.group or told.user) if told else "",
        attempt.queues[1:],
        attempt.tasks,
    )
