"""One truth of who waits, what is promised and what is on each GPU: every answer reads the same."""

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from fleetcast.features.demand_series import Target
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import JobEvent, Queued, Started, Submitted
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.source import Batch
from fleetcast.placement.ledger.ledger import Ledger
from fleetcast.service.board.board import Board, BoardReader
from fleetcast.service.config import Config, PlacerConfig
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.pipeline import Pipeline
from fleetcast.service.placer.metrics import PlacerMetrics
from fleetcast.service.placer.service import PlacementService

NOW_MS = 1_789_000_000_000
NODES = 4


class Site:
    """A pipeline and a placer on one state folder, without telemetry: the events' word counts."""

    def __init__(self, folder: Path, queues: str = "") -> None:
        self.clock = ManualClock(NOW_MS)
        self.config = Config(state=str(folder))
        if queues:
            file = folder / "queues.toml"
            file.write_text(queues)
            self.config = msgspec.structs.replace(self.config, placer=PlacerConfig(queues=str(file)))
        topology = Topology.build([NodeSpec(f"n{row}", gpus=8) for row in range(NODES)])
        self.pipeline = Pipeline(self.config, self.clock, topology, lambda _: [])
        self.tick()
        self.placer = PlacementService(self.config, self.clock, Ledger(self.config.ledger), PlacerMetrics())

    def tick(self) -> Board:
        self.clock.advance(1)
        asyncio.run(self.pipeline.tick())
        board = BoardReader(self.config.board).latest()
        assert board is not None
        return board

    def tell(self, *events: JobEvent) -> None:
        self.pipeline.apply_batch(Batch(events=events))

    def enqueue(self, job: str, gpus: int = 8, **facts: object) -> None:
        self.placer.enqueue(request(job, gpus, **facts), "test")

    def place(self, job: str, gpus: int = 8) -> None:
        reply = msgspec.json.decode(self.placer.place(request(job, gpus), "test"))
        assert reply["outcome"] == "placed", reply["sentence"]

    def demand(self, target: Target) -> float:
        """The newest level of all queues, once the forecaster has read what the ticks noted."""
        forecasts = self.pipeline.capabilities[DemandForecasts]
        asyncio.run(forecasts.forecast(self.pipeline.state))
        demand = self.pipeline.state.demand
        level = demand.read_series("all", target, self.clock.now_ms(), 60, 1)[-1]  # NaN before the first event
        return float(np.nan_to_num(level))


def request(job: str, gpus: int = 8, **facts: object) -> PlacementRequest:
    return PlacementRequest(request_id=f"r-{job}", job=job, gpus_per_node=gpus, **facts)  # type: ignore[arg-type]


def submitted(job: str, gpus: int = 8) -> Submitted:
    return Submitted(job=job, sequence=1, time_ms=NOW_MS, gpus_per_node=gpus)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_requests_of_our_own_queue_wait_in_every_answer_with_or_without_an_event(site: Site) -> None:
    site.enqueue("alone")
    site.enqueue("told", 4)
    site.tell(submitted("told", 4), submitted("elsewhere", 2))
    board = site.tick()
    fleet = board.json("doc.fleet")
    assert (fleet["queued_jobs"], fleet["queued_gpus"]) == (3, 14)
    rows = {row["job"]: row for row in board.json("doc.jobs")}
    assert {job: row["state"] for job, row in rows.items()} == dict.fromkeys(("alone", "told", "elsewhere"), "queued")
    assert rows["alone"]["source"] == "queue"
    assert site.demand("queued") == 14


def test_a_request_that_is_withdrawn_waits_no_more_and_may_come_back(site: Site) -> None:
    site.enqueue("a")
    site.tick()
    assert site.demand("queued") == 8
    site.placer.withdraw("r-a", "test")
    board = site.tick()
    assert board.json("doc.fleet")["queued_gpus"] == 0
    assert site.demand("queued") == 0
    site.placer.enqueue(msgspec.structs.replace(request("a"), request_id="r-again"), "test")
    board = site.tick()
    assert board.json("doc.fleet")["queued_gpus"] == 8
    assert site.demand("queued") == 8


def test_a_promise_is_named_and_neither_free_nor_waiting(site: Site) -> None:
    site.enqueue("a")
    assert site.placer.backlog.run_pass() == 1
    board = site.tick()
    fleet = board.json("doc.fleet")
    gpus = fleet["gpus"]
    assert (gpus["promised"], gpus["free"], gpus["running"], fleet["queued_gpus"]) == (8, 24, 0, 0)
    held = [gpu for node in fleet["nodes"] for gpu in node["gpus"] if gpu.get("held_by") == "promise"]
    assert {gpu["request"] for gpu in held} == {"r-a"}
    assert [row["state"] for row in board.json("doc.jobs")] == ["promised"]
    assert (site.demand("queued"), site.demand("running")) == (0, 8)
    ranks = site.placer.ledger.list_active_intents()[0].ranks
    site.tell(Started(job="a", sequence=2, time_ms=site.clock.now_ms(), ranks=ranks))
    gpus = site.tick().json("doc.fleet")["gpus"]
    assert (gpus["promised"], gpus["free"], gpus["running"]) == (0, 24, 8)
    assert site.demand("running") == 8


def test_a_promise_that_expires_leaves_no_demand(site: Site) -> None:
    site.place("a")
    site.tick()
    assert site.demand("running") == 8
    site.placer.cancel("r-a", "test")
    site.tick()
    assert (site.demand("running"), site.demand("queued")) == (0, 0)


def test_a_request_whose_queue_may_have_no_more_waits_for_a_quota_and_for_no_machines(tmp_path: Path) -> None:
    site = Site(tmp_path, "[queue.a]\nlimit = {gpu = 8}\n[queue.b]\n")
    for job, queue, gpus, placed in (("runs", "a", 8, 1), ("over", "a", 4, 0), ("large", "b", 8, 0)):
        site.enqueue(job, gpus, queue=queue, gang=5 if job == "large" else 1)
        site.clock.advance(1)
        assert site.placer.backlog.run_pass() == placed
    board = site.tick()
    site.demand("queued")
    rows = {
        (row.queue, row.pool): row.waits_for
        for row in site.pipeline.capabilities[DemandForecasts].rows
        if row.target == "queued" and (row.class_, row.group) == ("all", "all")
    }
    waits = {whose: (found.quota, found.machines) for whose, found in rows.items() if found is not None}
    assert waits["a", "all"] == (4, 0)
    assert waits["all", "all"] == (4, 40)
    assert waits["all", "unassigned"] == (4, 0)
    assert sum(quota + machines for (queue, pool), (quota, machines) in waits.items() if pool != "all") == 44
    reasons = {row["job"]: row.get("queued_reason") for row in board.json("doc.jobs")}
    assert "over" in reasons


def test_a_quota_that_grows_is_seen_by_the_next_tick(tmp_path: Path) -> None:
    site = Site(tmp_path, "[queue.a]\nlimit = {gpu = 8}\n[queue.b]\n")
    for job, queue, gang in (("fills", "b", 3), ("runs", "a", 1), ("over", "a", 1)):
        site.enqueue(job, 8, queue=queue, gang=gang)
        site.clock.advance(1)
    assert site.placer.backlog.run_pass() == 2
    promises = site.pipeline.state.promises
    assert promises is not None
    assert [row.is_over_quota for row in promises.list_open_requests() if not row.is_promised] == [True]
    (tmp_path / "queues.toml").write_text("[queue.a]\nlimit = {gpu = 64}\n[queue.b]\n")
    site.tick()
    assert site.placer.backlog.run_pass() == 0
    assert [row.is_over_quota for row in promises.list_open_requests() if not row.is_promised] == [False]


def test_a_blocked_job_with_a_request_waits_by_its_request(site: Site) -> None:
    site.tell(submitted("a"), Queued(job="a", sequence=2, time_ms=NOW_MS, reason="JobHeldUser", blocked=True))
    assert site.tick().json("doc.fleet")["queued_gpus"] == 0
    site.enqueue("a")
    board = site.tick()
    assert board.json("doc.fleet")["queued_gpus"] == 8
    assert [row["state"] for row in board.json("doc.jobs")] == ["queued"]


def test_open_requests_survive_a_restart_of_the_pipeline(site: Site) -> None:
    site.enqueue("a")
    site.tick()
    assert site.demand("queued") == 8
    asyncio.run(site.pipeline.save())
    topology = site.pipeline.state.topology
    site.pipeline = Pipeline(site.config, site.clock, topology, lambda _: [])
    site.tick()
    assert site.demand("queued") == 8
    site.placer.withdraw("r-a", "test")
    site.tick()
    assert site.demand("queued") == 0


def test_promised_gpus_on_which_another_job_starts_count_once(tmp_path: Path) -> None:
    """Somebody starts a job by hand on GPUs that are promised to another."""
    site = Site(tmp_path)
    site.tick()
    site.place("mine", gpus=8)
    (intent,) = site.placer.ledger.list_active_intents()
    (rank,) = intent.ranks
    for taken in (3, 8):
        other = msgspec.structs.replace(rank, gpus=rank.gpus[:taken])
        site.tell(Started(job="theirs", sequence=taken, time_ms=NOW_MS, ranks=(other,)))
        board = site.tick()
        gpus = {row["job"]: row["gpus"] for row in board.json("doc.jobs")}
        assert gpus == {"theirs": taken, "mine": 8 - taken}
        assert board.json("doc.fleet")["gpus"]["promised"] == 8 - taken
        assert site.demand("running") == 8
