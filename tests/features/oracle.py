"""A store written sample by sample in plain Python, and small batches to feed both."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.counters import SATURATES_AT, WRAPS_AT
from fleetcast.features.layout import BUCKET_MS
from fleetcast.features.ring import Ring
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS, find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch

GPU, PORT, NODE = EntityKind.GPU, EntityKind.PORT, EntityKind.NODE
T0 = 1_700_000_100_000  # a multiple of 15 s and of 10 min
INTERVAL_MS = 15_000
Row = tuple[str, int, int, float]  # metric name, entity, time_ms, value


def fleet(gpus: int = 3) -> Entities:
    """GPUs n0/0, n0/1, n1/0, n1/1, …, with as many ports."""
    entities = Entities()
    for gpu in range(gpus):
        entities.add_to_node(GPU, f"n{gpu // 2}", gpu % 2)
        entities.add_to_node(PORT, f"n{gpu // 2}", f"mlx5_{gpu % 2}", 1)
    return entities


def whole(ring: Ring, name: str) -> NDArray[Any]:
    """A ring array (row, slot, entity) as if all of its slots were open: those that are not hold nothing."""
    first, newest = (ring.first_bucket, ring.newest_bucket) if name == "coarse" else (ring.first_slot, ring.head)
    array: NDArray[Any] = getattr(ring, name)
    opened = np.unique(np.arange(max(first, newest - array.shape[1] + 1), newest + 1) % array.shape[1])
    copy = np.full(array.shape, 0 if name == "events" else np.nan, array.dtype)
    copy[:, opened] = array[:, opened]
    return copy


def batch(kind: EntityKind, rows: list[Row]) -> SampleBatch:
    return SampleBatch.from_rows(
        kind, [(find_metric_row(kind, name), entity, time, value) for name, entity, time, value in rows]
    )


@dataclass
class Series:
    time_ms: int = -1
    raw: float = math.nan
    changed_ms: int = 0
    current: float = math.nan
    fine: dict[int, float] = field(default_factory=dict)
    events: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    buckets: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))


class NaiveStore:
    """Keeps everything for ever; the rule and the arithmetic one sample at a time."""

    def __init__(self, kind: EntityKind) -> None:
        self.kind = kind
        self.series: dict[tuple[str, int], Series] = defaultdict(Series)
        self.types = {metric.name: metric for metric in METRICS[kind]}
        self.applied = 0

    def write(self, rows: list[Row]) -> None:
        for name, entity, time, value in rows:
            series = self.series[name, entity]
            if time > series.time_ms:
                self.applied += 1
                self._apply(name, series, time, value)

    def _apply(self, name: str, series: Series, time: int, value: float) -> None:
        moved, series.current = math.nan, value
        if self.types[name].is_counter:
            moved = self._moved(name, series.raw, value)
            series.current = moved / ((time - series.time_ms) / 1000)
        if self.types[name].is_counter and self.types[name].unit == "events":
            if moved > 0:
                series.events[time // INTERVAL_MS] += int(moved)
        else:
            series.fine[time // INTERVAL_MS] = series.current
            if not math.isnan(series.current):
                series.buckets[time // BUCKET_MS].append(series.current)
        if value != series.raw:
            series.changed_ms = time
        series.time_ms, series.raw = time, value

    def _moved(self, name: str, before: float, now: float) -> float:
        wraps = WRAPS_AT.get(name, math.inf)
        if before == now == SATURATES_AT.get(name):
            return math.nan
        if now < before and 0.9 * wraps < before < wraps and now < 0.1 * wraps:
            return wraps - before + now
        return now if now < before else now - before
