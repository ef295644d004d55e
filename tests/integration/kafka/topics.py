"""Topics of one test: written by a real producer, read by the source, counted by a consumer of the test's own."""

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from fleetcast.clients.kafka import KafkaReader, KafkaWriter
from fleetcast.clients.kafka_access import KafkaAccess
from fleetcast.clients.kafka_records import FetchLimits, Message, OutgoingRecord, Place
from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import SourceError
from fleetcast.ingest.kafka.source import KafkaSource
from fleetcast.ingest.source import Batch

LIMITS = FetchLimits(500, 8 * 2**20, 2**20)
Series = tuple[str, str]


class Topics:
    """Made on construction, with names that no other test has."""

    def __init__(self, access: KafkaAccess, tag: str, partitions: int = 4) -> None:
        self.access = access
        self.telemetry, self.events, self.dead = (f"{name}-{tag}" for name in ("telemetry", "events", "dead"))
        self.group = f"group-{tag}"
        self.writer = KafkaWriter(access)
        made = self.writer.create_missing_topics({self.telemetry: partitions, self.events: 1})
        assert len(made) == 2

    def options(self, **more: Any) -> dict[str, Any]:
        return {
            "brokers": self.access.addresses,
            "telemetry": self.telemetry,
            "events": self.events,
            "dead_letters": self.dead,
            "group": self.group,
        } | more

    def source(self, **more: Any) -> KafkaSource:
        return KafkaSource(Entities(), SystemClock(), self.options(**more))

    def send(self, values: Iterable[tuple[bytes, bytes]], topic: str = "") -> None:
        """(key, value) pairs, acknowledged when this returns."""
        self.writer.write([OutgoingRecord(topic or self.telemetry, key, value) for key, value in values])

    def letters(self) -> list[Message]:
        """All dead letters there are."""
        return asyncio.run(read_all(self.access, self.dead))

    def close(self) -> None:
        self.writer.close()


async def read_all(access: KafkaAccess, topic: str) -> list[Message]:
    """Every record of a topic; none when there is no such topic."""
    reader = KafkaReader(access, "", LIMITS)
    try:
        places: list[Place] = [(topic, number) for number in await reader.list_partitions(topic)]
        if not places:
            return []
        await reader.assign(dict.fromkeys(places))
        left, found = sum((await reader.read_end_offsets(places)).values()), []
        while len(found) < left:
            messages, _ = await reader.poll(5.0)
            assert messages, f"{len(found)} of {left} records of {topic}"
            found += messages
        return found
    finally:
        await reader.close()


async def take_until(source: KafkaSource, done: Any, limit_s: float = 300.0) -> list[Batch]:
    """Batches until `done(batches)`, as the pipeline takes them: a source that is away is asked again."""
    taken: list[Batch] = []
    deadline = time.monotonic() + limit_s
    while not done(taken):
        left_s = deadline - time.monotonic()
        assert left_s > 0, f"{len(taken)} batches, {source.health()}"
        try:
            taken.append(await asyncio.wait_for(source.next(), left_s))
        except SourceError as error:
            await asyncio.sleep(min(0.2, error.retry_after_s))
    return taken
