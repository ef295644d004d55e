"""Rows of the archive: their order, and their files."""

import io

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.archive import rows as archive_rows
from fleetcast.ingest.archive.rows import (
    ENTITY_BITS,
    KINDS,
    METRIC_BITS,
    METRIC_NAMES,
    POSITION_BITS,
    STATISTICS,
    ArchiveRows,
    NameLookups,
    decode_samples,
    encode_samples,
    make_row_lookup,
    pack_series,
    sort_unique_rows,
)

HOUR_MS = 1_795_276_800_000
LARGEST = (len(KINDS) - 1, 2**METRIC_BITS - 1, 2**ENTITY_BITS - 1)
SERIES = ((0, 0, 0), (0, 0, 2), (0, 1, 0), (3, 0, 1), LARGEST)  # kind, metric, entity
Row = tuple[tuple[int, int, int], int]  # series, milliseconds after HOUR_MS


def rows_of(given_rows: list[Row]) -> ArchiveRows:
    """Return rows whose values are their positions."""
    kind, metric, entity = np.array([series for series, _ in given_rows], np.int64).reshape(-1, 3).T
    time_ms = np.array([HOUR_MS + ms for _, ms in given_rows], np.int64)
    return ArchiveRows(pack_series(kind, metric, entity), time_ms, np.arange(len(given_rows), dtype=np.float64))


def tuples(rows: ArchiveRows) -> list[Row]:
    names = zip(rows.kind.tolist(), rows.metric.tolist(), rows.entity.tolist(), strict=True)
    return list(zip(names, (rows.time_ms - HOUR_MS).tolist(), strict=True))


def test_a_series_and_a_position_fit_a_number_that_is_not_negative() -> None:
    assert int(pack_series(*LARGEST)) << POSITION_BITS < 2**63
    assert tuples(rows_of([(LARGEST, 0)])) == [(LARGEST, 0)]


@pytest.mark.parametrize("position_bits", [POSITION_BITS, 2])
@given(given_rows=st.lists(st.tuples(st.sampled_from(SERIES), st.sampled_from((0, 1, 15_000, 3_599_999))), max_size=40))
def test_rows_are_ordered_by_series_and_time_and_the_first_of_equal_ones_remains(
    given_rows: list[Row], position_bits: int
) -> None:
    """With few bits for positions, most examples have more rows than these can number."""
    first = {row: at for at, row in reversed(list(enumerate(given_rows)))}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_rows, "POSITION_BITS", position_bits)
        rows, order = sort_unique_rows(rows_of(given_rows), HOUR_MS)
    assert tuples(rows) == sorted(first)
    assert order.tolist() == rows.value.tolist() == [first[row] for row in sorted(first)]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 20])
def test_a_file_of_several_row_groups_has_all_rows(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_rows, "ROWS_A_GROUP", 8)
    entities = Entities()
    gpus = [entities.add_to_node(EntityKind.GPU, f"n{number}", 0) for number in range(5)]
    ports = [entities.add_to_node(EntityKind.PORT, "n1", "mlx5_0", number) for number in range(2)]
    places = [(0, 3, gpu) for gpu in gpus[1:]] + [(KINDS.index(EntityKind.PORT), 4, port) for port in ports]
    rows, _ = sort_unique_rows(rows_of([(places[at % len(places)], at) for at in range(count)]), HOUR_MS)
    data = encode_samples(rows, {kind: entities[kind].names for kind in KINDS})
    found = Entities()
    read = decode_samples(io.BytesIO(data), NameLookups(make_row_lookup(found)))
    assert pq.read_metadata(io.BytesIO(data)).num_row_groups == max(1, -(-count // 8))
    assert _named(read, found) == _named(rows, entities)
    assert read.value.tolist() == rows.value.tolist()


def _named(rows: ArchiveRows, entities: Entities) -> list[tuple[str, str, str, int]]:
    return [
        (KINDS[kind].value, METRIC_NAMES[metric], entities[KINDS[kind]].names[entity], ms)
        for (kind, metric, entity), ms in tuples(rows)
    ]


@pytest.mark.parametrize("statistics", [archive_rows.PART_STATISTICS, STATISTICS])
def test_row_groups_state_the_limits_of_some_columns(statistics: tuple[str, ...]) -> None:
    entities = Entities()
    entities.add_to_node(EntityKind.GPU, "n1", 0)
    data = encode_samples(
        rows_of([((0, 0, 0), 1)]), {EntityKind.GPU: entities[EntityKind.GPU].names}, METRIC_NAMES, statistics
    )
    group = pq.read_metadata(io.BytesIO(data)).row_group(0)
    columns = [group.column(at) for at in range(group.num_columns)]
    assert {one.path_in_schema for one in columns if one.statistics and one.statistics.has_min_max} == {*statistics}


def test_entities_that_repeat_with_each_metric_are_stored_about_once() -> None:
    """More entities than a page had rows by default: compression finds repeats only within a page."""
    gpus, metrics = 24_000, 8
    rows = ArchiveRows(
        pack_series(0, np.arange(metrics).repeat(gpus), np.tile(np.arange(gpus), metrics)),
        np.full(gpus * metrics, HOUR_MS),
        np.zeros(gpus * metrics),
    )
    data = encode_samples(rows, {KINDS[0]: [f"n{gpu // 8:05d}/{gpu % 8}" for gpu in range(gpus)]})
    group = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(0)
    entity = next(group.column(at) for at in range(5) if group.column(at).path_in_schema == "entity")
    assert entity.total_compressed_size < 6 * gpus, "at two bytes a row, eight metrics would need 16 times the GPUs"
