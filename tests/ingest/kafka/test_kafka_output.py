"""What is written to Kafka: keys, forms, and nothing dropped while brokers are away."""

import asyncio
import json
from collections.abc import Sequence

import pytest

from fleetcast.clients.kafka_records import OutgoingRecord, Place
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError, SourceError
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.inbox.event_body import decode_body
from fleetcast.ingest.kafka.columnar import JSON_TYPE, RecordDecoder
from fleetcast.ingest.kafka.output import Output, find_node_blocks, forward_batches, send_events
from fleetcast.ingest.kafka.source import KafkaSource
from fleetcast.ingest.source import Batch, MemorySource
from tests.ingest.fake_kafka import FakeBrokers, FakeReader
from tests.ingest.kafka.test_columnar import NOW_MS
from tests.ingest.kafka.test_kafka import EVENTS, TELEMETRY, finished, take


class Writer:
    """Fails as often as told before it writes."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.records: list[OutgoingRecord] = []

    async def send(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]:
        if self.failures:
            self.failures -= 1
            raise SourceError("kafka: away", 0.0)
        self.records += records
        return {}


def batches(entities: Entities) -> list[Batch]:
    power = [(5, entities.add_to_node(EntityKind.GPU, node, 0), NOW_MS, 400.0) for node in ("n1", "n2")]
    return [Batch(bad=(RecordError("bad_line"),)), Batch(samples=(SampleBatch.from_rows(EntityKind.GPU, power),))]


@pytest.mark.parametrize("form", ["binary", "json"])
def test_records_are_keyed_by_block_else_by_node_and_wait_for_the_brokers(form: str) -> None:
    entities, writer = Entities(), Writer(failures=2)
    source = MemorySource(batches(entities), ends=True)
    output = Output(writer, TELEMETRY)
    asyncio.run(forward_batches(source, entities, output, {"n1": "block-1"}, form))
    assert [record.key for record in writer.records] == [b"block-1", b"n2"]
    assert (dict(writer.records[0].headers)["content-type"] == JSON_TYPE.encode()) is (form == "json")
    assert (output.sent.records, output.sent.samples, output.sent.bad) == (2, 2, {"bad_line": 1})
    decoder = RecordDecoder(Entities())
    first, second = (decoder.decode(record.value or b"", NOW_MS) for record in writer.records)
    assert [len(first), len(first.bad), len(second), len(second.bad)] == [1, 1, 1, 0]


def test_blocks_are_those_of_the_topology() -> None:
    nodes = [NodeSpec("n1", 8, domains={Level.BLOCK: "b1"}), NodeSpec("n2", 8)]
    assert find_node_blocks(Topology.build(nodes)) == {"n1": "b1"}


def test_events_go_as_they_are_keyed_by_job_and_the_source_reads_them() -> None:
    writer = Writer()
    node_event = json.dumps(
        {"node": "n1", "source": "admin", "sequence": 1, "time_ms": NOW_MS, "type": "drain"}
    ).encode()
    body = decode_body(b"\n".join([finished("a"), b"{}", node_event]), NOW_MS)
    output = Output(writer, EVENTS)
    asyncio.run(send_events(body, output))
    assert [record.key for record in writer.records] == [b"a", b"n1"]
    assert (output.sent.events, output.sent.bad) == (2, {"missing_field": 1})
    brokers = FakeBrokers()
    brokers.topic(TELEMETRY, 1)
    for record in writer.records:
        brokers.put((EVENTS, 0), record.value, record.key)
    batch = take(KafkaSource(Entities(), ManualClock(NOW_MS), {"brokers": "k1:9092"}, FakeReader(brokers)))
    assert (len(batch.events), len(batch.node_events), len(batch.bad)) == (1, 1, 0)
