"""The rows of the archive: columns in memory, their order, and their Parquet encoding.

    samples   kind, metric, entity (dictionary strings) · time_ms int64 · value float64; by (kind, metric, entity, time)
    events    time_ms · of ("job" or "node") · name · attempt · source · sequence · type · event (the whole of it, JSON)

Values are exact. BYTE_STREAM_SPLIT with zstd needs 1.55 bytes for a recorded H100 value (dictionary 2.0,
plain 1.77).
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import NODE_OWNED, Entities
from fleetcast.fleet.events import JobEvent, NodeEvent
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind

KINDS = tuple(EntityKind)
METRIC_NAMES = tuple(sorted({metric.name for metrics in METRICS.values() for metric in metrics}))
ROWS_A_GROUP = 2**18
TIME_BITS, ENTITY_BITS, METRIC_BITS = 22, 25, 12  # milliseconds of an hour, names of a kind, names of metrics
POSITION_BITS = 22  # what a series leaves of 63 bits
PART_STATISTICS = ("kind", "metric", "time_ms")  # nearly all entities are in each row group of a part
STATISTICS = (*PART_STATISTICS, "entity")
_METRIC_AT = {name: row for row, name in enumerate(METRIC_NAMES)}
COLUMNS = ("kind", "metric", "entity", "time_ms", "value")


@dataclass(frozen=True, slots=True)
class ArchiveRows:
    """The columns of samples, each (n,).

    series: kind, metric and entity as one number, in this order (see `pack_series`).
    """

    series: NDArray[np.int64]
    time_ms: NDArray[np.int64]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.series)

    @property
    def kind(self) -> NDArray[np.int8]:
        """(n,) int8, the index of each row's kind in KINDS."""
        return (self.series >> (METRIC_BITS + ENTITY_BITS)).astype(np.int8)

    @property
    def metric(self) -> NDArray[np.int16]:
        """(n,) int16, the index of each row's metric in METRIC_NAMES."""
        metric: NDArray[np.int16] = (self.series >> ENTITY_BITS & 2**METRIC_BITS - 1).astype(np.int16)
        return metric

    @property
    def entity(self) -> NDArray[np.int32]:
        """(n,) int32, the index of each row's entity among the names of its kind."""
        entity: NDArray[np.int32] = (self.series & 2**ENTITY_BITS - 1).astype(np.int32)
        return entity

    def select(self, at: NDArray[Any] | slice) -> "ArchiveRows":
        return ArchiveRows(self.series[at], self.time_ms[at], self.value[at])

    def find_kind_starts(self) -> list[int]:
        """Return the index of the first row of each kind. The last element is the number of rows.

        The rows must be ordered by series.
        """
        starts: list[int] = np.searchsorted(self.series, pack_series(np.arange(len(KINDS) + 1), 0, 0)).tolist()
        return starts

    @classmethod
    def empty(cls) -> "ArchiveRows":
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.float64))

    @classmethod
    def concat(cls, parts: Sequence["ArchiveRows"]) -> "ArchiveRows":
        return cls(
            np.concatenate([part.series for part in parts]),
            np.concatenate([part.time_ms for part in parts]),
            np.concatenate([part.value for part in parts]),
        )


def pack_series(kind: Any, metric: Any, entity: Any) -> NDArray[np.int64]:
    """Pack the kind, metric and entity of each series into one int64 number, in this order.

    The arguments are indices as in `ArchiveRows`, each an array or a number.
    """
    series: NDArray[np.int64] = (np.int64(1) * kind << METRIC_BITS | metric) << ENTITY_BITS | entity
    return series


def make_metric_columns() -> dict[EntityKind, NDArray[np.int16]]:
    """Return kind → (catalogue row,) int16, the index of each metric in METRIC_NAMES."""
    return {kind: np.array([_METRIC_AT[metric.name] for metric in METRICS[kind]], np.int16) for kind in KINDS}


def make_sort_keys(rows: ArchiveRows, hour_ms: int) -> NDArray[np.int64]:
    """Return (n,) int64 keys that order rows by kind, metric, entity and time.

    All times must lie in the hour that begins at `hour_ms`.
    """
    return (rows.series << TIME_BITS) | (rows.time_ms - hour_ms)


def sort_unique_rows(rows: ArchiveRows, hour_ms: int) -> tuple[ArchiveRows, NDArray[np.intp]]:
    """Sort one hour's rows by series and time, and drop repeated ones.

    Returns the rows, and (n,) the index that each of them had before. The first of several rows with the same
    series and time remains.
    """
    series, order = _sort_series(rows.series)
    ordered = ArchiveRows(series, rows.time_ms.take(order), rows.value.take(order))  # faster than an index
    is_later = ordered.time_ms[1:] > ordered.time_ms[:-1]
    is_later |= series[1:] != series[:-1]
    if is_later.all():
        return ordered, order
    codes = make_sort_keys(ordered, hour_ms)  # few rows are late or repeated: a stable sort is quick
    again = np.argsort(codes, kind="stable")
    codes = codes[again]
    again = again[np.concatenate([[True], codes[1:] != codes[:-1]])]
    return ordered.select(again), order[again]


def _sort_series(series: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.intp]]:
    """Return the series sorted, and (n,) the index that each of them had before. The sort is stable."""
    if len(series) > 2**POSITION_BITS:
        order = np.argsort(series, kind="stable")
        return series[order], order
    numbers = series << POSITION_BITS
    numbers |= np.arange(len(series))
    numbers.sort()  # a third of the time of argsort
    return numbers >> POSITION_BITS, numbers & (2**POSITION_BITS - 1)


def _make_write_options() -> Mapping[str, Any]:
    """Return pyarrow's options for all Parquet files, so that each column of a row group is one page.

    Entities repeat with every metric, and compression finds repeats only within a page. Newer versions
    of pyarrow end a page after 20,000 rows unless an option says otherwise.
    """
    import pyarrow.parquet as pq

    options: dict[str, Any] = {"compression": "zstd", "compression_level": 3, "write_batch_size": 2**16}
    if "max_rows_per_page" in inspect.signature(pq.ParquetWriter.__init__).parameters:
        options["max_rows_per_page"] = ROWS_A_GROUP
    return options


def encode_samples(
    rows: ArchiveRows,
    names: Mapping[EntityKind, Sequence[str]],
    metrics: Sequence[str] = METRIC_NAMES,
    statistics: Sequence[str] = PART_STATISTICS,
) -> Any:
    """Encode sorted rows as a Parquet file, and return it as a buffer.

    names: kind → the names that `rows.entity` indexes. statistics: the columns for which each row group stores the
    smallest and the largest value.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    tables = _make_tables(rows, names, metrics)
    first = next(tables)
    options: dict[str, Any] = {
        "use_dictionary": ["kind", "metric", "entity"],
        "write_statistics": [*statistics],
        "column_encoding": {"time_ms": "DELTA_BINARY_PACKED", "value": "BYTE_STREAM_SPLIT"},
    }
    with pq.ParquetWriter(sink, first.schema, **options, **_make_write_options()) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table, ROWS_A_GROUP)
    return sink.getvalue()


def _make_tables(rows: ArchiveRows, names: Mapping[EntityKind, Sequence[str]], metrics: Sequence[str]) -> Iterator[Any]:
    """Yield an Arrow table for each row group, at least one.

    Tables of ROWS_A_GROUP rows fit the caches of a core.
    """
    import pyarrow as pa

    place, used = _make_name_dictionary(rows, names)
    words = [pa.array([kind.value for kind in KINDS]), pa.array(metrics), pa.array(used, pa.string())]
    for first in range(0, max(1, len(rows)), ROWS_A_GROUP):
        part = rows.select(slice(first, first + ROWS_A_GROUP))
        entity, starts = part.entity, part.find_kind_starts()
        for kind, begin, end in zip(KINDS, starts[:-1], starts[1:], strict=True):
            if begin < end:
                entity[begin:end] = place[kind].take(entity[begin:end])
        columns = [
            *map(pa.DictionaryArray.from_arrays, (part.kind, part.metric, entity), words),
            pa.array(part.time_ms),
            pa.array(part.value),
        ]
        fields = [pa.field(name, column.type, nullable=False) for name, column in zip(COLUMNS, columns, strict=True)]
        yield pa.table(columns, schema=pa.schema(fields))


def _make_name_dictionary(
    rows: ArchiveRows, names: Mapping[EntityKind, Sequence[str]]
) -> tuple[dict[EntityKind, NDArray[np.int32]], list[str]]:
    """Return the dictionary of all entity names in the rows, and the index of each entity in it.

    Returns (kind → (entity,) int32 index in the list of names, the list of names).
    """
    place: dict[EntityKind, NDArray[np.int32]] = {}
    used: list[str] = []
    starts = rows.find_kind_starts()
    for kind, first, end in zip(KINDS, starts[:-1], starts[1:], strict=True):
        if first < end:
            there = np.flatnonzero(np.bincount(rows.series[first:end] & 2**ENTITY_BITS - 1))
            place[kind] = np.empty(int(there[-1]) + 1, np.int32)
            place[kind][there] = np.arange(len(used), len(used) + len(there))
            table = names[kind]
            used += [table[row] for row in there.tolist()]
    return place, used


@dataclass(frozen=True, slots=True)
class NameLookups:
    """The lookups from the names in a file to our own indices.

    Rows are dropped if the lookup of their entity or metric returns None.
    """

    row_of: Callable[[EntityKind, str], int | None]
    metric_of: Callable[[str], int | None] = _METRIC_AT.get


def decode_samples(file: IO[bytes], words: NameLookups, filters: Any = None) -> ArchiveRows:
    """Read the rows of a samples file. Raises OSError or ValueError if the file is torn.

    filters: as for pyarrow.parquet.read_table, or None for all rows.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(file, filters=filters, use_threads=False).unify_dictionaries().combine_chunks()
    if not len(table):
        return ArchiveRows.empty()
    kind_at, kinds = _read_dictionary_column(table, "kind")
    metric_at, metrics = _read_dictionary_column(table, "metric")
    entity_at, named = _read_dictionary_column(table, "entity")
    kind = np.array([_KIND_AT.get(name, -1) for name in kinds], np.int8)[kind_at]
    metric = np.array([_replace_none(words.metric_of(name)) for name in metrics], np.int16)[metric_at]
    entity = np.full(len(table), -1, np.int32)
    for row in np.unique(kind[kind >= 0]).tolist():
        of_kind = kind == row
        there = np.flatnonzero(np.bincount(entity_at[of_kind]))
        place = np.empty(int(there[-1]) + 1, np.int32)
        place[there] = [_replace_none(words.row_of(KINDS[row], named[at])) for at in there.tolist()]
        entity[of_kind] = place[entity_at[of_kind]]
    rows = ArchiveRows(pack_series(kind, metric, entity), table["time_ms"].to_numpy(), table["value"].to_numpy())
    known = (kind >= 0) & (metric >= 0) & (entity >= 0)
    return rows if known.all() else rows.select(known)


def _replace_none(found: int | None) -> int:
    return -1 if found is None else found


def make_row_lookup(entities: Entities) -> Callable[[EntityKind, str], int]:
    """Return a function that finds the row of an entity in `entities`, and adds unknown entities."""

    def find_or_add_row(kind: EntityKind, name: str) -> int:
        if kind is EntityKind.NODE:
            return entities.find_or_add_node(name)
        row = entities[kind].find_row(name)
        if row is not None:
            return row
        owner = entities.find_or_add_node(name.split("/", 1)[0]) if kind in NODE_OWNED else -1
        return entities[kind].add(name, owner)

    return find_or_add_row


_KIND_AT = {kind.value: row for row, kind in enumerate(KINDS)}


def _read_dictionary_column(table: Any, column: str) -> tuple[NDArray[Any], list[str]]:
    array = table[column].combine_chunks()
    array = array.chunk(0) if hasattr(array, "num_chunks") else array
    return array.indices.to_numpy(), array.dictionary.to_pylist()


def encode_events(events: Sequence[JobEvent | NodeEvent]) -> Any:
    """Encode events as a Parquet file, ordered by time, and return it as a buffer."""
    import pyarrow as pa

    rows = [_make_event_row(event) for event in sorted(events, key=lambda event: event.time_ms)]
    columns = {name: [row[at] for row in rows] for at, name in enumerate(EVENT_COLUMNS)}
    schema = pa.schema(
        [
            ("time_ms", pa.int64()),
            *((name, pa.string()) for name in ("of", "name")),
            ("attempt", pa.int64()),
            ("source", pa.string()),
            ("sequence", pa.int64()),
            *((name, pa.string()) for name in ("type", "event")),
        ]
    )
    return encode_event_table(pa.table(columns, schema=schema))


def encode_event_table(table: Any) -> Any:
    """Encode a table of events as a Parquet file, and return it as a buffer."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    options: dict[str, Any] = {
        "use_dictionary": ["of", "name", "source", "type", "attempt"],
        "column_encoding": {"time_ms": "DELTA_BINARY_PACKED", "sequence": "DELTA_BINARY_PACKED"},
    }
    pq.write_table(table, sink, row_group_size=ROWS_A_GROUP, **options, **_make_write_options())
    return sink.getvalue()


EVENT_COLUMNS = ("time_ms", "of", "name", "attempt", "source", "sequence", "type", "event")


def _make_event_row(event: JobEvent | NodeEvent) -> tuple[Any, ...]:
    whole = msgspec.json.encode(event).decode()
    if isinstance(event, NodeEvent):
        return event.time_ms, "node", event.node, None, event.source, event.sequence, event.type, whole
    kind = str(type(event).__struct_config__.tag)
    return event.time_ms, "job", event.job, event.attempt, None, event.sequence, kind, whole
