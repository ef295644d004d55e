"""The cache of a tick: results of the previous tick, with the objects from which they were made."""

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, Generic, TypeVar, cast

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.service.pipeline.occupancy import OccupancyCache

K = TypeVar("K")
T = TypeVar("T")
NOTHING_BESIDE: Mapping[tuple[str, int], object] = {}


class AttemptRows(Generic[T]):
    """A cache of one row for each attempt. A row is made again only if the attempt has changed.

    The attempts of a tick are copies that never change. An attempt without changes is the same object as in
    the last tick.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._attempts: tuple[JobAttempt, ...] = ()
        self._beside: tuple[object, ...] = ()  # of each attempt
        self._rows: list[T] = []  # of each attempt

    def get_rows(
        self,
        attempts: Iterable[JobAttempt],
        make: Callable[[JobAttempt], T],
        of: tuple[object, ...] = (),
        beside: Mapping[tuple[str, int], object] = NOTHING_BESIDE,
    ) -> list[T]:
        """Return the rows of these attempts, in order. Calls `make` only for rows that are new or have changed.

        of: other objects on which all rows depend. beside: attempt → another object on which its row depends.
        """
        attempts, is_valid = tuple(attempts), _are_same(self._of, of)
        others = tuple([beside.get((row.job, row.attempt)) for row in attempts]) if beside else (None,) * len(attempts)
        if not (is_valid and _are_same(self._attempts, attempts) and _are_same(self._beside, others)):
            known = zip(self._beside, self._rows, strict=True)
            before = dict(zip(map(id, self._attempts), known, strict=True)) if is_valid else {}
            self._rows = [
                row[1] if (row := before.get(id(attempt))) is not None and row[0] is other else make(attempt)
                for attempt, other in zip(attempts, others, strict=True)
            ]
            self._of, self._attempts, self._beside = of, attempts, others
        return self._rows.copy()


def _are_same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return len(before) == len(now) and all(map(is_, before, now))


class TickCache:
    """A cache of results that depend on a few objects, but not on the time.

    Examples of such objects are the topology and the placements.
    """

    def __init__(self) -> None:
        self.occupancy = OccupancyCache()
        self._rows: dict[str, AttemptRows[Any]] = {}
        self._shared: dict[str, object] = {}
        self._made: dict[str, tuple[tuple[object, ...], object]] = {}

    def get_or_make(self, name: str, of: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the result of `make`. It is called only if an object in `of` has changed since the last call.

        name: identifies the result. Only one caller uses it. The caller changes neither the result nor the
        objects.
        """
        before = self._made.get(name)
        if before is None or not _are_same(before[0], of):
            before = self._made[name] = (of, make())
        return cast(T, before[1])

    def share_equal_values(self, name: str, rows: dict[K, dict[str, int]]) -> dict[K, dict[str, int]]:
        """Put the object of the last call in place of each value that equals it, in the same order. Returns `rows`.

        So a value is the same object until it changes. name: as in `get_or_make`.
        """
        before = cast(dict[K, dict[str, int]], self._shared.get(name, {}))
        for key, value in rows.items():
            known = before.get(key)
            if known is not None and known == value and list(known) == list(value):
                rows[key] = known
        self._shared[name] = rows
        return rows

    def get_row_cache(self, name: str) -> AttemptRows[Any]:
        """Return the row cache of one caller. `name` identifies the caller."""
        return self._rows.setdefault(name, AttemptRows())
