"""A source faster than we are makes us slower, never larger; afterwards nothing waits, and nothing is lost.

The pipeline is made slow (it may run for a small part of the time) while Kafka gets, and the api accepts, more than
five times what it takes. BACKPRESSURE_S is how long that goes on: 60 is the whole of it.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import numpy as np
import pytest

from fleetcast.benchmarks.inputs.kafka import draw_gpu_values
from fleetcast.clients.kafka_records import OutgoingRecord
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.kafka.columnar import ColumnarRecord, Header, RecordNames, encode_binary_record
from fleetcast.ingest.remote_write.request import Version
from fleetcast.service.config import load_config
from tests.ingest.write_requests import gpu, message_v1, packed
from tests.integration.crash.load import Diary, Door
from tests.integration.crash.roles import RunningRole
from tests.integration.crash.streams import GPUS, KAFKA_NODES, WRITE_METRICS, WRITE_NODES, Book, WriteSender, until
from tests.integration.crash.test_streams import running, write_config
from tests.integration.kafka.topics import Topics

pytestmark = pytest.mark.integration

LOAD_S = float(os.environ.get("BACKPRESSURE_S", "15"))
TIMES = 5.0
SAMPLES_PER_S = 350_000  # into Kafka
RUNS_S, RESTS = 0.03, 6.0
MOST_BYTES = 448 * 2**20
BUFFER_BYTES = 32 * 2**20
LAG_ZERO_S = 600.0
METRIC_NAMES = tuple(metric.name for metric in METRICS[EntityKind.GPU])[:40]
BATCH = 40  # records of a node at once
WRITE_SAMPLES = 200  # of a series in a request


@contextmanager
def slowed(role: RunningRole) -> Iterator[None]:
    """The process runs for RUNS_S or a little longer, then stands still RESTS times as long as it ran, and so on."""
    over = threading.Event()

    def beat() -> None:
        ran_s = RUNS_S
        while not over.is_set():
            role.process.send_signal(signal.SIGSTOP)
            over.wait(RESTS * ran_s)
            role.process.send_signal(signal.SIGCONT)
            began = time.monotonic()
            time.sleep(RUNS_S)
            ran_s = time.monotonic() - began

    beater = threading.Thread(target=beat, daemon=True)
    beater.start()
    try:
        yield
    finally:
        over.set()
        beater.join()


class Flood(threading.Thread):
    """Records as fast as the broker takes them; `samples` are acknowledged."""

    def __init__(self, topics: Topics) -> None:
        super().__init__(daemon=True)
        self.topics = topics
        self.samples = 0
        self.ending = threading.Event()
        self.trouble = ""
        self._next_ms = dict.fromkeys(KAFKA_NODES, 0)
        entities = tuple(str(index) for index in range(GPUS))
        self._names = RecordNames(METRIC_NAMES, entities)
        self._values = draw_gpu_values(METRIC_NAMES, np.random.default_rng(1))

    def run(self) -> None:
        try:
            began = time.monotonic()
            while not self.ending.is_set():
                self.once()
                time.sleep(max(0.0, began + self.samples / SAMPLES_PER_S - time.monotonic()))
        except Exception as error:
            self.trouble = repr(error)

    def once(self) -> None:
        records = []
        for node in KAFKA_NODES:
            header = Header(node, {"gpu": self._names}, "H100")
            first_ms = max(self._next_ms[node], time.time_ns() // 1_000_000)
            self._next_ms[node] = first_ms + BATCH
            for time_ms in range(first_ms, first_ms + BATCH):
                body = encode_binary_record(ColumnarRecord(header, time_ms, (self._values,)))
                records.append(OutgoingRecord(self.topics.telemetry, node.encode(), body))
        self.topics.writer.write(records)
        self.samples += len(records) * len(METRIC_NAMES) * GPUS


class WriteFlood(WriteSender):
    """Large requests, one after the other; `samples` are acknowledged."""

    samples = 0
    _next_ms = 0

    def once(self) -> None:
        first_ms = max(self._next_ms, time.time_ns() // 1_000_000)
        self._next_ms = first_ms + WRITE_SAMPLES
        told = [(time_ms, float(1 + time_ms % 97)) for time_ms in range(first_ms, self._next_ms)]
        rows = [(gpu(name, 0, node), told) for node in WRITE_NODES for name in WRITE_METRICS]
        self.post(Version.V1, packed(message_v1(rows)))
        self.samples += len(rows) * len(told)


def ingestion(port: int) -> dict[str, Any]:
    """The document; empty while nobody answers."""
    status, answer, _ = Door(port, Diary()).ask("GET", "/v1/ingestion")
    return msgspec.json.decode(answer) if status == 200 else {}


def rate_taken(port: int, began_ms: int) -> float:
    """Samples a second up to the last board; 0 where none came, as on a machine that has others to serve."""
    document = ingestion(port)
    for_ms = document["as_of_ms"] - began_ms
    return float(document["samples_total"] / for_ms * 1000) if for_ms > 1000 else 0.0


def all_read(port: int, after_ms: int) -> bool:
    document = ingestion(port)
    rows = {row["name"]: row for row in document.get("sources", ())}
    return (
        document.get("as_of_ms", 0) > after_ms
        and rows["kafka"]["lag_records"] == 0
        and rows["inbox"]["backlog_bytes"] == 0
    )


def test_five_times_more_than_we_take_makes_us_slower_and_never_larger(tmp_path: Path, topics: Topics) -> None:
    path = write_config(tmp_path, topics, instances=1, snapshot_s=5.0)
    text = path.read_text() + f"\n[archive]\nbuffer_bytes = {BUFFER_BYTES}\n"
    path.write_text(text)
    port, book = load_config(path).api.port, Book()
    with running(path) as (pipeline, api):
        until(lambda: ingestion(port), 60, "no board")
        flood, writes = Flood(topics), WriteFlood(book, port, 1)
        began, began_ms = time.monotonic(), time.time_ns() // 1_000_000
        with slowed(pipeline):
            flood.start()
            writes.start()
            time.sleep(LOAD_S)
            for sender in (flood, writes):
                sender.ending.set()
                sender.join(60)
            took_s = time.monotonic() - began
            taken_per_s = rate_taken(port, began_ms)
        sent = flood.samples + writes.samples
        assert not flood.trouble, flood.trouble
        assert not book.troubles, book.troubles
        print(f"\n{took_s:.0f} s: {sent / took_s:,.0f} samples/s sent, {taken_per_s:,.0f} samples/s taken")
        assert sent / took_s > TIMES * taken_per_s
        began = time.monotonic()
        after_ms = time.time_ns() // 1_000_000 + 2000
        until(lambda: all_read(port, after_ms), LAG_ZERO_S, "not all was read")
        lag_s = time.monotonic() - began
        most = {role.name: role.most_bytes() for role in (pipeline, api)}
        print(f"lag zero {lag_s:.1f} s later; most memory, MiB: { {name: size >> 20 for name, size in most.items()} }")
        assert max(most.values()) < MOST_BYTES
        assert pipeline.stop() == 0, pipeline.words()
    files = f"read_parquet('{tmp_path}/state/archive/samples/**/*.parquet', hive_partitioning = true)"
    query = f"select count(*), count(distinct (metric, entity, time_ms)) from {files}"
    counted = duckdb.connect().sql(query).fetchall()[0]
    print(f"archive: count(*) {counted[0]}, distinct {counted[1]}, sent {sent}")
    assert counted == (sent, sent)
