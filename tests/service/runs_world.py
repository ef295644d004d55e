"""A pipeline of one node and jobs that came, ran and ended: for tests of run times."""

from pathlib import Path
from typing import Any

import numpy as np

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import Failed, Finished, JobEvent, Started, Submitted
from fleetcast.fleet.metrics import find_metric_row
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline

NOW_MS = 1_789_000_000_000
GIB = 2.0**30


def pipeline_in(folder: Path, now_ms: int = NOW_MS) -> Pipeline:
    topology = Topology.build([NodeSpec("n1", 8)])
    return Pipeline(Config(state=str(folder)), ManualClock(now_ms), topology, lambda _: [MemorySource()])


def came(job: str, at_ms: int, *, user: str = "ada", gpus: int = 2, limit_s: float | None = None) -> Submitted:
    return Submitted(job=job, sequence=0, time_ms=at_ms, user=user, queue="train", gpus_per_node=gpus, limit_s=limit_s)


def began(job: str, at_ms: int, gpus: int = 2, first: int = 0) -> Started:
    rank = RankPlacement(0, "n1", tuple(range(first, first + gpus)))
    return Started(job=job, sequence=1, time_ms=at_ms, ranks=(rank,))


def run_of(job: str, end_ms: int, run_s: float, **more: Any) -> list[JobEvent]:
    """A whole life that ended at `end_ms`."""
    start_ms = end_ms - round(run_s * 1000)
    told = came(job, start_ms - 1000, **more)
    return [told, began(job, start_ms, told.gpus_per_node), Finished(job=job, sequence=2, time_ms=end_ms)]


def past(jobs: int = 20, run_s: float = 600.0, before_ms: int = NOW_MS) -> list[JobEvent]:
    """Runs of ada's, train-0 … one after the other, of `run_s` and a little more each."""
    return [
        event
        for number in range(jobs)
        for event in run_of(f"train-{number}", before_ms - (jobs - number) * 3_600_000, run_s * (1 + number / 100))
    ]


def failed(job: str, at_ms: int) -> Failed:
    return Failed(job=job, sequence=2, time_ms=at_ms, category="user")


def readings(entities: Entities, time_ms: int, memory_gib: float, power_w: float) -> SampleBatch:
    """All eight GPUs of n1 use as much."""
    names = {"fb_used_bytes": memory_gib * GIB, "power_w": power_w}
    rows = [
        (find_metric_row(EntityKind.GPU, name), entities.add_to_node(EntityKind.GPU, "n1", index), time_ms, value)
        for name, value in names.items()
        for index in range(8)
    ]
    return SampleBatch.from_rows(EntityKind.GPU, rows)


def batch(*events: JobEvent) -> Batch:
    return Batch(events=tuple(events))


def board_of(folder: Path) -> Board:
    board = BoardReader(Config(state=str(folder)).board).latest()
    assert board is not None
    return board


def finite(values: Any) -> bool:
    return bool(np.isfinite(values).all())
