"""Memory per GPU, as the difference between a pipeline of a whole fleet and one of a tenth of it.

Each process has decoded every node's page (40 fields a GPU), and filled rings of 120 fine slots and
a day of 10-minute means. It has applied the events of jobs on all GPUs, and ticked. The first page
came a day before the others, so that every slot of the rings is allocated, as after a day of work.
`resident` is the memory at the end, `peak` the largest. In the second pair of cases each GPU has an
InfiniBand port with 17 counters.
"""

import asyncio
import gc
import multiprocessing
import os
import resource
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.inputs.decode import FIELDS, make_round_pages
from fleetcast.benchmarks.kit.case import fits_memory, make_record
from fleetcast.benchmarks.kit.exporters import draw_healthy_value
from fleetcast.benchmarks.kit.service import MAKE_S
from fleetcast.benchmarks.ticks.tick import (
    GPUS_PER_NODE,
    add_entities,
    make_gang_events,
    make_no_sources,
    make_scrape,
    make_topology,
)
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.samples import EntityKind
from fleetcast.ingest.pages.exporters import ExporterResolver
from fleetcast.ingest.pages.text import PageDecoder, Target
from fleetcast.ingest.source import Batch
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.process_memory import use_one_heap

SIZES = (100_000,)
BYTES_PER_GPU = 110_000
T0 = 1_700_000_100_000
SCRAPES, SCRAPE_S, DAY_S = 4, 15, 86_400
DECODE_PER_GPU_S = 0.01
KIB = 1024


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The memory of one process in bytes, and its CPU time."""

    resident: int
    peak: int
    cpu_s: float


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield two records for each fleet size and kind of fleet.

    Sizes that do not fit the memory are left out.
    """
    for gpus in sizes:
        if not fits_memory(gpus, BYTES_PER_GPU):
            continue
        for ports in (0, 1):
            small, large = (_measure_memory(size, ports) for size in (gpus // 10, gpus))
            size = {"gpus": gpus, "less": gpus // 10, "metrics": len(FIELDS) + 17 * ports}
            for what, more in (("resident", large.resident - small.resident), ("peak", large.peak - small.peak)):
                case = f"a GPU and its port, {what}" if ports else f"a GPU, {what}"
                value = more / (gpus - gpus // 10) / KIB
                yield make_record("memory", case, size, [value], "KiB/GPU", cpu_s=large.cpu_s)


def _measure_memory(gpus: int, ports: int) -> MemoryUse:
    context = multiprocessing.get_context("spawn")
    line, theirs = context.Pipe()
    process = context.Process(target=_run_measured_fleet, args=(gpus, ports, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        assert line.poll(MAKE_S + gpus * DECODE_PER_GPU_S), "the fleet was not made in time"
        held: MemoryUse = line.recv()
    finally:
        process.terminate()
        process.join(10)
    return held


def _run_measured_fleet(gpus: int, ports: int, line: Any) -> None:
    use_one_heap()  # as the pipeline's process does
    with tempfile.TemporaryDirectory() as folder:
        fleet = MeasuredFleet(max(1, gpus // GPUS_PER_NODE), ports, Path(folder))
        fleet.ingest_scrape()
        fleet.clock.advance(DAY_S)
        for _ in range(SCRAPES):
            fleet.ingest_scrape()
            fleet.run_tick()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
        used = resource.getrusage(resource.RUSAGE_SELF)
        peak = used.ru_maxrss * KIB
        line.send(MemoryUse(pages * os.sysconf("SC_PAGE_SIZE"), peak, used.ru_utime + used.ru_stime))


class MeasuredFleet:
    """A pipeline with a decoder for each node. Each page is made at its scrape, as an exporter makes it."""

    def __init__(self, nodes: int, ports: int, folder: Path) -> None:
        self.nodes = nodes
        self.clock = ManualClock(T0)
        self.pipeline = Pipeline(Config(state=str(folder)), self.clock, make_topology(nodes), make_no_sources)
        self._reader = BoardReader(folder / "board")
        self._rng = np.random.default_rng(1)
        entities = self.pipeline.state.entities
        resolver = ExporterResolver(entities)
        self._decoders = [PageDecoder(resolver, Target(f"n{node:05d}")) for node in range(nodes)]
        self._ports = add_entities(entities, EntityKind.PORT, nodes * ports)
        self.pipeline.apply_batch(Batch(events=tuple(make_gang_events(nodes, T0))))

    def ingest_scrape(self) -> None:
        """Ingest one page of each node, and advance the clock by SCRAPE_S."""
        now_ms = self.clock.now_ms()
        for first in range(0, self.nodes, 256):
            part = self._decoders[first : first + 256]
            pages = make_round_pages(len(part), self._rng, value=draw_healthy_value).values()
            for number, (decoder, page) in enumerate(zip(part, pages, strict=True), first):
                own = page.replace(b"n%05d" % (number - first), b"n%05d" % number)
                self.pipeline.apply_batch(decoder.decode(own, now_ms))
        if len(self._ports):
            self.pipeline.apply_batch(Batch(samples=(make_scrape(EntityKind.PORT, self._ports, now_ms, self._rng),)))
        self.clock.advance(SCRAPE_S)

    def run_tick(self) -> None:
        asyncio.run(self.pipeline.tick())
        board = self._reader.latest()
        assert board is not None
        assert board.array("gpu.usable").sum() == self.nodes * GPUS_PER_NODE
        assert not board.array("node.flagged").any(), "a healthy fleet was flagged"
        assert self.pipeline.state.counts.late == 0
