"""The time that the service needs to fingerprint every running job once.

The benchmark measures `fleetcast.service.pipeline.jobs.fingerprints`, with half an hour of readings in the
rings. A quarter of the jobs report checkpoints, an eighth swings with a period that telemetry can
show, and the others work steadily. One job in ten spans two nodes.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.features.store import WindowStore
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Checkpoint, JobEvent, Started, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.service.pipeline.jobs.fingerprints import PERIOD_S, Fingerprints
from fleetcast.service.pipeline.state import FleetState

SIZES = (1_000, 10_000)  # GPUs
GPUS_PER_NODE, GPUS_PER_JOB = 8, 4
NOW_MS, INTERVAL_MS, SLOTS = 1_760_000_000_000, 15_000, 120
ROUNDS = 3
MOST_PASSES = 2000
READINGS = ("sm_active", "tensor_active", "gpu_util", "power_w", "fb_used_bytes")


class WallClock(ManualClock):
    """A clock that is set manually, and runs as fast as wall time."""

    def convert_to_wall_s(self, fleet_s: float) -> float:
        return fleet_s


def run(sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield three records for each fleet size in GPUs.

    They are the seconds until every job was fingerprinted, the share of a core, and the longest wait of
    the loop.
    """
    for gpus in sizes:
        state, jobs = make_full_fleet(gpus)
        clock = WallClock(NOW_MS)
        prints = Fingerprints(clock)
        size = {"gpus": gpus, "jobs": jobs}
        rounds: list[float] = []
        cores: list[float] = []
        waits_ms: list[float] = []
        for _ in range(ROUNDS):
            passes, cpu_s = _run_round(prints, state, jobs, clock, waits_ms)
            rounds.append(passes * PERIOD_S)
            cores.append(cpu_s / (passes * PERIOD_S))
        cpu_s = min(cores) * min(rounds)
        yield make_record("fingerprints", "every running job looked at", size, rounds, "s", cpu_s=cpu_s)
        yield make_record("fingerprints", "share of a core", size, cores, "cores", cpu_s=cpu_s)
        yield make_record("fingerprints", "longest wait of the loop in a pass", size, waits_ms, "ms", cpu_s=cpu_s)


def _run_round(
    prints: Fingerprints, state: FleetState, jobs: int, clock: ManualClock, waits_ms: list[float]
) -> tuple[int, float]:
    """Run passes until each job is fingerprinted. Returns the number of passes, and their CPU seconds.

    waits_ms: receives the longest wait of the event loop in each pass.
    """
    seen: set[str] = set()
    cpu_s = 0.0
    began_ms = clock.now_ms()
    for number in range(1, MOST_PASSES):
        cpu = time.process_time()
        waits_ms.append(1000 * asyncio.run(_measure_pass_wait(prints, state)))
        cpu_s += time.process_time() - cpu
        seen = {job for (job, _), answer in prints.answers.items() if answer.use.looked_ms >= began_ms}
        if len(seen) == jobs:
            return number, cpu_s
        clock.advance(PERIOD_S)
    raise AssertionError(f"{len(seen)} of {jobs} jobs were looked at in {MOST_PASSES} passes")


async def _measure_pass_wait(prints: Fingerprints, state: FleetState) -> float:
    """Run one pass. Returns the longest wait of another task in the loop, in seconds."""
    looking = asyncio.ensure_future(prints.run_pass(state))
    longest = 0.0
    while not looking.done():
        before = time.perf_counter()
        await asyncio.sleep(0.001)
        longest = max(longest, time.perf_counter() - before)
    await looking
    return longest


def make_full_fleet(gpus: int) -> tuple[FleetState, int]:
    """Make the state of a full fleet. Returns the state, and the number of running jobs."""
    nodes = gpus // GPUS_PER_NODE
    entities = Entities()
    for node in range(nodes):
        for gpu in range(GPUS_PER_NODE):
            entities.add_to_node(EntityKind.GPU, f"n{node:05d}", gpu)
            entities.add_to_node(EntityKind.PORT, f"n{node:05d}", f"mlx5_{gpu}", 1)
    specs = [
        NodeSpec(f"n{node:05d}", GPUS_PER_NODE, "H100", domains={Level.RACK: f"r{node // 16}"}, power_domain="p1")
        for node in range(nodes)
    ]
    state = FleetState(entities, WindowStore(entities), Topology.build(specs))
    _fill_rings(state, nodes * GPUS_PER_NODE)
    events = list(_make_job_events(nodes))
    state.apply(Batch(events=tuple(events)), NOW_MS)
    return state, len(state.jobs.list_running())


def _fill_rings(state: FleetState, gpus: int) -> None:
    """Write SLOTS readings of all GPUs into the rings. The last one is of now."""
    rng = np.random.default_rng(1)
    job = np.arange(gpus) // GPUS_PER_JOB
    for slot in range(SLOTS):
        time_ms = NOW_MS - (SLOTS - 1 - slot) * INTERVAL_MS
        swing = np.where(job % 8 == 3, np.where((slot + job) % 8 < 5, 1.0, 0.1), 1.0)
        busy = 0.8 * swing * (1 + 0.02 * rng.standard_normal(gpus))
        columns = (busy, 0.5 * busy, np.ones(gpus), 100 + 500 * busy, np.full(gpus, 6e10))
        rows = np.arange(gpus, dtype=np.int32)
        for name, values in zip(READINGS, columns, strict=True):
            metric = np.full(gpus, find_metric_row(EntityKind.GPU, name), np.int16)
            times = np.full(gpus, time_ms, np.int64)
            state.store.write(SampleBatch(EntityKind.GPU, metric, rows, times, values), time_ms)
    state.store.advance(NOW_MS)


def _make_job_events(nodes: int) -> Iterator[JobEvent]:
    """Yield the events of jobs that fill the fleet, with GPUS_PER_JOB GPUs each.

    Every tenth job instead has two whole nodes.
    """
    began_ms = NOW_MS - 7_200_000
    slots = [(node, half) for node in range(nodes) for half in range(2)]
    number = at = 0
    while at < len(slots):
        wide = number % 10 == 9 and at % 2 == 0 and at + 4 <= len(slots)
        taken = slots[at : at + (4 if wide else 1)]
        at += len(taken)
        ranks = tuple(
            RankPlacement(rank, f"n{node:05d}", tuple(range(half * GPUS_PER_JOB, (half + 1) * GPUS_PER_JOB)))
            for rank, (node, half) in enumerate(taken)
        )
        yield Submitted(job=f"job{number}", sequence=0, time_ms=began_ms, gang=len(ranks), gpus_per_node=GPUS_PER_JOB)
        yield Started(job=f"job{number}", sequence=1, time_ms=began_ms, ranks=ranks)
        if number % 4 == 0:
            yield from _make_checkpoints(f"job{number}", NOW_MS - 600_000 * 8 + 7000 * number % 600_000)
        number += 1


def _make_checkpoints(job: str, first_ms: int) -> Iterator[JobEvent]:
    for turn in range(8):
        at = first_ms + 600_000 * turn
        yield Checkpoint(job=job, sequence=10 + 2 * turn, time_ms=at, edge="begin", bytes=10**11, target="store")
        yield Checkpoint(job=job, sequence=11 + 2 * turn, time_ms=at + 30_000, edge="end")
