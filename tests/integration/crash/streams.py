"""What two kinds of senders put into a site while it is killed: records into Kafka, remote writes into its api.

Everything that was acknowledged is in the `Book`: samples by series and time, events, the places of poison, and what
was sent in the order in which a reader finds it. Records come late, twice and broken on purpose; a remote write is sent
again until it is acknowledged.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fleetcast.clients.kafka import KafkaWriter
from fleetcast.clients.kafka_records import Message, OutgoingRecord, Place
from fleetcast.ingest.kafka.columnar import (
    BINARY_TYPE,
    JSON_TYPE,
    ColumnarRecord,
    Header,
    RecordNames,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.remote_write.request import Version
from tests.ingest.write_requests import Row, gpu, message_v1, message_v2, packed

KAFKA_NODES = tuple(f"k{number}" for number in range(8))
WRITE_NODES = tuple(f"w{number}" for number in range(8))
KAFKA_METRICS = ("sm_clock_mhz", "gpu_temp_c", "power_w", "pcie_replays", "energy_j")
WRITE_METRICS = {
    "DCGM_FI_DEV_SM_CLOCK": "sm_clock_mhz",
    "DCGM_FI_DEV_GPU_TEMP": "gpu_temp_c",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "pcie_replays",
}
GPUS = 8
TYPES = {BINARY_TYPE: encode_binary_record, JSON_TYPE: encode_json_record}
WRITE_TYPES = {
    Version.V1: "application/x-protobuf",
    Version.V2: "application/x-protobuf;proto=io.prometheus.write.v2.Request",
}
POISON = (b"{", b'{"schema": 2}', b"\xff\xfe\x00 no page", b"FCT1\xff\xff\xff\xff", b'["job"]')

Sample = tuple[str, str, int]  # metric, entity, time_ms


def block_of(node: str) -> str:
    """Pairs of nodes of either kind: k0 and k1 are b0, w0 and w1 are b0 as well."""
    return f"b{int(node[1:]) // 2}"


@dataclass(slots=True)
class Book:
    """What was acknowledged. records, writes: as they were sent; poison: where it lies."""

    samples: dict[Sample, float] = field(default_factory=dict)
    records: list[Message] = field(default_factory=list)
    writes: list[tuple[Version, bytes]] = field(default_factory=list)
    poison: set[tuple[str, int, int]] = field(default_factory=set)
    troubles: list[str] = field(default_factory=list)
    retries: int = 0


class Sender(threading.Thread):
    """A thread that sends until it is told to stop; what it dies of is trouble."""

    def __init__(self, name: str, book: Book, seed: int, pause_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self.book = book
        self.rng = random.Random(f"{seed} {name}")
        self.pause_s = pause_s
        self.ending = threading.Event()
        self.counters: dict[str, float] = {}

    def run(self) -> None:
        try:
            while not self.ending.wait(self.pause_s):
                self.once()
        except Exception as error:
            self.book.troubles.append(f"{self.name}: {error!r}")

    def once(self) -> None:
        raise NotImplementedError

    def value(self, metric: str, entity: str) -> float:
        """A gauge wanders; a counter grows, and is reset now and then."""
        if metric in ("pcie_replays", "energy_j"):
            key = f"{metric} {entity}"
            grown = self.counters.get(key, 0.0) + self.rng.randint(0, 5)
            self.counters[key] = 0.0 if self.rng.random() < 0.02 else grown
            return self.counters[key]
        return round(self.rng.uniform(30.0, 90.0 if metric == "gpu_temp_c" else 1980.0), 3)


class KafkaSender(Sender):
    """Columnar records of every node in both forms, job and node events, and poison among both."""

    def __init__(self, book: Book, writer: KafkaWriter, telemetry: str, events: str, seed: int) -> None:
        super().__init__("kafka", book, seed, 0.1)
        self.writer = writer
        self.telemetry, self.events = telemetry, events
        self.job = 0
        self.late: list[tuple[OutgoingRecord, dict[Sample, float]]] = []

    def once(self) -> None:
        for node in KAFKA_NODES:
            record, samples = self.record(node)
            draw = self.rng.random()
            if draw < 0.05:  # overtaken by the node's next one
                self.late.append((record, samples))
                continue
            self.send(record, samples, twice=draw > 0.95)
        if self.rng.random() < 0.5:
            for late in self.late:
                self.send(*late)
            self.late = []
        for event in self.life():
            self.send(OutgoingRecord(self.events, None, json.dumps(event).encode()), {}, twice=self.rng.random() < 0.1)
        if self.rng.random() < 0.5:
            topic = self.rng.choice((self.telemetry, self.events))
            self.send(OutgoingRecord(topic, self.rng.randbytes(4), self.rng.choice(POISON)), {}, poison=True)

    def record(self, node: str) -> tuple[OutgoingRecord, dict[Sample, float]]:
        now_ms = time.time_ns() // 1_000_000
        entities = tuple(str(index) for index in range(GPUS))
        values = np.array([[self.value(metric, f"{node}/{index}") for index in entities] for metric in KAFKA_METRICS])
        header = Header(node, {"gpu": RecordNames(KAFKA_METRICS, entities)}, "H100")
        kind = self.rng.choice(tuple(TYPES))
        body = TYPES[kind](ColumnarRecord(header, now_ms, (values,)))
        samples = {
            (metric, f"{node}/{index}", now_ms): values[row, column]
            for row, metric in enumerate(KAFKA_METRICS)
            for column, index in enumerate(entities)
        }
        return OutgoingRecord(
            self.telemetry, block_of(node).encode(), body, (("content-type", kind.encode()),)
        ), samples

    def life(self) -> list[dict[str, Any]]:
        """Of a job that starts now and ends at once or a while later; now and then a drain."""
        self.job += 1
        now_ms = time.time_ns() // 1_000_000
        job = {"job": f"j{self.job}", "attempt": 1, "time_ms": now_ms}
        node = self.rng.choice((*KAFKA_NODES, *WRITE_NODES))
        ranks = [{"rank": 0, "node": node, "gpus": [self.rng.randrange(GPUS)]}]
        events: list[dict[str, Any]] = [
            job | {"sequence": 1, "type": "submitted", "gpus_per_node": 1, "queue": self.rng.choice("ab")},
            job | {"sequence": 2, "type": "started", "ranks": ranks},
        ]
        if self.job > 10:
            over = {"job": f"j{self.job - 10}", "attempt": 1, "time_ms": now_ms, "sequence": 3, "type": "finished"}
            events.append(over)
        if self.rng.random() < 0.1:
            kind = self.rng.choice(("drain", "undrain"))
            events.append({"node": node, "source": "test", "sequence": self.job, "time_ms": now_ms, "type": kind})
        return events

    def send(
        self, record: OutgoingRecord, samples: dict[Sample, float], *, twice: bool = False, poison: bool = False
    ) -> None:
        for _ in range(2 if twice else 1):
            ((place, end),) = self.writer.write([record]).items()
            self.note(place, end - 1, record, poison)
        self.book.samples.update(samples)

    def note(self, place: Place, offset: int, record: OutgoingRecord, poison: bool) -> None:
        if poison:
            self.book.poison.add((*place, offset))
        message = Message(place, offset, time.time_ns() // 1_000_000, record.key, record.value, record.headers)
        self.book.records.append(message)


class WriteSender(Sender):
    """Requests of both versions with three samples of every series, each again until it is acknowledged."""

    PATIENCE_S = 300.0

    def __init__(self, book: Book, port: int, seed: int) -> None:
        super().__init__("writer", book, seed, 0.1)
        self.port = port

    def once(self) -> None:
        now_ms = time.time_ns() // 1_000_000
        rows: list[Row] = []
        samples: dict[Sample, float] = {}
        for node in WRITE_NODES:
            for index in range(GPUS):
                for name, metric in WRITE_METRICS.items():
                    told = [(now_ms - 40 + 20 * number, self.value(metric, f"{node}/{index}")) for number in range(3)]
                    rows.append((gpu(name, index, node), told))
                    samples |= {(metric, f"{node}/{index}", time_ms): value for time_ms, value in told}
        version = self.rng.choice((Version.V1, Version.V2))
        body = packed((message_v1 if version is Version.V1 else message_v2)(rows))
        self.post(version, body)
        self.book.writes.append((version, body))
        self.book.samples |= samples
        if self.rng.random() < 0.05:  # as a sender whose answer got lost
            self.post(version, body)

    def post(self, version: Version, body: bytes) -> None:
        deadline = time.monotonic() + self.PATIENCE_S
        while (status := self.ask(version, body)) != 204:
            assert status in (0, 503), status
            assert time.monotonic() < deadline, "no answer"
            self.book.retries += 1
            time.sleep(0.05)

    def ask(self, version: Version, body: bytes) -> int:
        """The status; 0 when nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        headers = {"Content-Type": WRITE_TYPES[version], "Content-Encoding": "snappy"}
        try:
            connection.request("POST", "/api/v1/write", body, headers)
            response = connection.getresponse()
            response.read()
            return response.status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()


def until(check: Callable[[], Any], limit_s: float, what: str) -> Any:
    """The first truthy answer."""
    deadline = time.monotonic() + limit_s
    while not (answer := check()):
        assert time.monotonic() < deadline, what
        time.sleep(0.1)
    return answer
