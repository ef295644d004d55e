"""Remote write, both versions: decoding alone, and the whole path.

decode           bodies in memory → samples of the catalogue, with known series
door to ring     our api over HTTP (unpack, walk, write, fsync), then the inbox, decoding and the
                 window store here; samples per second of all that CPU time; the peer is a real
                 Prometheus with the same bodies
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.inputs.decode import FIELDS, GPUS
from fleetcast.benchmarks.kit.case import make_record, measure
from fleetcast.benchmarks.kit.peer_prometheus import PrometheusPeer, find_prometheus
from fleetcast.benchmarks.kit.service import ServerProcess, pin_beside_server, read_cpu_s
from fleetcast.benchmarks.kit.written import WriteConnection, WriteRequests, make_series_labels
from fleetcast.features.store import WindowStore
from fleetcast.fleet.entities import Entities
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.remote_write.decoder import WriteDecoder
from fleetcast.ingest.remote_write.request import Version
from fleetcast.service.process_memory import use_one_heap

SIZES = (1_000,)
ROUNDS, REPEATS = 10, 3
INTERVAL_MS = 1000


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield two records for each version and fleet size in GPUs."""
    use_one_heap()  # as the processes of api and pipeline do
    for gpus in sizes:
        nodes = max(1, gpus // GPUS)
        size = {"nodes": nodes, "gpus": nodes * GPUS, "series": nodes * GPUS * len(FIELDS)}
        for version in Version:
            requests = WriteRequests(make_series_labels(nodes), version, np.random.default_rng(1))
            yield _measure_decoding(requests, version, size)
            with tempfile.TemporaryDirectory() as folder, pin_beside_server():
                yield _measure_whole_path(requests, version, size, Path(folder))


def _measure_decoding(requests: WriteRequests, version: Version, size: dict[str, int]) -> dict[str, Any]:
    decoder = WriteDecoder(ExporterResolver(Entities()))
    bodies = requests.make_round(_read_now_ms())

    def decode_once() -> int:
        batches = [decoder.decode(body, version, _read_now_ms()) for body in bodies]
        assert not any(batch.bad for batch in batches)
        assert sum(map(len, batches)) == requests.samples
        return requests.samples

    return measure("remote_write", f"decode {version}.0", size, decode_once, "samples/s")


def _measure_whole_path(
    requests: WriteRequests, version: Version, size: dict[str, int], folder: Path
) -> dict[str, Any]:
    began_ms = _read_now_ms() - (REPEATS * ROUNDS + 1) * INTERVAL_MS
    entities = Entities()
    ring = InboxPipeline(folder / "inbox", entities)
    rates, spent_s = [], []
    with ServerProcess.start_role("api", folder) as server:
        server.wait_for_answer("/healthz")
        sender = WriteConnection(server.port, version)
        _send_bodies(sender, requests.make_round(began_ms))
        ring.write_to_ring(requests.samples)
        for repeat in range(REPEATS):
            rounds = _make_rounds(requests, began_ms + (repeat * ROUNDS + 1) * INTERVAL_MS)
            before = server.measure_cpu_s()
            _send_bodies(sender, rounds)
            own_s = ring.write_to_ring(requests.samples * ROUNDS)
            spent_s.append(server.measure_cpu_s() - before + own_s)
            rates.append(requests.samples * ROUNDS / spent_s[-1])
        sender.close()
    peer = _measure_prometheus(requests, version, folder / "peer", began_ms)
    best = rates.index(max(rates))
    case = f"door to ring {version}.0, of CPU"
    return make_record("remote_write", case, size, rates, "samples/s", cpu_s=spent_s[best], peer=peer)


class InboxPipeline:
    """The part of a pipeline that reads the inbox and writes the rings, in this process."""

    def __init__(self, inbox: Path, entities: Entities) -> None:
        self._source = InboxSource(inbox, writes=WriteDecoder(ExporterResolver(entities)))
        self._store = WindowStore(entities)

    def write_to_ring(self, samples: int) -> float:
        """Write `samples` samples from the inbox into the ring, and return the CPU seconds for this work."""
        began = time.process_time()
        asyncio.run(self._write_samples(samples))
        return time.process_time() - began

    async def _write_samples(self, samples: int) -> None:
        applied = 0
        while applied < samples:
            batch = await asyncio.wait_for(self._source.next(), 30)
            assert not batch.bad, batch.bad[0]
            applied += sum(self._store.write(part, _read_now_ms()).applied for part in batch.samples)
        assert applied == samples, f"{applied} samples of {samples}"


def _make_rounds(requests: WriteRequests, first_ms: int) -> list[bytes]:
    times = range(first_ms, first_ms + ROUNDS * INTERVAL_MS, INTERVAL_MS)
    return [body for time_ms in times for body in requests.make_round(time_ms)]


def _send_bodies(sender: WriteConnection, bodies: Sequence[bytes]) -> None:
    for body in bodies:
        sender.send(body)


def _measure_prometheus(
    requests: WriteRequests, version: Version, folder: Path, began_ms: int
) -> tuple[str, float] | None:
    """Measure a Prometheus that receives the same requests.

    Returns its name and its samples per CPU second. Returns None if no Prometheus is installed.
    """
    program = find_prometheus()
    if program is None:
        return None
    peer = PrometheusPeer(program, folder, {})
    try:
        sender = WriteConnection(peer.port, version)
        _send_bodies(sender, requests.make_round(began_ms))
        rates = []
        for repeat in range(REPEATS):
            rounds = _make_rounds(requests, began_ms + (repeat * ROUNDS + 1) * INTERVAL_MS)
            before = read_cpu_s(peer.process.pid)
            _send_bodies(sender, rounds)
            rates.append(requests.samples * ROUNDS / (read_cpu_s(peer.process.pid) - before))
        sender.close()
        return f"{peer.name}, its receiver", max(rates)
    finally:
        peer.close()


def _read_now_ms() -> int:
    return time.time_ns() // 1_000_000
