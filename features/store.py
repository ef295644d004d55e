"""WindowStore: recent telemetry of all entities, as rings per (kind, resolution).

The write rule: a sample is applied if and only if its time is newer than the last of its series. So applying
everything twice, a snapshot plus an overlapping replay, and any re-batching that keeps each series' order end in the
same state. Counters become rates at the door, reset-, wrap- and saturation-aware; gauges are stored. Several samples
of a gauge in one slot: the newest wins; increments of event counters add up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from features.clock_step import move_back
from features.layout import Span, layout_of
from features.ring import Ring
from features.store_files import SEGMENTS, OtherIntervalError, StoreError, read_store, save_store
from fleet.entities import Entities
from fleet.samples import EntityKind, SampleBatch

__all__ = ["OtherIntervalError", "StoreError", "WindowStore", "Written"]

GAPS_KEPT = 16
LARGEST_VALUE = 1e30  # beyond it a value is garbage, and float32 is near its end


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a batch's samples. `future` and `not_finite` are bad records, `late` ones are not."""

    applied: int = 0
    late: int = 0
    future: int = 0
    not_finite: int = 0

    def __add__(self, other: "Written") -> "Written":
        return Written(
            self.applied + other.applied,
            self.late + other.late,
            self.future + other.future,
            self.not_finite + other.not_finite,
        )


class WindowStore:
    """One writer. Room grows with `entities`; nothing is removed, a silent entity's slots run empty."""

    def __init__(
        self,
        entities: Entities,
        *,
        interval_s: float = 15.0,
        fine_slots: int = 120,
        future_limit_s: float = 60.0,
    ) -> None:
        self.entities = entities
        self.span = Span(round(interval_s * 1000), fine_slots, round(future_limit_s * 1000))
        self.rings: dict[EntityKind, Ring] = {}
        self.gaps: list[tuple[int, int]] = []  # until when nobody listened, and for how long, ms; in order of time
        self._files: list[Path] = []  # slot files of the last save; empty: the next one writes everything
        self._saves = self._steps = 0

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings.values())

    def ring(self, kind: EntityKind) -> Ring:
        """The ring of a kind, with room for all its entities."""
        ring = self.rings.get(kind)
        if ring is None:
            ring = self.rings[kind] = Ring(layout_of(kind), self.span)
        ring.reserve(len(self.entities[kind]))
        return ring

    def write(self, batch: SampleBatch, now_ms: int) -> Written:
        """Apply what is newer than the last of its series, in the batch's order; count the rest by reason."""
        finite = np.abs(batch.value) < LARGEST_VALUE
        ahead = batch.time_ms > now_ms + self.span.future_ms
        good = finite & ~ahead
        metric, entity = batch.metric.astype(np.intp), batch.entity.astype(np.intp)
        time_ms, value = batch.time_ms, batch.value
        future = int(ahead.sum())
        garbage = len(batch) - future - int(good.sum())
        if not good.all():
            metric, entity, time_ms, value = metric[good], entity[good], time_ms[good], value[good]
        if not len(time_ms):
            return Written(future=future, not_finite=garbage)
        ring = self.ring(batch.kind)
        ring.advance(now_ms, int(time_ms.max()))
        applied = 0
        for part in _rounds(ring, metric, entity):
            applied += ring.apply(metric[part], entity[part], time_ms[part], value[part])
        return Written(applied, len(time_ms) - applied, future, garbage)

    def advance(self, now_ms: int) -> None:
        """Let time pass: slots close and empty also where no sample arrives."""
        for ring in self.rings.values():
            ring.advance(now_ms)

    def was_deaf(self, until_ms: int, for_ms: int) -> None:
        """Nobody listened for that long: silence does not count meanwhile (see `features.extract`)."""
        self.gaps = [*self.gaps, (until_ms, for_ms)][-GAPS_KEPT:]

    def clock_went_back(self, now_ms: int, by_ms: int) -> bool:
        """Move all that is known back with a clock that was set back by `by_ms`, if it was seen by that clock.

        False when no sample lies ahead of it: then whoever sent them has another clock, and nothing is moved.
        """
        newest_ms = max((int(ring.time_ms.max(initial=-1)) for ring in self.rings.values()), default=-1)
        if newest_ms <= now_ms:
            return False
        for ring in self.rings.values():
            move_back(ring, by_ms)
        self.gaps = [(until_ms - by_ms, for_ms) for until_ms, for_ms in self.gaps]
        self._files, self._steps = [], self._steps + 1
        return True

    def saving(self, folder: Path, *, becomes: Path | None = None) -> Iterator[Callable[[], None]]:
        """The works that save into `folder` everything a restart needs; it may hold the previous save.

        The store may be written while they are under way, but not while the next one is taken: see
        `features.store_files`. A work raises OSError; then, and when the works are not all done, the next save
        holds everything again. `becomes`: where the caller will move the folder to.
        """
        self._saves += 1
        number, files = self._saves, self._files
        there = len(files) < SEGMENTS and all(path.exists() for path in files)
        files, self._files = files if there else [], []
        steps = self._steps
        for work in save_store(self, folder, files):
            if steps != self._steps:
                raise OSError("the clock was set back in the middle of it")
            yield work
        if (number, steps) == (self._saves, self._steps):  # none has begun meanwhile: the next save adds to this one
            self._files = [(becomes or folder) / path.name for path in files]

    def save(self, folder: Path) -> None:
        """All works of `saving`, at once."""
        for work in self.saving(folder):
            work()

    @classmethod
    def load(
        cls, folder: Path, *, interval_s: float | None = None, future_limit_s: float | None = None
    ) -> "WindowStore":
        """The store of a folder, with entities of its own in their old rows; `future_limit_s` None: as it was saved.

        Raises StoreError when it is missing or torn, OtherIntervalError when it was cut at another than the wanted one.
        """
        entities, span, rings = read_store(folder, None if future_limit_s is None else round(future_limit_s * 1000))
        if interval_s is not None and round(interval_s * 1000) != span.interval_ms:
            raise OtherIntervalError(f"{folder} has slots of {span.interval_ms} ms, wanted {interval_s} s", entities)
        store = cls(entities)
        store.span, store.rings = span, rings
        return store


def _rounds(ring: Ring, metric: NDArray[np.intp], entity: NDArray[np.intp]) -> Iterator[NDArray[np.intp] | slice]:
    """Cut a batch so that no series occurs twice in a part: the k-th part holds each series' k-th sample."""
    key = metric * ring.capacity + entity
    if not ring.repeats(key):
        yield slice(None)
        return
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rank = np.arange(len(key)) - np.repeat(starts, np.diff(np.r_[starts, len(key)]))
    by_rank = np.argsort(rank, kind="stable")
    for part in np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1]):
        yield np.sort(part)
