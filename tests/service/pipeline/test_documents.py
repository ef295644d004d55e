import msgspec
import numpy as np

from fleetcast.features.extract import extract_frames
from fleetcast.features.frame import FeatureFrame
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Submitted
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.service.pipeline.documents import (
    estimate_all_by_past_jobs,
    estimate_by_past_jobs,
    find_answering_nodes,
    make_gpu_answers,
    make_host_answers,
)

NODE = EntityKind.NODE
T0 = 1_760_000_000_000


def frame_of(kind: EntityKind, name: str, *values: float) -> FeatureFrame:
    column = np.array(values, np.float32)[:, None]
    return FeatureFrame(
        kind, (name,), column, np.arange(len(values), dtype=np.int32), np.zeros(column.shape, np.int64), 0
    )


NO_GPU = frame_of(EntityKind.GPU, "age_s")


def test_a_fleet_without_nodes_has_no_gpus_to_tell_of() -> None:
    none = np.zeros((0, 0), np.int32)
    assert make_gpu_answers(NO_GPU, none, np.zeros(0, np.int32), none, (), none > 0) == []


def test_each_node_has_its_own_gpus_with_who_holds_them() -> None:
    rows, holder = np.full((3, 2), -1, np.int32), np.array([[0, -1], [-1, -1], [0, 1]], np.int32)
    unknown_use = np.array([[False, True], [False, False], [False, False]])
    answers = make_gpu_answers(NO_GPU, rows, np.array([2, 0, 2], np.int32), holder, ("a/1", "b/1"), unknown_use)
    assert msgspec.to_builtins(answers) == [
        [{"index": 0, "job": "a/1"}, {"index": 1, "job": None, "held_by": "unknown"}],
        [],
        [{"index": 0, "job": "a/1"}, {"index": 1, "job": "b/1"}],
    ]


def test_a_node_that_sends_by_itself_answers_while_its_gpus_are_recent() -> None:
    node = frame_of(EntityKind.NODE, "scrape_up", 1.0, 0.0, np.nan, np.nan, np.nan)
    gpu = frame_of(EntityKind.GPU, "age_s", 10.0, 500.0, 20.0, np.nan)
    rows = np.array([[1, -1], [0, -1], [1, 2], [1, -1], [3, -1]], np.int32)
    #  scraped: what the scraper says    sends   stopped  never heard
    np.testing.assert_array_equal(find_answering_nodes(node, gpu, rows, 5), [1.0, 0.0, 1.0, 0.0, np.nan])
    np.testing.assert_array_equal(
        find_answering_nodes(frame_of(EntityKind.NODE, "scrape_up"), NO_GPU, rows, 5), [np.nan] * 5
    )


def test_a_host_is_told_of_by_shares_and_rates_and_only_by_what_is_known() -> None:
    entities = Entities()
    for name in ("n1", "n2"):
        entities.find_or_add_node(name)
    store = WindowStore(entities)
    for step in (0, 1):
        time_ms = T0 + 15_000 * step
        told = {"cpu_steal_s": 1.5 * step, "memory_available_bytes": 2e12, "net_rx_bytes": 3e9 * step}
        rows = [(find_metric_row(NODE, name), 0, time_ms, value) for name, value in told.items()]
        store.write(SampleBatch.from_rows(NODE, rows), time_ms)
    frame = extract_frames(store, time_ms).node
    assert msgspec.to_builtins(make_host_answers(frame, 3)) == [
        {"cpu_steal": 0.1, "memory_available_bytes": 2e12, "net_rx_bytes_per_s": 2e8},
        None,
        None,
    ]
    assert make_host_answers(None, 2) == [None, None]
    assert np.isnan(frame.column("cpu_idle_share")[0])


def test_remaining_times_of_all_attempts_are_those_of_each() -> None:
    durations = {
        "by_gpus": {"1": {"p50": 60.5, "p90": 601.0, "n": 9}, "2": {"p50": 1.0, "p90": 2.0, "n": 0}},
        "all": {"p50": 300, "p90": 4000, "n": 12},
    }
    gpus = [1, 1, 1, 2, 4, 8, 1]
    ages_ms = [0, 60_500, 61_000, 5_500, 299_500, 9_999_999, -5_000]
    attempts = [JobAttempt("j", 1, started_ms=T0 - age_ms) for age_ms in ages_ms]
    for attempt, count in zip(attempts, gpus, strict=True):
        attempt.submission = Submitted(job="j", sequence=0, time_ms=T0, gang=1, gpus_per_node=count)
    age_s = np.maximum(0.0, np.array(ages_ms) / 1000)
    for known in (durations, {"by_gpus": {}, "all": None}, {"by_gpus": durations["by_gpus"], "all": None}):
        each = [estimate_by_past_jobs(attempt, T0, known) for attempt in attempts]
        assert estimate_all_by_past_jobs(gpus, age_s, known) == each
        assert any(each) == (known["by_gpus"] != {})
    assert estimate_all_by_past_jobs([], np.zeros(0), durations) == []
