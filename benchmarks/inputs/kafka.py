"""Columnar records from Kafka: decoding alone, and the whole work of a consumer with a real broker.

    decode            records in memory → samples; the peers are Arrow's stream format, and the
                      standard library for JSON
    from a broker     poll, checksum, unpack, decode; samples per second of this process's CPU time,
                      which is the rate of one core; the peer is the client alone, without decoding
    after a stop      seconds until the lag is zero; before, a fleet wrote for 60 s without a reader,
                      and it continues to write

The broker is the one that FLEETCAST_KAFKA names (HOST:PORT), else one that is started as in the
integration tests.
"""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.benchmarks.inputs.decode import GPUS
from fleetcast.benchmarks.kit.case import Peer, make_record, measure
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.clients.kafka import KafkaReader, KafkaWriter
from fleetcast.clients.kafka_access import KafkaAccess
from fleetcast.clients.kafka_records import FetchLimits, OutgoingRecord, Place
from fleetcast.features.store import WindowStore
from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.metrics import METRICS, find_metric_row
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.kafka.columnar import (
    BINARY_TYPE,
    ColumnarRecord,
    Header,
    RecordDecoder,
    RecordNames,
    encode_binary_record,
    encode_json_record,
)
from fleetcast.ingest.kafka.source import KafkaSource

VARIABLE = "FLEETCAST_KAFKA"
SIZES = (1_000, 10_000)
PARTITIONS = 8
INTERVAL_S = 15.0
STOP_S = 60.0
MOST_BACKLOG = 60_000  # records
NAMES = RecordNames(tuple(metric.name for metric in METRICS[EntityKind.GPU]), tuple(map(str, range(GPUS))))
SAMPLES = len(NAMES.metrics) * GPUS  # of a record
HEADERS = (("content-type", BINARY_TYPE.encode()),)
Encode = Callable[[ColumnarRecord], bytes]


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure decoding at each size in GPUs, and the cases with a broker at the largest size."""
    for gpus in sizes:
        yield from _measure_decoding(max(1, gpus // GPUS))
    with _start_broker() as brokers:
        if brokers is not None:
            nodes = max(1, max(sizes) // GPUS)
            yield from _measure_from_broker(brokers, nodes)
            yield _measure_catch_up(brokers, nodes)


def draw_gpu_values(metrics: Sequence[str], rng: np.random.Generator) -> NDArray[np.float64]:
    """Draw (metric, GPU) float64, plausible values of each metric of the catalogue."""
    limits = [METRICS[EntityKind.GPU][find_metric_row(EntityKind.GPU, name)].limits for name in metrics]
    low = np.array([0.0 if found is None else found.low for found in limits])[:, None]
    high = np.array([100.0 if found is None else min(100.0, found.high) for found in limits])[:, None]
    values: NDArray[np.float64] = low + (high - low) * rng.random((len(metrics), GPUS))
    return values.round(4)


def make_node_record(node: int, time_ms: int, rng: np.random.Generator) -> ColumnarRecord:
    """Make a record of one node: all metrics of the catalogue for its eight GPUs, with random values."""
    values = draw_gpu_values(NAMES.metrics, rng)
    return ColumnarRecord(Header(f"n{node:05d}", {"gpu": NAMES}, "H100"), time_ms, (values,))


def _make_size(nodes: int) -> dict[str, int]:
    return {"nodes": nodes, "gpus": nodes * GPUS, "samples": nodes * SAMPLES}


def _measure_decoding(nodes: int) -> Iterator[dict[str, Any]]:
    rng, now_ms = np.random.default_rng(1), SystemClock().now_ms()
    records = [make_node_record(node, now_ms, rng) for node in range(nodes)]
    peers = {"compact": _make_arrow_peer(records[:200]), "json": _make_json_peer(records[:200])}
    encoders: dict[str, Encode] = {"compact": encode_binary_record, "json": encode_json_record}
    for form, encode in encoders.items():
        values, decoder = [encode(row) for row in records], RecordDecoder(Entities())

        def decode_once(values: list[bytes] = values, decoder: RecordDecoder = decoder) -> int:
            return sum(len(decoder.decode(value, now_ms)) for value in values)

        assert decode_once() == nodes * SAMPLES
        yield measure(
            "kafka", f"decode, {form}", _make_size(nodes), decode_once, "samples/s", peer=peers[form], repeats=3
        )


def _make_arrow_peer(records: Sequence[ColumnarRecord]) -> Peer:
    """Return a peer that reads the same records from Arrow's stream format, in long form."""
    import pyarrow as pa

    streams = []
    for row in records:
        metric = np.repeat(np.array(NAMES.metrics), GPUS)
        entity = np.tile(np.array([f"{row.header.node}/{gpu}" for gpu in NAMES.entities]), len(NAMES.metrics))
        columns = {
            "metric": pa.array(metric).dictionary_encode(),
            "entity": pa.array(entity).dictionary_encode(),
            "time_ms": pa.array(np.full(SAMPLES, row.time_ms)),
            "value": pa.array(row.values[0].ravel()),
        }
        batch, sink = pa.RecordBatch.from_pydict(columns), pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        streams.append(sink.getvalue().to_pybytes())

    def read_arrow() -> int:
        return sum(len(pa.ipc.open_stream(stream).read_all()["value"].to_numpy()) for stream in streams)

    return Peer("pyarrow.ipc", read_arrow)


def _make_json_peer(records: Sequence[ColumnarRecord]) -> Peer:
    texts = [encode_json_record(row) for row in records]

    def read_json() -> int:
        return sum(SAMPLES for text in texts if json.loads(text))

    return Peer("json.loads", read_json)


@contextlib.contextmanager
def _start_broker() -> Iterator[list[str] | None]:
    """Yield the addresses of a broker while the context is open.

    Yields None if there is no broker, and prints the reason.
    """
    named = os.environ.get(VARIABLE)
    if named:
        yield named.split(",")
        return
    try:
        from tests.integration.built import BuildError
        from tests.integration.kafka.build import kafka
        from tests.integration.kafka.cluster import Cluster

        program = kafka(lambda line: print(line, file=sys.stderr, flush=True))
    except (ImportError, BuildError) as error:
        print(f"kafka: no broker to measure with: {error}; name one: {VARIABLE}=HOST:PORT", file=sys.stderr)
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(program, Path(folder))
        try:
            yield cluster.addresses
        finally:
            cluster.stop()


@dataclass(frozen=True, slots=True)
class _Topic:
    """A topic of this benchmark."""

    access: KafkaAccess
    name: str

    @classmethod
    def create(cls, brokers: list[str]) -> "_Topic":
        topic = cls(KafkaAccess(brokers=brokers), f"bench-{uuid.uuid4().hex[:8]}")
        writer = KafkaWriter(topic.access)
        writer.create_missing_topics({topic.name: PARTITIONS})
        writer.close()
        return topic

    def make_source(self) -> KafkaSource:
        options = {"telemetry": self.name, "events": "", "dead_letters": "", "group": ""}
        return KafkaSource(Entities(), SystemClock(), {"brokers": self.access.addresses, **options})

    def fill(self, nodes: int, moments: int) -> int:
        """Write a record for each node and moment. Returns the number of records."""
        writer, rng = KafkaWriter(self.access), np.random.default_rng(1)
        first_ms = SystemClock().now_ms() - int(moments * INTERVAL_S * 1000)
        for moment in range(moments):
            _write_records(writer, self.name, range(nodes), first_ms + int(moment * INTERVAL_S * 1000), rng)
        writer.close()
        return nodes * moments


def _write_records(writer: KafkaWriter, topic: str, nodes: range, time_ms: int, rng: np.random.Generator) -> None:
    for first in range(nodes.start, nodes.stop, 500):
        part = range(first, min(first + 500, nodes.stop))
        values = [(node, encode_binary_record(make_node_record(node, time_ms, rng))) for node in part]
        writer.write([OutgoingRecord(topic, b"block-%d" % (node // 64), value, HEADERS) for node, value in values])


def _measure_from_broker(brokers: list[str], nodes: int) -> Iterator[dict[str, Any]]:
    """Yield two records of reading from a broker: into samples, and also into the window store."""
    topic = _Topic.create(brokers)
    moments = max(1, min(4, 20_000 // nodes))
    count = topic.fill(nodes, moments)
    size = _make_size(nodes) | {"records": count}
    alone = max(SAMPLES * count / asyncio.run(_measure_polling(topic, count)) for _ in range(2))
    for case, rings in (("from a broker", False), ("from a broker, into the ring", True)):
        cpu_s = [asyncio.run(_measure_reading(topic, count, rings)) for _ in range(3)]
        rates = [SAMPLES * count / one for one in cpu_s]
        peer = ("kafka-python alone", alone)
        yield make_record("kafka", case, size, rates, "samples/core/s", cpu_s=min(cpu_s), peer=peer)


async def _measure_reading(topic: _Topic, records: int, rings: bool) -> float:
    """Read all records, and return the CPU seconds that this process used.

    rings: whether to write the samples to a window store, too.
    """
    source = topic.make_source()
    store = WindowStore(source.decoder._columnar.entities)
    began, samples = time.process_time(), 0
    while samples < records * SAMPLES:
        batch = await source.next()
        assert not batch.bad, batch.bad[0]
        samples += len(batch)
        for part in batch.samples if rings else ():
            store.write(part, SystemClock().now_ms())
    took = time.process_time() - began
    await source.close()
    return took


async def _measure_polling(topic: _Topic, records: int) -> float:
    """Return the CPU seconds to poll all records without decoding them."""
    reader = KafkaReader(topic.access, "", FetchLimits(200, 8 * 2**20, 2**20))
    places: dict[Place, int | None] = {
        (topic.name, number): None for number in await reader.list_partitions(topic.name)
    }
    await reader.assign(places)
    began, seen = time.process_time(), 0
    while seen < records:
        seen += len((await reader.poll(1.0))[0])
    took = time.process_time() - began
    await reader.close()
    return took


def _measure_catch_up(brokers: list[str], nodes: int) -> dict[str, Any]:
    """Measure how long a reader needs to catch up after a stop.

    First, all records that a fleet writes during the stop are written at once. Then another process writes at the
    fleet's usual rate.
    """
    topic = _Topic.create(brokers)
    backlog = topic.fill(nodes, max(1, min(int(STOP_S / INTERVAL_S), MOST_BACKLOG // nodes)))
    command = [sys.executable, "-m", "fleetcast.benchmarks.inputs.kafka", ",".join(brokers), topic.name, str(nodes)]
    fleet = ChildProcess("the writing fleet", command)
    try:
        time.sleep(3.0)
        began, cpu_s = time.perf_counter(), time.process_time()
        taken = asyncio.run(_read_until_caught_up(topic))
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    finally:
        fleet.stop()
    assert taken >= backlog, f"only {taken} of {backlog} records were read"
    size = _make_size(nodes) | {"records": backlog}
    return make_record("kafka", "lag zero after a stop of 60 s", size, [took_s], "s", cpu_s=cpu_s)


async def _read_until_caught_up(topic: _Topic) -> int:
    """Read records into the rings until the lag is zero. Returns the number of records."""
    source = topic.make_source()
    store = WindowStore(source.decoder._columnar.entities)
    while True:
        batch = await source.next()
        for part in batch.samples:
            store.write(part, SystemClock().now_ms())
        if source.health()["lag_records"] == 0:
            await source.close()
            return sum(source._next.values())


def write_fleet_records(brokers: str, topic: str, nodes: int) -> None:
    """Write a fleet's records at its usual rate: every node once in INTERVAL_S, for at most two minutes."""
    writer, rng = KafkaWriter(KafkaAccess(brokers=brokers)), np.random.default_rng(2)
    began, slices = time.monotonic(), 30
    for turn in range(slices * 8):
        part = turn % slices
        _write_records(
            writer, topic, range(nodes * part // slices, nodes * (part + 1) // slices), SystemClock().now_ms(), rng
        )
        time.sleep(max(0.0, began + (turn + 1) * INTERVAL_S / slices - time.monotonic()))


if __name__ == "__main__":
    write_fleet_records(sys.argv[1], sys.argv[2], int(sys.argv[3]))
