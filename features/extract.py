"""Extraction of feature frames from the store at one time. Training and serving both use it.

<metric>                                 newest value (counter: rate per second), NaN once older than STALE_S
<metric>_mean_2m, _mean_30m, _std_30m    over a window of slots up to now, at most the fine ring
<metric>_count_10m, _count_30m           exact increments of an event counter
max_<metric>                             largest value of the last day
age_s, first_seen_s, frozen_s, silent_s  seconds; our own downtime does not count as silence
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.features.layout import SUMMED, make_layout
from fleetcast.features.ring import NEVER, Ring
from fleetcast.features.store import WindowStore
from fleetcast.features.sums import compute_mean, compute_std
from fleetcast.fleet.metrics import METRICS, find_metric_row
from fleetcast.fleet.samples import EntityKind

STALE_S = 120.0
STICKY = frozenset(  # true until reset, so never stale
    {
        "xid",
        "row_remap_failure",
        "retired_pages_sbe",
        "retired_pages_dbe",
        "retired_pages_pending",
        "remapped_rows_uncorrectable",
        "remapped_rows_correctable",
    }
)
MAXIMA: dict[EntityKind, tuple[str, ...]] = {
    EntityKind.GPU: ("sm_clock_mhz",),
    EntityKind.PORT: ("speed_bytes_per_s",),
    EntityKind.NODE: ("gpus_reported",),
}
AGES: dict[EntityKind, tuple[str, ...]] = {
    EntityKind.GPU: ("age_s", "first_seen_s", "frozen_s", "silent_s"),
    EntityKind.PORT: ("age_s", "first_seen_s"),
    EntityKind.NODE: ("age_s", "first_seen_s"),
}
SUMMED_FEATURES = {
    kind: tuple(METRICS[kind][find_metric_row(kind, name)].feature for name in names) for kind, names in SUMMED.items()
}


def _list_feature_names(kind: EntityKind) -> tuple[str, ...]:
    layout = make_layout(kind)
    summed = [name for name in layout.values if layout.value[layout.metrics.index(name)] in layout.summed]
    assert sorted(summed) == sorted(SUMMED[kind])
    windows = [f"{name}_{window}" for window in ("mean_2m", "mean_30m", "std_30m") for name in SUMMED_FEATURES[kind]]
    counts = [f"{name}_count_{window}" for window in ("10m", "30m") for name in layout.events if name != "gaps"]
    gaps = ["gaps_10m", "gaps_30m"] if layout.gaps >= 0 else []
    newest = [metric.feature for metric in METRICS[kind]]
    return (*newest, *windows, *counts, *gaps, *(f"max_{name}" for name in MAXIMA[kind]), *AGES[kind])


GPU_FEATURES = _list_feature_names(EntityKind.GPU)
PORT_FEATURES = _list_feature_names(EntityKind.PORT)
NODE_FEATURES = _list_feature_names(EntityKind.NODE)


@dataclass(frozen=True, slots=True)
class Frames:
    """The features that the models receive at one time, one frame for each kind.

    A frame has the same rows as the kind's table in `Entities`.
    """

    gpu: FeatureFrame
    port: FeatureFrame
    node: FeatureFrame


def extract_frames(store: WindowStore, now_ms: int, topology_generation: int = 0) -> Frames:
    """Return copies of the features of every GPU, port and node at `now_ms`.

    If the store has a later time, the windows end there.
    """
    store.advance(now_ms)
    gpu = _FrameBuilder(store, EntityKind.GPU, GPU_FEATURES, now_ms)
    gpu.fill_common_features()
    gpu["frozen_s"] = _compute_frozen_s(gpu.ring, gpu.last_ms)
    gpu["silent_s"] = _compute_silent_s(store, gpu.last_ms, now_ms)
    port = _FrameBuilder(store, EntityKind.PORT, PORT_FEATURES, now_ms)
    port.fill_common_features()
    node = _FrameBuilder(store, EntityKind.NODE, NODE_FEATURES, now_ms)
    node.fill_common_features()
    return Frames(*(columns.make_frame(topology_generation) for columns in (gpu, port, node)))


class _FrameBuilder:
    """The builder of one frame. values, since_ms: (feature, entity), so that a feature is contiguous."""

    def __init__(self, store: WindowStore, kind: EntityKind, names: tuple[str, ...], now_ms: int) -> None:
        self.kind = kind
        self.ring = store.ring(kind)
        self.gaps = store.gaps
        self.node = store.entities[kind].node.copy()
        self.names = names
        self.now_ms = now_ms
        self.index = {name: row for row, name in enumerate(names)}
        self.values = np.empty((len(names), self.ring.size), np.float32)
        self.since_ms = np.zeros((len(names), self.ring.size), np.int64)
        self.last_ms = _find_last_ms(self.ring)

    def __setitem__(self, name: str, column: NDArray[np.floating]) -> None:
        self.values[self.index[name]] = column

    def fill_common_features(self) -> None:
        """Compute the features that entities of all kinds have."""
        ring = self.ring
        ring.recompute_sums()
        self._fill_newest_values()
        self._fill_window_statistics()
        self._fill_event_counts()
        for name in MAXIMA[self.kind]:
            self[f"max_{name}"] = ring.compute_peak(name)
        seen, last = ring.first_seen_ms[: ring.size], self.last_ms
        listened_ms = _exclude_downtime(self.gaps, last)
        self["age_s"] = np.where(last < 0, np.nan, (self.now_ms - listened_ms) / 1000).clip(min=0)
        self["first_seen_s"] = np.where(seen == NEVER, np.nan, (self.now_ms - seen) / 1000).clip(min=0)

    def _fill_newest_values(self) -> None:
        ring = self.ring
        seen, oldest_ms = ring.first_seen_ms[: ring.size], self.now_ms - STALE_S * 1000
        for row, name in enumerate(ring.layout.metrics):
            self.values[row] = ring.find_newest_values(row)
            if name not in STICKY:
                self.values[row][ring.time_ms[row, : ring.size] < oldest_ms] = np.nan
            changed = ring.changed_ms[row, : ring.size]
            np.copyto(self.since_ms[row], changed, where=changed > seen)

    def _fill_window_statistics(self) -> None:
        ring, opened = self.ring, self._find_open_slots()
        for index, name in enumerate(SUMMED_FEATURES[self.kind]):
            count, total, square = ring.value_sums.read_windows(ring.fine, index, opened, ring.size)
            self[f"{name}_mean_2m"], self[f"{name}_mean_30m"] = compute_mean(count, total)
            self[f"{name}_std_30m"] = compute_std(count[1], total[1], square)

    def _fill_event_counts(self) -> None:
        ring, layout, opened = self.ring, self.ring.layout, self._find_open_slots()
        for row, name in enumerate(layout.events):
            counter, feature = ("scrape_up", name) if row == layout.gaps else (name, f"{name}_count")
            never = ring.time_ms[layout.metrics.index(counter), : ring.size] < 0
            counts = ring.event_sums.read_windows(ring.events, row, opened, ring.size)
            self[f"{feature}_10m"], self[f"{feature}_30m"] = np.where(never, np.nan, counts)

    def _find_open_slots(self) -> NDArray[np.intp]:
        return self.ring.list_open_slots(self.ring.closed + 1, self.ring.end_slot) % self.ring.span.slots

    def make_frame(self, topology_generation: int) -> FeatureFrame:
        return FeatureFrame(
            self.kind, self.names, self.values.T, self.node, self.since_ms.T, self.now_ms, topology_generation
        )


def _find_last_ms(ring: Ring) -> NDArray[np.int64]:
    """Return (entity,) the time of each entity's newest sample in Unix ms, -1 if it has none."""
    last: NDArray[np.int64] = ring.time_ms[:, : ring.size].max(axis=0, initial=-1)
    return last


def _exclude_downtime(gaps: list[tuple[int, int]], last: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (entity,) `last`, moved later by our own downtime since then. So downtime does not count as silence."""
    for until_ms, for_ms in gaps:
        last = np.where((last >= 0) & (last < until_ms), np.minimum(last + for_ms, until_ms), last)
    return last


def _compute_frozen_s(ring: Ring, last: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return (entity,) seconds in which samples have arrived but no value has changed.

    The result is NaN for entities without samples.
    """
    changed = ring.changed_ms[:, : ring.size].max(axis=0, initial=0)
    return np.where(last < 0, np.nan, (last - changed) / 1000)


def _compute_silent_s(store: WindowStore, last: NDArray[np.int64], now_ms: int) -> NDArray[np.float64]:
    """Return (gpu,) seconds since a GPU went missing from its exporter's pages, 0 if it is there.

    A page was served if `gpus_reported` or another GPU of the node arrived. If neither is known, a
    `scrape_up` of 1 counts. Only recent pages count, because a silent exporter says nothing about its GPUs.
    """
    nodes = store.ring(EntityKind.NODE)
    owner = store.entities[EntityKind.GPU].node
    served = np.full(nodes.size, -1, np.int64)
    np.maximum.at(served, owner[owner >= 0], last[owner >= 0])
    metrics = nodes.layout.metrics
    page = nodes.time_ms[metrics.index("gpus_reported"), : nodes.size]
    up = metrics.index("scrape_up")
    answered = np.where(nodes.raw[up, : nodes.size] == 1, nodes.time_ms[up, : nodes.size], -1)
    served = np.maximum(served, np.where(page >= 0, page, answered))
    of_gpu = np.where(owner >= 0, served[owner], -1)
    interval = store.span.interval_ms
    missed = (of_gpu - last > 0.5 * interval) & (now_ms - last > 1.5 * interval)
    silent = missed & (last >= 0) & (now_ms - of_gpu <= 3 * interval)
    return np.where(silent, (now_ms - _exclude_downtime(store.gaps, last)).clip(min=0) / 1000, 0.0)
