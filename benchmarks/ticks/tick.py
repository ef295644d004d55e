"""The tick: extract, score and publish, on a fleet of busy nodes.

    extract, score, publish      healthy, with gangs of one to eight nodes
    … 40 % of the nodes silent   the same, after 40 % of the nodes stopped answering
    … a job on each node         as many jobs as nodes
    … a job on each GPU          eight times as many jobs
    … 25 of them replaced        the same, where 25 jobs end and 25 others start before each tick

The garbage collector has the service's settings.
"""

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.benchmarks.kit.case import fits_memory, measure
from fleetcast.benchmarks.kit.collector import configure_garbage_collector
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Finished, JobEvent, Started, Submitted
from fleetcast.fleet.metrics import METRICS
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline

GPUS_PER_NODE = 8
T0 = 1_700_000_100_000
SCRAPES = 4
BYTES_PER_GPU = 120_000
GANGS = (1, 1, 1, 2, 4, 8)  # nodes
SILENT_SHARE = 0.4
REPLACED_JOBS = 25
SILENT_SCRAPES = 12  # until silence counts
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
    """Measure a fleet of each size in GPUs. Sizes that do not fit the memory are left out."""
    for gpus in sizes:
        if not fits_memory(gpus, BYTES_PER_GPU):
            continue
        for case, jobs in CASES.items():
            with tempfile.TemporaryDirectory() as folder:
                fleet = BusyFleet(gpus, Path(folder), jobs)
                if case == SILENT:
                    fleet.silence_nodes(SILENT_SHARE)
                with configure_garbage_collector():
                    work = fleet.replace_jobs_and_tick if case == REPLACED else fleet.run_tick
                    yield measure("tick", case, {"gpus": gpus}, work, "ms")


class BusyFleet:
    """A pipeline that has ingested some scrapes of a whole fleet."""

    def __init__(self, gpus: int, folder: Path, jobs: Callable[[int, int], Iterator[JobEvent]] | None = None) -> None:
        """Create the fleet, and scrape it SCRAPES times.

        jobs: makes the events of running jobs from the number of nodes and the present time in ms. If it is None,
        the jobs are gangs.
        """
        self.nodes = max(1, gpus // GPUS_PER_NODE)
        self.clock = ManualClock(T0)
        self.pipeline = Pipeline(Config(state=str(folder)), self.clock, make_topology(self.nodes), make_no_sources)
        self.reader = BoardReader(folder / "board")
        self._rng = np.random.default_rng(1)
        entities = self.pipeline.state.entities
        self._rows = {kind: add_entities(entities, kind, self.nodes) for kind in (EntityKind.GPU, EntityKind.PORT)}
        self.pipeline.apply_batch(Batch(events=tuple((jobs or make_gang_events)(self.nodes, T0))))
        self._may_flag = False
        self._replaced = 0
        for _ in range(SCRAPES):
            self.ingest_scrape()

    def ingest_scrape(self) -> None:
        """Ingest one scrape of all GPUs and ports, and advance the clock by 15 s."""
        now_ms = self.clock.now_ms()
        self.pipeline.apply_batch(
            Batch(samples=tuple(make_scrape(kind, rows, now_ms, self._rng) for kind, rows in self._rows.items()))
        )
        self.clock.advance(15)

    def silence_nodes(self, share: float) -> None:
        """Stop scraping a share of the nodes, the first ones, and tick until the pipeline has flagged them."""
        self._may_flag = True
        silent = round(share * self.nodes) * GPUS_PER_NODE
        self._rows = {kind: rows[silent:] for kind, rows in self._rows.items()}
        for _ in range(SILENT_SCRAPES):
            self.ingest_scrape()
            self.run_tick()
        board = self.reader.latest()
        assert board is not None
        assert board.array("node.flagged").sum() == silent // GPUS_PER_NODE, "the silent nodes are not flagged"

    def replace_jobs_and_tick(self) -> int:
        """End some jobs and start others in their places, then run one tick. Returns the result of `run_tick`."""
        now_ms, events = self.clock.now_ms(), list[JobEvent]()
        for attempt in self.pipeline.state.jobs.list_running()[:REPLACED_JOBS]:  # the ones that started first
            self._replaced += 1
            job, gpus = f"later{self._replaced}", attempt.gpus
            events.append(Finished(job=attempt.job, sequence=2, time_ms=now_ms))
            events.append(Submitted(job=job, sequence=0, time_ms=now_ms, gang=1, gpus_per_node=gpus))
            events.append(Started(job=job, sequence=1, time_ms=now_ms, ranks=attempt.ranks))
        self.pipeline.apply_batch(Batch(events=tuple(events)))
        return self.run_tick()

    def run_tick(self) -> int:
        """Run one tick. Returns the number of nodes on the published board."""
        self.clock.advance(1)
        asyncio.run(self.pipeline.tick())
        board = self.reader.latest()
        assert board is not None
        assert board.as_of_ms == self.clock.now_ms()
        assert self._may_flag or not board.array("node.flagged").any(), "a healthy fleet was flagged"
        return len(board.names("names.node"))


def make_no_sources(entities: Entities) -> Sequence[MemorySource]:
    return []


def add_entities(entities: Entities, kind: EntityKind, nodes: int) -> NDArray[np.int32]:
    """Return (entity,) int32, the rows of eight GPUs or eight ports on each node. Adds missing entities."""
    units = [(f"mlx5_{unit}", 1) if kind is EntityKind.PORT else (unit,) for unit in range(GPUS_PER_NODE)]
    names = [f"n{node:05d}" for node in range(nodes)]
    return np.array([entities.add_to_node(kind, name, *unit) for name in names for unit in units], np.int32)


def make_scrape(kind: EntityKind, rows: NDArray[np.int32], now_ms: int, rng: np.random.Generator) -> SampleBatch:
    """Make samples of all metrics of some entities, close to the usual values. rows: (entity,)."""
    metrics = METRICS[kind]
    usual = np.array([USUAL.get(metric.name, 0.0) for metric in metrics])
    values = usual * (1 + 0.005 * rng.standard_normal((len(rows), len(metrics))))
    exact = [metric.name.startswith(("pcie_", "state", "physical", "speed")) for metric in metrics]
    values[:, exact] = usual[exact]
    return SampleBatch(
        kind,
        np.tile(np.arange(len(metrics), dtype=np.int16), len(rows)),
        np.repeat(rows, len(metrics)),
        np.full(values.size, now_ms, np.int64),
        values.ravel(),
    )


def make_topology(nodes: int) -> Topology:
    return Topology.build(
        [
            NodeSpec(f"n{node:05d}", gpus=GPUS_PER_NODE, gpu_model="H100", domains={Level.RACK: f"r{node // 16}"})
            for node in range(nodes)
        ]
    )


def make_gang_events(nodes: int, now_ms: int) -> Iterator[JobEvent]:
    """Yield the events of gangs on whole nodes that fill the fleet. They started a quarter of an hour ago."""
    began_ms = now_ms - 900_000
    rng = np.random.default_rng(2)
    node = number = 0
    while node < nodes:
        width = min(int(rng.choice(GANGS)), nodes - node)
        job = f"job{number}"
        gpus = tuple(range(GPUS_PER_NODE))
        ranks = tuple(RankPlacement(rank, f"n{node + rank:05d}", gpus) for rank in range(width))
        yield Submitted(job=job, sequence=0, time_ms=began_ms, gang=width, gpus_per_node=GPUS_PER_NODE)
        yield Started(job=job, sequence=1, time_ms=began_ms, ranks=ranks)
        node, number = node + width, number + 1


def make_node_job_events(nodes: int, now_ms: int) -> Iterator[JobEvent]:
    """Yield the events of a job on all GPUs of each node."""
    return _make_single_member_events(nodes, now_ms, [tuple(range(GPUS_PER_NODE))])


def make_gpu_job_events(nodes: int, now_ms: int) -> Iterator[JobEvent]:
    """Yield the events of a job on each GPU."""
    return _make_single_member_events(nodes, now_ms, [(gpu,) for gpu in range(GPUS_PER_NODE)])


def _make_single_member_events(nodes: int, now_ms: int, places: Sequence[tuple[int, ...]]) -> Iterator[JobEvent]:
    """Yield the events of jobs with one member. places: for each job of a node, the GPUs that it holds."""
    began_ms = now_ms - 900_000
    for node in range(nodes):
        for number, gpus in enumerate(places):
            job = f"job{node}-{number}"
            yield Submitted(job=job, sequence=0, time_ms=began_ms, gang=1, gpus_per_node=len(gpus))
            ranks = (RankPlacement(0, f"n{node:05d}", gpus),)
            yield Started(job=job, sequence=1, time_ms=began_ms, ranks=ranks)


SILENT = "extract, score, publish; 40 % of the nodes silent"
REPLACED = "extract, score, publish; a job on each GPU, 25 of them replaced"
CASES: dict[str, Callable[[int, int], Iterator[JobEvent]]] = {
    "extract, score, publish": make_gang_events,
    SILENT: make_gang_events,
    "extract, score, publish; a job on each node": make_node_job_events,
    "extract, score, publish; a job on each GPU": make_gpu_job_events,
    REPLACED: make_gpu_job_events,
}
