"""A save from before the catalogue grew is read by the names of what it holds."""

from pathlib import Path

import numpy as np
import pytest

from fleetcast.features import layout
from fleetcast.features.extract import extract_frames
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS, find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch

PORT, NODE = EntityKind.PORT, EntityKind.NODE
T0 = 1_760_000_000_000
BEFORE = {PORT: 17, NODE: 7, EntityKind.SERVED_MODEL: 0}  # how many metrics they had


def test_a_save_with_fewer_metrics_loads_and_the_new_ones_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entities = Entities()
    port = entities.add_to_node(PORT, "n1", "mlx5_0", 1)
    older = {**METRICS, **{kind: METRICS[kind][:count] for kind, count in BEFORE.items()}}
    monkeypatch.setattr(layout, "METRICS", older)
    for name in ("SUMMED", "DAILY"):  # of what nodes had, only this was averaged
        kept = ("scrape_duration_s",) if name == "SUMMED" else ("scrape_duration_s", "gpus_reported")
        monkeypatch.setattr(layout, name, {**getattr(layout, name), NODE: kept})
    layout.make_layout.cache_clear()
    store = WindowStore(entities)
    for step in range(3):
        time_ms = T0 + 15_000 * step
        told = {"link_downed": float(step), "state": 4.0}
        rows = [(find_metric_row(PORT, name), port, time_ms, value) for name, value in told.items()]
        store.write(SampleBatch.from_rows(PORT, rows), time_ms)
        store.write(SampleBatch.from_rows(NODE, [(find_metric_row(NODE, "scrape_up"), 0, time_ms, 1.0)]), time_ms)
    store.save(tmp_path)

    monkeypatch.undo()
    layout.make_layout.cache_clear()
    loaded = WindowStore.load(tmp_path)
    frames = extract_frames(loaded, time_ms)
    assert np.isnan(frames.node.column("cpu_steal_share_mean_2m")[0])
    frame = frames.port
    assert frame.column("state")[0] == 4.0
    assert frame.column("link_downed_count_30m")[0] == 2.0
    assert np.isnan(frame.column("cnp_sent_per_s")[0])
    later = [(find_metric_row(PORT, "cnp_sent"), port, time_ms + 15_000 * step, 30.0 * step) for step in (1, 2)]
    assert loaded.write(SampleBatch.from_rows(PORT, later), time_ms + 30_000).applied == 2
    assert extract_frames(loaded, time_ms + 30_000).port.column("cnp_sent_per_s")[0] == 2.0


def test_a_save_with_the_slots_of_every_metric_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older versions saved fine slots that nothing reads."""
    names = ("power_w", "energy_j", "fb_used_bytes", "xid", "fp64_active")

    def make_store() -> WindowStore:
        entities = Entities()
        gpu = entities.add_to_node(EntityKind.GPU, "n1", "0", 0)
        store = WindowStore(entities)
        for step in range(50):
            now_ms = T0 + 15_000 * step
            rows = [(find_metric_row(EntityKind.GPU, name), gpu, now_ms, float(10 + step)) for name in names[:4]]
            store.write(SampleBatch.from_rows(EntityKind.GPU, rows), now_ms)
        return store

    every = {kind: tuple(metric.name for metric in metrics) for kind, metrics in METRICS.items()}
    monkeypatch.setattr(layout, "FINE", every)
    layout.make_layout.cache_clear()
    older = make_store()
    assert set(names) <= set(older.ring(EntityKind.GPU).layout.values)
    older.save(tmp_path)
    monkeypatch.undo()
    layout.make_layout.cache_clear()

    loaded, now_ms = WindowStore.load(tmp_path), T0 + 15_000 * 50
    fresh = make_store()
    one, other = extract_frames(loaded, now_ms).gpu, extract_frames(fresh, now_ms).gpu
    for name in one.names:
        np.testing.assert_array_equal(one.column(name), other.column(name), err_msg=name)
    for name in names[:3]:
        np.testing.assert_array_equal(
            loaded.ring(EntityKind.GPU).read_slots(name, 120), fresh.ring(EntityKind.GPU).read_slots(name, 120)
        )
