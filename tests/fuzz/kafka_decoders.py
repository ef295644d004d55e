"""Decoders of what lies on Kafka's topics: columnar records in both forms, pages, events, headers."""

import struct

import numpy as np

from fleetcast.clients.kafka_records import Message
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import SampleBatch
from fleetcast.ingest.kafka.columnar import (
    BINARY_TYPE,
    MAGIC,
    ColumnarRecord,
    Header,
    RecordNames,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.kafka.payload import DecodedPayload, PayloadDecoder
from tests.fuzz.bounds import MIB
from tests.fuzz.decoder import Decoder
from tests.fuzz.door_decoders import DRAIN, NOW_MS, PAGE, PORTS, STARTED, WRAPPED, take

COLUMNS = {
    "gpu": RecordNames(("power_w", "xid", "from_tomorrow"), ("0", "1")),
    "gpu_instance": RecordNames(("sm_active",), ("0/7",)),
    "port": RecordNames(("rx_bytes",), ("mlx5_0/1",)),
    "node": RecordNames(("scrape_up",)),
}
VALUES = tuple(np.full((len(names.metrics), len(names.entities)), 0.5) for names in COLUMNS.values())
RECORD = ColumnarRecord(Header("n001", COLUMNS, "H100", {"bad_line": 2}), NOW_MS, VALUES)
ODD = ColumnarRecord(
    Header("n002", {"gpu": RecordNames(("power_w",), ("0", "1"))}), NOW_MS, (np.array([[np.nan, np.inf]]),)
)
HEADERS: tuple[tuple[tuple[str, bytes], ...], ...] = (
    (),
    (("content-type", BINARY_TYPE.encode()),),
    (("Content-Type", b"text/plain; version=0.0.4"), ("node", b"n7"), ("time_ms", b"1760000000000")),
    (("ce_specversion", b"1.0"), ("ce_id", b"1"), ("ce_source", b"/x"), ("ce_type", b"t")),
)


def decode_value(value: bytes) -> None:
    """Decode a record of either topic again and again: records read alike change nothing. The length picks headers."""
    entities = Entities()
    decoder = PayloadDecoder(entities, ManualClock(NOW_MS))
    message = Message(("t", 0), 0, NOW_MS, value[:20], value, HEADERS[len(value) % len(HEADERS)])
    # The first time, a line without an index may stand before the line that states the index of its UUID.
    _, second, third = (_check(decoder.decode_telemetry(message), entities) for _ in range(3))
    assert second == third
    take(_checked(decoder.decode_events(message)).batch)
    told = Message(("t", 0), 0, NOW_MS, b"n1", b"up 1", (("time_ms", value[:40]), ("node", value[:300])))
    _check(decoder.decode_telemetry(told), entities)


def _checked(decoded: DecodedPayload) -> DecodedPayload:
    assert decoded.poison is None or decoded.batch.bad
    return decoded


def _check(decoded: DecodedPayload, entities: Entities) -> list[object]:
    for samples in _checked(decoded).batch.samples:
        _check_samples(samples, entities)
    return [
        (rows.kind, rows.metric.tolist(), rows.entity.tolist(), rows.value.tolist()) for rows in decoded.batch.samples
    ]


def _check_samples(samples: SampleBatch, entities: Entities) -> None:
    assert ((samples.metric >= 0) & (samples.metric < len(METRICS[samples.kind]))).all()
    assert ((samples.entity >= 0) & (samples.entity < len(entities[samples.kind]))).all()
    assert np.isfinite(samples.value).all()
    assert (samples.time_ms <= NOW_MS + 60_000).all()


VALUES_OF_KAFKA = Decoder(
    decode_value,
    (
        *(
            encode_binary_record(RECORD),
            encode_json_record(RECORD),
            encode_binary_record(ODD),
            encode_json_record(ODD),
            PAGE,
            PAGE + PORTS,
        ),
        *(STARTED, b"[" + DRAIN + b"]", WRAPPED, b"", MAGIC, b"{}"),
    ),
    (
        *(MAGIC, struct.pack("<I", 2**31), struct.pack("<q", NOW_MS), struct.pack("<d", 1.5), bytes(8)),
        *(b"\xa4node\xa4n001", b"\xa7columns\x81", b"\xa8entities\x92\xa10\xa11", b"\xa7metrics\x91\xa7power_w"),
        *(
            b'"schema":1,',
            b'"entities":["0"],',
            b'"values":{"power_w":[1.5]}',
            b'"bad":{"x":100000}',
            b'"time_ms":',
            b"null",
        ),
    ),
    base_bytes=8 * MIB,
    times=2000,  # each of the many ways to read a value keeps what it found; pages are read three times a header
)

KAFKA = {"kafka": VALUES_OF_KAFKA}
