import numpy as np

from service.documents import gpu_answers


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
