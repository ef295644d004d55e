"""A site whose exporters print nothing that is read: what `/v1/ingestion` and `/v1/fleet` say."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from fleetcast.fleet.clock import SystemClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.pages.scrape import Scraper
from fleetcast.ingest.source import Source
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config, ScrapeConfig
from fleetcast.service.pipeline.pipeline import Pipeline

FIELD = Path(__file__).parents[2] / "field"


def document(folder: Path, name: str) -> Any:
    board = BoardReader(Config(state=str(folder)).board).latest()
    assert board is not None
    return board.json(name)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def pages() -> Iterator[str]:
    """The field's pages behind HTTP on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(FIELD)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def after_one_round(state: Path, *files: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The documents (ingestion, fleet) once each file was scraped."""

    async def scenario() -> None:
        clock = SystemClock()

        def sources(entities: Entities) -> list[Source]:
            targets = [f"{url}/{file}" for file in files]
            return [Scraper(entities, targets, ScrapeConfig(interval_s=1.0), clock)]

        pipeline = Pipeline(Config(state=str(state)), clock, Topology.build([]), sources)
        (source,) = pipeline.sources
        while sum(source.health()[0][key] for key in ("up", "down")) < len(files):
            pipeline.apply_batch(await asyncio.wait_for(source.next(), 30.0))
        await pipeline.tick()
        await source.close()

    with pages() as url:
        asyncio.run(scenario())
    return document(state, "doc.ingestion"), document(state, "doc.fleet")


@pytest.mark.parametrize(
    ("file", "has", "reads", "lines"),
    [
        ("41-nvidia-smi-exporter.prom", "nvidia_smi_gpu_info", "dcgm-exporter", 4),
        ("43-infiniband-exporter.prom", "infiniband_port_transmit_data_bytes_total", "node_exporter", 8),
    ],
)
def test_a_page_of_which_nothing_is_read_is_a_failing_target_and_the_fleet_says_so(
    tmp_path: Path, file: str, has: str, reads: str, lines: int
) -> None:
    ingestion, fleet = after_one_round(tmp_path, file)
    (row,) = ingestion["sources"]
    assert ingestion["targets"] == {"up": 0, "down": 1}
    assert (row["targets_unread"], row["failures"]["nothing_read"] >= 1) == (1, True)
    assert row["records"]["unread"] == row["records"]["all"] >= lines
    assert row["records"]["all"] % lines == 0
    assert has in row["records"]["unread_names"]
    (failing,) = row["targets_failing"]
    assert failing["target"].endswith(file)
    for words in (has, reads):
        assert words in failing["reason"]
        assert words in fleet["no_telemetry"]
    assert fleet["nodes"] == [], "a page that nothing reads says nothing about a host"


def test_one_exporter_that_is_read_is_telemetry(tmp_path: Path) -> None:
    ingestion, fleet = after_one_round(tmp_path, "41-nvidia-smi-exporter.prom", "02-lower-case-names.prom")
    assert ingestion["targets"] == {"up": 1, "down": 1}
    assert fleet["no_telemetry"] is None
    assert [node["node"] for node in fleet["nodes"]] == ["gpu-0"]
