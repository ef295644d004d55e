"""The delay of a hard signal, from its source to the node's answer in the API.

A signal starts as a scrape that shows an XID, or as an event that reports a drain. The pipeline and the api
are real processes. A source feeds the pipeline a whole fleet's samples all the time. The pipeline ticks as
configured, scrapes a few nodes over HTTP and reads the inbox. So signals compete with all the work that a
tick of a large fleet does.
"""

import asyncio
import http.client
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fleetcast.benchmarks.kit.case import fits_memory, make_record
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.kit.service import START_S, find_free_port, read_cpu_s, write_topology
from fleetcast.benchmarks.ticks.tick import BYTES_PER_GPU, GPUS_PER_NODE, add_entities, make_gang_events, make_scrape
from fleetcast.fleet.clock import Clock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.ingest.source import Batch, Source
from fleetcast.service.board.board import BoardReader

NODES_WITH_XID, NODES_DRAINED = 24, 24
INTERVAL_S = 15.0
SLICES = 150  # of a scrape of the fleet: one every 0.1 s
TICKS = 2  # at least, while signals come
PATIENCE_S = 600.0
POLL_S = 0.004
FILL_PER_GPU_S = 0.002


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield records for each fleet size in GPUs: start, delays of both kinds of signals, CPU, memory.

    Sizes that do not fit the memory are left out.
    """
    for gpus in sizes:
        if not fits_memory(gpus, BYTES_PER_GPU):
            continue
        fleet = {"gpus": gpus}
        with tempfile.TemporaryDirectory() as name, UrgentSite(Path(name), gpus) as site:
            yield make_record(
                "urgent", "start to a whole board", fleet, [site.start_s], "s", cpu_s=site.read_pipeline_cpu_s()
            )
            began, before = time.monotonic(), site.read_pipeline_cpu_s()
            for way, trials_ms in (("event", site.measure_drains_ms()), ("scrape", site.measure_xids_ms())):
                size = {"gpus": gpus, "signals": len(trials_ms)}
                for what, value in (("median", statistics.median(trials_ms)), ("worst", max(trials_ms))):
                    yield make_record(
                        "urgent", f"{way} to answer, {what}", size, [value], "ms", cpu_s=site.read_pipeline_cpu_s()
                    )
            used_s, took_s = site.read_pipeline_cpu_s() - before, time.monotonic() - began
            yield make_record(
                "urgent", "CPU of the pipeline", fleet, [1000 * used_s / took_s], "ms/s of time", cpu_s=used_s
            )
            yield make_record(
                "urgent", "memory of the pipeline", fleet, [site.read_resident_mib()], "MiB", cpu_s=used_s
            )


class FleetFeed(Source):
    """A source for `pipeline.sources`: one scrape of a busy fleet, then a part of it every 0.1 s."""

    name = "fleet"

    def __init__(self, entities: Entities, clock: Clock, options: dict[str, Any]) -> None:
        self._clock = clock
        self._nodes = max(1, int(options["gpus"]) // GPUS_PER_NODE)
        self._rows = {kind: add_entities(entities, kind, self._nodes) for kind in (EntityKind.GPU, EntityKind.PORT)}
        self._rng = np.random.default_rng(1)
        self._next = -SLICES - 1

    async def next(self) -> Batch:
        self._next += 1
        if self._next == -SLICES:
            return Batch(events=tuple(make_gang_events(self._nodes, self._clock.now_ms())))
        await asyncio.sleep(INTERVAL_S / SLICES if self._next > 0 else 0.0)
        return Batch(samples=tuple(self._scrape_slice(kind, self._next % SLICES) for kind in self._rows))

    def _scrape_slice(self, kind: EntityKind, number: int) -> SampleBatch:
        rows = self._rows[kind]
        part = rows[len(rows) * number // SLICES : len(rows) * (number + 1) // SLICES]
        return make_scrape(kind, part, self._clock.now_ms(), self._rng)

    def position(self) -> dict[str, Any]:
        return {}

    def seek(self, position: dict[str, Any]) -> None:
        """Do nothing, because the source has no position."""

    async def close(self) -> None:
        """Do nothing, because the source holds nothing open."""


class Exporters:
    """HTTP exporters of nodes `u000`, `u001`, …

    `code`: the XID that all exporters show, 0 for none. `shown`: node → when its page first showed an XID, in
    monotonic seconds.
    """

    def __init__(self) -> None:
        self.code = 0
        self.shown: dict[str, float] = {}
        exporters = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                node = self.path.split("/")[1]
                body = exporters.make_page(node)
                self.send_response(200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                if exporters.code:
                    exporters.shown.setdefault(node, time.monotonic())
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # they end with the connections of the pipeline, which ends first
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.nodes = [f"u{number:03d}" for number in range(NODES_WITH_XID)]
        self.urls = [f"http://127.0.0.1:{self._server.server_port}/{node}/metrics" for node in self.nodes]

    def make_page(self, node: str) -> bytes:
        lines = []
        for gpu in range(GPUS_PER_NODE):
            labels = f'{{gpu="{gpu}",UUID="GPU-{node}-{gpu}",Hostname="{node}"}}'
            lines.append(f"DCGM_FI_DEV_POWER_USAGE{labels} {400 + time.monotonic() % 100:.3f}\n")
            lines.append(f"DCGM_FI_DEV_XID_ERRORS{labels} {self.code if gpu == 0 else 0}\n")
        return "".join(lines).encode()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class UrgentSite:
    """A pipeline and an api with one state folder."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self.nodes = max(1, gpus // GPUS_PER_NODE)
        self._folder = folder
        self._exporters = Exporters()
        self._port = find_free_port()
        config = {
            "state": str(folder / "state"),
            "fleet": {"topology": str(write_topology(folder, gpus))},  # unknown GPUs are bounded
            "api": {"port": self._port},
            "placer": {"port": find_free_port()},
            "scrape": {"targets": self._exporters.urls, "interval_s": INTERVAL_S},
            "pipeline": {
                "sources": [{"use": "fleetcast.benchmarks.ticks.urgent:FleetFeed", "options": {"gpus": gpus}}]
            },
        }
        (folder / "site.toml").write_text(tomli_w.dumps(config))
        self._patience_s = START_S + gpus * FILL_PER_GPU_S
        self._client = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        self._processes: list[ChildProcess] = []
        self.start_s = 0.0

    def _start_role(self, name: str) -> ChildProcess:
        command = [
            sys.executable,
            "-m",
            "fleetcast.cli.main",
            "run",
            "--role",
            name,
            "--config",
            str(self._folder / "site.toml"),
        ]
        return ChildProcess(f"the {name}", command)

    def _is_site_ready(self) -> bool:
        """Return whether the board contains every node, and the api answers."""
        board = BoardReader(self._folder / "state" / "board").latest()
        if board is None or len(board.names("names.node")) < self.nodes + NODES_WITH_XID:
            return False
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_S)) as client:
            try:
                client.request("GET", "/healthz")
                return client.getresponse().status == 200
            except OSError:
                return False

    def measure_drains_ms(self) -> list[float]:
        """Return the milliseconds from each drain event to an answer that shows it.

        The events are sent at random moments of a tick.
        """
        rng = np.random.default_rng(3)
        took = []
        with self._wait_for_ticks():
            for number in range(NODES_DRAINED):
                time.sleep(rng.random())
                node = f"n{number * self.nodes // NODES_DRAINED:05d}"
                event = {"node": node, "source": "bench", "sequence": number, "time_ms": 0, "type": "drain"}
                event["time_ms"] = time.time_ns() // 1_000_000
                began = time.monotonic()
                self._send_request("POST", "/v1/events", json.dumps(event).encode())
                self._wait_until(
                    f"drain of {node}", PATIENCE_S, partial(self._is_in_answer, node, b'"state":"drained"')
                )
                took.append((time.monotonic() - began) * 1000)
        return took

    def measure_xids_ms(self) -> list[float]:
        """Return the milliseconds from the first XID on each exporter's page to an answer that shows it."""
        exporters, took = self._exporters, {}

        def is_visible() -> bool:
            for node in [node for node in exporters.shown if node not in took]:
                if self._is_in_answer(node, b"XID 79"):
                    took[node] = (time.monotonic() - exporters.shown[node]) * 1000
            return len(took) == NODES_WITH_XID

        with self._wait_for_ticks():
            time.sleep(INTERVAL_S)  # every page was read once without an XID: an old one is no news
            exporters.code = 79
            self._wait_until("all XIDs", PATIENCE_S, is_visible)
        return list(took.values())

    @contextmanager
    def _wait_for_ticks(self) -> Iterator[None]:
        """Wait at the end of the context until TICKS ticks have passed since its beginning."""
        before = self._fetch_tick_count()
        yield
        self._wait_until("ticks", PATIENCE_S, lambda: self._fetch_tick_count() >= before + TICKS)

    def _fetch_tick_count(self) -> int:
        return int(json.loads(self._send_request("GET", "/v1/ingestion"))["ticks"])

    def _is_in_answer(self, node: str, what: bytes) -> bool:
        return what in self._send_request("GET", f"/v1/nodes/{node}")

    def _send_request(self, method: str, path: str, body: bytes | None = None) -> bytes:
        self._client.request(method, path, body, {"content-type": "application/json"} if body else {})
        response = self._client.getresponse()
        answer = response.read()
        assert response.status in (200, 202), f"{path}: {response.status} {answer[:200]!r}"
        return answer

    def _wait_until(self, what: str, patience_s: float, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + patience_s
        while not holds():
            late = f"{what}: not within {patience_s:.0f} s" if time.monotonic() > deadline else ""
            for process in self._processes:
                process.check_running(unless=late)
            time.sleep(POLL_S)

    def read_pipeline_cpu_s(self) -> float:
        return read_cpu_s(self._processes[0].pid)

    def read_resident_mib(self) -> float:
        """Return the resident memory of the pipeline in MiB."""
        pages = Path(f"/proc/{self._processes[0].pid}/statm").read_text(encoding="utf-8").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def __enter__(self) -> "UrgentSite":
        began = time.monotonic()
        try:
            for name in ("pipeline", "api"):
                self._processes.append(self._start_role(name))
            self._wait_until("a first board", self._patience_s, self._is_site_ready)
            self.start_s = time.monotonic() - began
        except BaseException:
            self._stop_processes()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop_processes()

    def _stop_processes(self) -> None:
        self._client.close()
        for process in self._processes:
            process.stop()
        self._exporters.close()
