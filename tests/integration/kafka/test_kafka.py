"""The Kafka source against a real broker."""

import asyncio
import json
import time

import numpy as np
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition

from fleetcast.cli.produce import _connect_writer
from fleetcast.clients.kafka import CUT_BYTES
from fleetcast.clients.kafka_access import make_client_settings
from fleetcast.fleet.errors import ConfigError, SourceError
from fleetcast.ingest.kafka.columnar import (
    ColumnarRecord,
    Header,
    RecordNames,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.kafka.source import read_kafka_options
from fleetcast.ingest.source import Batch
from tests.integration.kafka.cluster import Cluster
from tests.integration.kafka.topics import Topics, take_until

pytestmark = pytest.mark.integration


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def scrape(node: str, time_ms: int, gpus: int = 8) -> ColumnarRecord:
    names = RecordNames(("power_w", "gpu_temp_c"), tuple(str(gpu) for gpu in range(gpus)))
    values = np.full((2, gpus), float(time_ms % 1000))
    return ColumnarRecord(Header(node, {"gpu": names}), time_ms, (values,))


def samples(batches: list[Batch]) -> list[tuple[int, int, int]]:
    """(metric, entity, time_ms) of every sample."""
    return [
        row
        for batch in batches
        for part in batch.samples
        for row in zip(part.metric.tolist(), part.entity.tolist(), part.time_ms.tolist(), strict=True)
    ]


def finished(job: str, sequence: int = 1) -> bytes:
    return json.dumps({"job": job, "sequence": sequence, "time_ms": now_ms(), "type": "finished"}).encode()


def test_what_was_produced_is_read_once_in_every_form(topics: Topics) -> None:
    start_ms = now_ms() - 60_000
    for step in range(10):
        encode = encode_binary_record if step % 2 else encode_json_record
        topics.send((f"block{node % 4}".encode(), encode(scrape(f"n{node}", start_ms + step))) for node in range(8))
    topics.send([(b"", finished("a"))], topics.events)
    source = topics.source()

    async def read() -> list[Batch]:
        taken = await take_until(source, lambda taken: sum(map(len, taken)) >= 10 * 8 * 16 + 1)
        source.prune(source.position())
        await source.close()
        return taken

    taken = asyncio.run(read())
    told = samples(taken)
    assert len(told) == len(set(told)) == 10 * 8 * 16
    assert [event.job for batch in taken for event in batch.events] == ["a"]
    row = source.health()
    assert (row["up"], row["lag_records"], row["lag_s"], row["bad"]) == (True, 0, 0.0, 0)
    consumer = KafkaConsumer(**make_client_settings(topics.access), group_id=topics.group, enable_auto_commit=False)
    committed = {place: consumer.committed(TopicPartition(*place)) for place in source._next}
    consumer.close()
    assert committed == source._next


def test_a_restart_goes_on_behind_the_position_and_two_pipelines_share_the_partitions(topics: Topics) -> None:
    start_ms = now_ms() - 60_000
    topics.send(
        (f"key{number}".encode(), encode_binary_record(scrape("n1", start_ms + number, 1))) for number in range(200)
    )

    async def read(number: int, want: int, position: dict[str, object]) -> tuple[list[Batch], dict[str, object]]:
        source = topics.source(instance=number, instances=2, max_records=20)
        source.seek(position)
        try:
            taken = await take_until(source, lambda taken: sum(map(len, taken)) >= want)
            return taken, json.loads(json.dumps(source.position()))
        finally:
            await source.close()

    async def both() -> list[Batch]:
        first, half = await read(0, 30, {})
        more, _ = await read(0, total(0) - sum(map(len, first)), half)
        other, _ = await read(1, total(1), {})
        return first + more + other

    def total(instance: int) -> int:
        return sum(2 * count for partition, count in counts.items() if partition % 2 == instance)

    counts = asyncio.run(sizes(topics))
    told = samples(asyncio.run(both()))
    assert len(told) == len(set(told)) == 400


async def sizes(topics: Topics) -> dict[int, int]:
    """Partition → records."""
    source = topics.source()
    try:
        places = [(topics.telemetry, number) for number in await source._reader.list_partitions(topics.telemetry)]
        return {partition: end for (_, partition), end in (await source._reader.read_end_offsets(places)).items()}
    finally:
        await source.close()


def test_poison_goes_to_the_dead_letters_once_whatever_restarts(topics: Topics) -> None:
    start_ms = now_ms() - 60_000
    values = [
        b"{poison" if number % 5 == 0 else encode_json_record(scrape("n1", start_ms + number, 1))
        for number in range(50)
    ]
    topics.send((b"b1", value) for value in values)

    async def read(want: int, position: dict[str, object]) -> dict[str, object]:
        source = topics.source(max_records=7)
        source.seek(position)
        try:
            await take_until(source, lambda taken: sum(len(batch.bad) for batch in taken) >= want)
            return source.position()
        finally:
            await source.close()

    async def crashes() -> None:
        kept = await read(3, {})
        await read(4, kept)  # and no snapshot of it
        await read(10 - sum(1 for number in range(end_of(kept)) if number % 5 == 0), kept)

    def end_of(position: dict[str, object]) -> int:
        offsets = position["offsets"]
        assert isinstance(offsets, dict)
        return max(offsets[topics.telemetry].values())

    asyncio.run(crashes())
    letters = topics.letters()
    assert len(letters) == len({letter.key for letter in letters}) == 10
    assert {dict(letter.headers)["reason"] for letter in letters} == {b"not_readable"}
    assert {letter.value for letter in letters} == {b"{poison"}


def test_poison_too_large_for_the_dead_letters_is_cut_and_says_so(topics: Topics) -> None:
    admin = KafkaAdminClient(**make_client_settings(topics.access))
    configs = {"max.message.bytes": "200000"}
    admin.create_topics({topics.dead: {"num_partitions": 1, "configs": configs}}, wait_for_metadata=True)
    admin.close()
    large = b"{" + np.random.default_rng(1).bytes(300_000)
    topics.send([(b"b1", large), (b"b1", b"{small")])
    source = topics.source()

    async def read() -> None:
        await take_until(source, lambda taken: sum(len(batch.bad) for batch in taken) >= 2)
        await source.close()

    asyncio.run(read())
    letters = {dict(letter.headers)["offset"]: letter for letter in topics.letters()}
    assert letters[b"0"].value == large[:CUT_BYTES]
    assert dict(letters[b"0"].headers)["cut-from-bytes"] == str(len(large)).encode()
    assert letters[b"1"].value == b"{small"


def test_a_topic_that_grows_is_read_whole(topics: Topics, cluster: Cluster) -> None:
    start_ms = now_ms() - 60_000
    source = topics.source()

    async def read() -> list[Batch]:
        topics.send(
            (f"k{number}".encode(), encode_binary_record(scrape("n1", start_ms + number, 1))) for number in range(40)
        )
        first = await take_until(source, lambda taken: sum(map(len, taken)) >= 80)
        await asyncio.to_thread(grow, topics, 12)
        topics.send(
            (f"g{number}".encode(), encode_binary_record(scrape("n2", start_ms + number, 1))) for number in range(80)
        )
        more = await take_until(source, lambda taken: sum(map(len, taken)) >= 160)
        await source.close()
        return first + more

    told = samples(asyncio.run(read()))
    assert len(told) == len(set(told)) == 240
    assert source.health()["partitions"] == 13


def grow(topics: Topics, partitions: int) -> None:
    """More partitions, and a producer that knows of them."""
    admin = KafkaAdminClient(**make_client_settings(topics.access))
    admin.create_partitions({topics.telemetry: partitions})
    admin.close()
    topics.writer.close()
    deadline = time.monotonic() + 60
    while len(asyncio.run(sizes(topics))) < partitions:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    topics.writer = type(topics.writer)(topics.access)


def test_what_retention_took_is_counted_and_reading_goes_on(topics: Topics) -> None:
    start_ms = now_ms() - 60_000
    topics.send((b"b1", encode_binary_record(scrape("n1", start_ms + number, 1))) for number in range(30))
    (partition,) = [number for number, count in asyncio.run(sizes(topics)).items() if count]
    admin = KafkaAdminClient(**make_client_settings(topics.access))
    admin.delete_records({TopicPartition(topics.telemetry, partition): 20})
    admin.close()
    source = topics.source()
    source.seek({"offsets": {topics.telemetry: {str(partition): 5}}})

    async def read() -> list[Batch]:
        try:
            return await take_until(source, lambda taken: sum(map(len, taken)) >= 20)
        finally:
            await source.close()

    assert len(samples(asyncio.run(read()))) == 20
    assert source.health()["lost_to_retention"] == 15


def test_brokers_that_nobody_started_are_a_source_error(topics: Topics) -> None:
    source = topics.source(brokers="127.0.0.1:1")

    async def read() -> None:
        try:
            await source.next()
        finally:
            await source.close()

    with pytest.raises(SourceError):
        asyncio.run(read())


def test_a_topic_that_is_not_there_is_refused_and_not_waited_for(topics: Topics) -> None:
    options = read_kafka_options(topics.options())
    _connect_writer(options, topics.telemetry).close()
    with pytest.raises(ConfigError, match=r"no topic 'nowhere': `fleetcast produce topics` makes it"):
        _connect_writer(options, "nowhere")
