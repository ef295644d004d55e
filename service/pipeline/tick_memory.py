"""The memory of a tick: results of the previous tick, with the objects that they were made from."""

from collections.abc import Callable, Iterable, Mapping
from operator import is_
from typing import Any, Generic, TypeVar, cast

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.service.pipeline.occupancy import OccupancyMemory

T = TypeVar("T")
NOTHING_BESIDE: Mapping[tuple[str, int], object] = {}


class AttemptRows(Generic[T]):
    """Rows of attempts, made again only if something new about the attempt has arrived.

    The attempts of a tick are copies that never change. An attempt without news is the same object as in the
    last tick.
    """

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._attempts: tuple[JobAttempt, ...] = ()
        self._beside: tuple[object, ...] = ()  # of each attempt
        self._rows: list[T] = []  # of each attempt

    def of(
        self,
        attempts: Iterable[JobAttempt],
        make: Callable[[JobAttempt], T],
        of: tuple[object, ...] = (),
        beside: Mapping[tuple[str, int], object] = NOTHING_BESIDE,
    ) -> list[T]:
        """Return the rows of these attempts, in order.

        of: other objects that all rows depend on. beside: by attempt, the object that its row depends on.
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


class TickMemory:
    """Results that depend only on a few objects, such as the topology and the placements, not on the time."""

    def __init__(self) -> None:
        self.occupancy = OccupancyMemory()
        self._rows: dict[str, AttemptRows[Any]] = {}
        self._made: dict[str, tuple[tuple[object, ...], object]] = {}

    def recall(self, name: str, of: tuple[object, ...], make: Callable[[], T]) -> T:
        """Return the result of `make`, from memory if all objects in `of` are the same as at the last call.

        name: identifies the result, and only one caller uses it. The caller changes neither the result nor the
        objects.
        """
        before = self._made.get(name)
        if before is None or not _are_same(before[0], of):
            before = self._made[name] = (of, make())
        return cast(T, before[1])

    def rows(self, name: str) -> AttemptRows[Any]:
        """Return the rows of attempts that one caller remembers under this name."""
        return self._rows.setdefault(name, AttemptRows())
