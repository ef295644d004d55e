"""ShownSizes: how much of the GPUs attempts hold, where the occupancy shows another amount than their events state."""

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from features.contribution import Contribution, Key, contribution
from features.pool_inventory import PoolInventory
from fleet.jobs import JobAttempt
from fleet.stateful import Dump, Stateful

MOST_SIZES = 20_000  # attempts, most of them at rest: the oldest goes first


class ShownSizes(Stateful):
    """Attempt → thousandths of GPUs. An attempt that ends keeps its size."""

    def __init__(self) -> None:
        self._milli: dict[Key, int] = {}

    def contribution(self, attempt: JobAttempt, inventory: PoolInventory) -> Contribution | None:
        """Return what an attempt adds, with the size that the occupancy showed, if it did."""
        change, milli = contribution(attempt, inventory), self._milli.get((attempt.job, attempt.attempt))
        return change if change is None or milli is None else replace(change, milli=milli)

    def outdated(self, shown: Mapping[Key, int], known: Mapping[Key, Contribution]) -> list[Key]:
        """Return the attempts that still run and that the occupancy shows no more: their events state their size."""
        gone = (self._milli.keys() & known.keys()) - shown.keys()
        return [key for key in gone if known[key].ended_ms is None]

    def drop(self, key: Key) -> None:
        """Drop the size of an attempt."""
        del self._milli[key]

    def note(self, shown: Mapping[Key, int], known: Mapping[Key, Contribution]) -> Iterator[tuple[Key, Contribution]]:
        """Record the sizes that the occupancy shows. Yield what the attempts add whose size is new."""
        for key, milli in shown.items():
            change = known.get(key)
            if change is not None and change.milli != milli:
                self._milli[key] = milli
                yield key, replace(change, milli=milli)

    def rest(self, key: Key, awake: Container[Key]) -> None:
        """Make an attempt the newest of those at rest, and drop the oldest if there are too many."""
        if key in self._milli:
            self._milli[key] = self._milli.pop(key)
            if len(self._milli) > MOST_SIZES:
                del self._milli[next(key for key in self._milli if key not in awake)]

    def dump(self) -> Dump:
        return {"sizes": [(*key, milli) for key, milli in self._milli.items()]}, {}

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._milli = {(job, attempt): milli for job, attempt, milli in about["sizes"]}
