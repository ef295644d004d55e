"""Scenes of jobs, requests and promises on one site, to compare what all answers say about them.

A site plays all scenes, one after the other, so that a scene costs two ticks and no new processes.
"""

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from fleetcast.features.demand_series import Target
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConflictError
from fleetcast.fleet.events import Finished, JobEvent, NodeEvent, Queued, Started, Step, Submitted
from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.fleet.tellers import UNSEEN_START
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.schedulers.bands import BandRule, Bands
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.board.cache import BoardCache
from fleetcast.service.config import Config, PlacerConfig
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.service import PlacementService
from fleetcast.service.weather import WeatherStation

NOW_MS = 1_789_000_000_000
NODES, GPUS = 4, 8
SCENE_MS = 600_000
QUEUES = """
[queue.a]
[queue.b]
[[reservation]]
name = "mlperf"
queue = "b"
nodes = ["n2"]
from = 2026-01-01T00:00:00Z
to = 2066-01-01T00:00:00Z
[[maintenance]]
name = "fans"
nodes = ["n3"]
from = 2026-01-01T00:00:00Z
to = 2066-01-01T00:00:00Z
"""
RUNS = (
    "named",
    "label",
    "sdk",
    "nodes",
    "submitted_nodes",
    "beyond",
    "loop",
    "again",
    "repeated",
    "part",
    "beside",
    "part_nodes",
)
WAITS = (
    "event",
    "queue",
    "both",
    "held",
    "held_both",
    "withdrawn",
    "two_queues",
    "event_part",
    "queue_part",
    "both_part",
)
STARTS = ("promise", "promise_started", "promise_misnamed", "promise_taken", "promise_part", "promise_part_started")
PARTS = (
    "part",
    "beside",
    "part_nodes",
    "event_part",
    "queue_part",
    "both_part",
    "promise_part",
    "promise_part_started",
)
SHARES = {1: 250, 2: 500, 4: 143}  # thousandths of a GPU of a job of `PARTS`, by its GPUs in the scene


@dataclass(frozen=True)
class JobScene:
    """A job: what is known of it, how many GPUs it wants, and where it runs if it does."""

    kind: str
    gpus: int
    node: int


@dataclass(frozen=True)
class Scene:
    """unknown: GPUs at work of each node, from its last GPU on. checks: why a scheduler keeps a node, "" for none."""

    jobs: tuple[JobScene, ...]
    unknown: tuple[int, ...]
    checks: tuple[str, ...]


jobs = st.builds(
    JobScene, st.sampled_from(RUNS + WAITS + STARTS), st.sampled_from([1, 2, 4]), st.integers(0, NODES - 1)
)
scenes = st.builds(
    Scene,
    st.lists(jobs, max_size=8).map(tuple),
    st.tuples(*[st.sampled_from([0, 0, 0, 2])] * NODES),
    st.tuples(*[st.sampled_from(["", "", "", "maintenance", "reserved", "powered_down"])] * NODES),
)


class Site:
    """A pipeline and a placer on one state folder. Events say what runs. No event names the jobs of `unknown_gpus`."""

    def __init__(self, folder: Path, queues: str) -> None:
        self.clock, self.number = ManualClock(NOW_MS), 0
        file = folder / "queues.toml"
        if queues:
            file.write_text(queues)
        self.config = Config(state=str(folder / "state"), placer=PlacerConfig(queues=str(file) if queues else ""))
        self.restart_pipeline()
        self.queue = "a" if queues else ""
        self.unknown_gpus = np.zeros((NODES, GPUS), bool)
        self.tick()
        self.placer = PlacementService(self.config, self.clock, Ledger(self.config.ledger), PlacerMetrics())
        self.cache = BoardCache(self.config.board, hold_s=0.0)
        self.station = WeatherStation(self.config, self.clock, Bands(BandRule()))

    def restart_pipeline(self) -> None:
        topology = Topology.build([NodeSpec(f"n{row}", gpus=GPUS) for row in range(NODES)])
        self.pipeline = Pipeline(self.config, self.clock, topology, lambda _: [])

    def tick(self) -> Board:
        self.clock.advance(1)
        asyncio.run(self.pipeline.tick())
        board = BoardReader(self.config.board).latest()
        assert board is not None
        return board

    def report(self, *events: JobEvent) -> None:
        self.pipeline.apply_batch(Batch(events=events))

    def request(self, job: str, gpus: int, share: int | None = None) -> PlacementRequest:
        each = gpus if share is None else 1
        return PlacementRequest(request_id=f"r-{job}", job=job, gpus_per_node=each, gpu_share=share, queue=self.queue)

    def demand(self, target: Target) -> float:
        demand = self.pipeline.state.demand
        self.pipeline.capabilities[DemandForecasts].record_ticks(self.pipeline.state)
        return float(np.nan_to_num(demand.read_series("all", target, self.clock.now_ms(), 60, 1)[-1]))

    def play(self, scene: Scene) -> Board:
        """Make a scene of new jobs, and return its board."""
        self.number += 1
        self.names = [f"s{self.number}-{at}" for at in range(len(scene.jobs))]
        self.unknown_gpus = np.arange(GPUS) >= GPUS - np.array(scene.unknown)[:, None]
        used = Counter[int]()
        self.shares: dict[str, int] = {}
        self.shared: dict[int, tuple[int, int]] = {}  # node → the GPU of its latest part, thousandths of it in use
        for row, check in enumerate(scene.checks):
            self._withhold(row, "withhold" if check else "release", check)
        for job, name in zip(scene.jobs, self.names, strict=True):
            if job.kind in PARTS:
                self.shares[name] = SHARES[job.gpus]
            self._tell(job, name, used)
        self.tick()
        self.placer.view.refresh()
        with suppress_refusals():
            self.placer.backlog.run_pass()
        promised = [
            (job, name)
            for job, name in zip(scene.jobs, self.names, strict=True)
            if job.kind in STARTS and self._place(job, name)
        ]
        board = self.tick()
        for job, name in promised:
            if job.kind != "promise":
                self._start_promised(job, name)
                board = self.tick()
        return board

    def end(self) -> None:
        """End all jobs and requests of the scene, and let time pass."""
        now_ms = self.clock.now_ms()
        for name in self.names:
            self.report(Finished(job=name, sequence=99, time_ms=now_ms))
        for entry in self.placer.ledger.list_queue_entries():
            self.placer.withdraw(entry.request.request_id, "test")
        self.tick()
        self.placer.view.refresh()
        for intent in self.placer.ledger.list_active_intents():
            self.placer.cancel(intent.request_id, "test")
        self.unknown_gpus[:] = False
        self.tick()
        self.pipeline.capabilities[DemandForecasts].record_ticks(self.pipeline.state)
        self.clock.advance(SCENE_MS)

    def _withhold(self, row: int, type_: Any, check: str) -> None:
        now_ms, sequence = self.clock.now_ms(), 2 * self.number
        release = NodeEvent(node=f"n{row}", source="s", sequence=sequence, time_ms=now_ms, type="release")
        event = NodeEvent(
            node=f"n{row}",
            source="s",
            sequence=sequence + 1,
            time_ms=now_ms + 1,
            type=type_,
            check=check,
            message=check,
        )
        self.pipeline.apply_batch(Batch(node_events=(release, event) if check else (release,)))

    def _tell(self, job: JobScene, name: str, used: Counter[int]) -> None:
        now_ms, node = self.clock.now_ms(), f"n{job.node}"
        submitted = Submitted(job=name, sequence=1, time_ms=now_ms, gpus_per_node=job.gpus, queue=self.queue)
        share = self.shares.get(name)
        if share is not None:
            submitted = msgspec.structs.replace(submitted, gpus_per_node=1, gpu_share=share)
        if job.kind in ("event", "both", "held", "held_both", "event_part", "both_part"):
            self.report(submitted)
        if job.kind == "two_queues":
            both = (self.queue, "b") if self.queue else ("batch", "debug")
            self.report(msgspec.structs.replace(submitted, queue=both[0], queues=both))
        if job.kind in ("held", "held_both"):
            self.report(Queued(job=name, sequence=3, time_ms=now_ms, reason="Dependency", blocked=True))
        if job.kind in ("queue", "both", "held_both", "withdrawn", "queue_part", "both_part"):
            self.placer.enqueue(self.request(name, job.gpus, share), "test")
        if job.kind == "withdrawn":
            self.placer.withdraw(f"r-{name}", "test")
        if job.kind not in RUNS:
            return
        first = used[job.node]
        if share is not None:
            self._start_part(job, name, submitted, used)
            return
        if first + job.gpus > GPUS:
            return
        if job.kind == "loop":  # a training loop that names its node, and no GPUs
            self.report(Step(job=name, sequence=2, time_ms=now_ms, step=1, duration_s=1.0, rank=0, node=node))
            used[job.node] += 1
            return
        if job.kind == "again":  # the GPUs of the job before, whose end nobody reported
            first = max(0, first - job.gpus)
            used[job.node] -= min(job.gpus, used[job.node])
        gpus = tuple(range(first, first + job.gpus))
        used[job.node] += job.gpus
        if job.kind == "label":
            self.report(msgspec.structs.replace(submitted, labels=UNSEEN_START))
        if job.kind in ("submitted_nodes", "beyond"):
            self.report(submitted)
        if job.kind == "nodes":
            used[job.node] = GPUS
        started = Started(job=name, sequence=2, time_ms=now_ms)
        if job.kind in ("nodes", "submitted_nodes"):
            self.report(msgspec.structs.replace(started, nodes=(node,)))
        else:
            named = tuple(gpu + 64 for gpu in gpus) if job.kind == "beyond" else gpus
            ranks = tuple(RankPlacement(rank, node, named) for rank in range(2 if job.kind == "repeated" else 1))
            self.report(msgspec.structs.replace(started, ranks=ranks))

    def _start_part(self, job: JobScene, name: str, submitted: Submitted, used: Counter[int]) -> None:
        """Start a job on a part of a GPU: on one of its own, beside the latest part of its node, or not named."""
        assert submitted.gpu_share is not None
        gpu, milli = self.shared.get(job.node, (-1, 1000))
        fits = milli + submitted.gpu_share <= 1000 and job.kind == "beside"
        if not fits:
            if used[job.node] >= GPUS:
                return
            gpu, milli = used[job.node], 0
            used[job.node] += 1
        node = f"n{job.node}"
        started = Started(job=name, sequence=2, time_ms=self.clock.now_ms(), nodes=(node,))
        if job.kind != "part_nodes":
            self.shared[job.node] = gpu, milli + submitted.gpu_share
            rank = RankPlacement(0, node, (gpu,), submitted.gpu_share)
            started = msgspec.structs.replace(started, nodes=(), ranks=(rank,))
        self.report(submitted, started)

    def _place(self, job: JobScene, name: str) -> bool:
        reply = msgspec.json.decode(self.placer.place(self.request(name, job.gpus, self.shares.get(name)), "test"))
        return bool(reply["outcome"] == "placed")

    def _start_promised(self, job: JobScene, name: str) -> None:
        intent = next(row for row in self.placer.ledger.list_active_intents() if row.job == name)
        ranks = intent.ranks
        if job.kind == "promise_taken":  # another job starts on a part of the promised GPUs
            ranks = tuple(msgspec.structs.replace(rank, gpus=rank.gpus[: 1 + job.node]) for rank in intent.ranks)
            self.names.append(name := f"{name}-other")
        if job.kind == "promise_misnamed":
            ranks = tuple(msgspec.structs.replace(rank, gpus=tuple(gpu + 64 for gpu in rank.gpus)) for rank in ranks)
        self.report(Started(job=name, sequence=2, time_ms=self.clock.now_ms(), ranks=ranks))


def suppress_refusals() -> Any:
    """A pass over an empty queue, or one whose requests were decided meanwhile, does not fail the scene."""
    return suppress(ConflictError)
