"""Telemetry records, schema 1: one node's scrape as columns, in two forms.

Example: docs/sources/kafka.md.

    JSON      {"schema": 1, "node", "time_ms", "columns": {kind: {"entities": […], "values": {metric: […]}}}}
    compact   b"FCT1"  header length uint32  time_ms int64  header (msgpack)  float64 × n, all little-endian
    header    {"node", "columns": {kind: {"entities": […], "metrics": […]}}}
    n values  kind after kind, metric after metric, entity after entity, as the header names them

Both may have `gpu_model` and `bad` (counts by reason of what the sender could not read). Other keys are
refused. Names and units are those of `fleet/metrics.py`, and counters are raw. Entities are named within
their node: GPU `"3"`, MIG instance `"3/7"`, port `"mlx5_0/1"`, the node `""`. Entities that no node owns
have their full names. A missing value is null or NaN. Most records repeat an earlier header, so a decoder
caches decoded headers.
"""

import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.decode_faults import explain_decode_error, explain_json_error
from fleetcast.fleet.entities import MAX_NAME_LENGTH, NODE_OWNED, Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import METRICS, find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.node_names import find_or_register_node
from fleetcast.ingest.pages.serving import MAX_INSTANCES
from fleetcast.ingest.source import Batch
from fleetcast.ingest.tally import MAX_UNREAD_NAMES, RecordTally, SkipRule

JSON_TYPE = "application/vnd.fleetcast.telemetry.v1+json"
BINARY_TYPE = "application/vnd.fleetcast.telemetry.v1+binary"
MAGIC = b"FCT1"
FUTURE_LIMIT_MS = 60_000
MAX_ENTITIES = 1024  # of a kind in a record
MAX_METRICS = 1024  # of a kind in a record
MAX_BAD = 10_000  # told of in a record
PLANS_BYTES = 64 * 2**20  # of headers whose meaning is kept
_HEAD = struct.Struct("<4sIq")
_LATEST_MS = 2**53
Row = TypeVar("Row")


class RecordNames(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The names of metrics and entities that label one kind's (metrics, entities) values."""

    metrics: tuple[str, ...]
    entities: tuple[str, ...] = ("",)


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The header of a record: everything except its time and its values."""

    node: str
    columns: dict[str, RecordNames]
    gpu_model: str = ""
    bad: dict[str, int] = {}


class _Columns(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    values: dict[str, list[float | None]]
    entities: tuple[str, ...] = ("",)


class _JsonRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    schema: Literal[1]
    node: str
    time_ms: int
    columns: dict[str, _Columns]
    gpu_model: str = ""
    bad: dict[str, int] = {}


_read_header = msgspec.msgpack.Decoder(Header).decode
_read_json = msgspec.json.Decoder(_JsonRecord).decode


@dataclass(frozen=True, slots=True)
class ColumnarRecord:
    """A columnar record before it is encoded.

    values: for each kind of the header, (metrics, entities) float64, NaN where missing.
    """

    header: Header
    time_ms: int
    values: tuple[NDArray[np.float64], ...]


def encode_binary_record(record: ColumnarRecord) -> bytes:
    """Encode a record in the compact form."""
    header = msgspec.msgpack.encode(record.header)
    parts = [np.ascontiguousarray(block, "<f8").tobytes() for block in record.values]
    return b"".join((_HEAD.pack(MAGIC, len(header), record.time_ms), header, *parts))


def encode_json_record(record: ColumnarRecord) -> bytes:
    """Encode a record in the JSON form. NaN becomes null."""
    columns = {
        kind: _Columns(dict(zip(names.metrics, block.tolist(), strict=True)), names.entities)
        for (kind, names), block in zip(record.header.columns.items(), record.values, strict=True)
    }
    header = record.header
    return msgspec.json.encode(_JsonRecord(1, header.node, record.time_ms, columns, header.gpu_model, header.bad))


@dataclass(frozen=True, slots=True)
class _Block:
    """The series of one kind in a record, and the place of their values.

    rows: the rows of the values that belong to known metrics, or None if all metrics are known.
    """

    kind: EntityKind
    metric: NDArray[np.int16]  # (known metrics × entities,)
    entity: NDArray[np.int32]  # (entities,)
    turns: NDArray[np.intp]  # (known metrics × entities,) which of them, metric after metric
    at: slice  # of the record's values
    rows: NDArray[np.intp] | None  # known metrics, as rows of the values


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan to decode all records with one header: the number of their values, and their series."""

    values: int
    blocks: tuple[_Block, ...]
    unknown: int  # series outside the catalogue
    names: tuple[str, ...]  # of some of them
    bad: tuple[RecordError, ...]


@dataclass(slots=True)
class RecordDecoder:
    """A decoder of the columnar records of all nodes.

    `noted`: counts of the skipped values, by the reasons `blank` and `unknown_metric`. models: node → GPU model.
    """

    entities: Entities
    noted: Counter[str] = field(default_factory=Counter)
    future_limit_ms: int = FUTURE_LIMIT_MS
    models: dict[str, str] = field(default_factory=dict)
    _plans: dict[bytes, _Plan] = field(default_factory=dict)
    _held: int = 0

    def decode(self, record: bytes, now_ms: int) -> Batch:
        """Decode the samples of a record in either form. Raises RecordError if it is unreadable as a whole.

        >>> json = b'{"schema":1,"node":"n1","time_ms":5,"columns":{"gpu":{"entities":["0"],"values":{"power_w":[9]}}}}'
        >>> RecordDecoder(Entities()).decode(json, now_ms=10).samples[0].value
        array([9.])
        """
        binary = record.startswith(MAGIC)
        header, time_ms, values = _split_binary_record(record) if binary else _split_json_record(record)
        if not 0 <= time_ms <= _LATEST_MS:
            raise RecordError("bad_timestamp", f"time_ms {time_ms}: expected Unix milliseconds")
        if time_ms > now_ms + self.future_limit_ms:
            raise RecordError("future", f"{(time_ms - now_ms) / 1000:.0f} s ahead")
        plan = self._plans.get(header)
        if plan is None:
            plan = self._make_plan(header)
        if len(values) != plan.values:
            raise RecordError("bad_shape", f"{len(values)} values, and names for {plan.values}")
        return self._make_batch(plan, time_ms, values)

    def _make_plan(self, raw: bytes) -> _Plan:
        header = _decode_or_refuse(_read_header, raw)
        plan = _register_header(header, self.entities)
        if header.gpu_model and header.node:
            self.models[header.node] = header.gpu_model[:MAX_NAME_LENGTH]
        if self._held + len(raw) > PLANS_BYTES:
            self._plans.clear()
            self._held = 0
        if not header.bad:  # which comes once
            self._plans[raw] = plan
            self._held += len(raw)
        return plan

    def _make_batch(self, plan: _Plan, time_ms: int, values: NDArray[np.float64]) -> Batch:
        bad = list(plan.bad)
        blank = 0
        if plan.unknown:
            self.noted["unknown_metric"] += plan.unknown
        samples = []
        for block in plan.blocks:
            value = values[block.at]
            if block.rows is not None:
                value = value.reshape(-1, len(block.entity))[block.rows].ravel()
            entity = block.entity.take(block.turns)
            metric = block.metric
            good = np.isfinite(value)
            if np.count_nonzero(good) < len(value):
                odd = self._make_value_errors(block, value)
                bad += odd
                blank += len(value) - int(np.count_nonzero(good)) - len(odd)
                metric, entity, value = metric[good], entity[good], value[good]
            if len(value):
                samples.append(SampleBatch(block.kind, metric, entity, np.full(len(value), time_ms, np.int64), value))
        ignored = {SkipRule.NO_DATA: blank} if blank else {}
        read = sum(map(len, samples))
        tally = RecordTally(read, len(bad), ignored, plan.unknown, plan.names)
        return Batch(samples=tuple(samples), bad=tuple(bad), tally=tally)

    def _make_value_errors(self, block: _Block, value: NDArray[np.float64]) -> list[RecordError]:
        infinite = int(np.isinf(value).sum())
        self.noted["blank"] += int(np.isnan(value).sum())
        return [RecordError("not_finite", f"a value of kind {block.kind}")] * infinite


def _split_binary_record(record: bytes) -> tuple[bytes, int, NDArray[np.float64]]:
    """Split the compact form into (header, time_ms, values). Raises RecordError if it is truncated."""
    if len(record) < _HEAD.size:
        raise RecordError("truncated", f"{len(record)} bytes, the head alone has {_HEAD.size}")
    _, length, time_ms = _HEAD.unpack_from(record)
    begin = _HEAD.size + length
    if begin > len(record) or (len(record) - begin) % 8:
        raise RecordError("truncated", f"{len(record)} bytes with a header of {length}: no whole number of values")
    return record[_HEAD.size : begin], time_ms, np.frombuffer(record, "<f8", offset=begin)


def _split_json_record(record: bytes) -> tuple[bytes, int, NDArray[np.float64]]:
    message = _decode_or_refuse(_read_json, record)
    columns: dict[str, RecordNames] = {}
    for kind, block in message.columns.items():
        wrong = next((name for name, row in block.values.items() if len(row) != len(block.entities)), None)
        if wrong is not None:
            found = f"{len(block.values[wrong])} values for {len(block.entities)} entities"
            raise RecordError("bad_shape", f"{kind} {wrong[:80]!r}: {found}")
        columns[kind] = RecordNames(tuple(block.values), block.entities)
    rows = chain.from_iterable(block.values.values() for block in message.columns.values())
    values = np.array(list(chain.from_iterable(rows)), np.float64)
    header = msgspec.msgpack.encode(Header(message.node, columns, message.gpu_model, message.bad))
    return header, message.time_ms, values


def _decode_or_refuse(read: Callable[[bytes], Row], raw: bytes) -> Row:
    try:
        return read(raw)
    except msgspec.ValidationError as error:
        raise RecordError("bad_record", explain_decode_error(error, read, raw)[:300]) from None
    except (ValueError, RecursionError) as error:
        raise RecordError("not_readable", explain_json_error(error)[:300]) from None


def _register_header(header: Header, entities: Entities) -> _Plan:
    """Register the node and entities of a header, and return the plan to decode its values.

    Raises RecordError if a name is invalid.
    """
    node = find_or_register_node(header.node, entities) if header.node else ""
    blocks, at, unknown = [], 0, 0
    unread: list[str] = []
    for kind, names in header.columns.items():
        size = len(names.metrics) * len(names.entities)
        if len(names.metrics) > MAX_METRICS or len(names.entities) > MAX_ENTITIES:
            counts = f"{len(names.metrics)} metrics of {len(names.entities)} entities"
            raise RecordError("too_many_series", f"{kind[:40]}: {counts}, at most {MAX_METRICS} of {MAX_ENTITIES}")
        if len(set(names.metrics)) < len(names.metrics) or len(set(names.entities)) < len(names.entities):
            raise RecordError("duplicate", f"{kind[:40]}: a metric or an entity is named twice")
        metric, rows = _find_metric_rows(kind, names.metrics)
        if left_out := size - len(metric) * len(names.entities):
            unknown += left_out
            read = set(rows.tolist())
            unread += [f"{kind}.{name}"[:80] for row, name in enumerate(names.metrics) if row not in read]
        if len(metric) and names.entities:
            known = EntityKind(kind)
            entity = np.array([_find_or_add_entity(known, node, name, entities) for name in names.entities], np.int32)
            every = None if len(metric) == len(names.metrics) else rows
            columns, turns = _repeat_metrics(metric.tobytes(), len(entity))
            blocks.append(_Block(known, columns, entity, turns, slice(at, at + size), every))
        at += size
    return _Plan(at, tuple(blocks), unknown, tuple(unread[:MAX_UNREAD_NAMES]), _make_sender_errors(header.bad))


def _find_metric_rows(kind: str, names: Sequence[str]) -> tuple[NDArray[np.int16], NDArray[np.intp]]:
    """Return the catalogue rows of the known metrics, and their indices in `names`.

    A newer sender may use metrics that this version does not know.
    """
    if kind not in METRICS:
        return np.empty(0, np.int16), np.empty(0, np.intp)
    found = [(_find_catalogue_row(EntityKind(kind), name), at) for at, name in enumerate(names)]
    known = [(row, at) for row, at in found if row is not None]
    return np.array([row for row, _ in known], np.int16), np.array([at for _, at in known], np.intp)


def _find_catalogue_row(kind: EntityKind, name: str) -> int | None:
    try:
        return find_metric_row(kind, name)
    except KeyError:
        return None


@lru_cache(1024)  # the nodes of a fleet have the same columns
def _repeat_metrics(metric: bytes, entities: int) -> tuple[NDArray[np.int16], NDArray[np.intp]]:
    """Repeat each metric once per entity. metric: int16 rows of the catalogue, as bytes.

    Returns the metrics and the indices of their entities, both (metrics × entities,).
    """
    row = np.frombuffer(metric, np.int16)
    return np.repeat(row, entities), np.tile(np.arange(entities), len(row))


def _find_or_add_entity(kind: EntityKind, node: str, name: str, entities: Entities) -> int:
    """Return the row of the entity that a record calls `name`. Adds an unknown entity.

    Raises RecordError if the name is invalid for its kind.
    """
    good = len(name) <= MAX_NAME_LENGTH and name.isprintable() and " " not in name
    if kind is EntityKind.NODE:
        if not node or name:
            raise RecordError("bad_label", f"{name[:80]!r}: a node's own columns have the one entity ''")
        return entities.find_or_add_node(node)
    if kind not in NODE_OWNED:
        if not good or not name:
            raise RecordError("bad_label", f"{kind} {name[:80]!r} is no name")
        if name not in entities[kind] and len(entities[kind]) >= MAX_INSTANCES:
            raise RecordError("too_many_models", f"more than {MAX_INSTANCES:,} of kind {kind}: {name[:80]!r}")
        return entities[kind].add(name)
    parts = name.split("/")
    whole = len(parts) == (1 if kind is EntityKind.GPU else 2)
    if not (node and good and whole and all(parts)) or not all(map(_is_index, parts[_DEVICE_NAMES[kind] :])):
        raise RecordError("bad_label", f"{kind} {name[:80]!r} of node {node[:80]!r}: expected {_EXPECTED[kind]}")
    return entities.add_to_node(kind, node, *parts)


_DEVICE_NAMES = {EntityKind.GPU: 0, EntityKind.GPU_INSTANCE: 0, EntityKind.PORT: 1}  # the parts behind are numbers
_EXPECTED = {
    EntityKind.GPU: "its index, such as '3'",
    EntityKind.GPU_INSTANCE: "indexes of GPU and instance, such as '3/7'",
    EntityKind.PORT: "device and port, such as 'mlx5_0/1'",
}


def _is_index(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 3 and str(int(text)) == text


def _make_sender_errors(counts: Mapping[str, int]) -> tuple[RecordError, ...]:
    """Return one error for each record that the sender could not read, at most MAX_BAD."""
    errors: list[RecordError] = []
    for reason, count in counts.items():
        room = MAX_BAD - len(errors)
        errors += [RecordError(reason[:40], "reported by the sender")] * max(0, min(count, room))
    return tuple(errors)
