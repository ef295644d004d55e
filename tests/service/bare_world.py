"""A service that has exporter pages and nothing else: pages of our own writing → pipeline → board → placer's view."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.requests import Decision, PlacementRequest
from fleetcast.fleet.topology import Topology
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch, Source
from fleetcast.placement.engine import decide
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.placer.view import ViewDecoder

NOW_MS = 1_789_000_000_000
GPUS = 8
IDLE = {"DCGM_FI_DEV_GPU_UTIL": 0, "DCGM_FI_DEV_FB_USED": 4, "DCGM_FI_DEV_POWER_USAGE": 71.4}
BUSY = {"DCGM_FI_DEV_GPU_UTIL": 99, "DCGM_FI_DEV_FB_USED": 70_000, "DCGM_FI_DEV_POWER_USAGE": 688.2}
Labels = Mapping[str, str]


Gpu = tuple[Mapping[str, float], Labels]


def page(node: str, gpus: Iterable[Gpu], shared: Iterable[tuple[int, Labels]] = ()) -> bytes:
    """A page of dcgm-exporter 3.x: (readings, further labels) of each GPU. shared: GPUs under other labels, too."""
    told = list(gpus)
    rows = [*enumerate(told), *((index, (told[index][0], labels)) for index, labels in shared)]
    lines = []
    for name in IDLE:
        lines += [f"# HELP {name} A field.", f"# TYPE {name} gauge"]
        for index, (readings, labels) in rows:
            fixed = {"gpu": str(index), "UUID": f"GPU-{node}-{index}", "device": f"nvidia{index}", "Hostname": node}
            text = ",".join(
                f'{key}="{value}"' for key, value in (fixed | {"modelName": "NVIDIA H100 80GB HBM3", **labels}).items()
            )
            lines.append(f"{name}{{{text}}} {readings[name]}")
    return "\n".join([*lines, ""]).encode()


class BareWorld:
    """One pipeline on a clock of its own; `scrape` gives it a page, `tick` publishes."""

    def __init__(
        self, folder: Path, topology: Topology | None = None, sources: Sequence[Source] = (), **config: Any
    ) -> None:
        """sources: asked for what they say of nodes; their batches are the test's to `take`."""
        self.config = Config(state=str(folder), **config)
        self.clock = ManualClock(NOW_MS)
        self.pipeline = Pipeline(self.config, self.clock, topology or Topology.build([]), lambda _: list(sources))
        self.resolver = ExporterResolver(self.pipeline.state.entities)
        self._decoders: dict[str, PageDecoder] = {}

    def scrape(self, **pages: bytes) -> list[Batch]:
        """A page of each node at once."""
        batches = []
        for node, text in pages.items():
            decoder = self._decoders.setdefault(node, PageDecoder(self.resolver, Target(node)))
            batches.append(decoder.decode(text, self.clock.now_ms()))
            self.pipeline.apply_batch(batches[-1])
        return batches

    def tick(self) -> Board:
        asyncio.run(self.pipeline.tick())
        board = BoardReader(self.config.board).latest()
        assert board is not None
        return board

    def run(self, for_s: float, every_s: float = 15.0, **pages: bytes) -> Board:
        """Scrape the same pages and tick, again and again."""
        for _ in range(round(for_s / every_s)):
            self.clock.advance(every_s)
            self.scrape(**pages)
            board = self.tick()
        return board

    def forecast(self) -> None:
        """Let what ticks saw of demand into its series."""
        asyncio.run(self.pipeline.capabilities[DemandForecasts].forecast(self.pipeline.state))

    def running(self, bins: int = 3, pool: str = "all") -> list[float]:
        """GPUs in use of the last minutes."""
        return self.pipeline.state.demand.read_series(pool, "running", self.clock.now_ms(), 60, bins).tolist()

    def decide(self, board: Board, **request: Any) -> Decision:
        view = ViewDecoder(self.config.placer).decode_board(board).view
        return decide(PlacementRequest(request_id="r", **request), view)
