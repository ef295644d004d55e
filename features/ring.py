"""Ring: the recent samples of all entities of one kind.

All arrays have the entity last, so a row of one metric and slot is contiguous over entities. Per GPU (50 metrics, 126
fine slots of 11 values and nine event counters, 144 ten-minute means of nine metrics) that is about 17 KiB.

    time_ms, raw, changed_ms   (metric, entity)        newest sample of a series: when, what, since when this value
    rate                       (counter, entity)       newest rate per second, NaN before the second reading
    fine                       (value, slot, entity)   newest gauge or rate of a slot, for metrics whose slots are read
    events                     (event, slot, entity)   exact increments, added up
    coarse                     (day, bucket, entity)   mean over 10 minutes, written as a series leaves the bucket;
                                                       of the present one: bucket_total / bucket_count
    first_seen_ms              (entity,)               earliest first sample of any of its series

One call writes at most one sample per series. A sample is stored in the slot and bucket of its event time,
however late it arrives. Only the order within a series matters. Slots before `first_slot` and buckets before
`first_bucket` were never opened: no code may read or write their cells, for which the system has not allocated
memory yet. So a large fleet starts at once, and its rings grow as time passes.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.counters import compute_increments
from fleetcast.features.layout import BUCKET_MS, BUCKETS, OPEN_SLOTS, Layout, RingSpan
from fleetcast.features.ring_arrays import find_ring_slices, widen_array, widen_open_slots
from fleetcast.features.sums import EventSums, ValueSums, find_largest

NEVER = np.iinfo(np.int64).max
STRIPES = 128  # one part of the entities is summed anew as each slot closes, so that rounding never builds up
LARGEST_INCREMENT = float(np.iinfo(np.uint32).max)


class Ring:
    """The recent samples of all entities of one kind. Only one task may change it.

    size: the number of entities. capacity: the number of entities that fit. head: the newest open slot.
    """

    def __init__(self, layout: Layout, span: RingSpan) -> None:
        self.layout = layout
        self.span = span
        self.size = 0
        self.capacity = 0
        self.head = -1
        self.closed = -1
        self.first_slot = self.first_bucket = 0  # the oldest that are open; up to `head` and `newest_bucket` all are
        self.touched_slot = 0  # the oldest slot and bucket written since they were last saved
        self.touched_bucket = 0
        metrics, values, days = len(layout.metrics), len(layout.values), len(layout.days)
        self.time_ms: NDArray[np.int64] = np.empty((metrics, 0), np.int64)
        self.raw: NDArray[np.float64] = np.empty((metrics, 0), np.float64)
        self.changed_ms: NDArray[np.int64] = np.empty((metrics, 0), np.int64)
        self.rate: NDArray[np.float32] = np.empty((len(layout.counters), 0), np.float32)
        self.fine: NDArray[np.float32] = np.empty((values, span.slots, 0), np.float32)
        self.events: NDArray[np.uint32] = np.empty((len(layout.events), span.slots, 0), np.uint32)
        self.coarse: NDArray[np.float32] = np.empty((days, BUCKETS, 0), np.float32)
        self.bucket_total: NDArray[np.float64] = np.empty((days, 0), np.float64)
        self.bucket_count: NDArray[np.int32] = np.empty((days, 0), np.int32)
        self.first_seen_ms: NDArray[np.int64] = np.empty(0, np.int64)
        self.mark: NDArray[np.int32] = np.empty((metrics, 0), np.int32)
        self.dirty: NDArray[np.bool_] = np.empty(0, np.bool_)
        lengths = (span.count_window_slots(120) - OPEN_SLOTS, span.count_window_slots(1800) - OPEN_SLOTS)
        self.value_sums = ValueSums(layout.summed, lengths)
        lengths = (span.count_window_slots(600) - OPEN_SLOTS, span.count_window_slots(1800) - OPEN_SLOTS)
        self.event_sums = EventSums(len(layout.events), lengths)

    # -- room ---------------------------------------------------------------------------------------------------

    def reserve(self, size: int) -> None:
        """Make room for `size` entities.

        If the arrays must grow, they are copied and grow by at least an eighth.
        """
        if size > self.capacity:
            grown = max(size, self.capacity + self.capacity // 8)
            self.capacity = -(-grown // 16) * 16
            for name, fill in FILLS.items():
                setattr(self, name, widen_array(getattr(self, name), self.capacity, fill))
            slots = find_ring_slices(self.first_slot, self.head + 1, self.span.slots)
            self.fine = widen_open_slots(self.fine, self.capacity, np.nan, slots)
            self.events = widen_open_slots(self.events, self.capacity, 0, slots)
            self.coarse = widen_open_slots(self.coarse, self.capacity, np.nan, self._list_open_buckets())
            self.value_sums.widen_arrays(self.capacity)
            self.event_sums.widen_arrays(self.capacity)
        self.size = max(self.size, size)

    @property
    def nbytes(self) -> int:
        arrays: list[NDArray[Any]] = [getattr(self, name) for name in (*FILLS, "fine", "events", "coarse")]
        return sum(array.nbytes for array in arrays) + self.value_sums.nbytes + self.event_sums.nbytes

    # -- time ---------------------------------------------------------------------------------------------------

    @property
    def newest_bucket(self) -> int:
        return self.head * self.span.interval_ms // BUCKET_MS

    def reset_touched_range(self) -> None:
        self.touched_slot, self.touched_bucket = self.head + 1, self.newest_bucket + 1

    @property
    def end_slot(self) -> int:
        """The number of the last slot of all windows. It contains the latest time passed to `advance`."""
        return self.closed + OPEN_SLOTS

    def advance(self, now_ms: int, newest_ms: int | None = None) -> None:
        """Open slots up to now (or up to a newer sample), and close slots that are too old."""
        now_slot = now_ms // self.span.interval_ms
        head = max(now_slot, self.head, (newest_ms or 0) // self.span.interval_ms)
        self._open_slots(head)
        self._close_slots(now_slot - OPEN_SLOTS)

    def _open_slots(self, head: int) -> None:
        if self.head < 0:
            self.head = head
            self.first_slot, self.first_bucket = head + 1, self.newest_bucket + 1
            self.open_earlier_slots(head, self.newest_bucket)
            return
        if head == self.head:
            return
        self.touched_slot = min(self.touched_slot, self.head + 1)
        was, was_bucket, self.head = self.head, self.newest_bucket, head
        self._clear_slots(was + 1, head + 1)
        if self.newest_bucket > was_bucket:
            self.touched_bucket = min(self.touched_bucket, was_bucket + 1)
            self._clear_buckets(was_bucket + 1, self.newest_bucket + 1)

    def open_earlier_slots(self, slot: int, bucket: int) -> None:
        """Open earlier slots and buckets for a late sample, as far back as the ring reaches."""
        slot, bucket = max(slot, self.head - self.span.slots + 1), max(bucket, self.newest_bucket - BUCKETS + 1)
        if slot < self.first_slot:
            self._clear_slots(slot, self.first_slot)
            self.first_slot = slot
        if bucket < self.first_bucket:
            self._clear_buckets(bucket, self.first_bucket)
            self.first_bucket = bucket

    def _clear_slots(self, first: int, end: int) -> None:
        for run in find_ring_slices(first, end, self.span.slots):
            self.fine[:, run] = np.nan
            self.events[:, run] = 0

    def _clear_buckets(self, first: int, end: int) -> None:
        for run in find_ring_slices(first, end, BUCKETS):
            self.coarse[:, run] = np.nan

    def _list_open_buckets(self) -> list[slice]:
        return find_ring_slices(self.first_bucket, self.newest_bucket + 1, BUCKETS)

    def list_open_slots(self, first: int, last: int) -> NDArray[np.intp]:
        """Return (slot,) the numbers of the open slots from `first` to `last`."""
        return np.arange(max(first, self.first_slot, self.head - self.span.slots + 1), min(last, self.head) + 1)

    def _close_slots(self, closed: int) -> None:
        if closed <= self.closed:
            return
        oldest_leaving = self.closed + 1 - max(self.value_sums.longest, self.event_sums.longest)
        if self.closed < 0 or oldest_leaving <= self.head - self.span.slots:
            self.dirty[: self.size] = True
            self.closed = closed
            return
        for slot in range(self.closed + 1, closed + 1):
            self.value_sums.close_slot(self.fine, slot, self.size, self.first_slot)
            self.event_sums.close_slot(self.events, slot, self.size, self.first_slot)
            first = slot % STRIPES * self.size // STRIPES
            self.dirty[first : (slot % STRIPES + 1) * self.size // STRIPES] = True
        self.closed = closed

    def recompute_sums(self) -> None:
        """Recompute the window sums of each entity marked `dirty`.

        An entity is dirty if one of its closed slots was written, or if its regular recomputation is due.
        """
        columns = np.flatnonzero(self.dirty[: self.size])
        if len(columns):
            first, last = int(columns[0]), int(columns[-1])
            one_run = last - first + 1 == len(columns)  # usually: then slots are copied in runs, ten times as fast
            at = slice(first, last + 1) if one_run else columns
            self.value_sums.recompute_entities(self.fine, self.closed, at, self.first_slot)
            self.event_sums.recompute_entities(self.events, self.closed, at, self.first_slot)
            self.dirty[columns] = False

    # -- writing ------------------------------------------------------------------------------------------------

    def has_repeated_series(self, key: NDArray[np.intp]) -> bool:
        """Return whether a series occurs twice among the flat (metric, entity) keys."""
        order = np.arange(len(key), dtype=np.int32)
        mark = self.mark.reshape(-1)
        mark[key] = order
        return not np.array_equal(mark.take(key), order)

    def apply(
        self,
        metric: NDArray[np.intp],
        entity: NDArray[np.intp],
        time_ms: NDArray[np.int64],
        value: NDArray[np.float64],
    ) -> NDArray[np.bool_]:
        """Apply the samples (n,) that are newer than the newest one of their series.

        Returns (n,) bool, true for these samples. There may be at most one sample per series. Call `reserve` first.
        """
        key = metric * self.capacity + entity
        before = self.time_ms.reshape(-1).take(key)
        newer = time_ms > before
        if not newer.all():
            metric, entity, time_ms, value = metric[newer], entity[newer], time_ms[newer], value[newer]
            key, before = key[newer], before[newer]
        if not len(key):
            return newer
        raw = self.raw.reshape(-1).take(key)
        self.time_ms.reshape(-1)[key] = time_ms
        self.raw.reshape(-1)[key] = value
        changed = value != raw
        self.changed_ms.reshape(-1)[key[changed]] = time_ms[changed]
        first = np.flatnonzero(before < 0)
        if len(first):
            np.minimum.at(self.first_seen_ms, entity[first], time_ms[first])
        slot = time_ms // self.span.interval_ms
        inside = slot > self.head - self.span.slots
        oldest = int(slot.min())
        self.touched_slot = min(self.touched_slot, oldest)
        if oldest < self.first_slot:
            self.open_earlier_slots(int(slot[inside].min(initial=self.first_slot)), self.first_bucket)
        self.dirty[entity[inside & (slot <= self.closed)]] = True
        stored = self._store_counters(metric, entity, time_ms, value, before, raw, slot, inside)
        self._store_slots(metric, entity, time_ms, stored, before, slot, inside)
        return newer

    def _store_counters(
        self,
        metric: NDArray[np.intp],
        entity: NDArray[np.intp],
        time_ms: NDArray[np.int64],
        value: NDArray[np.float64],
        before: NDArray[np.int64],
        raw: NDArray[np.float64],
        slot: NDArray[np.int64],
        inside: NDArray[np.bool_],
    ) -> NDArray[np.float32]:
        """Store rates and exact increments, and return (n,) float32 the values for the fine ring.

        The value of a gauge is unchanged. The value of a counter is its rate per second.
        """
        stored = value.astype(np.float32)
        layout = self.layout
        counter = layout.counter[metric]
        at = np.flatnonzero(counter >= 0)
        if len(at):
            rows = metric[at]
            moved = compute_increments(raw[at], value[at], layout.saturates[rows], layout.wraps[rows])
            rate = moved / ((time_ms[at] - before[at]) / 1000.0)
            stored[at] = rate
            self.rate[counter[at], entity[at]] = rate
            event = layout.event[rows]
            counted = np.flatnonzero((event >= 0) & inside[at] & (moved > 0))
            self._add_events(event[counted], slot[at[counted]], entity[at[counted]], moved[counted])
        if layout.gaps >= 0:
            self._count_gaps(metric, entity, time_ms, value, before, slot, inside)
        return stored

    def _count_gaps(
        self,
        metric: NDArray[np.intp],
        entity: NDArray[np.intp],
        time_ms: NDArray[np.int64],
        value: NDArray[np.float64],
        before: NDArray[np.int64],
        slot: NDArray[np.int64],
        inside: NDArray[np.bool_],
    ) -> None:
        """Count the gaps between scrapes of nodes: each failed scrape, and each missing one since the last sample."""
        at = np.flatnonzero((metric == self.layout.metrics.index("scrape_up")) & inside)
        if not len(at):
            return
        periods = np.rint((time_ms[at] - before[at]) / self.span.interval_ms)
        missed = np.where(before[at] < 0, 0.0, np.maximum(periods - 1, 0.0)) + (value[at] == 0)
        self._add_events(np.full(len(at), self.layout.gaps), slot[at], entity[at], missed)

    def _add_events(
        self, event: NDArray[Any], slot: NDArray[np.int64], entity: NDArray[np.intp], moved: NDArray[np.float64]
    ) -> None:
        at = (event * self.span.slots + slot % self.span.slots) * self.capacity + entity
        flat = self.events.reshape(-1)
        flat[at] = np.minimum(flat[at] + np.rint(moved), LARGEST_INCREMENT).astype(np.uint32)

    def _store_slots(
        self,
        metric: NDArray[np.intp],
        entity: NDArray[np.intp],
        time_ms: NDArray[np.int64],
        stored: NDArray[np.float32],
        before: NDArray[np.int64],
        slot: NDArray[np.int64],
        inside: NDArray[np.bool_],
    ) -> None:
        """Write samples (n,) into their fine slots, and add them to the mean of their bucket."""
        row = self.layout.value[metric]
        is_open = (row >= 0) & inside
        if not is_open.all():
            fine = np.flatnonzero(is_open)
            at = (row[fine] * self.span.slots + slot[fine] % self.span.slots) * self.capacity + entity[fine]
            self.fine.reshape(-1)[at] = stored[fine]
        else:
            at = (row * self.span.slots + slot % self.span.slots) * self.capacity + entity
            self.fine.reshape(-1)[at] = stored
        day = self.layout.day[metric]
        daily = np.flatnonzero(day >= 0)
        self._update_bucket_mean(day[daily], entity[daily], time_ms[daily], stored[daily], before[daily])

    def _update_bucket_mean(
        self,
        row: NDArray[np.intp],
        entity: NDArray[np.intp],
        time_ms: NDArray[np.int64],
        stored: NDArray[np.float32],
        before: NDArray[np.int64],
    ) -> None:
        """Add values to the means of the current bucket.

        When a series enters the next bucket, the mean of its previous bucket is stored first.
        """
        at = row * self.capacity + entity
        bucket, last = time_ms // BUCKET_MS, before // BUCKET_MS
        totals, counts = self.bucket_total.reshape(-1), self.bucket_count.reshape(-1)
        moved = np.flatnonzero(bucket != last)
        if len(moved):
            self._store_bucket_mean(row[moved], entity[moved], last[moved])
        known = ~np.isnan(stored)
        totals[at] += np.where(known, stored, 0)
        counts[at] += known

    def _store_bucket_mean(self, row: NDArray[np.intp], entity: NDArray[np.intp], bucket: NDArray[np.int64]) -> None:
        count = self.bucket_count[row, entity]
        done = (count > 0) & (bucket > self.newest_bucket - BUCKETS)
        if done.any():
            oldest = int(bucket[done].min())
            self.touched_bucket = min(self.touched_bucket, oldest)
            self.open_earlier_slots(self.first_slot, oldest)
        mean = self.bucket_total[row[done], entity[done]] / count[done]
        self.coarse[row[done], bucket[done] % BUCKETS, entity[done]] = mean
        self.bucket_total[row, entity] = 0.0
        self.bucket_count[row, entity] = 0

    # -- reading ------------------------------------------------------------------------------------------------

    def find_newest_values(self, metric: int) -> NDArray[np.float64] | NDArray[np.float32]:
        """Return (entity,) the newest value of a gauge, or the newest rate per second of a counter.

        The result is a view, not a copy.
        """
        counter = self.layout.counter[metric]
        return self.raw[metric, : self.size] if counter < 0 else self.rate[counter, : self.size]

    def compute_peak(self, name: str) -> NDArray[np.float32]:
        """Return (entity,) the largest known value of a metric in the fine slots and in the ten-minute means.

        The metric must have a row in the ring of ten-minute means.
        """
        metric = self.layout.metrics.index(name)
        day, fine = self.layout.day[metric], self.fine[self.layout.value[metric]]
        assert day >= 0, f"{name} is none of {self.layout.days}"
        slots = self.list_open_slots(self.end_slot - self.span.fine_slots + 1, self.end_slot)
        parts = [self.coarse[day][run] for run in self._list_open_buckets()]
        parts += (
            [fine[run] for run in find_ring_slices(int(slots[0]), int(slots[-1]) + 1, self.span.slots)]
            if len(slots)
            else []
        )
        peak = np.full(self.size, np.nan, np.float32)
        for part in parts:
            np.fmax(peak, find_largest(part[:, : self.size]), out=peak)
        at, means, _ = self._compute_current_means(metric)
        peak[at] = np.fmax(peak[at], means)
        return peak

    def read_slots(self, name: str, window: int) -> NDArray[np.float32]:
        """Return (slot, entity) a metric's last `window` slots up to now, oldest first.

        The metric must have a row in the fine ring.
        """
        row = self.layout.value[self.layout.metrics.index(name)]
        assert row >= 0, f"{name} is none of {self.layout.values}"
        first = self.end_slot - window + 1
        picked = np.full((window, self.size), np.nan, np.float32)
        opened = self.list_open_slots(first, self.end_slot)
        picked[opened - first] = self.fine[row, opened % self.span.slots, : self.size]
        return picked

    def read_day_means(self, name: str) -> NDArray[np.float32]:
        """Return (bucket, entity) a metric's ten-minute means over a day, oldest first.

        The last bucket is the current one. The metric must have a row in the ring of ten-minute means.
        """
        metric = self.layout.metrics.index(name)
        newest = self.newest_bucket
        row, first = self.layout.day[metric], newest - BUCKETS + 1
        opened = np.arange(max(first, self.first_bucket), newest + 1)
        days = np.full((BUCKETS, self.size), np.nan, np.float32)
        days[opened - first] = self.coarse[row, opened % BUCKETS, : self.size]
        at, means, age = self._compute_current_means(metric)
        days[BUCKETS - 1 - age, at] = means
        return days

    def _compute_current_means(self, metric: int) -> tuple[NDArray[np.intp], NDArray[np.float64], NDArray[np.int64]]:
        """Return the entities with an unfinished bucket, the mean of each bucket so far, and its age in buckets."""
        row = self.layout.day[metric]
        count = self.bucket_count[row, : self.size]
        age = self.newest_bucket - self.time_ms[metric, : self.size] // BUCKET_MS
        at = np.flatnonzero((count > 0) & (age >= 0) & (age < BUCKETS))
        return at, self.bucket_total[row, at] / count[at], age[at]


FILLS: dict[str, Any] = {
    "time_ms": -1,
    "raw": np.nan,
    "changed_ms": 0,
    "rate": np.nan,
    "bucket_total": 0.0,
    "bucket_count": 0,
    "first_seen_ms": NEVER,
    "mark": 0,
    "dirty": False,
}
