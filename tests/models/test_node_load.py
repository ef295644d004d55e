"""How busy nodes will be: dips do not count, loading jobs will work, a free GPU is free."""

import numpy as np
import pytest

from fleetcast.features.frame import FeatureFrame
from fleetcast.fleet.samples import EntityKind
from fleetcast.models.node_load import LATELY_S, Z_90, GpuUse, compute_node_loads, forecast_host_shares

NAN = np.nan
LONG, YOUNG = 10 * LATELY_S, LATELY_S / 2


def use(newest: list[list[float]], held_s: list[list[float]], mean: float | None = None, std: float = 0.0) -> GpuUse:
    """mean: of two minutes, everywhere; None: as the newest readings."""
    now = np.array(newest)
    return GpuUse(now, now if mean is None else np.full(now.shape, mean), np.full(now.shape, std), np.array(held_s))


def hosts(**columns: list[float]) -> FeatureFrame:
    values = np.array([*columns.values()], np.float32).T
    since = np.zeros(values.shape, np.int64)
    return FeatureFrame(EntityKind.NODE, tuple(columns), values, np.arange(len(values), dtype=np.int32), since, 0)


HOSTS = {"cpu_idle_share": [0.75], "memory_available_bytes": [3e9], "memory_total_bytes": [4e9]}


def test_a_dip_of_a_job_does_not_count_and_a_gpu_that_was_freed_does() -> None:
    newest = [[0.1, 0.1]]
    assert use(newest, [[LONG, LONG]], mean=0.9).forecast_use()[0] == pytest.approx([0.9])
    assert use(newest, [[NAN, NAN]], mean=0.9).forecast_use()[0] == pytest.approx([0.1])
    assert use(newest, [[LONG, NAN]], mean=0.9).forecast_use()[0] == pytest.approx([0.5])


def test_a_job_that_loads_will_work_as_others_do() -> None:
    found = use([[0.8], [0.7], [0.9], [0.03]], [[LONG], [LONG], [LONG], [YOUNG]]).forecast_use()
    assert found[0] == pytest.approx([0.8, 0.7, 0.9, 0.8])
    assert use([[0.03]], [[YOUNG]]).forecast_use()[0] == pytest.approx([0.03])


def test_the_p90_is_as_far_as_the_node_varied_and_never_above_one() -> None:
    low, high = use([[0.5, 0.5], [0.95, 0.95]], [[LONG, LONG]] * 2, std=0.1).forecast_use()
    assert high == pytest.approx([0.5 + 0.1 * Z_90, 1.0])
    assert low == pytest.approx([0.5, 0.95])


def test_only_gpus_that_tell_count_and_a_node_without_any_is_unknown() -> None:
    found = use([[0.4, NAN], [NAN, NAN]], [[LONG, LONG]] * 2).forecast_use()
    assert found[:, 0] == pytest.approx([0.4, 0.4])
    assert np.isnan(found[:, 1]).all()


def test_a_host_is_as_it_was_read_last() -> None:
    assert forecast_host_shares(hosts(**HOSTS), 2)[:, 0] == pytest.approx([0.25, 0.25])
    assert np.isnan(forecast_host_shares(hosts(**HOSTS), 2)[:, 1]).all()
    assert compute_node_loads(use([[0.5]], [[LONG]]), hosts(**HOSTS))[:, :, 0] == pytest.approx(
        np.array([[0.5, 0.25, 0.25]] * 2)
    )


def test_sm_activity_stands_for_utilisation_that_no_exporter_tells() -> None:
    names = [name + window for name in ("gpu_util", "sm_active") for window in ("", "_mean_2m", "_std_30m")]
    values = np.array([[NAN, NAN, NAN, 0.4, 0.5, 0.0], [0.9, 0.8, 0.0, 0.4, 0.5, 0.0]], np.float32)
    frame = FeatureFrame(EntityKind.GPU, tuple(names), values, np.zeros(2, np.int32), np.zeros((2, 6), np.int64), 0)
    found = GpuUse.from_frame(frame, np.array([[0], [1], [-1]], np.int32), np.full((3, 1), LONG)).forecast_use()
    assert found[0] == pytest.approx([0.5, 0.9, NAN], nan_ok=True)
