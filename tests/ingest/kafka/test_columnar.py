"""Columnar records: what goes in comes out, in both forms; what cannot be read says why."""

import json
import math

import numpy as np
import pytest

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.metrics import METRICS, find_metric_row
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.kafka import columnar
from fleetcast.ingest.kafka.columnar import (
    ColumnarRecord,
    Header,
    RecordDecoder,
    RecordNames,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.kafka.node_records import make_node_records
from fleetcast.ingest.source import Batch

NOW_MS = 1_760_000_000_000
GPUS = RecordNames(("power_w", "xid"), ("0", "1"))
RECORD = ColumnarRecord(
    Header("n1", {"gpu": GPUS, "node": RecordNames(("scrape_up",))}, "H100"),
    NOW_MS,
    (np.array([[401.5, 399.0], [math.nan, 79.0]]), np.array([[1.0]])),
)


def told(batch: Batch, entities: Entities) -> set[tuple[str, str, int, float]]:
    """(metric, entity, time_ms, value)"""
    return {
        (METRICS[rows.kind][metric].name, entities[rows.kind].names[entity], time_ms, value)
        for rows in batch.samples
        for metric, entity, time_ms, value in zip(
            rows.metric.tolist(), rows.entity.tolist(), rows.time_ms.tolist(), rows.value.tolist(), strict=True
        )
    }


@pytest.mark.parametrize("encode", [encode_binary_record, encode_json_record])
def test_a_record_comes_back_as_it_was_written(encode: object) -> None:
    assert callable(encode)
    decoder = RecordDecoder(entities := Entities())
    for _ in range(2):  # the second time its header is known
        assert told(decoder.decode(encode(RECORD), NOW_MS), entities) == {
            ("power_w", "n1/0", NOW_MS, 401.5),
            ("power_w", "n1/1", NOW_MS, 399.0),
            ("xid", "n1/1", NOW_MS, 79.0),
            ("scrape_up", "n1", NOW_MS, 1.0),
        }
    assert decoder.noted["blank"] == 2
    assert decoder.models == {"n1": "H100"}


def test_both_forms_share_what_a_header_stands_for() -> None:
    decoder = RecordDecoder(Entities())
    decoder.decode(encode_json_record(RECORD), NOW_MS)
    decoder.decode(encode_binary_record(RECORD), NOW_MS)
    assert len(decoder._plans) == 1


def test_metrics_and_kinds_of_a_newer_sender_are_noted_and_the_rest_is_read() -> None:
    columns = {"gpu": RecordNames(("from_tomorrow", "power_w"), ("0",)), "quantum": RecordNames(("spin",), ("a", "b"))}
    values = np.array([[7.0], [401.5]]), np.array([[1.0, 2.0]])
    decoder = RecordDecoder(entities := Entities())
    batch = decoder.decode(encode_binary_record(ColumnarRecord(Header("n1", columns), NOW_MS, values)), NOW_MS)
    assert told(batch, entities) == {("power_w", "n1/0", NOW_MS, 401.5)}
    assert decoder.noted["unknown_metric"] == 3


def test_infinite_values_are_bad_and_the_others_are_kept() -> None:
    record = ColumnarRecord(
        Header("n1", {"gpu": RecordNames(("power_w",), ("0", "1"))}), NOW_MS, (np.array([[math.inf, 2.0]]),)
    )
    batch = RecordDecoder(Entities()).decode(encode_binary_record(record), NOW_MS)
    assert [error.reason for error in batch.bad] == ["not_finite"]
    assert [rows.value.tolist() for rows in batch.samples] == [[2.0]]


def test_what_the_sender_could_not_read_is_counted_here() -> None:
    record = ColumnarRecord(Header("n1", {}, bad={"bad_line": 2, "bad_value": 1}), NOW_MS, ())
    batch = RecordDecoder(Entities()).decode(encode_binary_record(record), NOW_MS)
    assert sorted(error.reason for error in batch.bad) == ["bad_line", "bad_line", "bad_value"]


def columns(**given: object) -> bytes:
    record = {"schema": 1, "node": "n1", "time_ms": NOW_MS, "columns": {}} | given
    return json.dumps(record).encode()


POWER = {"entities": ["0"], "values": {"power_w": [1.0]}}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (b"{", "not_readable"),
        (columns(schema=2), "bad_record"),
        (columns(colour="red"), "bad_record"),
        (columns(node="a/b", columns={"gpu": POWER}), "bad_label"),
        (columns(node="", columns={"gpu": POWER}), "bad_label"),
        (columns(time_ms=NOW_MS + 61_000), "future"),
        (columns(time_ms=-1), "bad_timestamp"),
        (columns(columns={"gpu": {"entities": ["0"], "values": {"power_w": [1.0, 2.0]}}}), "bad_shape"),
        (columns(columns={"gpu": {"entities": ["x"], "values": {"power_w": [1.0]}}}), "bad_label"),
        (columns(columns={"gpu": {"entities": ["0", "0"], "values": {"power_w": [1.0, 2.0]}}}), "duplicate"),
        (columns(columns={"port": {"entities": ["mlx5_0"], "values": {"rx_bytes": [1.0]}}}), "bad_label"),
        (columns(columns={"node": {"entities": ["n1"], "values": {"scrape_up": [1.0]}}}), "bad_label"),
        (encode_binary_record(RECORD)[:-3], "truncated"),
        (encode_binary_record(RECORD)[:-8], "bad_shape"),
        (b"FCT1", "truncated"),
        (b"FCT1" + bytes(12), "not_readable"),
    ],
)
def test_a_record_that_cannot_be_read_says_why(record: bytes, reason: str) -> None:
    with pytest.raises(RecordError) as caught:
        RecordDecoder(Entities()).decode(record, NOW_MS)
    assert caught.value.reason == reason


def test_a_scrape_becomes_a_record_for_each_node_and_moment() -> None:
    entities = Entities()
    power, up = find_metric_row(EntityKind.GPU, "power_w"), find_metric_row(EntityKind.NODE, "scrape_up")
    gpus = [entities.add_to_node(EntityKind.GPU, node, gpu) for node in ("n1", "n2") for gpu in (0, 1)]
    rows = [(power, gpu, NOW_MS + (15_000 if gpu == gpus[3] else 0), float(gpu)) for gpu in gpus]
    batch = Batch(
        samples=(
            SampleBatch.from_rows(EntityKind.GPU, rows),
            SampleBatch.from_rows(
                EntityKind.NODE, [(up, entities.find_or_add_node("n1"), NOW_MS + 3, 1.0)]
            ),  # one scrape with its page
        ),
        bad=(RecordError("bad_line"),),
    )
    records = make_node_records(batch, entities, {"n2": "H100"})
    assert [(one.header.node, one.time_ms) for one in records] == [
        ("n1", NOW_MS),
        ("n2", NOW_MS),
        ("n2", NOW_MS + 15_000),
    ]
    assert records[0].header == Header(
        "n1", {"gpu": RecordNames(("power_w",), ("0", "1")), "node": RecordNames(("scrape_up",))}, bad={"bad_line": 1}
    )
    assert records[1].header == Header("n2", {"gpu": RecordNames(("power_w",), ("0",))}, "H100")
    decoder = RecordDecoder(again := Entities())
    came = set().union(*(told(decoder.decode(encode_binary_record(one), NOW_MS), again) for one in records[:2]))
    assert came == {
        ("power_w", "n1/0", NOW_MS, 0.0),
        ("power_w", "n1/1", NOW_MS, 1.0),
        ("power_w", "n2/0", NOW_MS, 2.0),
        ("scrape_up", "n1", NOW_MS, 1.0),
    }


def test_served_models_are_bounded_as_those_of_metric_pages_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columnar, "MAX_INSTANCES", 3)
    decoder = RecordDecoder(entities := Entities())

    def send(name: str) -> None:
        header = Header("", {"served_model": RecordNames((METRICS[EntityKind.SERVED_MODEL][0].name,), (name,))}, "")
        decoder.decode(encode_binary_record(ColumnarRecord(header, NOW_MS, (np.array([[1.0]]),))), NOW_MS)

    for number in range(3):
        send(f"pool/model/{number}")
    with pytest.raises(RecordError, match="too_many_models"):
        send("pool/model/3")
    send("pool/model/2")
    assert len(entities[EntityKind.SERVED_MODEL]) == 3
