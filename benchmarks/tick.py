"""The tick: extract, score and publish, on a fleet of healthy, busy nodes under gangs of one to eight nodes."""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.case import measure
from fleet.clock import ManualClock
from fleet.entities import Entities
from fleet.events import JobEvent, Started, Submitted
from fleet.metrics import METRICS
from fleet.requests import RankPlacement
from fleet.samples import EntityKind, SampleBatch
from fleet.topology import Level, NodeSpec, Topology
from ingest.source import Batch, MemorySource
from service.board import BoardReader
from service.config import Config
from service.pipeline import Pipeline

GPUS_PER_NODE = 8
T0 = 1_700_000_100_000
SCRAPES = 4
BYTES_PER_GPU = 120_000
GANGS = (1, 1, 1, 2, 4, 8)  # nodes
USUAL = {
    "power_w": 560.0,
    "gpu_temp_c": 62.0,
    "sm_clock_mhz": 1980.0,
    "sm_active": 0.8,
    "tensor_active": 0.3,
    "gpu_util": 1.0,
    "fb_used_bytes": 6e10,
    "pcie_link_gen": 5.0,
    "pcie_max_link_gen": 5.0,
    "pcie_link_width": 16.0,
    "pcie_max_link_width": 16.0,
    "state": 4.0,
    "physical_state": 5.0,
    "speed_bytes_per_s": 5e10,
}


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A fleet of each size in GPUs; sizes that do not fit the memory are left out."""
    for gpus in sizes:
        if gpus * BYTES_PER_GPU > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            fleet = BusyFleet(gpus, Path(folder))
            yield measure("tick", "extract, score, publish", {"gpus": gpus}, fleet.tick, "ms")


class BusyFleet:
    """A pipeline that has taken in some scrapes of a whole fleet."""

    def __init__(self, gpus: int, folder: Path) -> None:
        self.nodes = max(1, gpus // GPUS_PER_NODE)
        self.clock = ManualClock(T0)
        self.pipeline = Pipeline(Config(state=str(folder)), self.clock, _topology(self.nodes), _no_sources)
        self.reader = BoardReader(folder / "board")
        self._rng = np.random.default_rng(1)
        entities = self.pipeline.state.entities
        self._rows = {
            kind: np.array(
                [
                    entities.of_node(kind, f"n{node:05d}", *parts(unit))
                    for node in range(self.nodes)
                    for unit in range(8)
                ],
                np.int32,
            )
            for kind, parts in ((EntityKind.GPU, _gpu), (EntityKind.PORT, _port))
        }
        self.pipeline.take(Batch(events=tuple(_jobs(self.nodes))))
        for _ in range(SCRAPES):
            self.scrape()

    def scrape(self) -> None:
        """One scrape of everything, and the 15 s after it."""
        self.pipeline.take(Batch(samples=tuple(self._scrape(kind) for kind in self._rows)))
        self.clock.advance(15)

    def _scrape(self, kind: EntityKind) -> SampleBatch:
        rows, metrics = self._rows[kind], METRICS[kind]
        usual = np.array([USUAL.get(metric.name, 0.0) for metric in metrics])
        values = usual * (1 + 0.005 * self._rng.standard_normal((len(rows), len(metrics))))
        exact = [metric.name.startswith(("pcie_", "state", "physical", "speed")) for metric in metrics]
        values[:, exact] = usual[exact]
        return SampleBatch(
            kind,
            np.tile(np.arange(len(metrics), dtype=np.int16), len(rows)),
            np.repeat(rows, len(metrics)),
            np.full(values.size, self.clock.now_ms(), np.int64),
            values.ravel(),
        )

    def tick(self) -> int:
        """One tick; returns how many nodes the published board holds."""
        self.clock.advance(1)
        asyncio.run(self.pipeline.tick())
        board = self.reader.latest()
        assert board is not None
        assert board.as_of_ms == self.clock.now_ms()
        assert not board.array("node.flagged").any(), "a healthy fleet was flagged"
        return len(board.names("names.node"))


def _no_sources(entities: Entities) -> Sequence[MemorySource]:
    return []


def _gpu(unit: int) -> tuple[object, ...]:
    return (unit,)


def _port(unit: int) -> tuple[object, ...]:
    return (f"mlx5_{unit}", 1)


def _topology(nodes: int) -> Topology:
    return Topology.build(
        [
            NodeSpec(f"n{node:05d}", gpus=GPUS_PER_NODE, gpu_model="H100", domains={Level.RACK: f"r{node // 16}"})
            for node in range(nodes)
        ]
    )


def _jobs(nodes: int) -> Iterator[JobEvent]:
    """Gangs of whole nodes until the fleet is full."""
    rng = np.random.default_rng(2)
    node = number = 0
    while node < nodes:
        width = min(int(rng.choice(GANGS)), nodes - node)
        job = f"job{number}"
        gpus = tuple(range(GPUS_PER_NODE))
        ranks = tuple(RankPlacement(rank, f"n{node + rank:05d}", gpus) for rank in range(width))
        yield Submitted(job=job, sequence=0, time_ms=T0 - 900_000, gang=width, gpus_per_node=GPUS_PER_NODE)
        yield Started(job=job, sequence=1, time_ms=T0 - 900_000, ranks=ranks)
        node, number = node + width, number + 1
