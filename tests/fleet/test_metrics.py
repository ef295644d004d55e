import pytest

from fleetcast.fleet.metrics import COUNTER, GAUGE, METRICS, find_dcgm_row, find_metric_row
from fleetcast.fleet.samples import EntityKind


def test_every_metric_stands_at_its_row_under_its_kind() -> None:
    for kind, metrics in METRICS.items():
        for row, metric in enumerate(metrics):
            assert metric.kind is kind
            assert find_metric_row(kind, metric.name) == row
            if metric.dcgm_id is not None:
                assert find_dcgm_row(kind, metric.dcgm_id) == row


def test_names_and_field_ids_are_unique_within_a_kind() -> None:
    for metrics in METRICS.values():
        names = [metric.name for metric in metrics]
        ids = [metric.dcgm_id for metric in metrics if metric.dcgm_id is not None]
        assert len(set(names)) == len(names)
        assert len(set(ids)) == len(ids)


def test_a_metric_is_a_gauge_or_a_counter_and_has_a_unit() -> None:
    for metrics in METRICS.values():
        for metric in metrics:
            assert metric.type in {GAUGE, COUNTER}
            assert metric.unit
            assert metric.is_counter == (metric.type == COUNTER)


def test_names_end_in_the_unit_where_they_carry_one() -> None:
    suffixes = {"_w": "W", "_c": "°C", "_mhz": "MHz", "_bytes_per_s": "B/s", "_bytes": "B", "_j": "J", "_s": "s"}
    for metrics in METRICS.values():
        for metric in metrics:
            suffix = next((end for end in suffixes if metric.name.endswith(end)), None)
            if suffix is not None:
                assert metric.unit == suffixes[suffix], metric


def test_instances_report_what_belongs_to_a_slice() -> None:
    names = {metric.name for metric in METRICS[EntityKind.GPU_INSTANCE]}
    assert "sm_active" in names
    assert "fb_used_bytes" in names
    assert "gpu_temp_c" not in names
    assert names <= {metric.name for metric in METRICS[EntityKind.GPU]}


def test_what_the_catalogue_does_not_hold_has_no_row() -> None:
    assert find_dcgm_row(EntityKind.GPU, 9999) is None
    assert find_dcgm_row(EntityKind.GPU_INSTANCE, 150) is None
    with pytest.raises(KeyError):
        find_metric_row(EntityKind.PORT, "power_w")
