"""The layout of the rings: which row each metric of a kind has, and how time is divided into slots."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.counters import SATURATES_AT, WRAPS_AT
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind

BUCKET_MS = 600_000
BUCKETS = 144  # a day of 10-minute means
OPEN_SLOTS = 2  # the newest slots are still being written: they are not yet in the running sums
GUARD_SLOTS = 2  # room for ticks that come late

# Gauges and rates whose mean and spread over windows are kept up to date, by kind.
SUMMED: dict[EntityKind, tuple[str, ...]] = {
    EntityKind.GPU: (
        "power_w",
        "gpu_temp_c",
        "sm_clock_mhz",
        "sm_active",
        "tensor_active",
        "gpu_util",
        "nvlink_tx_bytes_per_s",
        "pcie_tx_bytes_per_s",
        "pcie_rx_bytes_per_s",
    ),
    EntityKind.PORT: ("rx_bytes", "tx_bytes", "rx_packets", "tx_packets", "tx_wait"),
    EntityKind.NODE: ("scrape_duration_s", "cpu_steal_s"),
}
# Metrics of which means over 10 minutes are kept for a day: what anybody looks at over more than the fine slots.
DAILY: dict[EntityKind, tuple[str, ...]] = {
    EntityKind.GPU: SUMMED[EntityKind.GPU],
    EntityKind.PORT: (*SUMMED[EntityKind.PORT], "speed_bytes_per_s"),
    EntityKind.NODE: (*SUMMED[EntityKind.NODE], "gpus_reported"),
}
# Metrics whose fine slots are read: those of the day, what a job's fingerprint needs beyond them, and served models.
FINE: dict[EntityKind, tuple[str, ...]] = {
    **DAILY,
    EntityKind.GPU: (*DAILY[EntityKind.GPU], "energy_j", "fb_used_bytes"),
    EntityKind.SERVED_MODEL: tuple(metric.name for metric in METRICS[EntityKind.SERVED_MODEL]),
}
GAPS = "gaps"  # pseudo event counter of a node: scrapes that failed or never came


@dataclass(frozen=True, slots=True)
class RingSpan:
    """The length of a slot and of the rings.

    `slots`: the number of slots in a fine ring, with the guard slots.
    """

    interval_ms: int = 15_000
    fine_slots: int = 120
    future_ms: int = 60_000

    @property
    def slots(self) -> int:
        return self.fine_slots + -(-self.future_ms // self.interval_ms) + GUARD_SLOTS

    def count_window_slots(self, seconds: float) -> int:
        """Return the number of slots in a window of `seconds`, including the current slot.

        The result is at most the number of slots in the ring, and at least the number of open slots.

        >>> [RingSpan().count_window_slots(window_s) for window_s in (120, 1800, 36_000)]
        [8, 120, 120]
        """
        return int(min(self.fine_slots, max(OPEN_SLOTS, round(seconds * 1000 / self.interval_ms))))


@dataclass(frozen=True, slots=True)
class Layout:
    """The rows of one kind's metrics in the rings. Each field is (metric,), -1 without such a row."""

    kind: EntityKind
    metrics: tuple[str, ...]
    value: NDArray[np.intp]  # in the fine ring: gauges and rates whose slots are read
    day: NDArray[np.intp]  # in the ring of 10-minute means
    event: NDArray[np.intp]  # in the event ring: exact increments
    counter: NDArray[np.intp]  # in the table of rates
    saturates: NDArray[np.float64]
    wraps: NDArray[np.float64]
    summed: tuple[int, ...]  # value rows
    gaps: int  # event row of missed scrapes, or -1

    @property
    def values(self) -> tuple[str, ...]:
        """The row names of the fine ring, in order."""
        return tuple(name for name, row in zip(self.metrics, self.value, strict=True) if row >= 0)

    @property
    def days(self) -> tuple[str, ...]:
        """The row names of the ring of ten-minute means, in order."""
        return tuple(name for name, row in zip(self.metrics, self.day, strict=True) if row >= 0)

    @property
    def events(self) -> tuple[str, ...]:
        """The row names of the ring of event counts, in order."""
        names = tuple(name for name, row in zip(self.metrics, self.event, strict=True) if row >= 0)
        return (*names, GAPS) if self.gaps >= 0 else names

    @property
    def counters(self) -> tuple[str, ...]:
        """The row names of the table of rates, in order."""
        return tuple(name for name, row in zip(self.metrics, self.counter, strict=True) if row >= 0)


def _assign_row_numbers(chosen: list[bool]) -> NDArray[np.intp]:
    rows = np.cumsum(chosen) - 1
    return np.where(chosen, rows, -1).astype(np.intp)


@cache
def make_layout(kind: EntityKind) -> Layout:
    """Return the layout of a kind, built from the catalogue of metrics."""
    metrics = METRICS[kind]
    is_event = [metric.is_counter and metric.unit == "events" for metric in metrics]
    names = tuple(metric.name for metric in metrics)
    value = _assign_row_numbers([name in FINE.get(kind, ()) for name in names])
    return Layout(
        kind=kind,
        metrics=names,
        value=value,
        day=_assign_row_numbers([name in DAILY.get(kind, ()) for name in names]),
        event=_assign_row_numbers(is_event),
        counter=_assign_row_numbers([metric.is_counter for metric in metrics]),
        saturates=np.array([SATURATES_AT.get(name, np.inf) for name in names]),
        wraps=np.array([WRAPS_AT.get(name, np.inf) for name in names]),
        summed=tuple(int(value[names.index(name)]) for name in SUMMED.get(kind, ())),
        gaps=sum(is_event) if kind is EntityKind.NODE else -1,
    )
