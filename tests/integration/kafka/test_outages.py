"""Brokers that end and come back while records flow: nothing is lost, nothing comes twice, and health says so."""

import asyncio
import contextlib
import gc
import threading
import time
import uuid
from collections.abc import Callable, Iterator

import pytest
from kafka import KafkaAdminClient

from fleetcast.clients import kafka as client
from fleetcast.clients.kafka_access import KafkaAccess, make_client_settings
from fleetcast.clients.kafka_records import OutgoingRecord
from fleetcast.fleet.errors import SourceError
from fleetcast.ingest.kafka.columnar import encode_binary_record
from fleetcast.ingest.kafka.source import KafkaSource
from fleetcast.ingest.source import Batch
from tests.integration.kafka.build import Kafka
from tests.integration.kafka.cluster import Cluster
from tests.integration.kafka.test_kafka import now_ms, samples, scrape
from tests.integration.kafka.topics import Topics, read_all, take_until

pytestmark = pytest.mark.integration


class Flow:
    """Writes a record of one node every few milliseconds, in a thread, until it is stopped."""

    def __init__(self, topics: Topics) -> None:
        self.topics = topics
        self.written = 0
        self._start_ms = now_ms() - 600_000
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            values = [
                (f"k{number}".encode(), encode_binary_record(scrape(f"n{number % 8}", self._start_ms + number, 1)))
                for number in range(self.written, self.written + 10)
            ]
            records = [OutgoingRecord(self.topics.telemetry, key, value) for key, value in values]
            while True:
                try:
                    self.topics.writer.write(records)
                    break
                except SourceError:
                    time.sleep(0.2)
            self.written += 10
            self._stop.wait(0.02)

    def stop(self) -> int:
        """Samples written."""
        self._stop.set()
        self._thread.join(120)
        return 2 * self.written


def read_through(topics: Topics, trouble: Callable[[KafkaSource], None]) -> tuple[list[Batch], int, KafkaSource]:
    """What a source takes while records flow and `trouble`, in a thread, comes over the brokers; samples written."""
    source = topics.source()

    async def read() -> tuple[list[Batch], int]:
        flow = Flow(topics)
        try:
            first = await take_until(source, lambda taken: sum(map(len, taken)) > 100)
            work = asyncio.create_task(asyncio.to_thread(trouble, source))
            meanwhile = await take_until(source, lambda _: work.done())
            await work
            more = await take_until(source, lambda taken: sum(map(len, taken)) > 100)
        finally:
            written = await asyncio.to_thread(flow.stop)
        taken = first + meanwhile + more
        left = written - len(set(samples(taken)))
        taken += await take_until(source, lambda taken: len(set(samples(taken))) >= left)
        await source.close()
        return taken, written

    taken, written = asyncio.run(read())
    return taken, written, source


def check_whole(taken: list[Batch], written: int, source: KafkaSource) -> None:
    """Every record of the topic came once, and all that was written is there.

    The writer may have sent some twice: where brokers are slow to come back it never hears that the first was taken.
    """
    told = samples(taken)
    assert len(told) == 2 * sum(source._next.values())
    assert len(set(told)) == written


@pytest.fixture
def own(kafka_program: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A broker to be ended."""
    started = Cluster(kafka_program, tmp_path_factory.mktemp("own"))
    yield started
    started.stop()


@pytest.mark.parametrize("how", ["kill", "terminate"])
def test_a_broker_that_restarts_loses_and_repeats_nothing(own: Cluster, how: str) -> None:
    topics = Topics(KafkaAccess(brokers=own.addresses), uuid.uuid4().hex[:8])

    def restart(source: KafkaSource) -> None:
        getattr(own, how)(1)
        deadline = time.monotonic() + 300
        while source.health()["up"]:
            assert time.monotonic() < deadline, "the health row never said that the broker was away"
            time.sleep(0.05)
        own.start(1)
        own.until_ready()

    taken, written, source = read_through(topics, restart)
    check_whole(taken, written, source)
    assert source.health()["up"]
    topics.close()


@pytest.mark.filterwarnings("ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning")
def test_a_writer_goes_on_after_an_outage_longer_than_a_delivery_may_take(
    own: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DELIVERY_MS", 2000)
    usual = client._make_client_settings
    monkeypatch.setattr(client, "_make_client_settings", lambda access: usual(access) | {"request_timeout_ms": 1000})
    topics = Topics(KafkaAccess(brokers=own.addresses), uuid.uuid4().hex[:8])
    topics.send([(b"before", b"1")])
    own.kill(1)
    for _ in range(2):  # the first finds out that its records expired, the second opens another connection
        with pytest.raises(SourceError):
            topics.send([(b"meanwhile", b"2")])
    own.start(1)
    own.until_ready()
    while not asyncio.run(read_all(topics.access, topics.telemetry))[1:]:
        with contextlib.suppress(SourceError):
            topics.send([(b"after", b"3")])
    assert (b"after", b"3") in [(one.key, one.value) for one in asyncio.run(read_all(topics.access, topics.telemetry))]
    topics.close()
    gc.collect()  # the client leaves the selector of a producer that found no broker to the collector


def test_one_broker_of_three_may_die(three: Cluster) -> None:
    topics = Topics(KafkaAccess(brokers=three.addresses), uuid.uuid4().hex[:8])

    def kill_a_leader(source: KafkaSource) -> None:
        leader = leader_of(topics)
        three.kill(leader)
        time.sleep(5)
        three.start(leader)
        three.until_ready()

    check_whole(*read_through(topics, kill_a_leader))
    topics.close()


def leader_of(topics: Topics) -> int:
    admin = KafkaAdminClient(**make_client_settings(topics.access))
    try:
        return int(admin.describe_topics([topics.telemetry])[0]["partitions"][0]["leader_id"])
    finally:
        admin.close()


def test_a_stopped_reader_catches_up(topics: Topics) -> None:
    """A short form of what `fleetcast bench kafka` measures in full: a backlog is read much faster than it came."""
    start_ms = now_ms() - 600_000
    for step in range(20):
        topics.send(
            (f"b{node % 8}".encode(), encode_binary_record(scrape(f"n{node}", start_ms + step))) for node in range(200)
        )
    source = topics.source()

    async def read() -> float:
        began = time.process_time()  # others' load costs nothing
        await take_until(source, lambda _: source.health()["lag_records"] == 0)
        await source.close()
        return time.process_time() - began

    took_s = asyncio.run(read())
    assert took_s < 15
    assert sum(source._next.values()) == 4000
