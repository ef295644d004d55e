"""A real Prometheus writes to us: 10,000 series in both versions of the protocol, and nothing is lost on the way."""

import http.server
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from fleetcast.benchmarks.inputs.decode import GPUS, make_page
from tests.ingest.write_requests import Row, gpu, message_v1, message_v2, packed
from tests.integration.built import needed
from tests.integration.prometheus_build import prometheus
from tests.integration.prometheus_writer import MESSAGES, PrometheusWriter
from tests.integration.service_process import Service

pytestmark = pytest.mark.integration

SERIES, NODES = 10_000, 40
QUICK = {"pipeline": {"tick_s": 1.0, "snapshot_s": 2.0}, "speed": 1.0}


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest) -> Path:
    """Prometheus; the first run ever builds it."""
    return needed(prometheus, request)


@contextmanager
def page_server(page: bytes) -> Iterator[str]:
    """The address of an exporter that always says the same."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/plain; version=0.0.4")
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def archived(service: Service) -> dict[tuple[str, str], list[tuple[int, float]]]:
    """(entity, metric) → [(time_ms, value)], of every file that is there now."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for path in sorted((service.folder / "state" / "archive" / "samples").rglob("*.parquet")):
        rows = pq.ParquetFile(path).read(["entity", "metric", "time_ms", "value"]).to_pydict()
        for entity, metric, time_ms, value in zip(*rows.values(), strict=True):
            found.setdefault((entity, metric), []).append((time_ms, value))
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_real_prometheus_writes_arrives_whole(
    version: int, program: Path, tmp_path: Path, start_service: Callable[..., Service]
) -> None:
    nodes = [f"n{number:04d}" for number in range(NODES)]
    pages = [make_page(node, np.random.default_rng(number)) for number, node in enumerate(nodes)]
    series = sum(page.count(b"\n") - page.count(b"\n#") - 1 for page in pages)
    lines = b"".join(line + b"\n" for page in pages for line in page.split(b"\n") if line and line[:1] != b"#")
    service = start_service(**QUICK)
    service.until("the api", lambda: service.request("GET", "/healthz")[0] == 200)
    with page_server(lines) as target:
        writer = PrometheusWriter(
            program,
            tmp_path,
            [target],
            write=f"http://127.0.0.1:{service.port}/api/v1/write",
            version=version,
            interval_s=3.0,
        )
        try:
            known = service.until(
                "every node", lambda: (told := service.get("/v1/risk/nodes?limit=100")) and told["rows"], 60
            )
            service.until("all series in the archive", lambda: len(archived(service)) >= SERIES, 60)
            kept = archived(service)
            assert series >= SERIES
            failed = writer.sum("prometheus_remote_storage_samples_failed_total")
        finally:
            writer.stop()
    assert failed == 0
    assert {row["node"] for row in known} <= set(nodes)
    of_nodes = [key for key in kept if key[0].partition("/")[0] in nodes]
    assert len(of_nodes) >= SERIES
    assert all(len({at for at, _ in rows}) == len(rows) for rows in kept.values()), "a sample is there twice"
    assert len(service.get(f"/v1/nodes/{nodes[0]}")["gpus"]) == GPUS


def post(service: Service, version: int, rows: list[Row]) -> int:
    body = packed((message_v1 if version == 1 else message_v2)(rows))
    request = urllib.request.Request(f"http://127.0.0.1:{service.port}/api/v1/write", body, method="POST")
    request.add_header("Content-Type", f"application/x-protobuf;proto={MESSAGES[version]}")
    request.add_header("Content-Encoding", "snappy")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.status)


def kill_everything(service: Service) -> None:
    pids = service.pids()
    service.process.send_signal(signal.SIGKILL)
    service.process.wait()
    for role, pid in pids.items():
        if role != "supervisor":
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("version", [1, 2])
def test_what_was_acknowledged_is_there_after_everything_was_killed(
    version: int, start_service: Callable[..., Service]
) -> None:
    service = start_service(**QUICK)
    service.until("the api", lambda: service.request("GET", "/healthz")[0] == 200)
    now_ms = time.time_ns() // 1_000_000
    rows: list[Row] = [
        (gpu("DCGM_FI_DEV_POWER_USAGE", index, "kept01"), [(now_ms, 100.0 + index)]) for index in range(8)
    ]
    assert post(service, version, rows) == 204
    kill_everything(service)
    service.start()
    answer = service.until("the node", lambda: service.get("/v1/nodes/kept01"), 30)
    assert len(answer["gpus"]) == 8
    service.until("the samples in the archive", lambda: len(archived(service)) >= 8, 30)
    kept = {entity: rows for (entity, metric), rows in archived(service).items() if metric == "power_w"}
    assert kept == {f"kept01/{index}": [(now_ms, 100.0 + index)] for index in range(8)}
