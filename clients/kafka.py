"""A Kafka client over kafka-python.

The library's calls block, so all of them run in one thread. The client raises SourceError if a broker
does not answer. Readers assign partitions themselves and store their own positions. They commit group
offsets only for tools that show the lag.
"""

import asyncio
import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fleetcast.clients.kafka_access import KafkaAccess, make_client_settings
from fleetcast.clients.kafka_records import FetchLimits, Gap, Message, OutgoingRecord, Place
from fleetcast.fleet.errors import SourceError

with warnings.catch_warnings():  # it reads its schemas in a way that Python 3.11 deprecates
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
    from kafka.errors import (
        KafkaError,
        LogTruncationError,
        MessageSizeTooLargeError,
        OffsetOutOfRangeError,
        TopicAlreadyExistsError,
    )
    from kafka.net.inet import KafkaNetSocket
    from kafka.structs import OffsetAndMetadata

logging.getLogger("kafka").setLevel(logging.CRITICAL)  # four lines a failed attempt; our errors say what matters

RETRY_S = 2.0  # wall
METADATA_MS = 5000  # how soon new partitions are noticed
ANSWER_MS = 5000
DELIVERY_MS = 15_000
COMMIT_S = 10.0
MOST_REQUEST_BYTES = 64 * 2**20
CUT_BYTES = 65_536  # what is kept of a letter that the broker finds too large

Answer = TypeVar("Answer")


class _DirectSocket(KafkaNetSocket):  # type: ignore[misc]
    """A socket without a proxy. It is closed if its connection is refused.

    kafka-python's own socket stays open until garbage collection.
    """

    SCHEMES = ("direct",)

    async def sock_connect(self, net: Any, sock: Any, sockaddr: Any, timeout_at: float | None = None) -> Any:
        try:
            return await super().sock_connect(net, sock, sockaddr, timeout_at=timeout_at)
        except (KafkaError, OSError):
            sock.close()
            raise


def _make_client_settings(access: KafkaAccess) -> dict[str, Any]:
    return make_client_settings(access) | {"proxy_url": "direct://"}


class KafkaReader:
    """A reader of assigned partitions for one event loop.

    It connects at the first call. Every call may raise SourceError.
    """

    def __init__(self, access: KafkaAccess, group: str, limits: FetchLimits) -> None:
        self._access = access
        self._group = group
        self._limits = limits
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka")
        self._consumer: Any = None
        self._writer: KafkaWriter | None = None
        self._closed = False
        self._ends_then: dict[Any, int] = {}  # as the brokers were last asked: fetches may be long in coming

    async def list_partitions(self, topic: str) -> frozenset[int]:
        """Return the topic's present partitions. The set is empty if the topic does not exist."""
        return await self._run_in_thread(lambda: frozenset(self._get_consumer().partitions_for_topic(topic)))

    async def assign(self, starts: Mapping[Place, int | None]) -> None:
        """Read exactly these partitions from now on, and no others.

        starts: partition → offset at which to begin, None for the partition's beginning. The offset is used
        only for a partition that was not read before.
        """
        await self._run_in_thread(lambda: self._assign_partitions(starts))

    def _assign_partitions(self, starts: Mapping[Place, int | None]) -> None:
        consumer = self._get_consumer()
        before = consumer.assignment()
        fresh = {TopicPartition(*place): offset for place, offset in starts.items()}
        fresh = {partition: offset for partition, offset in fresh.items() if partition not in before}
        unknown = [partition for partition, offset in fresh.items() if offset is None]
        begins = consumer.beginning_offsets(unknown, timeout_ms=ANSWER_MS) if unknown else {}
        consumer.assign([TopicPartition(*place) for place in starts])
        for partition, offset in fresh.items():
            consumer.seek(partition, begins[partition] if offset is None else offset)
        if fresh:
            self._ends_then.update(consumer.end_offsets(list(fresh), timeout_ms=ANSWER_MS))

    async def poll(self, wait_s: float) -> tuple[list[Message], list[Gap]]:
        """Return the records that have arrived, at most `max_records`, and the gaps that were skipped.

        Waits for the first record for at most `wait_s`.
        """
        return await self._run_in_thread(lambda: self._fetch_records(round(wait_s * 1000)))

    def _fetch_records(self, wait_ms: int) -> tuple[list[Message], list[Gap]]:
        consumer = self._get_consumer()
        try:
            fetched = consumer.poll(timeout_ms=wait_ms, max_records=self._limits.max_records)
        except OffsetOutOfRangeError as error:
            return [], [self._skip_gap(partition, wanted) for partition, wanted in error.args[0].items()]
        except LogTruncationError as error:
            return [], [
                self._skip_gap(partition, consumer.position(partition), None if found is None else found.offset)
                for partition, found in error.divergent_offsets.items()
            ]
        return [_make_message(record) for records in fetched.values() for record in records], []

    def _skip_gap(self, partition: Any, wanted: int, begins: int | None = None) -> Gap:
        consumer = self._get_consumer()
        if begins is None:
            begins = consumer.beginning_offsets([partition], timeout_ms=ANSWER_MS)[partition]
        consumer.seek(partition, begins)
        return Gap((partition.topic, partition.partition), wanted, begins)

    async def read_lag(self) -> dict[Place, int]:
        """Return the consumer lag of each partition, in records.

        It does not ask the brokers, but uses the end offsets that they reported last.
        """
        return await self._run_in_thread(self._compute_lag)

    def _compute_lag(self) -> dict[Place, int]:
        consumer, found = self._get_consumer(), {}
        for partition in consumer.assignment():
            end = max(consumer.highwater(partition) or 0, self._ends_then.get(partition, 0))
            found[(partition.topic, partition.partition)] = max(0, end - consumer.position(partition))
        return found

    async def read_end_offsets(self, places: Iterable[Place]) -> dict[Place, int]:
        """Fetch the end offset of each partition: the offset that its next record will have."""
        return await self._run_in_thread(lambda: self._fetch_ends(places))

    def _fetch_ends(self, places: Iterable[Place]) -> dict[Place, int]:
        ends = self._get_consumer().end_offsets([TopicPartition(*place) for place in places], timeout_ms=ANSWER_MS)
        self._ends_then.update(ends)
        return {(partition.topic, partition.partition): end for partition, end in ends.items()}

    async def read_keys(self, topic: str, since: Mapping[int, int], most: int) -> tuple[list[bytes], dict[int, int]]:
        """Return the keys of a topic's records since these offsets, and the end offset of each partition.

        It reads at most the last `most` records of each partition.
        """
        return await self._run_in_thread(lambda: self._read_keys(topic, since, most))

    def _read_keys(self, topic: str, since: Mapping[int, int], most: int) -> tuple[list[bytes], dict[int, int]]:
        known = self._get_consumer().partitions_for_topic(topic)
        if not known:
            return [], {}
        reader = self._make_consumer(group_id=None, auto_offset_reset="earliest")
        try:
            partitions = [TopicPartition(topic, number) for number in known]
            ends = reader.end_offsets(partitions, timeout_ms=ANSWER_MS)
            begins = reader.beginning_offsets(partitions, timeout_ms=ANSWER_MS)
            reader.assign(partitions)
            for one, end in ends.items():
                reader.seek(one, max(begins[one], end - most, min(since.get(one.partition, 0), end)))
            found: list[bytes] = []
            while any((reader.position(one, timeout_ms=ANSWER_MS) or 0) < end for one, end in ends.items()):
                fetched = reader.poll(timeout_ms=ANSWER_MS)
                if not fetched:
                    raise SourceError(f"kafka: no answer while reading {topic}", RETRY_S)
                found += [record.key for records in fetched.values() for record in records if record.key]
        finally:
            reader.close(autocommit=False)
        return found, {one.partition: end for one, end in ends.items()}

    async def send(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]:
        """Write records to all replicas. Returns the offset after the written records, by partition."""
        return await self._run_in_thread(lambda: self._send(records))

    def _send(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]:
        if self._writer is None:
            self._writer = KafkaWriter(self._access)
            self._writer.create_missing_topics(dict.fromkeys({record.topic for record in records}, 1))
        return self._writer.write(records)

    def commit(self, offsets: Mapping[Place, int]) -> None:
        """Commit the group's offsets. Call it from any thread except the loop's. Raises SourceError."""
        commits = {TopicPartition(*place): OffsetAndMetadata(offset, "", -1) for place, offset in offsets.items()}
        if commits and not self._closed:
            work = self._thread.submit(lambda: self._get_consumer().commit(commits, timeout_ms=ANSWER_MS))
            try:
                work.result(COMMIT_S)
            except (KafkaError, TimeoutError) as error:
                raise _make_source_error(error) from error

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
            self._thread.shutdown(wait=False)

    def _close(self) -> None:
        with contextlib.suppress(KafkaError):  # brokers that are away hear of it when they are back
            if self._writer is not None:
                self._writer.close()
            if self._consumer is not None:
                self._consumer.close(autocommit=False, timeout_ms=1000)

    async def _run_in_thread(self, work: Callable[[], Answer]) -> Answer:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except KafkaError as error:
            raise _make_source_error(error) from error

    def _get_consumer(self) -> Any:
        if self._consumer is None:
            self._consumer = self._make_consumer(group_id=self._group or None, auto_offset_reset="none")
        return self._consumer

    def _make_consumer(self, **own: Any) -> Any:
        return KafkaConsumer(
            **_make_client_settings(self._access),
            enable_auto_commit=False,
            allow_auto_create_topics=False,
            isolation_level="read_committed",
            metadata_max_age_ms=METADATA_MS,
            fetch_max_bytes=self._limits.fetch_bytes,
            max_partition_fetch_bytes=self._limits.partition_bytes,
            **own,
        )


class KafkaWriter:
    """A writer of records. All methods block except `send`.

    Every call may raise SourceError. In this case, none or only some of the records were written.
    """

    def __init__(self, access: KafkaAccess, *, compression: str = "zstd", linger_ms: int = 5) -> None:
        """Connect to the brokers. Raises SourceError if none answers."""
        self._access = access
        self._how = {"compression_type": compression, "linger_ms": linger_ms}
        self._producer: Any = None
        try:
            self._get_producer()
        except KafkaError as error:
            raise _make_source_error(error) from error

    def _get_producer(self) -> Any:
        if self._producer is None:
            self._producer = KafkaProducer(
                **_make_client_settings(self._access),
                **self._how,
                acks="all",
                batch_size=262_144,
                max_request_size=MOST_REQUEST_BYTES,
                max_block_ms=DELIVERY_MS,
                delivery_timeout_ms=DELIVERY_MS,
                allow_auto_create_topics=False,
            )
        return self._producer

    def list_topics(self) -> frozenset[str]:
        """Return the names of all topics."""
        try:
            admin = KafkaAdminClient(**_make_client_settings(self._access))
            try:
                return frozenset(admin.list_topics())
            finally:
                admin.close()
        except KafkaError as error:
            raise _make_source_error(error) from error

    def create_missing_topics(self, topics: Mapping[str, int]) -> list[str]:
        """Create the missing topics (name → partitions) with the brokers' default replication.

        Returns the created topics.
        """
        made = []
        try:
            admin = KafkaAdminClient(**_make_client_settings(self._access))
            try:
                there = set(admin.list_topics())
                for topic, partitions in topics.items():
                    if topic not in there and _create_topic(admin, topic, partitions):
                        made.append(topic)
            finally:
                admin.close()
        except KafkaError as error:
            raise _make_source_error(error) from error
        return made

    def write(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]:
        """Write records to all replicas. Returns the offset after the written records, by partition.

        Records that are too large are truncated and marked. Raises SourceError.
        """
        behind: dict[Place, int] = {}
        try:
            for record in self._write_batch(records, behind):
                for large in self._write_batch(
                    [record], behind
                ):  # alone: one that is refused takes its neighbours along
                    if self._write_batch([_truncate_record(large)], behind):
                        raise SourceError(f"kafka: {large.topic} takes not even {CUT_BYTES} bytes", RETRY_S)
        except KafkaError as error:
            self.close()  # a producer whose records expired delivers none any more, even to brokers that are back
            raise _make_source_error(error) from error
        return behind

    def _write_batch(self, records: Sequence[OutgoingRecord], behind: dict[Place, int]) -> list[OutgoingRecord]:
        """Write records, and return those that were too large.

        behind: receives the offset after the last written record of each partition.
        """
        sent = [(record, self._submit_record(record)) for record in records]
        refused = []
        for record, future in sent:
            try:
                written = future.get(timeout=DELIVERY_MS / 1000)
            except MessageSizeTooLargeError:
                refused.append(record)
            else:
                place = written.topic, written.partition
                behind[place] = max(behind.get(place, 0), written.offset + 1)
        if refused:
            self.close()  # a producer whose record was refused refuses all
        return refused

    async def send(self, records: Sequence[OutgoingRecord]) -> dict[Place, int]:
        """Write records in a thread, so that the event loop does not block. Returns what `write` returns."""
        return await asyncio.to_thread(self.write, records)

    def _submit_record(self, record: OutgoingRecord) -> Any:
        return self._get_producer().send(
            record.topic,
            key=record.key,
            value=record.value,
            headers=list(record.headers),
            timestamp_ms=record.time_ms,
        )

    def close(self) -> None:
        """Close the connections. The next write opens new ones."""
        producer, self._producer = self._producer, None
        if producer is not None:
            try:
                producer.close(timeout=1)
            except KafkaError:  # it waits for records that no broker takes
                producer._sender.force_close()
                with contextlib.suppress(KafkaError):
                    producer.close(timeout=1)


def _create_topic(admin: Any, topic: str, partitions: int) -> bool:
    try:
        admin.create_topics({topic: {"num_partitions": partitions}}, wait_for_metadata=True, timeout_ms=ANSWER_MS)
    except TopicAlreadyExistsError:
        return False
    return True


def _truncate_record(record: OutgoingRecord) -> OutgoingRecord:
    value = record.value or b""
    headers = (*record.headers, ("cut-from-bytes", str(len(value)).encode()))
    return OutgoingRecord(record.topic, record.key, value[:CUT_BYTES], headers, record.time_ms)


def _make_message(record: Any) -> Message:
    headers = tuple((name, value or b"") for name, value in record.headers or ())
    place = record.topic, record.partition
    return Message(place, record.offset, record.timestamp or 0, record.key, record.value, headers)


def _make_source_error(error: Exception) -> SourceError:
    said = str(error) or type(error).__name__
    return SourceError(f"kafka: {said[:300]}", RETRY_S)
