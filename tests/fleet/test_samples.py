import numpy as np
import pytest

from fleetcast.fleet.samples import EntityKind, SampleBatch


def test_rows_become_columns_of_the_right_types() -> None:
    batch = SampleBatch.from_rows(EntityKind.GPU, [(5, 0, 1_700_000_000_000, 410.5), (6, 1, 1_700_000_000_000, 9e15)])
    assert len(batch) == 2
    columns = (batch.metric, batch.entity, batch.time_ms, batch.value)
    assert [column.dtype for column in columns] == [np.int16, np.int32, np.int64, np.float64]
    assert batch.value.tolist() == [410.5, 9e15]


def test_no_rows_are_an_empty_batch() -> None:
    assert len(SampleBatch.from_rows(EntityKind.NODE, [])) == 0


def test_columns_of_different_length_are_refused() -> None:
    one, two = np.zeros(1), np.zeros(2)
    with pytest.raises(ValueError, match="differ in length"):
        SampleBatch(EntityKind.GPU, two.astype(np.int16), two.astype(np.int32), two.astype(np.int64), one)


def test_batches_of_a_kind_are_joined_in_order() -> None:
    first = SampleBatch.from_rows(EntityKind.GPU, [(0, 0, 1, 1.0)])
    second = SampleBatch.from_rows(EntityKind.GPU, [(0, 0, 2, 2.0)])
    assert SampleBatch.concat([first, second]).time_ms.tolist() == [1, 2]


def test_batches_of_two_kinds_or_none_cannot_be_joined() -> None:
    gpu, node = SampleBatch.from_rows(EntityKind.GPU, []), SampleBatch.from_rows(EntityKind.NODE, [])
    with pytest.raises(ValueError, match=r"gpu.*node"):
        SampleBatch.concat([gpu, node])
    with pytest.raises(ValueError, match="cannot concatenate"):
        SampleBatch.concat([])
