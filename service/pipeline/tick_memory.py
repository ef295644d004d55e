"""The memory of a tick: results of the previous tick, with the objects that they were made from."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar, cast

from fleet.jobs import JobAttempt
from service.pipeline.occupancy import OccupancyMemory

T = TypeVar("T")
NOTHING_BESIDE: Mapping[tuple[str, int], object] = {}


class AttemptRows(Generic[T]):
    """Rows of attempts, made again only if something new about the attempt has arrived.

    The attempts of a tick are copies that never change. An attempt without news is the same object as in the
    last tick.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[JobAttempt, object, T]] = {}  # by identity of the attempt, which the row holds
        self._of: tuple[object, ...] = ()

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
        before = self._rows if _are_same(self._of, of) else {}
        self._rows, self._of, rows = {}, of, list[T]()
        for attempt in attempts:
            known = before.get(id(attempt))
            other = beside.get((attempt.job, attempt.attempt)) if beside else None
            if known is None or known[1] is not other:
                known = (attempt, other, make(attempt))
            self._rows[id(attempt)] = known
            rows.append(known[2])
        return rows


def _are_same(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    return len(before) == len(now) and all(a is b for a, b in zip(before, now, strict=True))


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
