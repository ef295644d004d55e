"""What names cost: a tick may take twice the work for twice the nodes or jobs, never four times."""

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.entities import Entities
from fleetcast.fleet.events import NodeEvent, Started, Submitted
from fleetcast.fleet.requests import RankPlacement
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch, MemorySource
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline

NOW_MS = 1_789_000_000_000
SIZES = (200, 400, 800)


def unknown_nodes(count: int) -> Batch:
    """Nodes that no topology names, each with a failed GPU."""
    rows = [
        NodeEvent(node=f"stranger-{n}", source="s", sequence=1, time_ms=NOW_MS, type="xid", code=79, gpu=0)
        for n in range(count)
    ]
    return Batch(node_events=tuple(rows))


def jobs(count: int) -> Batch:
    """Half of them wait, half run on nodes that nobody knows."""
    events: list[Submitted | Started] = [
        Submitted(job=f"job-{n}", sequence=0, time_ms=NOW_MS - 1000) for n in range(count)
    ]
    events += [
        Started(job=f"job-{n}", sequence=1, time_ms=NOW_MS, nodes=(f"stranger-{n}",)) for n in range(0, count, 2)
    ]
    return Batch(events=tuple(events))


def calls(work: Callable[[], None]) -> int:
    """Python functions called and generators resumed by `work`, in its thread and in those that it starts."""
    counter = itertools.count()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            next(counter)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return next(counter)


def no_sources(entities: Entities) -> list[MemorySource]:
    return []


@pytest.mark.parametrize("names", [unknown_nodes, jobs])
def test_the_work_of_a_tick_grows_no_faster_than_the_names(names: Callable[[int], Batch], tmp_path: Path) -> None:
    first, later = [], []
    for size in SIZES:
        topology = Topology.build([NodeSpec("n1", 8)])
        pipeline = Pipeline(Config(state=str(tmp_path / str(size))), ManualClock(NOW_MS), topology, no_sources)
        batch = names(size)

        def take_and_tick(pipeline: Pipeline = pipeline, batch: Batch = batch) -> None:
            pipeline.apply_batch(batch)
            asyncio.run(pipeline.tick())

        first.append(calls(take_and_tick))
        later.append(calls(lambda pipeline=pipeline: asyncio.run(pipeline.tick())))  # type: ignore[misc]
    for small, middle, large in (first, later):
        assert middle > small, "nothing was counted"
        assert large - middle < 2.5 * (middle - small), (small, middle, large)


@pytest.mark.parametrize("gpus", [1, 4])
def test_a_running_job_without_news_costs_a_tick_a_few_calls(gpus: int, tmp_path: Path) -> None:
    counts, sizes = [], (64, 320)
    for size in sizes:
        nodes = [NodeSpec(f"n{number:02d}", 8) for number in range(320)]
        pipeline = Pipeline(
            Config(state=str(tmp_path / str(size))), clock := ManualClock(NOW_MS), Topology.build(nodes), no_sources
        )
        places = [(n * gpus // 8, tuple(range(n * gpus % 8, n * gpus % 8 + gpus))) for n in range(size)]
        about = [(f"job-{n}", (RankPlacement(0, f"n{node:02d}", own),)) for n, (node, own) in enumerate(places)]
        began_ms = NOW_MS - 600_000
        events = [Submitted(job=job, sequence=0, time_ms=began_ms, gpus_per_node=gpus) for job, _ in about]
        starts = [Started(job=job, sequence=1, time_ms=began_ms, ranks=ranks) for job, ranks in about]
        pipeline.apply_batch(Batch(events=(*events, *starts)))
        asyncio.run(pipeline.tick())
        clock.advance(1)
        counts.append(calls(lambda pipeline=pipeline: asyncio.run(pipeline.tick())))  # type: ignore[misc]
    of_a_job = (counts[1] - counts[0]) / (sizes[1] - sizes[0])
    assert 1 < of_a_job < 30, counts
