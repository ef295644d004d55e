"""Counters of ports from trees, a wired fleet, a serving engine and a real node_exporter, through the whole service."""

import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT
from tests.docs.runner import Reader
from tests.ingest.ports.test_sysfs import tree
from tests.integration.service_process import Service
from tests.ports import free_port
from tests.programs import needed

pytestmark = pytest.mark.integration

NODES = [f"n{number:02}" for number in range(1, 7)]
RACK = '[[rack]]\nname = "r1"\nnodes = "n[01-06]"\ngpus = 8\ngpu_model = "H100"\n'


def wiring() -> str:
    """`nvidia-smi topo -m` of a host with four adapters."""
    devices = [f"GPU{index}" for index in range(4)] + [f"NIC{index}" for index in range(4)]
    lines = ["\t" + "\t".join(devices) + "\tCPU Affinity"]
    for gpu in range(4):
        near = ["PXB" if nic == gpu else "SYS" for nic in range(4)]
        lines.append(f"GPU{gpu}\t" + "\t".join(["NV18"] * 4 + near) + "\t0-63")
    return "\n".join(lines) + "\n"


def test_a_slow_port_is_found_among_its_peers_and_named_by_rail_and_gpu(
    tmp_path: Path, start_service: Callable[..., Service]
) -> None:
    topology = tmp_path / "topology"
    topology.mkdir()
    (topology / "racks.toml").write_text(RACK)
    (topology / "H100.txt").write_text(wiring())
    trees = []
    for node in NODES:
        for index in range(4):
            slow = node == "n02" and index == 3
            tree(tmp_path / node, f"mlx5_{index}", rate="200 Gb/sec (4X HDR)\n" if slow else "400 Gb/sec (4X NDR)\n")
        trees.append(f"{node}={tmp_path / node}")
    service = start_service(
        fleet={"topology": str(topology)},
        pipeline={"tick_s": 5.0, "sources": [{"use": "sysfs", "options": {"paths": trees, "interval_s": 5.0}}]},
    )
    sentence = "port mlx5_3 (rail 3, GPU 3): InfiniBand link at 200 Gbit/s, usual 400 Gbit/s"

    def named() -> Any:
        answer = service.get("/v1/nodes/n02")
        return answer if answer and sentence in [row["sentence"] for row in answer["reasons"]] else None

    node = service.until("the slow port's reason", named, 60)
    assert node["placed"] is True
    assert service.get("/v1/nodes/n03")["reasons"] == []
    (source,) = [row for row in service.get("/v1/ingestion")["sources"] if row["kind"] == "sysfs"]
    assert (source["up"], source["down"], source["bad"]) == (6, 0, 0)


def served_page(step: int) -> str:
    labels = 'engine="0",model_name="meta/llama"'
    return (
        f"vllm:num_requests_running{{{labels}}} 7.0\n"
        f"vllm:num_requests_waiting{{{labels}}} 2.0\n"
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.25\n"
        f"vllm:generation_tokens_total{{{labels}}} {1000.0 * step}\n"
        f'vllm:time_to_first_token_seconds_bucket{{le="0.1",{labels}}} {10.0 * step}\n'
        f'vllm:time_to_first_token_seconds_bucket{{le="1.0",{labels}}} {20.0 * step}\n'
        f"vllm:time_to_first_token_seconds_sum{{{labels}}} {6.0 * step}\n"
        f"vllm:time_to_first_token_seconds_count{{{labels}}} {20.0 * step}\n"
    )


def test_a_serving_engine_is_seen_as_a_served_model_and_makes_no_node(
    folder_server: tuple[Path, str], start_service: Callable[..., Service], tmp_path: Path
) -> None:
    root, url = folder_server
    (root / "metrics").write_text(served_page(1))
    service = start_service(scrape={"targets": [url], "interval_s": 15.0}, pipeline={"tick_s": 5.0})
    step = 1

    def seen() -> Any:
        nonlocal step
        step += 1
        (root / "metrics").write_text(served_page(step))
        rows = (service.get("/v1/served-models") or {"rows": []})["rows"]
        return rows[0] if rows and rows[0]["ttft_s"]["mean"] else None

    row = service.until("the served model", seen, 60)
    assert (row["pool"], row["model"], row["requests_running"]) == ("default", "meta/llama", 7.0)
    assert (row["requests_waiting"], row["kv_cache_used"]) == (2.0, 0.25)
    assert row["ttft_s"]["mean"] == pytest.approx(0.3, abs=0.01)
    assert row["ttft_s"]["p50"] == pytest.approx(0.1, abs=0.01)
    assert row["generated_tokens_per_s"] > 0
    assert row["instances"][0]["instance"].startswith("127.0.0.1:")
    assert service.get("/v1/fleet")["nodes"] == []
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{service.port}/metrics", timeout=60).read().decode()
    assert 'fleetcast_served_requests_running{pool="default",model="meta/llama"} 7' in metrics
    reader = Reader(tmp_path / "reader", {"127.0.0.1:8080": f"127.0.0.1:{service.port}"})
    reader.run_page(ROOT / "docs/sources/infiniband.md", "run in hosts")


@pytest.fixture
def node_exporter(tmp_path: Path) -> Iterator[str]:
    """The URL of a real node_exporter's page."""
    program = needed("prometheus-node-exporter")
    port = free_port()
    with (tmp_path / "exporter.log").open("wb") as log:
        process = subprocess.Popen([program, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        for _ in range(100):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait(10)


def test_a_real_node_exporter_tells_of_its_host(
    node_exporter: str, tmp_path: Path, start_service: Callable[..., Service]
) -> None:
    service = start_service(
        scrape={"targets": [node_exporter], "interval_s": 15.0},
        pipeline={"tick_s": 5.0, "snapshot_s": 30.0},
        archive={"url": str(tmp_path / "archive")},
    )
    host = socket.gethostname()
    told = service.until("the host", lambda: (service.get(f"/v1/nodes/{host}") or {}).get("host"), 60)
    assert told["memory_available_bytes"] > 1e8

    def archived() -> Any:
        import pyarrow.dataset

        files = list((tmp_path / "archive").rglob("*.parquet"))
        if not files:
            return None
        table = pyarrow.dataset.dataset([str(path) for path in files if "samples" in str(path)]).to_table()
        found = set(table.column("metric").to_pylist())
        return found if {"cpu_idle_s", "memory_available_bytes"} <= found else None

    metrics = service.until("the host's samples in the archive", archived, 90)
    assert {"cpu_steal_s", "memory_total_bytes", "scrape_up"} <= metrics
