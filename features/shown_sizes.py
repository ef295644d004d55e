"""OccupiedSizes: the GPUs of attempts that hold more or fewer GPUs than their events state."""

from collections.abc import Callable, Container, Iterator, Mapping, Set
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from fleetcast.features.contribution import Contribution, Key, make_contribution
from fleetcast.features.pool_inventory import PoolInventory
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.stateful import Dump, Stateful

AttemptOf = Callable[[str, int], JobAttempt | None]  # job, attempt
NO_KEYS: Set[Key] = frozenset()
MOST_SIZES = 20_000  # attempts, most of them at rest: the oldest goes first


class OccupiedSizes(Stateful):
    """Attempt → the thousandths of GPUs that it really occupies. An ended attempt keeps its size.

    If the end of an attempt is reported late, other attempts already hold some of its GPUs. Such a
    displaced attempt counts with the GPUs that remain. Once its end is known, it counts with the GPUs
    in its events, because it held them while it ran.
    """

    def __init__(self) -> None:
        self._milli: dict[Key, int] = {}
        self._displaced: set[Key] = set()  # of these

    def make_contribution(self, attempt: JobAttempt, inventory: PoolInventory) -> Contribution | None:
        """Return an attempt's contribution, with its size by occupancy if known."""
        key = attempt.job, attempt.attempt
        if attempt.over_ms is not None and key in self._displaced:
            self.drop_size(key)
        change, milli = make_contribution(attempt, inventory), self._milli.get(key)
        return change if change is None or milli is None else replace(change, milli=milli)

    def find_outdated_attempts(self, shown: Mapping[Key, int], known: Mapping[Key, Contribution]) -> list[Key]:
        """Return the running attempts whose GPUs agree with their events again.

        shown: attempt → thousandths of GPUs by occupancy, where this size differs from the events. known: the attempts
        that may still change.
        """
        gone = (self._milli.keys() & known.keys()) - shown.keys()
        return [key for key in gone if known[key].ended_ms is None]

    def drop_size(self, key: Key) -> None:
        """Drop the size of an attempt."""
        del self._milli[key]
        self._displaced.discard(key)

    def record(
        self, shown: Mapping[Key, int], displaced: Set[Key], known: Mapping[Key, Contribution]
    ) -> Iterator[tuple[Key, Contribution]]:
        """Record the sizes by occupancy, and yield the new contribution of each attempt whose size changed."""
        for key, milli in shown.items():
            change = known.get(key)
            if change is None or (change.ended_ms is not None and key in displaced):
                continue
            if change.milli != milli:
                self._milli[key] = milli
                yield key, replace(change, milli=milli)
        self._displaced = (self._displaced - shown.keys()) | (displaced & self._milli.keys())

    def move_to_newest(self, key: Key, awake: Container[Key]) -> None:
        """Move an ended attempt to the end of the order, and drop the oldest one if there are too many.

        awake: the attempts that may still change. They are never dropped.
        """
        if key in self._milli:
            self._milli[key] = self._milli.pop(key)
            if len(self._milli) > MOST_SIZES:
                self.drop_size(next(key for key in self._milli if key not in awake))

    def dump(self) -> Dump:
        sizes = [(*key, milli) for key, milli in self._milli.items()]
        return {"sizes": sizes, "displaced": sorted(self._displaced)}, {}

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._milli = {(job, attempt): milli for job, attempt, milli in about["sizes"]}
        self._displaced = {(job, attempt) for job, attempt in about.get("displaced", ())}
