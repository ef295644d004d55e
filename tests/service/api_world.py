"""A small world for tests of the API: a hand-made board of three nodes, and a placer that answers what it is told."""

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray

from fleetcast.models.demand.rows import DemandRow
from fleetcast.service.api.routes import demand_examples
from fleetcast.service.board.board import BoardWriter, Section
from fleetcast.service.config import ApiConfig, Config, PlacerConfig
from fleetcast.service.pipeline.demand.sections import make_demand_sections
from fleetcast.service.pipeline.publish import make_pieces_sections

NOW_MS = 1_760_000_000_000
NODES = ("n001", "n002", "n003")
CLOSED_PORT = 9  # discard: nobody listens on it


def config(folder: Path, port: int = CLOSED_PORT, max_body_bytes: int = 2**20) -> Config:
    return Config(state=str(folder), api=ApiConfig(max_body_bytes=max_body_bytes), placer=PlacerConfig(port=port))


def risk_row(node: str, rack: str | None, state: str = "ok") -> dict[str, Any]:
    return {
        "node": node,
        "rack": rack,
        "state": state,
        "placed": rack is not None,
        "reason": "SM clock 990 MHz, usual 1,980" if state == "degraded" else None,
        "action": {"code": "drain" if state == "degraded" else "none", "sentence": "…"},
    }


def risk_values() -> NDArray[np.float64]:
    """(kind, horizon, node): p grows with the horizon, p, p + 0.1, p + 0.2, p + 0.3; nothing is known of n003."""
    shortest = np.array([[0.2, 0.1, np.nan], [0.0, 0.0, np.nan], [0.01, 0.6, np.nan]])  # fail, drain, slow
    values: NDArray[np.float64] = shortest[:, None, :] + 0.1 * np.arange(4)[None, :, None]
    return values


def job_row(job: str, state: str, attempt: int = 1) -> dict[str, Any]:
    return {
        "job": job,
        "attempt": attempt,
        "state": state,
        "class": "training",
        "user": "ada",
        "queue": "train",
        "gpus": 8,
        "nodes": ["n001"] if state == "running" else [],
        "submitted_ms": NOW_MS - 60_000,
        "started_ms": NOW_MS - 30_000 if state == "running" else None,
        "ended_ms": None,
        "remaining_s": None,
        "slow": False,
    }


def demand_row(pool: str, target: str) -> DemandRow:
    return DemandRow(
        queue=pool,
        class_="all",
        group="all",
        target=target,
        now=8.0,
        model="persistence",
        issued_ms=NOW_MS,
        horizons_s=[600, 3600],
        quantiles=[0.1, 0.5, 0.9],
        values=[[7.0, 6.0], [8.0, 8.0], [9.0, 10.0]],
        record=None,
    )


def documents() -> dict[str, Any]:
    return {
        "meta": {"fleet": "test", "generation": 1, "now_ms": NOW_MS, "warming": {"have_s": 60, "need_s": 1800}},
        "doc.jobs": [job_row("team/a", "running"), job_row("b", "queued"), job_row("c", "failed", 1)],
        "doc.job": {"team/a": {"placement": [{"rank": 0, "node": "n001", "gpus": [0]}], "events": []}},
        "doc.fingerprints": {"team/a": {"job": "team/a", "as_of_ms": NOW_MS, "class": "training", "period_s": 1.5}},
        "doc.spikes": [{"domain_kind": kind, "domain": "r01"} for kind in ("power", "rack")],
        "doc.jobs_looked": {"jobs_looked": 2, "jobs_running": 3},
        "doc.utilisation": [
            {"job": "team/a", "gpus": 8, "idle_s": 0.0, "verdict": "works"},
            {"job": "d", "gpus": 2, "idle_s": 1800.0, "verdict": "abandoned"},
        ],
        "doc.stragglers": {"team/a": {"slow": True, "ratio": 1.8, "sentence": "n002 is slow"}},
        "doc.ingestion": {
            "as_of_ms": NOW_MS,
            "sources": [],
            "samples_per_s": 100.0,
            "events_per_s": 0.5,
            "newest_sample_ms": NOW_MS,
            "bad_records": {"not_a_number": 3, "future": 2},
            "targets": {"up": 2, "down": 1},
            "ticks": 7,
            "tick_ms": {"p50": 40.0, "p99": 90.0},
            "samples_total": 1234,
        },
        "doc.fleet": {"as_of_ms": NOW_MS, "name": "test", "nodes": []},
        "doc.served_models": {"as_of_ms": NOW_MS, "rows": []},
        "doc.models": {"as_of_ms": NOW_MS, "rows": [], "shadows": []},
    }


def sections(as_of_ms: int = NOW_MS) -> list[Section]:
    bodies = [json.dumps({"node": name, "as_of_ms": as_of_ms, "state": "ok"}).encode() for name in NODES]
    ranked = [risk_row("n001", "r01"), risk_row("n002", "r01", "degraded"), risk_row("n003", None, "unknown")]
    parts: dict[str, Any] = {
        "names.node": "\n".join(NODES).encode(),
        "names.rack": b"r01",
        "node.domain.rack": np.array([0, 0, -1], np.int32),
        "node.risk": risk_values(),
        "doc.risk_calibration": b'{"rows":[],"history":{}}',
        **make_pieces_sections("answers.node", bodies),
        **make_pieces_sections("answers.risk", [json.dumps(row).encode() for row in ranked]),
        "metrics.fleet": b'# TYPE fleetcast_gpus gauge\nfleetcast_gpus{state="free"} 8\n',
    }
    parts |= {name: json.dumps(value).encode() for name, value in documents().items()}
    rows = [demand_row("all", "running"), demand_row("all", "queued"), demand_row("train", "running")]
    record = {"all|running": {"history": [[NOW_MS, 8.0]], "forecast": [], "old": []}}
    demand = make_demand_sections(rows, record, demand_examples.MODEL["rows"], as_of_ms)
    return demand + [
        Section(name, data, as_of_ms, "rules" if name == "answers.risk" else "") for name, data in parts.items()
    ]


def publish(folder: Path, as_of_ms: int = NOW_MS) -> BoardWriter:
    """The whole board of this world, published once."""
    writer = BoardWriter(folder / "board")
    writer.publish(sections(as_of_ms), as_of_ms)
    return writer


@dataclass
class FakePlacer:
    """Answers every request with what it was told, and keeps what it was asked."""

    status: int = 200
    body: bytes = b'{"outcome":  "placed"}'
    content_type: str = "application/json"
    asked: list[tuple[str, str, bytes]] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)  # of the last request
    port: int = 0

    def handler(self) -> type[BaseHTTPRequestHandler]:
        placer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def answer(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                placer.asked.append((self.command, self.path, self.rfile.read(length)))
                placer.headers = {name.lower(): value for name, value in self.headers.items()}
                self.send_response(placer.status)
                self.send_header("content-type", placer.content_type)
                self.send_header("content-length", str(len(placer.body)))
                self.end_headers()
                self.wfile.write(placer.body)

            do_GET = do_POST = do_DELETE = answer  # noqa: N815

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler


@contextmanager
def running(placer: FakePlacer) -> Iterator[FakePlacer]:
    """The placer on a loopback port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), placer.handler())
    placer.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield placer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Client:
    """Requests to an application in this process, started and stopped as a server would."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        self._runner = asyncio.Runner()

    def __enter__(self) -> "Client":
        self._life = self.app.router.lifespan_context(self.app)
        self._runner.run(self._life.__aenter__())
        self._http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://127.0.0.1")
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._http.aclose())
        self._runner.run(self._life.__aexit__(None, None, None))
        self._runner.close()

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return self._runner.run(self._http.request(method, f"http://127.0.0.1{path}", **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)
