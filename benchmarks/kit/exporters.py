"""Exporter pages of healthy GPUs, and a process that serves them for n nodes behind one port.

python -m fleetcast.benchmarks.kit.exporters NODES PORT
"""

import asyncio
import json
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np

from fleetcast.benchmarks.inputs.decode import NODE, make_page
from fleetcast.benchmarks.kit.child import ChildProcess
from fleetcast.benchmarks.kit.service import find_free_port
from fleetcast.benchmarks.ticks.tick import USUAL
from fleetcast.fleet.metrics import METRICS, find_dcgm_row
from fleetcast.fleet.samples import EntityKind

VARIANTS = 8
START_S = 60.0
PCIE = range(235, 239)  # exact, or the link is not what it was


def draw_healthy_value(field: int, rng: np.random.Generator) -> str:
    """Draw the text of a field's value as a busy healthy GPU prints it.

    Fields that have another unit in the catalogue get plausible values.
    """
    row = find_dcgm_row(EntityKind.GPU, field)
    assert row is not None
    usual = USUAL.get(METRICS[EntityKind.GPU][row].name, 0.0)
    if field in (203, 204):
        return str(rng.integers(90, 101))
    if field in (156, 252, 1009, 1010, 1011, 1012):
        return str(rng.integers(10**4, 6 * 10**4))
    return f"{usual * (1 + 0.005 * rng.standard_normal()):.6f}" if usual and field not in PCIE else str(int(usual))


class ExporterFarm:
    """A running process that acts as the exporters of many nodes. Its pages are made in advance and repeat.

    `write_groups` writes the target list that both Fleetcast and Prometheus read.
    """

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.port = find_free_port()
        command = [sys.executable, "-m", "fleetcast.benchmarks.kit.exporters", str(nodes), str(self.port)]
        self.process = ChildProcess("the farm of exporters", command)
        deadline = time.monotonic() + START_S
        while not self._is_answering():
            self.process.check_running(unless="the exporters do not answer" if time.monotonic() > deadline else "")
            time.sleep(0.1)

    def _is_answering(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{_format_node(0)}", timeout=5) as answer:
                return bool(answer.read())
        except OSError:
            return False

    def write_groups(self, path: Path) -> None:
        groups = [
            {"targets": [f"127.0.0.1:{self.port}"], "labels": {"__metrics_path__": f"/{_format_node(node)}"}}
            for node in range(self.nodes)
        ]
        path.write_text(json.dumps(groups), encoding="utf-8")

    def close(self) -> None:
        self.process.stop()


def _format_node(node: int) -> str:
    return f"n{node:05d}"


class _Exporter(asyncio.Protocol):
    """A minimal HTTP server for a scraper, with keep-alive connections."""

    pages: tuple[bytes, ...] = ()
    asked = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n\r\n" in self._buffer:
            head, _, self._buffer = self._buffer.partition(b"\r\n\r\n")
            name = head.split(b" ", 2)[1].strip(b"/")
            _Exporter.asked += 1
            page = self.pages[self.asked % len(self.pages)].replace(NODE.encode(), name[:6])
            self._transport.write(  # type: ignore[attr-defined]
                b"HTTP/1.1 200 OK\r\ncontent-type: text/plain; version=0.0.4\r\ncontent-length: "
                + str(len(page)).encode()
                + b"\r\n\r\n"
                + page
            )


async def _serve_pages(port: int) -> None:
    rng = np.random.default_rng(1)
    _Exporter.pages = tuple(make_page(NODE, rng, value=draw_healthy_value) for _ in range(VARIANTS))
    server = await asyncio.get_running_loop().create_server(_Exporter, "127.0.0.1", port, backlog=1024)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve_pages(int(sys.argv[2])))
