"""A simulated day in the real pipeline, as fast as possible: memory and tick time by the hour.

Every 15 s of fleet time all GPUs and nodes are scraped. Every minute there is a tick, and each running job
makes a step. Gangs queue, run for half an hour to hours and end. Some fail. Snapshots are five
minutes apart, forecasts ten. Pages have a dozen metrics per GPU, but rings have room for all metrics
anyway.
"""

import asyncio
import gc
import heapq
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import fits_memory, make_record
from fleetcast.benchmarks.kit.collector import configure_garbage_collector
from fleetcast.benchmarks.ticks.tick import BYTES_PER_GPU, GPUS_PER_NODE, T0, USUAL
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Failed, Finished, JobEvent, Started, Step, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline

HOURS = 24
LARGEST = 20_000  # a day of more takes hours
WARM_HOURS = 4  # rings are full, and the first ended jobs at rest
SCRAPE_S, TICK_S, SAVE_S, FORECAST_S = 15, 60, 300, 600
METRICS = (
    *("power_w", "gpu_temp_c", "sm_clock_mhz", "sm_active", "tensor_active", "gpu_util", "fb_used_bytes"),
    *("pcie_link_gen", "pcie_max_link_gen", "pcie_link_width", "pcie_max_link_width", "xid"),
)
GANGS = (1, 1, 1, 2, 4, 8)  # nodes
USERS = 50


@dataclass(frozen=True, slots=True)
class HourUse:
    """The memory, times and numbers of jobs in one hour. Times are medians in wall ms."""

    rss_mib: float
    tick_ms: float
    save_ms: float
    jobs_awake: int
    jobs_at_rest: int
    objects: int


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure a day of a fleet of each size in GPUs, up to LARGEST.

    Sizes that do not fit the memory are left out.
    """
    for gpus in sizes:
        if gpus > LARGEST or not fits_memory(gpus, BYTES_PER_GPU):
            continue
        with tempfile.TemporaryDirectory() as folder, configure_garbage_collector():
            cpu = time.process_time()
            hours = list(SoakSite(gpus, Path(folder)).run_hours(HOURS))
            yield from _make_records(hours, gpus, time.process_time() - cpu)


def _make_records(hours: Sequence[HourUse], gpus: int, cpu_s: float) -> Iterator[dict[str, Any]]:
    warm = hours[WARM_HOURS:]
    numbers = np.arange(len(warm))
    rows = (
        ("memory grows by", float(np.polyfit(numbers, [hour.rss_mib for hour in warm], 1)[0]), "MiB/h"),
        ("memory at its end", warm[-1].rss_mib, "MiB"),
        ("a tick grows by", float(np.polyfit(numbers, [hour.tick_ms for hour in warm], 1)[0]), "ms/h"),
        ("a tick at its end", warm[-1].tick_ms, "ms"),
    )
    for what, value, unit in rows:
        line = make_record("soak", f"a day: {what}", {"gpus": gpus}, [value], unit, cpu_s=cpu_s)
        yield line | {"by_hour": [{name: getattr(hour, name) for name in HourUse.__slots__} for hour in hours]}


class SoakSite:
    """A pipeline with a simulated fleet: its scrapes, its jobs and its clock."""

    def __init__(self, gpus: int, folder: Path) -> None:
        self.nodes = max(1, gpus // GPUS_PER_NODE)
        self.clock = ManualClock(T0)
        specs = [
            NodeSpec(_format_node(node), gpus=GPUS_PER_NODE, gpu_model="H100", domains={Level.RACK: f"r{node // 16}"})
            for node in range(self.nodes)
        ]
        config = Config(state=str(folder))
        self.pipeline = Pipeline(config, self.clock, Topology.build(specs), lambda _: [])
        self.mill = JobMill(self.nodes)
        self.taken = 0
        self._reader = BoardReader(config.board)
        self._rng = np.random.default_rng(1)
        entities = self.pipeline.state.entities
        rows = [
            entities.add_to_node(EntityKind.GPU, _format_node(node), unit)
            for node in range(self.nodes)
            for unit in range(GPUS_PER_NODE)
        ]
        self._gpu = _make_columns(EntityKind.GPU, METRICS, rows)
        up = [entities.find_or_add_node(_format_node(node)) for node in range(self.nodes)]
        self._node = _make_columns(EntityKind.NODE, ("scrape_up", "gpus_reported"), up)
        self._usual = np.tile([USUAL.get(name, 0.0) for name in METRICS], len(rows))
        self._exact = np.tile([name.startswith("pcie_") or name == "xid" for name in METRICS], len(rows))

    def run_hours(self, hours: int, tick_s: int = TICK_S) -> Iterator[HourUse]:
        """Run the site for some hours, and yield the measurements of each hour.

        Raises AssertionError if samples or events are not applied, or if a board is out of date.
        """
        for _ in range(hours):
            ticks, saves = [], []
            for second in range(0, 3600, SCRAPE_S):
                self.clock.advance(SCRAPE_S)
                self._ingest_scrape()
                if second % 60 == 0:
                    self._ingest_events(self.mill.make_minute_events(self.clock.now_ms()))
                if second % tick_s == 0:
                    ticks.append(self._measure_tick())
                if second % SAVE_S == 0:
                    saves.append(_measure_ms(lambda: asyncio.run(self.pipeline.save())))
                if second % FORECAST_S == 0:
                    asyncio.run(self.pipeline.capabilities[DemandForecasts].forecast(self.pipeline.state))
            yield self._measure_hour(float(np.median(ticks)), float(np.median(saves)))

    def _measure_hour(self, tick_ms: float, save_ms: float) -> HourUse:
        gc.collect()
        jobs = self.pipeline.state.jobs
        return HourUse(_read_rss_mib(), tick_ms, save_ms, len(jobs.attempts), len(jobs.resting), len(gc.get_objects()))

    def _ingest_scrape(self) -> None:
        now_ms = self.clock.now_ms()
        noise = self._rng.standard_normal(997)  # drawn few, used in turns: drawing would take longer than the pipeline
        values = self._usual * (1 + 0.005 * np.resize(noise, self._usual.size))
        values[self._exact] = self._usual[self._exact]
        up = np.tile([1.0, float(GPUS_PER_NODE)], self.nodes)
        batches = (_make_batch(self._gpu, values, now_ms), _make_batch(self._node, up, now_ms))
        self.pipeline.apply_batch(Batch(samples=batches))
        self.taken += sum(len(batch) for batch in batches)
        assert self.pipeline.state.counts.samples == self.taken, "samples were not ingested"

    def _ingest_events(self, events: Sequence[JobEvent]) -> None:
        before = self.pipeline.state.counts.events
        self.pipeline.apply_batch(Batch(events=tuple(events)))
        assert self.pipeline.state.counts.events - before == len(events), "events were not ingested"

    def _measure_tick(self) -> float:
        took_ms = _measure_ms(lambda: asyncio.run(self.pipeline.tick()))
        board = self._reader.latest()
        assert board is not None
        assert board.as_of_ms == self.clock.now_ms()
        assert len(board.json("jobs.running")) == len(self.mill.running), "the board does not know what runs"
        return took_ms


class JobMill:
    """A source of gangs that are submitted, wait for nodes, make a step every minute and end.

    A tenth of the gangs fail.
    """

    def __init__(self, nodes: int) -> None:
        self.running: dict[str, int] = {}  # job -> its last sequence
        self._rng = np.random.default_rng(2)
        self._free = deque(range(nodes))
        self._waiting: deque[tuple[str, int]] = deque()
        self._ends: list[tuple[int, str, tuple[int, ...]]] = []
        self._made = 0

    def make_minute_events(self, now_ms: int) -> list[JobEvent]:
        """Return the events of the next minute, in order."""
        return [
            *self._end_jobs(now_ms),
            *self._submit_jobs(now_ms),
            *self._start_jobs(now_ms),
            *self._report_steps(now_ms),
        ]

    def _end_jobs(self, now_ms: int) -> Iterator[JobEvent]:
        while self._ends and self._ends[0][0] <= now_ms:
            _, job, nodes = heapq.heappop(self._ends)
            self._free.extend(nodes)
            sequence = self.running.pop(job) + 1
            if self._rng.random() < 0.1:
                yield Failed(job=job, sequence=sequence, time_ms=now_ms, category="user")
            else:
                yield Finished(job=job, sequence=sequence, time_ms=now_ms)

    def _submit_jobs(self, now_ms: int) -> Iterator[JobEvent]:
        """Submit as many jobs as can run soon, and a few more that wait."""
        while sum(gang for _, gang in self._waiting) < len(self._free) + 8:
            job, gang = f"job{self._made}", int(self._rng.choice(GANGS))
            self._made += 1
            self._waiting.append((job, gang))
            user = f"user{self._made % USERS}"
            yield Submitted(
                job=job,
                sequence=0,
                time_ms=now_ms,
                gang=gang,
                gpus_per_node=GPUS_PER_NODE,
                user=user,
                queue=f"q{self._made % 5}",
            )

    def _start_jobs(self, now_ms: int) -> Iterator[JobEvent]:
        while self._waiting and self._waiting[0][1] <= len(self._free):
            job, gang = self._waiting.popleft()
            nodes = tuple(self._free.popleft() for _ in range(gang))
            self.running[job] = 1
            heapq.heappush(self._ends, (now_ms + round(1000 * self._rng.uniform(1800, 4 * 3600)), job, nodes))
            gpus = tuple(range(GPUS_PER_NODE))
            ranks = tuple(RankPlacement(rank, _format_node(node), gpus) for rank, node in enumerate(nodes))
            yield Started(job=job, sequence=1, time_ms=now_ms, ranks=ranks)

    def _report_steps(self, now_ms: int) -> Iterator[JobEvent]:
        for job, sequence in self.running.items():
            self.running[job] = sequence + 1
            yield Step(job=job, sequence=sequence + 1, time_ms=now_ms, step=sequence, duration_s=2.0)


Columns = tuple[EntityKind, "np.ndarray[Any, Any]", "np.ndarray[Any, Any]"]


def _make_columns(kind: EntityKind, metrics: Sequence[str], rows: Sequence[int]) -> Columns:
    """Return the kind, and the (sample,) metric and entity columns of all pages in a row."""
    numbers = np.array([find_metric_row(kind, name) for name in metrics], np.int16)
    return kind, np.tile(numbers, len(rows)), np.repeat(np.array(rows, np.int32), len(metrics))


def _make_batch(columns: Columns, values: "np.ndarray[Any, Any]", now_ms: int) -> SampleBatch:
    kind, metric, entity = columns
    return SampleBatch(kind, metric, entity, np.full(len(metric), now_ms, np.int64), values)


def _format_node(node: int) -> str:
    return f"n{node:05d}"


def _measure_ms(work: Any) -> float:
    began = time.perf_counter()
    work()
    return (time.perf_counter() - began) * 1000


def _read_rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
