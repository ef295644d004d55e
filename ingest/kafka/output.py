"""The output to Kafka: batches of a telemetry source as columnar records, and events unchanged.

A record's key is the block of its node, or the node itself if its block is unknown. So one pipeline reads a
whole block in order.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from fleetcast.clients.kafka_records import OutgoingRecord, Place
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import RecordError, SourceError
from fleetcast.fleet.events import NodeEvent
from fleetcast.fleet.topology import Level, Topology
from fleetcast.ingest.inbox.event_body import DecodedBody
from fleetcast.ingest.kafka.columnar import (
    BINARY_TYPE,
    JSON_TYPE,
    ColumnarRecord,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.kafka.node_records import make_node_records
from fleetcast.ingest.source import Batch, Source

logger = logging.getLogger(__name__)

FORMS: dict[str, tuple[Callable[[ColumnarRecord], bytes], str]] = {
    "binary": (encode_binary_record, BINARY_TYPE),
    "json": (encode_json_record, JSON_TYPE),
}


class Writer(Protocol):
    """The interface of a Kafka writer. See `fleetcast.clients.kafka.KafkaWriter`.

    `send` returns once the records are written.
    """

    async def send(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]: ...


@dataclass(slots=True)
class OutputCounts:
    """Counts of what was written to Kafka. `bad`: the number of unreadable records by reason."""

    records: int = 0
    samples: int = 0
    events: int = 0
    bad: dict[str, int] = field(default_factory=dict)

    def count_bad_records(self, errors: Sequence[RecordError]) -> None:
        for error in errors:
            self.bad[error.reason] = self.bad.get(error.reason, 0) + error.count


@dataclass(frozen=True, slots=True)
class Output:
    """An output to one topic. While the brokers do not answer, it waits and drops nothing."""

    writer: Writer
    topic: str
    sent: OutputCounts = field(default_factory=OutputCounts)

    async def send(self, records: Sequence[OutgoingRecord]) -> None:
        while records:
            try:
                await self.writer.send(records)
            except SourceError as error:
                logger.warning("%s, sending %d records again in %.0f s", error, len(records), error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)
                continue
            self.sent.records += len(records)
            return


def find_node_blocks(topology: Topology) -> dict[str, str]:
    """Return node → block, for the nodes that the topology places in a block."""
    found = ((node.name, node.domains.get(Level.BLOCK, "")) for node in topology.nodes)
    return {name: block for name, block in found if block}


async def forward_batches(
    source: Source, entities: Entities, output: Output, blocks: Mapping[str, str], form: str
) -> None:
    """Write all batches that `source` delivers until its end. form: a key of FORMS."""
    untold: tuple[RecordError, ...] = ()  # bad lines go with the next record there is
    while True:
        try:
            batch = await source.next()
        except StopAsyncIteration:
            return
        except SourceError as error:
            await asyncio.sleep(error.retry_after_s)
            continue
        full_batch = replace(batch, bad=untold + batch.bad)
        records = encode_batch(full_batch, entities, source.models(), blocks, (output.topic, form))
        untold = () if records else full_batch.bad
        await output.send(records)
        output.sent.samples += sum(map(len, batch.samples))
        output.sent.count_bad_records(batch.bad)


def encode_batch(
    batch: Batch, entities: Entities, models: Mapping[str, str], blocks: Mapping[str, str], to: tuple[str, str]
) -> list[OutgoingRecord]:
    """Encode a batch as Kafka records. to: (topic, form). blocks: node → block."""
    topic, form = to
    encode, kind = FORMS[form]
    headers = (("content-type", kind.encode()),)
    found = []
    for record in make_node_records(batch, entities, models):
        node = record.header.node
        found.append(OutgoingRecord(topic, blocks.get(node, node).encode(), encode(record), headers, record.time_ms))
    return found


async def send_events(body: DecodedBody, output: Output) -> None:
    """Send the good events of a body.

    The job or node of an event is the key of its record, so the events of one job or node stay in order.
    """
    rows = [(row.event.node if isinstance(row.event, NodeEvent) else row.event.job, row) for row in body.records]
    headers = (("content-type", b"application/json"),)
    await output.send(
        [OutgoingRecord(output.topic, key.encode(), row.raw, headers, row.event.time_ms) for key, row in rows]
    )
    output.sent.events += len(rows)
    output.sent.count_bad_records([error for _, error in body.rejected])
