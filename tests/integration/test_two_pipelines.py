"""Two pipeline processes under a supervisor: one fleet at the API, wherever a node is scraped and whoever is killed."""

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleetcast.ingest.pages.target_spec import parse_target
from fleetcast.ingest.shares import Share
from tests.integration.service_process import Service, soon

pytestmark = pytest.mark.integration

NODES = [f"n{number}" for number in range(8)]
GPUS = 4


class Exporters:
    """A page a node, at /NODE/metrics. xid: node -> code of its first GPU; served: when a page first showed it."""

    def __init__(self) -> None:
        self.xid: dict[str, int] = {}
        self.served: dict[str, float] = {}
        exporters = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                node = self.path.split("/")[1]
                page = exporters.page(node)
                self.send_response(200)
                self.send_header("Content-Length", str(len(page)))
                self.end_headers()
                self.wfile.write(page)
                if node in exporters.xid:
                    exporters.served.setdefault(node, time.monotonic())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def url(self, node: str) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/{node}/metrics"

    def page(self, node: str) -> bytes:
        lines = []
        for gpu in range(GPUS):
            labels = f'{{gpu="{gpu}",UUID="GPU-{node}-{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="{node}"}}'
            code = self.xid.get(node, 0) if gpu == 0 else 0
            lines += [f"DCGM_FI_DEV_GPU_TEMP{labels} {60 + gpu}", f"DCGM_FI_DEV_POWER_USAGE{labels} {500 + gpu}"]
            lines += [f"DCGM_FI_DEV_XID_ERRORS{labels} {code}", f"DCGM_FI_DEV_SM_CLOCK{labels} 1980"]
        return ("\n".join(lines) + "\n").encode()


@pytest.fixture
def exporters() -> Iterator[Exporters]:
    running = Exporters()
    yield running
    running.server.shutdown()
    running.server.server_close()


@pytest.fixture
def service(exporters: Exporters, start_service: Callable[..., Service]) -> Service:
    started = start_service(
        scrape={"targets": [exporters.url(node) for node in NODES], "interval_s": 7.5},
        pipeline={"instances": 2, "tick_s": 15.0, "snapshot_s": 30.0},
    )
    started.until("all nodes", lambda: states(started) == dict.fromkeys(NODES, "ok"), 60)
    return started


def states(service: Service) -> dict[str, str]:
    answer = service.get("/v1/fleet")
    return {row["node"]: row["state"] for row in answer["nodes"]} if answer else {}


def is_degraded(service: Service, node: str) -> bool:
    return bool(service.get(f"/v1/nodes/{node}")["state"] == "degraded")


def is_back(service: Service, role: str, pid: int, after_ms: int) -> bool:
    """Whether a role runs again, and boards come since."""
    board = service.get("/v1/fleet")
    return service.pids().get(role, pid) != pid and bool(board) and board["as_of_ms"] > after_ms


def scraped_by(exporters: Exporters, instance: int) -> list[str]:
    return [node for node in NODES if Share(instance, 2).scrapes(parse_target(exporters.url(node)))]


def test_two_pipelines_are_one_fleet_and_a_hard_signal_of_either_shows_within_a_second(
    service: Service, exporters: Exporters
) -> None:
    assert {"pipeline-0", "pipeline-1"} <= service.pids().keys()
    shares = [scraped_by(exporters, instance) for instance in range(2)]
    assert all(shares)
    for node in NODES:
        page = service.get(f"/v1/nodes/{node}")
        assert [gpu["power_w"] for gpu in page["gpus"]] == [500, 501, 502, 503]
        assert page["gpu_model"]
    sources = {row["name"]: row for row in service.get("/v1/ingestion")["sources"]}
    assert sources["scrape"]["targets_up"] == len(shares[0])
    assert sources["scrape (1)"]["targets_up"] == len(shares[1])
    for share in shares:
        node = share[0]
        exporters.xid[node] = 79
        service.until("the XID", partial(is_degraded, service, node), 10)
        took_s = time.monotonic() - exporters.served[node]
        print(f"pipeline {shares.index(share)}: {took_s:.2f} s from the page to the API")
        assert took_s < soon(1.0) + 0.1  # the asking is every 0.1 s
    job = {"job": "j", "attempt": 1, "sequence": 1, "time_ms": 1_789_000_000_000, "type": "submitted"}
    assert service.request("POST", "/v1/events", job)[0] == 202
    service.until("the event", lambda: service.get("/v1/ingestion")["events_total"] == 1)


def test_either_pipeline_may_be_killed(service: Service) -> None:
    for role in ("pipeline-1", "pipeline-0"):
        pid, after_ms = service.pids()[role], service.get("/v1/fleet")["as_of_ms"] + 45_000
        service.kill(role)
        service.until(f"{role} again", partial(is_back, service, role, pid, after_ms), 30)
        service.until("all nodes", lambda: states(service) == dict.fromkeys(NODES, "ok"))
    both = [Path(service.folder, "state", "snapshot"), Path(service.folder, "state", "pipeline-1", "snapshot")]
    service.until("snapshots of both", lambda: all(any(folder.glob("[0-9]*")) for folder in both))


def test_an_instance_that_there_is_not_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[pipeline]\ninstances = 2\n")
    command = [sys.executable, "-m", "fleetcast.cli.main", "run", "--config", str(tmp_path / "config.toml"), "--role"]
    for more in (["pipeline", "--instance", "2"], ["api", "--instance", "1"]):
        ended = subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2
        assert "expected 0..1 and --role pipeline" in ended.stderr
