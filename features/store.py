"""WindowStore: recent telemetry of all entities, with one ring for each kind.

The write rule: a sample counts only if it is newer than the newest one of its series. So three things do not
change the final state: repeats, replaying samples over a snapshot, and other batches with the same order within
each series. A slot holds its newest gauge. Counters become rates on arrival. Events add up.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.layout import BUCKET_MS, RingSpan, make_layout
from fleetcast.features.ring import NEVER, Ring
from fleetcast.features.store_files import SEGMENTS, OtherIntervalError, StoreError, make_save_steps, read_store
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import LARGEST_VALUE, METRICS, explain_implausible_value, list_plausible_ranges
from fleetcast.fleet.samples import EntityKind, SampleBatch

__all__ = ["OtherIntervalError", "StoreError", "WindowStore", "WrittenSamples"]

MAX_GAPS = 16


@dataclass(frozen=True, slots=True)
class WrittenSamples:
    """The outcome of a write: the numbers of samples by result.

    sure: (n,) bool, true for each sample of `taken` that is certain to be new.
    """

    applied: int = 0
    late: int = 0
    future: int = 0  # bad records, as are those not finite and implausible
    not_finite: int = 0
    implausible: tuple[RecordError, ...] = field(default=(), compare=False)
    taken: SampleBatch | None = field(default=None, compare=False, repr=False)  # applied or late
    sure: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_), compare=False, repr=False)


class WindowStore:
    """The recent telemetry of all entities. Only one task may change it.

    Its rings grow with `entities`. No entity is removed: the slots of a silent entity become empty.
    """

    def __init__(
        self,
        entities: Entities,
        *,
        interval_s: float = 15.0,
        fine_slots: int = 120,
        future_limit_s: float = 60.0,
    ) -> None:
        self.entities = entities
        self.span = RingSpan(round(interval_s * 1000), fine_slots, round(future_limit_s * 1000))
        self.rings: dict[EntityKind, Ring] = {}
        self.gaps: list[tuple[int, int]] = []  # until when nobody listened, and for how long, ms; in order of time
        self._files: list[Path] = []  # slot files of the last save; empty: the next one writes everything
        self._saves = self._steps = 0
        self._moved_ms = -1  # the newest sample before the clock was last set back

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.rings.values())

    def ring(self, kind: EntityKind) -> Ring:
        """Return the ring of a kind, with room for all its entities."""
        ring = self.rings.get(kind)
        if ring is None:
            ring = self.rings[kind] = Ring(make_layout(kind), self.span)
        ring.reserve(len(self.entities[kind]))
        return ring

    def write(self, batch: SampleBatch, now_ms: int) -> WrittenSamples:
        """Apply samples that are newer than the newest one of their series, in order. Count all others by reason."""
        good, future, garbage, odd = self._select_valid_samples(batch, now_ms)
        taken = batch if good is None else batch.select_samples(good)
        if not len(taken):
            return WrittenSamples(0, 0, future, garbage, odd)
        metric, entity = taken.metric.astype(np.intp), taken.entity.astype(np.intp)
        ring = self.ring(batch.kind)
        ring.advance(now_ms, int(taken.time_ms.max()))
        newer = np.empty(len(taken), np.bool_)
        for part in _split_repeated_series(ring, metric, entity):
            newer[part] = ring.apply(metric[part], entity[part], taken.time_ms[part], taken.value[part])
        applied = int(np.count_nonzero(newer))
        if self._moved_ms >= 0:
            newer &= taken.time_ms > self._moved_ms
        return WrittenSamples(applied, len(taken) - applied, future, garbage, odd, taken, newer)

    def _select_valid_samples(
        self, batch: SampleBatch, now_ms: int
    ) -> tuple[NDArray[np.bool_] | None, int, int, tuple[RecordError, ...]]:
        """Return (n,) bool, true for valid samples, or None if all are valid. Also return facts about the others.

        The facts are the number of samples ahead of the clock, the number of samples that are not finite, and
        the errors of implausible samples.
        """
        low, high = list_plausible_ranges(batch.kind)
        ahead = batch.time_ms > now_ms + self.span.future_ms
        good = (batch.value >= low[batch.metric]) & (batch.value <= high[batch.metric]) & ~ahead
        if good.all():
            return None, 0, 0, ()
        good |= (batch.value == 0) & ~ahead
        finite = np.abs(batch.value) <= LARGEST_VALUE
        odd = self._explain_implausible_samples(batch, np.flatnonzero(finite & ~ahead & ~good))
        return good, int(ahead.sum()), int((~finite & ~ahead).sum()), odd

    def _explain_implausible_samples(self, batch: SampleBatch, rows: NDArray[np.intp]) -> tuple[RecordError, ...]:
        """Return one error for each of the implausible samples `rows`.

        The errors of one metric are the same object, which names the metric's first row.
        """
        errors: list[RecordError] = []
        metrics, first, count = np.unique(batch.metric[rows], return_index=True, return_counts=True)
        for metric, row, many in zip(metrics.tolist(), rows[first].tolist(), count.tolist(), strict=True):
            why = explain_implausible_value(METRICS[batch.kind][metric], float(batch.value[row]))
            name = self.entities[batch.kind].names[batch.entity[row]]
            errors += [RecordError("implausible", f"{name}: {why}")] * many
        return tuple(errors)

    def advance(self, now_ms: int) -> None:
        """Advance all rings to `now_ms`, so that slots close and become empty even if no sample arrives."""
        for ring in self.rings.values():
            ring.advance(now_ms)

    def record_downtime(self, until_ms: int, for_ms: int) -> None:
        """Record our own downtime of `for_ms` up to `until_ms`, so that it does not count as silence.

        `features/extract.py` excludes such times.
        """
        self.gaps = [*self.gaps, (until_ms, for_ms)][-MAX_GAPS:]

    def move_times_back(self, now_ms: int, by_ms: int) -> bool:
        """Move all times back by `by_ms` because the clock was set back. Return whether they moved.

        If no sample is ahead of the clock, the senders use another clock, and nothing moves.
        """
        newest_ms = max((int(ring.time_ms.max(initial=-1)) for ring in self.rings.values()), default=-1)
        if newest_ms <= now_ms:
            return False
        self._moved_ms = max(self._moved_ms, newest_ms)
        for ring in self.rings.values():
            _move_ring_back(ring, by_ms)
        self.gaps = [(until_ms - by_ms, for_ms) for until_ms, for_ms in self.gaps]
        self._files, self._steps = [], self._steps + 1
        return True

    def iterate_save_steps(self, folder: Path, *, becomes: Path | None = None) -> Iterator[Callable[[], None]]:
        """Yield the steps of a save into `folder`, as functions (see `store_files.make_save_steps`).

        The folder may hold the previous save. Each function may raise OSError. After an unfinished save, the next save
        writes everything. becomes: the path to which the caller renames the folder.
        """
        self._saves += 1
        number, files = self._saves, self._files
        there = len(files) < SEGMENTS and all(path.exists() for path in files)
        files, self._files = files if there else [], []
        steps = self._steps
        for work in make_save_steps(self.entities, self.span, self.rings, folder, files):
            if steps != self._steps:
                raise OSError("the clock was set back in the middle of it")
            yield work
        if (number, steps) == (self._saves, self._steps):  # none has begun meanwhile: the next save adds to this one
            self._files = [(becomes or folder) / path.name for path in files]

    def save(self, folder: Path) -> None:
        """Save the store at once: run all steps of `iterate_save_steps`."""
        for work in self.iterate_save_steps(folder):
            work()

    @classmethod
    def load(
        cls, folder: Path, *, interval_s: float | None = None, future_limit_s: float | None = None
    ) -> "WindowStore":
        """Load a store with its own entities. Each entity keeps its row.

        future_limit_s: the new limit, or None for the saved one. Raises StoreError if the store is missing or torn,
        and OtherIntervalError if its slots have another interval.
        """
        entities, span, rings = read_store(folder, None if future_limit_s is None else round(future_limit_s * 1000))
        if interval_s is not None and round(interval_s * 1000) != span.interval_ms:
            raise OtherIntervalError(f"{folder} has slots of {span.interval_ms} ms, wanted {interval_s} s", entities)
        store = cls(entities)
        store.span, store.rings = span, rings
        return store


def _split_repeated_series(
    ring: Ring, metric: NDArray[np.intp], entity: NDArray[np.intp]
) -> Iterator[NDArray[np.intp] | slice]:
    """Yield the rows of a batch in parts in which no series occurs twice.

    Part k holds the k-th sample of each series.
    """
    key = metric * ring.capacity + entity
    if not ring.has_repeated_series(key):
        yield slice(None)
        return
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    rank = np.arange(len(key)) - np.repeat(starts, np.diff(np.r_[starts, len(key)]))
    by_rank = np.argsort(rank, kind="stable")
    for part in np.split(order[by_rank], np.cumsum(np.bincount(rank))[:-1]):
        yield np.sort(part)


def _move_ring_back(ring: Ring, by_ms: int) -> None:
    """Move all times of a ring back by `by_ms`. Slots and buckets move by whole slots.

        before   slots … 97 98 99 100          the clock said 100, and is set back by 40
        after    slots … 57 58 59  60 61 …     stored values keep their age, and later samples are newer

    Without this, a series would accept no sample until the clock has again passed the time of its newest one.
    """
    if ring.head < 0:
        return
    slots = round(by_ms / ring.span.interval_ms)
    buckets = ring.newest_bucket - (ring.head - slots) * ring.span.interval_ms // BUCKET_MS
    for times, never in ((ring.time_ms, -1), (ring.changed_ms, 0), (ring.first_seen_ms, NEVER)):
        times[times != never] -= by_ms
    _move_slots_back(ring.fine, slots, ring.first_slot, ring.head)
    _move_slots_back(ring.events, slots, ring.first_slot, ring.head)
    _move_slots_back(ring.coarse, buckets, ring.first_bucket, ring.newest_bucket)
    ring.head -= slots
    ring.closed = min(ring.closed - slots, ring.head)
    ring.first_slot -= slots
    ring.first_bucket -= buckets
    ring.touched_slot = ring.touched_bucket = 0
    ring.dirty[: ring.size] = True


def _move_slots_back(rows: np.ndarray, by: int, first: int, newest: int) -> None:
    """Move slot s of `first … newest` to s - by, in the ring (row, slot, entity).

    The other slots were never opened. It moves one row at a time, so that it needs little memory.
    """
    length = rows.shape[1]
    opened = np.arange(max(first, newest - length + 1), newest + 1)
    for row in rows:
        row[(opened - by) % length] = row[opened % length]
