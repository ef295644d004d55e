"""The circuit breaker: how many GPUs actions may take from running jobs within an hour.

It counts the actions that are sent. GPUs on lost nodes do not count: no decision took them, and their gang restarts
with or without an action. Otherwise the loss of one rack would open the breaker just when recovery is needed. The first
set beyond a limit is not sent, and opens the breaker. From then on nothing is sent until a person resets the breaker.
A reset also drops the counts. So the limits hold in every hour without a reset.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from fleetcast.placement.actions.action import JobAction

WINDOW_MS = 3_600_000
BUCKET_MS = 60_000  # uses within a minute are counted together, until the last of them is an hour old
SLACK = 1e-9
NO_LIMIT = 1.0  # a share of all GPUs sets no limit: a job that starts again may be stopped again within the hour


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """The largest shares of the capacity that actions may take within an hour: of one queue, and of the fleet.

    A share of 1 is no limit.
    """

    queue_share: float = 0.10
    fleet_share: float = 0.05


@dataclass(frozen=True, slots=True)
class BreakerCapacity:
    """The GPUs of the fleet, and of queues by leaf. The fleet's number applies to a queue without an entry."""

    fleet_gpus: float
    queue_gpus: Mapping[str, float]

    def find_queue_gpus(self, queue: str) -> float:
        return self.queue_gpus.get(queue, self.fleet_gpus)


class FreedGpus(msgspec.Struct, frozen=True, array_like=True):
    """The GPUs that actions freed of a queue within a minute that ends at `until_ms`."""

    until_ms: int
    queue: str
    gpus: float


class CircuitBreaker(msgspec.Struct, frozen=True):
    """The state of the circuit breaker. why: the reason why it is open, "" while it is closed."""

    taken: tuple[FreedGpus, ...] = ()
    opened_ms: int | None = None
    why: str = ""

    @property
    def is_open(self) -> bool:
        return self.opened_ms is not None

    def explain_excess(self, action: JobAction, now_ms: int, capacity: BreakerCapacity, limits: BreakerLimits) -> str:
        """Return the limit that sending this action would exceed, in words. Returns "" if there is none."""
        gpus = {action.queue: action.taken_gpus} if action.taken_gpus else {}
        return self.explain_excess_of_set(gpus, now_ms, capacity, limits)

    def explain_excess_of_set(
        self, gpus_by_queue: Mapping[str, float], now_ms: int, capacity: BreakerCapacity, limits: BreakerLimits
    ) -> str:
        """Return the limit that taking all these GPUs together would exceed, in words. Returns "" if there is none.

        Nothing may be taken of a fleet of unknown size.
        """
        taken = [row for row in self.taken if row.until_ms + WINDOW_MS > now_ms]
        rows = [
            (
                f"queue {queue!r}",
                "taken_queue_share",
                sum(row.gpus for row in taken if row.queue == queue) + gpus,
                *(limits.queue_share, capacity.find_queue_gpus(queue)),
            )
            for queue, gpus in sorted(gpus_by_queue.items())
            if limits.queue_share < NO_LIMIT
        ]
        whole = sum(row.gpus for row in taken) + sum(gpus_by_queue.values())
        if gpus_by_queue and (limits.fleet_share < NO_LIMIT or not capacity.fleet_gpus > 0):
            rows.append(("the fleet", "taken_fleet_share", whole, limits.fleet_share, capacity.fleet_gpus))
        for what, key, sum_gpus, share, of in rows:
            if not sum_gpus <= share * of + SLACK:
                said = f"{sum_gpus:g} GPUs of {what} within an hour are more than {share:.1%} of its {of:g}"
                return f"{said} (placer.{key})"
        return ""

    def count(self, action: JobAction, now_ms: int) -> "CircuitBreaker":
        """Return a copy of the breaker that also counts an action that is sent."""
        if not action.taken_gpus:
            return self
        until_ms = (now_ms // BUCKET_MS + 1) * BUCKET_MS
        taken = {(row.until_ms, row.queue): row.gpus for row in self.taken if row.until_ms + WINDOW_MS > now_ms}
        key = (until_ms, action.queue)
        taken[key] = taken.get(key, 0.0) + action.taken_gpus
        return msgspec.structs.replace(self, taken=tuple(FreedGpus(*key, gpus) for key, gpus in taken.items()))

    def open(self, why: str, now_ms: int) -> "CircuitBreaker":
        return msgspec.structs.replace(self, opened_ms=now_ms, why=why)

    def shift(self, by_ms: int) -> "CircuitBreaker":
        """Return a copy of the breaker with all times shifted, after the clock was set by `by_ms`."""
        taken = tuple(FreedGpus(row.until_ms + by_ms, row.queue, row.gpus) for row in self.taken)
        return msgspec.structs.replace(self, taken=taken)
