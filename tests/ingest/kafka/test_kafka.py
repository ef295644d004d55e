"""The Kafka source on brokers in memory."""

import asyncio
import json
from typing import Any

import pytest

from fleetcast.checks import check_source
from fleetcast.clients.kafka_records import Gap, Message
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.fleet.events import Finished
from fleetcast.ingest.kafka import source as kafka
from fleetcast.ingest.kafka.columnar import (
    BINARY_TYPE,
    ColumnarRecord,
    Header,
    RecordNames,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.kafka.source import KafkaSource
from fleetcast.ingest.source import Batch
from tests.ingest.fake_kafka import FakeBrokers, FakeReader
from tests.ingest.kafka.test_columnar import NOW_MS, RECORD, columns, told

TELEMETRY, EVENTS, DEAD = "fleetcast.telemetry", "fleetcast.events", "fleetcast.dead-letters"
PAGE = b'DCGM_FI_DEV_POWER_USAGE{gpu="0",UUID="GPU-1"} 401.5\n'


@pytest.fixture
def brokers() -> FakeBrokers:
    found = FakeBrokers()
    found.topic(TELEMETRY, 4)
    found.topic(EVENTS, 1)
    return found


POLL_S, TOPICS_S, QUIET_S = kafka.POLL_S, kafka.TOPICS_S, kafka.QUIET_S


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka, "POLL_S", 0.0)
    monkeypatch.setattr(kafka, "TOPICS_S", 0.0)
    monkeypatch.setattr(kafka, "QUIET_S", 0.0)


def source_on(brokers: FakeBrokers, most: int = 100, **options: Any) -> KafkaSource:
    given = {"brokers": "k1:9092"} | options
    return KafkaSource(Entities(), ManualClock(NOW_MS), given, FakeReader(brokers, most))


def take(source: KafkaSource, batches: int = 1) -> Batch:
    async def some() -> Batch:
        return Batch.merge([await asyncio.wait_for(source.next(), 60) for _ in range(batches)])

    return asyncio.run(some())


def test_a_poll_ends_before_the_brokers_are_asked_whether_they_are_there(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A poll that waited longer than QUIET_S would delay the news that no broker answers."""
    assert POLL_S < QUIET_S < TOPICS_S
    monkeypatch.setattr(kafka, "POLL_S", POLL_S)
    brokers.put((EVENTS, 0), finished("1"))
    waits: list[float] = []
    source = source_on(brokers)
    poll = source._reader.poll

    async def record(wait_s: float) -> tuple[list[Message], list[Gap]]:
        waits.append(wait_s)
        return await poll(wait_s)

    monkeypatch.setattr(source._reader, "poll", record)
    take(source)
    assert set(waits) == {POLL_S}


def finished(job: str, sequence: int = 1) -> bytes:
    event = {"job": job, "sequence": sequence, "time_ms": NOW_MS, "type": "finished"}
    return json.dumps(event).encode()


def power_of(node: str, time_ms: int = NOW_MS, watts: float = 400.0) -> bytes:
    return columns(node=node, time_ms=time_ms, columns={"gpu": {"entities": ["0"], "values": {"power_w": [watts]}}})


def test_every_form_of_telemetry_is_read(brokers: FakeBrokers) -> None:
    brokers.put((TELEMETRY, 0), encode_binary_record(RECORD), b"block-1")
    brokers.put((TELEMETRY, 0), encode_json_record(RECORD), b"block-1", headers={"content-type": BINARY_TYPE})
    brokers.put((TELEMETRY, 1), PAGE, b"n2", NOW_MS - 5)
    said = {"node": "n3", "time_ms": str(NOW_MS - 7), "content-type": "text/plain; version=0.0.4"}
    brokers.put((TELEMETRY, 1), PAGE.replace(b"GPU-1", b"GPU-2"), b"block-1", headers=said)
    brokers.put((TELEMETRY, 2), None, b"n2")
    source = source_on(brokers)
    batch = take(source)
    samples = told(batch, source.decoder._columnar.entities)
    assert ("power_w", "n1/0", NOW_MS, 401.5) in samples
    assert ("power_w", "n2/0", NOW_MS - 5, 401.5) in samples
    assert ("power_w", "n3/0", NOW_MS - 7, 401.5) in samples
    assert not batch.bad
    assert source.models()["n1"] == "H100"
    assert source.health()["noted"]["tombstone"] == 1


def test_the_header_names_a_page_s_node_and_time(brokers: FakeBrokers) -> None:
    page = PAGE.replace(b'UUID="GPU-1"', b'UUID="GPU-1",Hostname="other"')
    said = {"node": "n3", "time_ms": str(NOW_MS - 7)}
    brokers.put((TELEMETRY, 0), page, b"block-1", NOW_MS, headers=said)
    source = source_on(brokers)
    assert told(take(source), source.decoder._columnar.entities) == {("power_w", "n3/0", NOW_MS - 7, 401.5)}


def test_every_form_of_events_is_read(brokers: FakeBrokers) -> None:
    envelope = {"specversion": "1.0", "id": "1", "source": "/s", "type": "t", "data": json.loads(finished("c"))}
    brokers.put((EVENTS, 0), finished("a"))
    brokers.put((EVENTS, 0), b"[" + finished("b") + b"]")
    brokers.put((EVENTS, 0), json.dumps(envelope).encode(), headers={"content-type": "application/cloudevents+json"})
    ce = {"ce_specversion": "1.0", "ce_id": "1", "ce_source": "/s", "ce_type": "t"}
    brokers.put((EVENTS, 0), finished("d"), headers=ce)
    batch = take(source_on(brokers))
    assert [event.job for event in batch.events] == ["a", "b", "c", "d"]
    assert not batch.bad


def test_poison_becomes_a_dead_letter_with_its_bytes_and_why(brokers: FakeBrokers) -> None:
    brokers.put((TELEMETRY, 1), b"{not json", b"block-1", 77, {"colour": "red"})
    brokers.put((EVENTS, 0), b"[" + finished("a") + b', {"job": "b"}]')
    batch = take(source_on(brokers))
    assert [event.job for event in batch.events] == ["a"]
    assert sorted(error.reason for error in batch.bad) == ["missing_field", "not_readable"]
    second, first = brokers.letters(DEAD)  # the events come first here
    headers = dict(first.headers)
    assert (first.key, first.value, first.time_ms) == (f"{TELEMETRY}/1/0".encode(), b"{not json", 77)
    assert (headers["reason"], headers["topic"], headers["partition"]) == (b"not_readable", TELEMETRY.encode(), b"1")
    assert (headers["offset"], headers["original-colour"], headers["key"]) == (b"0", b"red", b"block-1")
    assert dict(second.headers)["detail"].startswith(b"record 1 of 2: ")


def test_bad_lines_of_a_page_are_counted_and_a_page_of_bad_lines_is_poison(brokers: FakeBrokers) -> None:
    brokers.put((TELEMETRY, 0), PAGE + b"broken{ 1\n", b"n1", NOW_MS)
    brokers.put((TELEMETRY, 0), b"broken{ 1\n", b"n1", NOW_MS)
    batch = take(source_on(brokers))
    assert len(batch.bad) == 2
    assert [letter.key for letter in brokers.letters(DEAD)] == [f"{TELEMETRY}/0/1".encode()]


def test_no_dead_letter_is_lost_or_written_twice_by_a_crash(brokers: FakeBrokers) -> None:
    for number in range(6):
        brokers.put((TELEMETRY, 0), b"{" if number % 2 else power_of("n1", NOW_MS - 10 + number), b"b")
    source = source_on(brokers, most=2)
    take(source)
    kept = json.loads(json.dumps(source.position()))
    take(source)  # a second letter, and then a crash before the next snapshot
    assert len(brokers.letters(DEAD)) == 2
    after = source_on(brokers, most=2)
    after.seek(kept)
    take(after, 2)
    keys = [letter.key for letter in brokers.letters(DEAD)]
    assert sorted(keys) == [f"{TELEMETRY}/0/{offset}".encode() for offset in (1, 3, 5)]


@pytest.mark.parametrize("key", [b"", b"/", b"{}/0", b"{}//5", b"{}/1/2/3", b"{}/" + b"9" * 5000 + b"/1", b"\xff/0/0"])
def test_letters_of_others_among_the_dead_ones_are_passed(brokers: FakeBrokers, key: bytes) -> None:
    brokers.put((DEAD, 0), b"x", key.replace(b"{}", TELEMETRY.encode()))
    brokers.put((TELEMETRY, 0), power_of("n1", NOW_MS), b"b")
    assert len(take(source_on(brokers))) == 1


def test_a_second_crash_before_the_known_letters_were_met_again_writes_none_twice(brokers: FakeBrokers) -> None:
    source = source_on(brokers, most=1)
    for number in range(3):
        brokers.put((TELEMETRY, 0), b"{")
        brokers.put((TELEMETRY, 0), power_of("n1", NOW_MS - 10 + number))
    position = source.position()
    take(source, 6)
    assert len(brokers.letters(DEAD)) == 3
    for _ in range(3):  # each reads two records, saves, and is killed
        source = source_on(brokers, most=1)
        source.seek(position)
        take(source, 2)
        position = json.loads(json.dumps(source.position()))
    assert len(brokers.letters(DEAD)) == 3
    assert position["dead_letters"] == {"0": 3}  # all were met: the next start reads none of them


def test_nothing_goes_on_while_a_dead_letter_cannot_be_written(brokers: FakeBrokers) -> None:
    brokers.put((TELEMETRY, 0), b"{", b"b")
    source = source_on(brokers)
    reader = source._reader
    assert isinstance(reader, FakeReader)
    whole, reader.send = reader.send, lambda records: refuse()  # type: ignore[method-assign, assignment]

    async def refuse() -> dict[Any, int]:
        raise SourceError("kafka: no broker takes it")

    with pytest.raises(SourceError):
        take(source)
    assert source.position()["offsets"] == {}
    reader.send = whole  # type: ignore[method-assign]
    assert len(take(source).bad) == 1
    assert source.position()["offsets"] == {TELEMETRY: {"0": 1}}
    assert len(brokers.letters(DEAD)) == 1


def test_partitions_are_shared_out_and_events_are_read_by_all(brokers: FakeBrokers) -> None:
    for number in range(4):
        brokers.put((TELEMETRY, number), power_of(f"n{number}"), b"b")
    brokers.put((EVENTS, 0), finished("a"))
    brokers.put((EVENTS, 0), b"{}")
    taken = []
    for instance in (0, 1):
        source = source_on(brokers, instance=instance, instances=2)
        batch = take(source)
        nodes = {entity.split("/")[0] for _, entity, _, _ in told(batch, source.decoder._columnar.entities)}
        taken.append((nodes, len(batch.events), len(batch.bad)))
    assert taken == [({"n0", "n2"}, 1, 1), ({"n1", "n3"}, 1, 0)]
    assert len(brokers.letters(DEAD)) == 1


def test_a_topic_that_grows_is_read_from_the_beginning_of_the_new_partition(brokers: FakeBrokers) -> None:
    brokers.put((TELEMETRY, 0), power_of("n1"))
    source = source_on(brokers)
    take(source)
    brokers.put((TELEMETRY, 4), power_of("n5"))
    assert ("power_w", "n5/0", NOW_MS, 400.0) in told(take(source), source.decoder._columnar.entities)
    again = source_on(brokers)
    again.seek({"offsets": {TELEMETRY: {"0": 1, "1": 0, "2": 0, "3": 0}}})
    assert len(take(again)) == 1


def test_what_retention_took_is_counted_and_passed(brokers: FakeBrokers) -> None:
    for number in range(5):
        brokers.put((TELEMETRY, 0), power_of("n1", NOW_MS - 10 + number))
    brokers.begins[(TELEMETRY, 0)] = 3
    source = source_on(brokers)
    source.seek({"offsets": {TELEMETRY: {"0": 1}}})
    assert len(take(source)) == 2
    assert source.health()["lost_to_retention"] == 2


def test_brokers_that_are_away_are_a_source_error_and_a_row_that_says_so(brokers: FakeBrokers) -> None:
    source = source_on(brokers)
    brokers.put((TELEMETRY, 0), power_of("n1"))
    take(source)
    assert source.health()["up"]
    brokers.away = True
    with pytest.raises(SourceError):
        take(source)
    assert not source.health()["up"]
    brokers.away = False
    brokers.put((TELEMETRY, 0), power_of("n1", NOW_MS + 1))
    assert len(take(source)) == 1
    assert (source.health()["up"], source.health()["lag_records"]) == (True, 0)


def test_topics_that_do_not_exist_are_waited_for() -> None:
    brokers = FakeBrokers()
    source = source_on(brokers)
    with pytest.raises(SourceError, match=r"no partition of fleetcast\.telemetry"):
        take(source)
    brokers.put((TELEMETRY, 0), power_of("n1"))
    assert len(take(source)) == 1


def test_offsets_are_committed_for_lag_tools_and_those_of_the_events_by_one(brokers: FakeBrokers) -> None:
    brokers.put((EVENTS, 0), finished("a"))
    brokers.put((TELEMETRY, 1), power_of("n1"))
    for instance, own in ((0, {(EVENTS, 0): 1}), (1, {(TELEMETRY, 1): 1})):
        brokers.committed.clear()
        source = source_on(brokers, instance=instance, instances=2)
        take(source)
        source.prune(source.position())
        assert brokers.committed == own
    brokers.away = True
    source.prune(source.position())  # lag tools wait, the snapshot does not


def test_the_contract_of_sources(brokers: FakeBrokers) -> None:
    for number in range(6):
        brokers.put((TELEMETRY, number % 4), power_of("n1", NOW_MS - 10 + number))
        brokers.put((EVENTS, 0), finished("a", number))
    check_source(lambda: source_on(brokers, most=2), 4)


def test_events_that_wait_hold_up_the_first_board_and_telemetry_does_not(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "BATCH_BYTES", 1)
    for number in range(3):
        brokers.put((EVENTS, 0), finished("a", number))
        brokers.put((TELEMETRY, 0), power_of("n1", NOW_MS - 10 + number))
    source = source_on(brokers, most=4)
    left = [source.backlog_bytes()]  # before anything is known
    for _ in range(6):
        take(source)
        left.append(source.backlog_bytes())
    assert left == [1, 2, 1, 0, 0, 0, 0]
    assert source_on(brokers, events="").backlog_bytes() == 0


def test_a_taken_batch_is_bounded_in_bytes_and_nothing_is_skipped(
    brokers: FakeBrokers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "BATCH_BYTES", 1)
    for number in range(3):
        brokers.put((TELEMETRY, 0), power_of("n1", NOW_MS - 10 + number))
    source = source_on(brokers)
    assert [len(take(source)) for _ in range(3)] == [1, 1, 1]
    assert source.position()["offsets"] == {TELEMETRY: {"0": 3}}


def test_a_cancelled_wait_loses_nothing(brokers: FakeBrokers) -> None:
    async def wait_twice() -> Batch:
        source = source_on(brokers)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(source.next(), 0.05)
        brokers.put((EVENTS, 0), finished("late"))
        return await asyncio.wait_for(source.next(), 60)

    assert asyncio.run(wait_twice()).events == (Finished(job="late", sequence=1, time_ms=NOW_MS),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"brokers": "k1"}, "brokers = 'k1': expected HOST:PORT"),
        ({"brokers": []}, "at least one"),
        ({"telemetry": "a b"}, "topic 'a b'"),
        ({"events": "x" * 250}, "1 to 249"),
        ({"broker": "k1:9092"}, "broker"),
        ({"security": "tls"}, "security = 'tls'"),
        ({"security": "sasl_ssl"}, "needs username"),
        ({"security": "sasl_ssl", "username": "u", "sasl_mechanism": "GSSAPI"}, "sasl_mechanism"),
        ({"security": "sasl_ssl", "username": "u"}, "FLEETCAST_KAFKA_PASSWORD"),
        ({"ca_file": "/no/such"}, "ca_file = '/no/such'"),
        ({"instance": 2, "instances": 2}, "instance = 2"),
        ({"max_records": 0}, "max_records = 0"),
        ({"events": TELEMETRY}, "expected different ones"),
        ({"telemetry": "", "events": ""}, "topics"),
    ],
)
def test_a_wrong_option_is_named_at_the_start(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        KafkaSource(Entities(), ManualClock(NOW_MS), {"brokers": "k1:9092"} | options)


def test_a_record_without_columns_is_no_poison(brokers: FakeBrokers) -> None:
    brokers.put(
        (TELEMETRY, 0), encode_binary_record(ColumnarRecord(Header("n1", {"gpu": RecordNames(())}), NOW_MS, ()))
    )
    brokers.put((EVENTS, 0), finished("a"))
    assert not take(source_on(brokers)).bad
