"""Decoding of job and node events: bodies in every framing, and a named reason for every bad record."""

import base64
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import structs

from fleetcast.fleet.entities import MAX_NAME_LENGTH
from fleetcast.fleet.errors import RecordError
from fleetcast.fleet.events import Finished, NodeEvent, Started, Step
from fleetcast.ingest.inbox.event_body import decode_body
from fleetcast.ingest.inbox.job_events import check_fields, decode_event, identify_event, is_usual_step
from tests.fuzz.bounds import examples

NOW_MS = 1_760_000_000_000


def event(**changes: object) -> dict[str, object]:
    return {"job": "train-42", "attempt": 1, "sequence": 7, "time_ms": NOW_MS, "type": "finished"} | changes


def step(**changes: object) -> dict[str, object]:
    return event(type="step", step=7, duration_s=1.5) | changes


def body(*rows: object) -> bytes:
    return json.dumps(rows[0] if len(rows) == 1 else list(rows)).encode()


def reason_of(record: bytes | dict[str, object]) -> str:
    raw = record if isinstance(record, bytes) else json.dumps(record).encode()
    with pytest.raises(RecordError) as caught:
        decode_event(raw, NOW_MS)
    return str(caught.value)


def test_one_object_is_one_event() -> None:
    (record,) = decode_body(body(event()), NOW_MS).records
    assert record.event == Finished(job="train-42", attempt=1, sequence=7, time_ms=NOW_MS)


def test_an_array_keeps_its_good_records_and_names_the_bad_by_index() -> None:
    decoded = decode_body(body(event(), {"job": "x"}, event(sequence=8)), NOW_MS)
    assert [record.index for record in decoded.records] == [0, 2]
    assert [index for index, _ in decoded.rejected] == [1]


@pytest.mark.parametrize("kind", ["application/x-ndjson", "application/json", ""])
def test_json_lines_are_records(kind: str) -> None:
    lines = b"\n".join([body(event()), b"", b'{"job": ', body(event(sequence=8)), b""])
    decoded = decode_body(lines, NOW_MS, {"content-type": kind})
    assert len(decoded.records) == 2
    assert [(index, error.reason) for index, error in decoded.rejected] == [(1, "truncated")]


def test_an_object_over_several_lines_is_one_record() -> None:
    assert len(decode_body(json.dumps(event(), indent=2).encode(), NOW_MS).records) == 1


def test_a_truncated_array_keeps_its_whole_records() -> None:
    decoded = decode_body(body(event(), event(sequence=8), event(sequence=9))[:-10], NOW_MS)
    assert [record.event.sequence for record in decoded.records] == [7, 8]
    assert [(index, error.reason) for index, error in decoded.rejected] == [(2, "truncated")]


def test_a_node_event_is_told_by_its_keys() -> None:
    raw = body({"node": "n042", "source": "nhc", "sequence": 1, "time_ms": NOW_MS, "type": "drain", "message": "fan"})
    found = decode_event(raw, NOW_MS)
    assert isinstance(found, NodeEvent)
    assert identify_event(found) == ("node", "n042", "nhc", 1)


def test_cloud_events_carry_the_event_in_their_data() -> None:
    envelope = {"specversion": "1.0", "id": "1", "source": "/s", "type": "job", "tenantid": "a", "data": event()}
    coded = {**envelope, "data": None, "data_base64": base64.b64encode(body(event())).decode()}
    del coded["data"]
    headers = {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "/s", "ce-type": "job"}
    structured = {"content-type": "application/cloudevents+json; charset=utf-8"}
    batch = {"content-type": "application/cloudevents-batch+json"}
    assert len(decode_body(body(event()), NOW_MS, headers).records) == 1
    assert len(decode_body(body(envelope), NOW_MS, structured).records) == 1
    assert len(decode_body(body(coded), NOW_MS, structured).records) == 1
    assert len(decode_body(body(envelope, envelope), NOW_MS, batch).records) == 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"specversion": "0.3"}, "0.3"),
        ({"datacontenttype": "text/xml"}, "text/xml"),
        ({"data_base64": "%%"}, "data_base64"),
        ({"data_base64": "\u00e9"}, "data_base64"),
        ({"id": 5}, "id"),
    ],
)
def test_a_broken_cloud_event_says_what_is_wrong(changes: dict[str, object], words: str) -> None:
    envelope = {"specversion": "1.0", "id": "1", "source": "/s", "type": "job", "data": event()} | changes
    ((_, error),) = decode_body(body(envelope), NOW_MS, {"content-type": "application/cloudevents+json"}).rejected
    assert error.reason == "cloud_event"
    assert words in str(error)


def test_a_cloud_event_without_data_or_headers_is_rejected() -> None:
    envelope = {"specversion": "1.0", "id": "1", "source": "/s", "type": "job"}
    ((_, missing),) = decode_body(body(envelope), NOW_MS, {"content-type": "application/cloudevents+json"}).rejected
    ((_, header),) = decode_body(body(event()), NOW_MS, {"ce-specversion": "1.0", "ce-id": "1"}).rejected
    assert "data is missing" in str(missing)
    assert "ce-source" in str(header)


@pytest.mark.parametrize(
    ("record", "label", "words"),
    [
        (event(user="x"), "unknown_key", "user"),
        (event(type="bogus"), "bad_value", "bogus"),
        (event(type="resized"), "missing_field", "ranks and nodes are empty"),
        (event(type="resized", ranks=[]), "missing_field", "ranks and nodes are empty"),
        (event(job=""), "empty_name", "job"),
        (event(job="j" * (MAX_NAME_LENGTH + 1)), "too_long", "job"),
        (event(job="a\nb"), "bad_name", "a\\nb"),
        (event(time_ms=NOW_MS + 61_000), "future", "61 s ahead"),
        (event(time_ms=-5), "negative", "-5"),
        (event(time_ms=1_700_000_000), "too_old", "1700000000"),
        (event(time_ms=10**400), "future", "far ahead"),
        (event(time_ms="now"), "wrong_type", "'now'"),
        (event(sequence=-1), "negative", "sequence -1"),
        (event(sequence=2**70), "out_of_range", str(2**70)),
        (event(sequence=True), "wrong_type", "true"),
        (step(duration_s=-1), "negative", "duration_s"),
        (step(parts={"compute": -1.0}), "negative", "parts.compute"),
        (step(duration_s=1e308), "out_of_range", "1e+308"),
        (event(type="submitted", host_memory_gib=1e13), "out_of_range", "host_memory_gib"),
        (step(parts={"gpu": 1.0}), "unknown_key", "gpu"),
        (event(type="submitted", gang={"min": 4, "desired": 2}), "bad_value", "gang"),
        (event(type="submitted", gang=0), "bad_value", "gang"),
        (event(type="started", ranks=[{"rank": 0, "node": 5}]), "wrong_type", "ranks[0].node: is 5, must be text"),
        (event(type="started", ranks=[{"rank": 0, "node": "n1", "gpus": [0, 0]}]), "bad_value", "twice"),
        (event(type="started", nodes=["a/b"]), "bad_name", "slash"),
        (
            {"node": "n", "source": "s", "sequence": 1, "time_ms": NOW_MS, "type": "xid", "code": "\u00b2"},
            *("bad_value", "ASCII"),
        ),
        ({"node": "n", "source": "", "sequence": 1, "time_ms": NOW_MS, "type": "lost"}, "empty_name", "source"),
        ({"node": "n", "source": "s", "sequence": 1, "time_ms": NOW_MS, "type": "x"}, "bad_value", "x"),
    ],
)
def test_a_bad_record_is_rejected_with_its_value(record: dict[str, object], label: str, words: str) -> None:
    reason = reason_of(record)
    assert reason.startswith(f"{label}: ")
    assert words in reason


@pytest.mark.parametrize(
    ("record", "label"),
    [
        (body(event()).replace(b"train", b"tr\xffin"), "not_utf8"),
        (b'{"job": "a", "sequence": NaN}', "not_json"),
        (b'{"a":' * 50_000, "too_deep"),
        (body(event(labels=0)).replace(b"0}", b"[" * 50_000), "too_deep"),
        (body(event()).replace(b": 7", b": " + b"9" * 6_000), "out_of_range"),
        (b'{"job": "' + b"a" * 2**20 + b'"}', "record_too_large"),
        (b"5", "wrong_type"),
        (b"", "truncated"),
    ],
)
def test_broken_bytes_are_rejected(record: bytes, label: str) -> None:
    assert reason_of(record).split(":")[0] == label


def test_a_minute_ahead_of_the_clock_is_still_taken() -> None:
    assert decode_event(body(event(time_ms=NOW_MS + 60_000)), NOW_MS).time_ms == NOW_MS + 60_000


def test_ranks_and_steps_come_out_typed() -> None:
    started = decode_event(body(event(type="started", ranks=[{"rank": 0, "node": "n1", "gpus": [0, 1]}])), NOW_MS)
    timed = decode_event(body(step(rank=3, parts={"compute": 1.0})), NOW_MS)
    assert isinstance(started, Started)
    assert started.ranks[0].gpus == (0, 1)
    assert isinstance(timed, Step)
    assert timed.parts is not None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_give_records_or_rejections(raw: bytes) -> None:
    for headers in ({}, {"content-type": "application/cloudevents-batch+json"}, {"ce-specversion": "1.0"}):
        decoded = decode_body(raw, NOW_MS, headers)
        assert all(str(error) for _, error in decoded.rejected)


@given(st.sampled_from(["type", "job", "sequence", "time_ms", "gang", "ranks", "labels"]), json_values)
def test_any_value_of_a_known_key_gives_an_event_or_a_rejection(key: str, value: object) -> None:
    for record in (event(type="submitted"), event(type="started"), step()):
        assert len(decode_body(json.dumps(record | {key: value}).encode(), NOW_MS)) == 1


GOOD = body(event())
ARRAYS = (
    b"[]",
    b"[ ]",
    b"[%b]",
    b"[%b , %b\n]",
    b" [{}, %b]",
    b"[%b,]",
    b"[%b",
    b"[%b %b]",
    b"[%b]]",
    b"[%b] x",
    b"[",
    b"[%b,,%b]",
    b"[1,2",
)


@pytest.mark.parametrize("array", ARRAYS)
def test_an_array_says_the_same_however_it_is_read(array: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, or one by one as arrays of very many records are."""
    text = array.replace(b"%b", GOOD)
    at_once = decode_body(text, NOW_MS)
    monkeypatch.setattr("fleetcast.ingest.inbox.event_body.MANY_COMMAS", -1)
    one_by_one = decode_body(text, NOW_MS)
    assert [row.raw for row in one_by_one.records] == [row.raw for row in at_once.records]
    assert [index for index, _ in one_by_one.rejected] == [index for index, _ in at_once.rejected]


def test_after_many_bad_records_the_rest_is_not_read() -> None:
    decoded = decode_body(b"[" + b"1," * 20_000 + GOOD + b"]", NOW_MS)
    assert not decoded.records
    assert [index for index, _ in decoded.rejected] == list(range(10_001))
    assert str(decoded.rejected[-1][1]).startswith("too_many: the rest was not read")


NUMBERS = st.sampled_from([-1, 0, 1, 7, 2**53, 2**53 + 1]) | st.integers(-(2**60), 2**60)


@examples(500)
@given(
    st.builds(
        Step,
        job=st.sampled_from(["train-1", "", "a\n", "x" * 253, "x" * 10_000]) | st.text(max_size=3),
        attempt=NUMBERS,
        sequence=NUMBERS,
        time_ms=st.sampled_from([-1, 0, 946_684_799_999, NOW_MS, NOW_MS + 60_000, NOW_MS + 60_001]),
        step=NUMBERS,
        duration_s=st.sampled_from([-1.0, 0.0, 1e-7, 1e-6, 1.5, 1e12, 2e12, float("nan"), float("inf")]),
        rank=st.none() | NUMBERS,
        stage=st.none() | NUMBERS,
        tokens=st.none() | NUMBERS,
        node=st.sampled_from(["", "a b", "n1"]),
        gpus=st.sampled_from([(), (0,), (-1,)]),
    )
)
@example(Step(job="a", attempt=1, sequence=1, time_ms=NOW_MS, step=1, duration_s=1.5, rank=0, tokens=5))
def test_a_step_that_passes_at_one_look_passes_field_by_field(event: Step) -> None:
    if is_usual_step(event, NOW_MS + 60_000):
        check_fields(event, NOW_MS, 60_000)


def test_the_usual_step_needs_one_look() -> None:
    event = Step(job="train-1", attempt=1, sequence=3, time_ms=NOW_MS, step=3, duration_s=1.5, rank=0, tokens=4096)
    assert is_usual_step(event, NOW_MS)
    assert not is_usual_step(structs.replace(event, tokens=-1), NOW_MS)
    assert not is_usual_step(event, NOW_MS - 1)
