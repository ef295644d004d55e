"""Rows of the archive: columns in memory, their order, and their Parquet encoding.

    samples   kind, metric, entity (dictionary strings) · time_ms int64 · value float64; by (kind, metric, entity, time)
    events    time_ms · of ("job" or "node") · name · attempt · source · sequence · type · event (the whole of it, JSON)

Values are exact. BYTE_STREAM_SPLIT with zstd needs 1.55 bytes for a recorded H100 value (dictionary 2.0,
plain 1.77).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.entities import NODE_OWNED, Entities
from fleet.events import JobEvent, NodeEvent
from fleet.metrics import METRICS
from fleet.samples import EntityKind

KINDS = tuple(EntityKind)
METRIC_NAMES = tuple(sorted({metric.name for metrics in METRICS.values() for metric in metrics}))
ROWS_A_GROUP = 2**18
TIME_BITS, ENTITY_BITS, METRIC_BITS = 22, 25, 12  # milliseconds of an hour, names of a kind, names of metrics
_METRIC_AT = {name: row for row, name in enumerate(METRIC_NAMES)}
_WRITE: Mapping[str, Any] = {
    "compression": "zstd",
    "compression_level": 3,
    "row_group_size": ROWS_A_GROUP,
    "write_batch_size": 2**16,
}


@dataclass(frozen=True, slots=True)
class ArchiveRows:
    """The columns of samples, each (n,).

    kind indexes KINDS, metric METRIC_NAMES, and entity the names of its kind (see `Names`).
    """

    kind: NDArray[np.int8]
    metric: NDArray[np.int16]
    entity: NDArray[np.int32]
    time_ms: NDArray[np.int64]
    value: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, at: NDArray[Any] | slice) -> "ArchiveRows":
        return ArchiveRows(self.kind[at], self.metric[at], self.entity[at], self.time_ms[at], self.value[at])

    @classmethod
    def none(cls) -> "ArchiveRows":
        return cls(np.empty(0, "i1"), np.empty(0, "i2"), np.empty(0, "i4"), np.empty(0, "i8"), np.empty(0, "f8"))

    @classmethod
    def concat(cls, parts: Sequence["ArchiveRows"]) -> "ArchiveRows":
        return cls(
            np.concatenate([part.kind for part in parts]),
            np.concatenate([part.metric for part in parts]),
            np.concatenate([part.entity for part in parts]),
            np.concatenate([part.time_ms for part in parts]),
            np.concatenate([part.value for part in parts]),
        )


def metric_columns() -> dict[EntityKind, NDArray[np.int16]]:
    """Return for each kind: row of its catalogue → row of METRIC_NAMES."""
    return {kind: np.array([_METRIC_AT[metric.name] for metric in METRICS[kind]], np.int16) for kind in KINDS}


def code(rows: ArchiveRows, hour_ms: int) -> NDArray[np.int64]:
    """Return (n,) one number for each (kind, metric, entity, time), in that order.

    All times must lie in the hour that begins at `hour_ms`.
    """
    series = (rows.kind.astype(np.int64) << METRIC_BITS | rows.metric) << ENTITY_BITS | rows.entity
    return (series << TIME_BITS) | (rows.time_ms - hour_ms)


def in_order(rows: ArchiveRows, hour_ms: int) -> tuple[ArchiveRows, NDArray[np.intp]]:
    """Return one hour's rows by kind, metric, entity and time, and where each row was before.

    Each (series, time) occurs once: its first row remains.
    """
    codes = code(rows, hour_ms)
    order = np.argsort(codes, kind="stable")  # batches are in order for long stretches: twice as fast as any other
    ordered = codes[order]
    fresh = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    if not fresh.all():
        order = order[fresh]  # the one that came first stays
    return rows.take(order), order


def encode_samples(
    rows: ArchiveRows, names: Mapping[EntityKind, Sequence[str]], metrics: Sequence[str] = METRIC_NAMES
) -> Any:
    """Encode rows that are in order as a Parquet file (a buffer).

    names: kind → the names that `rows.entity` indexes.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(
        _table(rows, names, metrics),
        sink,
        use_dictionary=["kind", "metric", "entity"],
        write_statistics=["kind", "metric", "entity", "time_ms"],
        column_encoding={"time_ms": "DELTA_BINARY_PACKED", "value": "BYTE_STREAM_SPLIT"},
        **_WRITE,
    )
    return sink.getvalue()


def _table(rows: ArchiveRows, names: Mapping[EntityKind, Sequence[str]], metrics: Sequence[str]) -> Any:
    import pyarrow as pa

    indices = np.empty(len(rows), np.int32)
    used: list[str] = []
    starts = np.searchsorted(rows.kind, np.arange(len(KINDS) + 1))
    for kind, first, end in zip(KINDS, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if first < end:
            there = np.flatnonzero(np.bincount(rows.entity[first:end]))
            place = np.empty(int(there[-1]) + 1, np.int32)
            place[there] = np.arange(len(used), len(used) + len(there))
            indices[first:end] = place[rows.entity[first:end]]
            table = names[kind]
            used += [table[row] for row in there.tolist()]
    dictionary = pa.DictionaryArray.from_arrays
    columns = {
        "kind": dictionary(pa.array(rows.kind), pa.array([kind.value for kind in KINDS])),
        "metric": dictionary(pa.array(rows.metric), pa.array(metrics)),
        "entity": dictionary(pa.array(indices), pa.array(used, pa.string())),
        "time_ms": pa.array(rows.time_ms),
        "value": pa.array(rows.value),
    }
    fields = [pa.field(name, column.type, nullable=False) for name, column in columns.items()]
    return pa.table(list(columns.values()), schema=pa.schema(fields))


@dataclass(frozen=True, slots=True)
class Words:
    """The lookups from a file's names to our own numbers. Rows with a name that gives None are left out."""

    row_of: Callable[[EntityKind, str], int | None]
    metric_of: Callable[[str], int | None] = _METRIC_AT.get


def decode_samples(file: IO[bytes], words: Words, filters: Any = None) -> ArchiveRows:
    """Read a file's rows. Raises OSError or ValueError if the file is torn.

    filters: in the form that pyarrow.parquet.read_table accepts.
    """
    import pyarrow.parquet as pq

    table = pq.read_table(file, filters=filters, use_threads=False).unify_dictionaries().combine_chunks()
    if not len(table):
        return ArchiveRows.none()
    kind_at, kinds = _indices(table, "kind")
    metric_at, metrics = _indices(table, "metric")
    entity_at, named = _indices(table, "entity")
    kind = np.array([_KIND_AT.get(name, -1) for name in kinds], np.int8)[kind_at]
    metric = np.array([_row(words.metric_of(name)) for name in metrics], np.int16)[metric_at]
    entity = np.full(len(table), -1, np.int32)
    for row in np.unique(kind[kind >= 0]).tolist():
        of_kind = kind == row
        there = np.flatnonzero(np.bincount(entity_at[of_kind]))
        place = np.empty(int(there[-1]) + 1, np.int32)
        place[there] = [_row(words.row_of(KINDS[row], named[at])) for at in there.tolist()]
        entity[of_kind] = place[entity_at[of_kind]]
    rows = ArchiveRows(kind, metric, entity, table["time_ms"].to_numpy(), table["value"].to_numpy())
    known = (kind >= 0) & (metric >= 0) & (entity >= 0)
    return rows if known.all() else rows.take(known)


def _row(found: int | None) -> int:
    return -1 if found is None else found


def adding(entities: Entities) -> Callable[[EntityKind, str], int]:
    """Return a lookup of rows in `entities` that adds new names."""

    def row_of(kind: EntityKind, name: str) -> int:
        if kind is EntityKind.NODE:
            return entities.node(name)
        row = entities[kind].row(name)
        if row is not None:
            return row
        owner = entities.node(name.split("/", 1)[0]) if kind in NODE_OWNED else -1
        return entities[kind].add(name, owner)

    return row_of


_KIND_AT = {kind.value: row for row, kind in enumerate(KINDS)}


def _indices(table: Any, column: str) -> tuple[NDArray[Any], list[str]]:
    array = table[column].combine_chunks()
    array = array.chunk(0) if hasattr(array, "num_chunks") else array
    return array.indices.to_numpy(), array.dictionary.to_pylist()


def encode_events(events: Sequence[JobEvent | NodeEvent]) -> Any:
    """Encode events as a Parquet file (a buffer), ordered by time."""
    import pyarrow as pa

    rows = [_event_row(event) for event in sorted(events, key=lambda event: event.time_ms)]
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
    """Encode a table of events as a Parquet file (a buffer)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    encoding = {"time_ms": "DELTA_BINARY_PACKED", "sequence": "DELTA_BINARY_PACKED"}
    dictionary = ["of", "name", "source", "type", "attempt"]
    pq.write_table(table, sink, use_dictionary=dictionary, column_encoding=encoding, **_WRITE)
    return sink.getvalue()


EVENT_COLUMNS = ("time_ms", "of", "name", "attempt", "source", "sequence", "type", "event")


def _event_row(event: JobEvent | NodeEvent) -> tuple[Any, ...]:
    whole = msgspec.json.encode(event).decode()
    if isinstance(event, NodeEvent):
        return event.time_ms, "node", event.node, None, event.source, event.sequence, event.type, whole
    kind = str(type(event).__struct_config__.tag)
    return event.time_ms, "job", event.job, event.attempt, None, event.sequence, kind, whole
