"""Samples made of several lines: one for each CPU, drive, interface, or reason why requests ended.

A sum or mean needs all parts of one time. On a page they come together (`Folding`). In remote write each
part arrives alone: `PartSums` holds the parts of a time back until a later time begins. It then returns their
sum or mean if there are at least as many parts as before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.ingest.series import Fold, Series


@dataclass(frozen=True, slots=True)
class Folding:
    """A rule that adds up a page's n rows to k samples.

    group: (n,) the sample of each row. first: (k,) one row of each sample. divisor: (k,) the number of parts of
    a mean, else 1. identity: (k,) int64, one number for (metric, entity). grows: the samples that are rates.
    """

    group: NDArray[np.intp]
    first: NDArray[np.intp]
    divisor: NDArray[np.float64]  # (k,) parts of a mean, else 1
    identity: NDArray[np.int64]
    grows: NDArray[np.intp]

    @classmethod
    def from_series(cls, series: Sequence[Series]) -> "Folding | None":
        """Build the folding of some series. Returns None if each row is a sample."""
        if all(one.fold is Fold.WHOLE for one in series):
            return None
        samples: dict[object, int] = {}
        group = [
            samples.setdefault((one.metric, one.entity) if one.fold else row, len(samples))
            for row, one in enumerate(series)
        ]
        found, first, count = np.unique(np.array(group, np.intp), return_index=True, return_counts=True)
        mean = np.array([series[row].fold is Fold.MEAN for row in first.tolist()])
        names = [series[row].metric << 32 | series[row].entity for row in first.tolist()]
        grows = np.flatnonzero([series[row].fold is Fold.RATE for row in first.tolist()])
        divisor = np.where(mean, count, 1).astype(np.float64)[: len(found)]
        return cls(np.array(group, np.intp), first, divisor, np.array(names, np.int64), grows)

    def fold_values(self, value: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return (k,) float64 sums and means of (n,) values. A sample with a NaN part is NaN."""
        totals: NDArray[np.float64] = np.bincount(self.group, value, len(self.first)) / self.divisor
        return totals


class CounterRates:
    """A converter of counter totals into growth per second since the previous time.

    A counter has no rate at its first time, nor at the first time after a restart.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, float]] = {}  # identity -> time in ms, total

    def compute_rates(
        self,
        grows: NDArray[np.intp],
        identity: NDArray[np.int64],
        time_ms: NDArray[np.int64],
        total: NDArray[np.float64],
    ) -> NDArray[np.float64]:
        """Return (k,) float64: in the rows `grows` the growth per second, and in all others `total` unchanged.

        The growth is NaN at a counter's first time, and if the counter fell.
        """
        value = total.copy()
        for row in grows[np.isfinite(total[grows])].tolist():
            name, at_ms = int(identity[row]), int(time_ms[row])
            before_ms, before = self._last.get(name, (at_ms, 0.0))
            grown, span_s = total[row] - before, (at_ms - before_ms) / 1000
            value[row] = grown / span_s if span_s > 0 and grown >= 0 else np.nan
            self._last[name] = (at_ms, float(total[row]))
        return value


@dataclass(frozen=True, slots=True)
class PartRows:
    """Parts of samples in their order of arrival, as columns of n rows.

    identity: one number for (kind, metric, entity). part: the number of the part. mean: whether the sample is a
    mean of its parts.
    """

    identity: NDArray[np.int64]
    part: NDArray[np.int64]
    time_ms: NDArray[np.int64]
    value: NDArray[np.float64]
    mean: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.identity)

    def select(self, keep: NDArray[np.bool_] | NDArray[np.intp]) -> "PartRows":
        return PartRows(self.identity[keep], self.part[keep], self.time_ms[keep], self.value[keep], self.mean[keep])

    @classmethod
    def concat(cls, one: "PartRows", other: "PartRows") -> "PartRows":
        return cls(
            np.concatenate([one.identity, other.identity]),
            np.concatenate([one.part, other.part]),
            np.concatenate([one.time_ms, other.time_ms]),
            np.concatenate([one.value, other.value]),
            np.concatenate([one.mean, other.mean]),
        )

    @classmethod
    def empty(cls) -> "PartRows":
        empty = np.empty(0, np.int64)
        return cls(empty, empty, empty, np.empty(0), np.empty(0, np.bool_))


class PartSums:
    """Sums and means of parts that arrive one by one. A restart loses unfinished sums."""

    def __init__(self, *, max_rows: int = 1_000_000) -> None:
        self._pending = PartRows.empty()
        self._expected: dict[int, int] = {}  # identity -> parts of the last whole moment
        self._max_rows = max_rows
        self.dropped = 0  # moments with fewer parts than the one before, and what was beyond `max_rows`

    def add_parts(self, rows: PartRows) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Add parts. Return the samples that are now complete, ordered by time, as (identity, time_ms, value)."""
        rows = PartRows.concat(self._pending, rows)
        if not len(rows):
            return rows.identity, rows.time_ms, rows.value
        order = np.lexsort((rows.part, rows.time_ms, rows.identity))
        rows = rows.select(order)
        same = (np.diff(rows.identity) == 0) & (np.diff(rows.time_ms) == 0)
        rows = rows.select(~np.r_[same & (np.diff(rows.part) == 0), False])  # told twice: the later one
        begins = np.r_[True, (np.diff(rows.identity) != 0) | (np.diff(rows.time_ms) != 0)]
        first = np.flatnonzero(begins)
        identity = rows.identity[first]
        newest = np.r_[identity[1:] != identity[:-1], True]
        moment = np.cumsum(begins) - 1
        waits = newest[moment]
        self._pending = rows.select(waits)
        if len(self._pending) > self._max_rows:
            self.dropped += int(newest.sum())
            self._pending = PartRows.empty()
        counts = np.diff(np.r_[first, len(rows)])
        totals = np.add.reduceat(rows.value, first) / np.where(rows.mean[first], counts, 1)
        done = self._find_complete_moments(identity, counts, ~newest) & np.isfinite(totals)
        times = rows.time_ms[first]
        order = np.flatnonzero(done)[np.argsort(times[done], kind="stable")]
        return identity[order], times[order], totals[order]

    def _find_complete_moments(
        self, identity: NDArray[np.int64], counts: NDArray[np.intp], closed: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return (sample,) bool, true for samples that are closed and complete.

        A sample is complete if it has at least as many parts as the series' previous sample. closed: (sample,) bool,
        true if a later sample of its series has begun.
        """
        whole = np.zeros(len(identity), np.bool_)
        for row in np.flatnonzero(closed).tolist():
            name, count = int(identity[row]), int(counts[row])
            whole[row] = count >= self._expected.get(name, count + 1)
            self.dropped += int(not whole[row])
            self._expected[name] = count
        return whole
