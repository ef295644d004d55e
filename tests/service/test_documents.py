import numpy as np

from features.frame import FeatureFrame
from fleet.samples import EntityKind
from service.documents import answering, gpu_answers


def test_a_fleet_without_nodes_has_no_gpus_to_tell_of() -> None:
    none = np.zeros((0, 0), np.int32)
    assert gpu_answers(None, none, np.zeros(0, np.int32), none, ()) == []


def test_each_node_has_its_own_gpus_with_who_holds_them() -> None:
    rows, holder = np.full((3, 2), -1, np.int32), np.array([[0, -1], [-1, -1], [0, 1]], np.int32)
    answers = gpu_answers(None, rows, np.array([2, 0, 2], np.int32), holder, ("a/1", "b/1"))
    assert [[(gpu.index, gpu.job) for gpu in node] for node in answers] == [
        [(0, "a/1"), (1, None)],
        [],
        [(0, "a/1"), (1, "b/1")],
    ]


def frame_of(kind: EntityKind, name: str, *values: float) -> FeatureFrame:
    column = np.array(values, np.float32)[:, None]
    return FeatureFrame(
        kind, (name,), column, np.arange(len(values), dtype=np.int32), np.zeros(column.shape, np.int64), 0
    )


def test_a_node_that_sends_by_itself_answers_while_its_gpus_are_recent() -> None:
    node = frame_of(EntityKind.NODE, "scrape_up", 1.0, 0.0, np.nan, np.nan, np.nan)
    gpu = frame_of(EntityKind.GPU, "age_s", 10.0, 500.0, 20.0, np.nan)
    rows = np.array([[1, -1], [0, -1], [1, 2], [1, -1], [3, -1]], np.int32)
    #  scraped: what the scraper says    sends   stopped  never heard
    np.testing.assert_array_equal(answering(node, gpu, rows, 5), [1.0, 0.0, 1.0, 0.0, np.nan])
    np.testing.assert_array_equal(answering(None, None, rows, 5), [np.nan] * 5)
