"""Contribution: the GPU demand that an attempt adds, and the scopes in which it counts."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

from fleetcast.features.delta_bins import MOST
from fleetcast.features.pool_inventory import EVERYTHING, PoolInventory, Weights, divide_by_weights
from fleetcast.fleet.held_gpus import count_wanted_milli
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import WHOLE_GPU
from fleetcast.fleet.wait_reasons import waits_for_quota

Key = tuple[str, int]  # job, attempt
Edge = tuple[int, int, int, int, int]  # time_ms, arriving, arriving_jobs, running, queued; GPUs in thousandths
OTHER = "other"
OTHERS_PLACE = 8  # of `Contribution.others` in its row


class DemandScope(NamedTuple):
    """The scope of a demand series. A field is EVERYTHING if the demand is not divided by it.

    Demand is divided by queue, or by pool of machines, never by both.
    """

    queue: str = EVERYTHING
    class_: str = EVERYTHING
    group: str = EVERYTHING
    pool: str = EVERYTHING

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "DemandScope":
        """Restore a scope from a snapshot's row. Older versions called the queue `pool`."""
        if "queue" not in row:
            return cls(row["pool"], row["class_"], row["group"])
        return cls(row["queue"], row["class_"], row["group"], row["pool"])

    @property
    def kind(self) -> str:
        """The kind of the scope: queue, class, group or pool. Each kind has its own limit on the number of scopes."""
        if self.pool != EVERYTHING:
            return "pool"
        return "group" if self.group != EVERYTHING else "class" if self.class_ != EVERYTHING else "queue"


@dataclass(frozen=True, slots=True)
class Contribution:
    """The GPU demand that one attempt adds to the series.

    A time is None until the attempt has reached it. An unknown class or group is "". milli: thousandths of
    GPUs, so that parts of GPUs add up.
    """

    queue: str
    milli: int
    arrives: bool
    submitted_ms: int | None
    started_ms: int | None
    ended_ms: int | None
    class_: str = ""
    group: str = ""
    others: tuple[str, ...] = ()  # further queues that it waits in; "all" counts it once
    jobs: int = 1
    weights: Weights = ()  # its pools of machines; empty where no inventory is known
    allowed: tuple[str, ...] = ()  # pools that it may run in; empty: any
    names_quota: bool = False  # its scheduler says that it waits for a quota

    def to_row(self) -> tuple[Any, ...]:
        """Return the fields as a tuple for JSON, in their order."""
        times = (self.submitted_ms, self.started_ms, self.ended_ms)
        whose = self.queue, self.milli, self.arrives, *times, self.class_, self.group, self.others, self.jobs
        return *whose, self.weights, self.allowed, self.names_quota

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "Contribution":
        """Restore a contribution from the JSON form of a row of `to_row`. Rows of older versions are shorter."""
        head, tail = row[:OTHERS_PLACE], row[OTHERS_PLACE:]
        defaults: list[Any] = [(), 1, (), (), False]
        others, jobs, weights, allowed, names_quota = [*tail, *defaults[len(tail) :]]
        pools = tuple((pool, weight) for pool, weight in weights)
        row = [*head, tuple(others), jobs, pools, tuple(allowed), names_quota]
        return cls(*row)

    @property
    def waits_for_quota(self) -> bool:
        """Return whether the attempt waits for a quota. More machines would not start it."""
        return self.names_quota and self.started_ms is None and self.ended_ms is None and self.submitted_ms is not None

    def split_by_pool(self) -> Iterator[tuple[DemandScope, "Contribution"]]:
        """Yield each of the attempt's pools as a scope, with the part of the contribution in it.

        Only the first pool counts the jobs, so that the jobs of all pools add up to the total.
        """
        jobs = self.jobs
        for pool, milli in _divide_milli(self.milli, dict(self.weights)).items() if self.weights else ():
            yield DemandScope(pool=pool), replace(self, milli=milli, jobs=jobs)
            jobs = 0

    def list_edges(self) -> list[Edge]:
        """Return the changes of demand over time, as (time_ms, arriving, arriving_jobs, running, queued).

        GPUs are in thousandths.
        """
        milli, submitted, started, ended = self.milli, self.submitted_ms, self.started_ms, self.ended_ms
        arrival = submitted if submitted is not None else started
        assert arrival is not None, "no contribution without an arrival"
        waits = milli if submitted is not None else 0
        edges = [(arrival, milli * self.arrives, self.jobs * self.arrives, 0, waits)]
        if started is not None:
            edges.append((max(started, arrival), 0, 0, milli, -waits))
            if ended is not None:
                edges.append((max(ended, started, arrival), 0, 0, -milli, 0))
        elif ended is not None:
            edges.append((max(ended, arrival), 0, 0, 0, -waits))
        return edges

    def list_scopes(self) -> tuple[DemandScope, ...]:
        """Return the scopes by queue, class and group in which the attempt counts if the series have room for them."""
        return _make_scopes((self.queue, *self.others), self.class_, self.group)


def _divide_milli(milli: int, weights: Mapping[str, int]) -> Mapping[str, int]:
    """Divide thousandths of GPUs among pools in proportion to `weights`. Whole GPUs stay whole."""
    if milli == sum(weights.values()):
        return weights
    unit = 1 if milli % WHOLE_GPU else WHOLE_GPU
    return {pool: part * unit for pool, part in divide_by_weights(milli // unit, weights).items()}


@lru_cache(maxsize=4096)
def _make_scopes(queues: tuple[str, ...], class_: str, group: str) -> tuple[DemandScope, ...]:
    found = []
    for each in dict.fromkeys((*queues, EVERYTHING)):
        found.append(DemandScope(each))
        if class_:
            found.append(DemandScope(each, class_))
        if group not in ("", EVERYTHING, OTHER):
            found.append(DemandScope(each, group=group))
    return tuple(found)


def find_changed_edges(old: Contribution, new: Contribution) -> Iterator[tuple[int, Edge]]:
    """Yield (-1, edge) for each edge of `old` to undo, and (1, edge) for each edge of `new` to add.

    Edges that are the same in both are omitted.
    """
    before, after = old.list_edges(), new.list_edges()
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    yield from ((-1, edge) for edge in before[same:])
    yield from ((1, edge) for edge in after[same:])


def make_contribution(attempt: JobAttempt, inventory: PoolInventory | None = None) -> Contribution | None:
    """Return the demand that an attempt adds to the series.

    Returns None if the attempt needs no GPUs, or if its arrival is not known yet. inventory: the pools of
    machines.
    """
    milli, stated = min(count_wanted_milli(attempt), MOST), attempt.submission
    if milli <= 0 or (attempt.eligible_ms is None and attempt.started_ms is None):
        return None
    if attempt.tasks != 1 and attempt.over_ms is not None:
        return None  # it stood for tasks that count by their own names now
    return Contribution(
        attempt.queue,
        milli,
        attempt.attempt <= 1 and not attempt.has_unseen_start,
        attempt.eligible_ms,
        attempt.started_ms,
        attempt.over_ms,
        attempt.class_,
        (stated.group or stated.user) if stated else "",
        attempt.queues[1:],
        attempt.tasks,
        inventory.weigh_pools(attempt) if inventory is not None else (),
        inventory.list_allowed_pools(attempt) if inventory is not None else (),
        waits_for_quota(attempt.queued_reason),
    )


def sum_over_quota(changes: Iterable[Contribution]) -> dict[DemandScope, float]:
    """Return scope → the number of GPUs of its attempts that wait for a quota."""
    found: Counter[DemandScope] = Counter()
    for change in changes:
        if change.waits_for_quota:
            for scope in (*change.list_scopes(), *(scope for scope, _ in change.split_by_pool())):
                found[scope] += change.milli
    return {scope: milli / WHOLE_GPU for scope, milli in found.items()}


def find_allowed_pools(changes: Iterable[Contribution]) -> dict[str, frozenset[str]]:
    """Return queue → the pools in which its attempts may run.

    Omits queues with an attempt that may run anywhere.
    """
    found: dict[str, set[str]] = {}
    anywhere: set[str] = set()
    for change in changes:
        for queue in (change.queue, *change.others):
            found.setdefault(queue, set()).update(change.allowed)
            if not change.allowed:
                anywhere.add(queue)
    return {queue: frozenset(pools) for queue, pools in found.items() if queue not in anywhere}
