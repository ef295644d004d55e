"""The Kafka source: a telemetry topic whose partitions the pipelines share, and an events topic.

    telemetry      pipeline p mod instances reads partition p. Records are keyed by block, so one pipeline
                   reads a whole block
    events         every pipeline reads all partitions. Pipeline p mod instances alone reports the bad records
    dead letters   unreadable records unchanged, with headers reason, detail, topic, partition, offset

The position in the snapshot is the next offset of every partition. A partition without an offset is read
from its beginning. Group offsets are for lag tools only. The source writes a dead letter before the
position passes its record, so none is lost. After a crash, the source reads the keys of letters written
since the last snapshot, so none is written twice.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from fleetcast.clients.kafka import KafkaReader
from fleetcast.clients.kafka_access import KafkaAccess, check_access
from fleetcast.clients.kafka_records import FetchLimits, Gap, Message, OutgoingRecord, Place
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.errors import ConfigError, RecordError, SourceError
from fleetcast.ingest.kafka.payload import DecodedPayload, PayloadDecoder
from fleetcast.ingest.source import Batch, Source, read_options
from fleetcast.ingest.tally import RecordTally, SkipRule

logger = logging.getLogger(__name__)

POLL_S = 0.5  # wall, as the following
TOPICS_S = 5.0  # how often the partitions of the topics are listed again
QUIET_S = 3.0  # without a record the brokers are asked whether they are there
RATE_S = 60.0
RECENT_S = 10.0  # an older lag is none
RETRY_S = 5.0
BATCH_BYTES = 2 * 2**20  # of records in a batch
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_LETTER = re.compile(rb"([\w.-]+)/(\d{1,10})/(\d{1,19})")  # the key of a dead letter: topic, partition, offset
LETTERS_READ = 100_000  # keys of dead letters that a start reads of each partition


class KafkaOptions(KafkaAccess, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The options of the source `kafka`. The pipeline itself sets `instance` and `instances`.

    If `dead_letters` is empty, unreadable records are counted and dropped.
    """

    name: str = "kafka"
    telemetry: str = "fleetcast.telemetry"
    events: str = "fleetcast.events"
    dead_letters: str = "fleetcast.dead-letters"
    group: str = "fleetcast"
    instance: int = 0
    instances: int = 1
    max_records: int = 200  # taken from the client at once
    fetch_bytes: int = 8_388_608  # of an answer of a broker
    partition_bytes: int = 1_048_576  # of one partition in it


LIMITS = {"max_records": (1, 10_000), "fetch_bytes": (1024, 2**30), "partition_bytes": (1024, 2**30)}


def read_kafka_options(raw: Mapping[str, Any]) -> KafkaOptions:
    """Read the options of the source `kafka`. Raises ConfigError that names the bad option."""
    options = read_options("kafka", raw, KafkaOptions)
    check_access(options)
    if not 0 <= options.instance < options.instances:
        raise ConfigError(f"kafka: instance = {options.instance} of instances = {options.instances}: 0 is the first")
    for key, (least, most) in LIMITS.items():
        if not least <= getattr(options, key) <= most:
            raise ConfigError(f"kafka: {key} = {getattr(options, key)}: must lie in {least}..{most}")
    topics = [topic for topic in (options.telemetry, options.events, options.dead_letters) if topic]
    for topic in topics:
        if not _TOPIC.fullmatch(topic) or topic in (".", ".."):
            raise ConfigError(f"kafka: topic {topic[:300]!r}: expected 1 to 249 letters, digits, '.', '_' and '-'")
    if len(set(topics)) < len(topics) or not options.name or not (options.telemetry or options.events):
        raise ConfigError(f"kafka: topics {topics} of source {options.name!r}: expected different ones, and a name")
    return options


class Reader(Protocol):
    """The part of a Kafka client that the source uses. See `fleetcast.clients.kafka.KafkaReader`."""

    async def list_partitions(self, topic: str) -> frozenset[int]: ...
    async def assign(self, starts: Mapping[Place, int | None]) -> None: ...
    async def poll(self, wait_s: float) -> tuple[list[Message], list[Gap]]: ...
    async def read_lag(self) -> dict[Place, int]: ...
    async def read_end_offsets(self, places: Iterable[Place]) -> dict[Place, int]: ...
    async def read_keys(
        self, topic: str, since: Mapping[int, int], most: int
    ) -> tuple[list[bytes], dict[int, int]]: ...
    async def send(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]: ...
    def commit(self, offsets: Mapping[Place, int]) -> None: ...
    async def close(self) -> None: ...


class KafkaSource(Source):
    """The source `kafka`. Only one task may call `next`."""

    divides = True  # every pipeline runs it, on partitions of its own

    def __init__(
        self, entities: Entities, clock: Clock, options: Mapping[str, Any], reader: Reader | None = None
    ) -> None:
        self.options = read_kafka_options(options)
        self.name = self.options.name
        self.reports_jobs = bool(self.options.events)
        self.decoder = PayloadDecoder(entities, clock)
        limits = FetchLimits(self.options.max_records, self.options.fetch_bytes, self.options.partition_bytes)
        self._reader: Reader = reader or KafkaReader(self.options, self.options.group, limits)
        self._next: dict[Place, int] = {}  # what `next` has returned ends here
        self._taken: dict[Place, int] = {}  # and what waits to be returned here
        self._assigned: set[Place] = set()
        self._polled_s = self._last_record_s = float("-inf")
        self._polling: asyncio.Future[tuple[list[Message], list[Gap]]] | None = None
        self._waiting: deque[Message] = deque()
        self._ready: Batch | None = None
        self._letters: list[OutgoingRecord] = []
        self._known_letters: set[bytes] | None = None  # written already; None: not read yet
        self._letters_end: dict[int, int] = {}
        self._letters_from: dict[int, int] = {}  # where `_known_letters` begin
        self._health = _Health()
        self._events_behind = 1 if self.options.events else 0  # at least, until the brokers told

    async def next(self) -> Batch:
        while True:
            if self._ready is None:
                await self._run_and_record_outage(self._assign_partitions)
                if not self._waiting:
                    await self._run_and_record_outage(self._fetch_records)
                self._ready = self._decode_waiting_records()
            if self._letters:
                await self._run_and_record_outage(self._write_dead_letters)
            batch, self._ready = self._ready, None
            self._next.update(self._taken)
            self._taken = {}
            self._health.count_batch(batch)
            if len(batch) or batch.bad:
                return batch

    async def _run_and_record_outage(self, work: Callable[[], Awaitable[None]]) -> None:
        """Await `work()`. If it raises SourceError, record that the brokers do not answer, and raise it again."""
        try:
            await work()
        except SourceError:
            self._health.up = False
            self._polled_s = float("-inf")
            raise

    async def _assign_partitions(self) -> None:
        """Assign the partitions of the topics to this reader, at the start and every TOPICS_S.

        Topics may get new partitions.
        """
        if time.monotonic() < self._polled_s + TOPICS_S:
            return
        if self._known_letters is None:
            await self._read_dead_letters()
        places = await self._find_partitions()
        if not places:
            topics = ", ".join(topic for topic in (self.options.telemetry, self.options.events) if topic)
            raise SourceError(f"kafka: no partition of {topics} to read: no such topics yet", RETRY_S)
        if places != self._assigned:
            new = len(places - self._assigned)
            await self._reader.assign({place: self._next.get(place) for place in sorted(places)})
            logger.info("%s: reads %d partitions, %d of them new", self.name, len(places), new)
            self._assigned = places
        self._polled_s = time.monotonic()

    async def _find_partitions(self) -> set[Place]:
        options = self.options
        found: set[Place] = set()
        if options.telemetry:
            mine = await self._reader.list_partitions(options.telemetry)
            found |= {(options.telemetry, number) for number in mine if self._owns_partition(number)}
        if options.events:
            found |= {(options.events, number) for number in await self._reader.list_partitions(options.events)}
        return found | self._assigned

    def _owns_partition(self, partition: int) -> bool:
        return partition % self.options.instances == self.options.instance

    async def _read_dead_letters(self) -> None:
        """Read the keys of the dead letters that were written after the restored position."""
        topic = self.options.dead_letters
        keys: Sequence[bytes] = ()
        if topic:
            self._letters_from = self._letters_end
            keys, self._letters_end = await self._reader.read_keys(topic, self._letters_from, LETTERS_READ)
        self._known_letters = {key for key in keys if self._is_record_unread(key)}

    def _is_record_unread(self, key: bytes) -> bool:
        """Return whether this pipeline will read the record of a dead letter again. key: the letter's key."""
        found = _LETTER.fullmatch(key)
        if found is None:  # of somebody else
            return False
        source, partition, offset = found[1].decode(), int(found[2]), int(found[3])
        ours = source in (self.options.telemetry, self.options.events) and self._owns_partition(partition)
        return ours and offset >= self._next.get((source, partition), 0)

    async def _fetch_records(self) -> None:
        """Wait for records. Raises SourceError if none arrives for QUIET_S and no broker answers."""
        if self._polling is None:
            self._polling = asyncio.ensure_future(self._reader.poll(POLL_S))
        try:
            messages, gaps = await asyncio.shield(self._polling)
        finally:
            if self._polling.done():
                self._polling = None
        for gap in gaps:
            self._skip_gap(gap)
        self._waiting.extend(messages)
        now_s = time.monotonic()
        if messages:
            self._last_record_s = now_s
        elif now_s > self._last_record_s + QUIET_S:
            await self._reader.read_end_offsets(self._assigned)
            self._last_record_s = now_s
        else:
            return
        behind = await self._reader.read_lag()
        self._events_behind = sum(records for (topic, _), records in behind.items() if topic == self.options.events)
        self._health.record_lag(behind)

    def _skip_gap(self, gap: Gap) -> None:
        lost = max(0, gap.begins - gap.wanted)
        self._health.lost += lost
        self._next[gap.place] = gap.begins
        what = f"{lost} records are gone" if lost else "the topic ends before that"
        logger.error("%s: %s has no offset %d, %s: going on at %d", self.name, gap.place, gap.wanted, what, gap.begins)

    def _decode_waiting_records(self) -> Batch:
        """Decode about BATCH_BYTES of the waiting records. Unreadable ones become dead letters."""
        parts, size = [], 0
        while self._waiting and size < BATCH_BYTES:
            message = self._waiting.popleft()
            size += len(message.value or b"")
            parts.append(self._decode_message(message))
            self._taken[message.place] = message.offset + 1
            self._health.last_record_ms = message.time_ms
        return Batch.merge(parts) if parts else Batch()

    def _decode_message(self, message: Message) -> Batch:
        topic, partition = message.place
        if topic == self.options.telemetry:
            decoded = self.decoder.decode_telemetry(message)
        else:
            decoded = self.decoder.decode_events(message)
            if not self._owns_partition(partition):  # another pipeline tells what is bad
                events, node_events, refused = decoded.batch.events, decoded.batch.node_events, len(decoded.batch.bad)
                ignored = {SkipRule.OTHER_PART: refused} if refused else {}
                tally = RecordTally(len(events) + len(node_events), ignored=ignored)
                return Batch(events=events, node_events=node_events, tally=tally)
        self._add_dead_letter(message, decoded)
        return decoded.batch

    def _add_dead_letter(self, message: Message, decoded: DecodedPayload) -> None:
        if decoded.poison is None or not self.options.dead_letters:
            return
        letter = make_dead_letter(self.options.dead_letters, message, decoded.poison)
        assert letter.key is not None
        assert self._known_letters is not None
        if letter.key in self._known_letters:
            self._known_letters.discard(letter.key)
        else:
            self._letters.append(letter)

    async def _write_dead_letters(self) -> None:
        """Write the waiting dead letters, and return once they are written."""
        ends = await self._reader.send(self._letters)
        self._health.letters += len(self._letters)
        self._letters = []
        for (_, partition), end in ends.items():
            self._letters_end[partition] = end

    def position(self) -> dict[str, Any]:
        offsets: dict[str, dict[str, int]] = {}
        for (topic, partition), offset in self._next.items():
            offsets.setdefault(topic, {})[str(partition)] = offset
        letters = self._letters_from if self._known_letters else self._letters_end  # until all of them were met again
        return {"offsets": offsets, "dead_letters": {str(place): end for place, end in letters.items()}}

    def seek(self, position: dict[str, Any]) -> None:
        self._next = _parse_offsets(position)
        self._letters_end = {int(place): int(end) for place, end in position.get("dead_letters", {}).items()}

    def prune(self, position: Mapping[str, Any]) -> None:
        """Commit a snapshot's offsets for lag tools. Runs in a thread.

        If it fails, the next snapshot tries again.
        """
        if not self.options.group:
            return
        own = {place: offset for place, offset in _parse_offsets(position).items() if self._owns_partition(place[1])}
        try:
            self._reader.commit(own)
        except SourceError as error:
            logger.warning("%s: offsets of group %s stay as they were: %s", self.name, self.options.group, error)

    def models(self) -> dict[str, str]:
        return self.decoder.get_gpu_models()

    def backlog_bytes(self) -> int:
        """Return the number of unread events, as a lower bound of their bytes.

        The pipeline waits for them, because a first board without them would show wrong running jobs.
        """
        return self._events_behind + sum(message.place[0] == self.options.events for message in self._waiting)

    def health(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": "kafka",
            **self._health.make_row(len(self._waiting)),
            "partitions": len(self._assigned),
            "noted": dict(self.decoder.noted),
        }

    async def close(self) -> None:
        await self._reader.close()


def make_dead_letter(topic: str, message: Message, poison: RecordError) -> OutgoingRecord:
    """Return the dead letter of a bad record. It has the record's value, and headers with the reason.

    The key identifies the record, so that consumers can count or compact letters.
    """
    source, partition = message.place
    headers = {
        "reason": poison.reason,
        "detail": poison.detail[:1000],
        "topic": source,
        "partition": str(partition),
        "offset": str(message.offset),
    }
    if message.key is not None:
        headers["key"] = message.key.decode("utf-8", "replace")
    headers_out = [(name, value.encode("utf-8", "replace")) for name, value in headers.items()]
    headers_out += [(f"original-{name}", value) for name, value in message.headers]
    key = f"{source}/{partition}/{message.offset}".encode()
    return OutgoingRecord(topic, key, message.value, tuple(headers_out), message.time_ms)


def _parse_offsets(position: Mapping[str, Any]) -> dict[Place, int]:
    return {
        (topic, int(partition)): int(offset)
        for topic, offsets in position.get("offsets", {}).items()
        for partition, offset in offsets.items()
    }


class _Health:
    """The health of the Kafka source. Rates and lag are in wall time, as are Kafka's timestamps."""

    def __init__(self) -> None:
        self.up = False
        self.reported = False
        self.behind = 0
        self.last_record_ms = 0  # time of the last record that arrived
        self.lost = 0
        self.letters = 0
        self._bad = 0
        self._reported_s = float("-inf")
        self._rates: deque[tuple[float, int]] = deque()

    def record_lag(self, behind: Mapping[Place, int]) -> None:
        """Record the lag that the brokers report. behind: the number of unread records in each partition."""
        self.up = self.reported = True
        self._reported_s = time.monotonic()
        self.behind = sum(max(0, records) for records in behind.values())

    def count_batch(self, batch: Batch) -> None:
        self._bad += sum(error.count for error in batch.bad)
        if len(batch):
            self._rates.append((time.monotonic(), len(batch)))
        while self._rates and self._rates[0][0] < time.monotonic() - RATE_S:
            self._rates.popleft()

    def make_row(self, waiting: int) -> dict[str, Any]:
        """Return the source's fields of the ingestion document.

        waiting: the number of records that were fetched but not decoded yet.
        """
        behind = self.behind + waiting
        span_s = time.monotonic() - self._rates[0][0] if self._rates else 0.0
        rate = sum(count for _, count in self._rates) / span_s if span_s > 0 else 0.0
        late_s = max(0.0, time.time() - self.last_record_ms / 1000) if self.last_record_ms else None
        return {
            "rate_per_s": round(rate, 1),
            "lag_s": (None if late_s is None else round(late_s, 3)) if behind else 0.0 if self.reported else None,
            "answered_s": round(time.monotonic() - self._reported_s, 3) if self.reported else None,
            "lag_records": behind if time.monotonic() < self._reported_s + RECENT_S else None,
            "bad": self._bad,
            "up": self.up,
            "dead_letters": self.letters,
            "lost_to_retention": self.lost,
        }
