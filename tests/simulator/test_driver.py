import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import fleetcast.simulator.outbox
from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.events import Finished, StepParts
from fleetcast.fleet.requests import RankPlacement
from fleetcast.simulator.days.replay import OngoingJob, TraceReplay
from fleetcast.simulator.days.traces import TraceJob
from fleetcast.simulator.driver import Driver
from fleetcast.simulator.faults.faults import FaultPlan
from fleetcast.simulator.hardware.workload import WorkloadProfile
from fleetcast.simulator.live_job import STEP_EVERY_MS, LiveJob
from fleetcast.simulator.outbox import Outbox, ProductApi
from fleetcast.simulator.story import Story, describe_culprit, describe_flag

PROFILE = WorkloadProfile("sharded", 600.0, 1.0, 0.7, 0.4, 0.4, step_s=2.0, checkpoint_s=10.0)
START_MS = 1_000_000_000_000


class FakeFleet:
    """Steps take what `step_s` says; phases are what `phases` says, else steady."""

    def __init__(self) -> None:
        self.running: dict[str, tuple[RankPlacement, ...]] = {}
        self.started_ms: dict[str, int] = {}
        self.step_s: dict[str, float] = {}
        self.phases: dict[str, str] = {}
        self.dead: list[tuple[str, str, str, str]] = []
        self.down: set[str] = set()

    def start_job(self, job: str, attempt: int, ranks: Any, profile: WorkloadProfile, now_ms: int) -> None:
        self.running[job] = tuple(ranks)
        self.started_ms[job] = now_ms

    def stop_job(self, job: str, now_ms: int) -> bool:
        return self.running.pop(job, None) is not None

    def draw_step_time_s(self, job: str) -> float:
        return self.step_s.get(job, PROFILE.step_s)

    def split_step(self, job: str, step_s: float) -> StepParts | None:
        return StepParts(compute=0.75 * step_s, communication=0.25 * step_s)

    def get_phase(self, job: str) -> str:
        return self.phases.get(job, "steady")

    def pop_failed_jobs(self) -> list[tuple[str, str, str, str]]:
        dead, self.dead = self.dead, []
        return dead

    def is_answering(self, node: str, exporter: str) -> bool:
        return node not in self.down


class FakeProduct:
    """The product's API: remembers what it is told, answers what it was given."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self.broken = 0
        self.unready = 0
        self.deaf = 0
        self.refuses = False
        self.app = web.Application()
        self.app.router.add_get("/healthz", self._ok)
        self.app.router.add_get("/readyz", self._ready)
        self.app.router.add_get("/v1/fleet", self._fleet)
        self.app.router.add_post("/v1/events", self._events)
        self.app.router.add_post("/v1/queue", self._queue)
        self.app.router.add_get("/v1/placements", self._placements)
        self.app.router.add_get("/v1/nodes/{node}", self._node)

    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    def place(self, request_id: str, *ranks: tuple[str, int], **more: Any) -> None:
        named = [{"rank": rank, "node": node, "gpus": list(range(gpus))} for rank, (node, gpus) in enumerate(ranks)]
        row = {"request_id": request_id, "outcome": "placed", "ranks": named, "sentence": "placed", "expires_ms": 0}
        self.rows.append(row | {"cursor": len(self.rows) + 1} | more)

    async def _ok(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _ready(self, request: web.Request) -> web.Response:
        self.calls.append("ready")
        self.unready -= 1
        return web.Response(status=503 if self.unready >= 0 else 200)

    async def _events(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.broken -= 1
        if self.broken >= 0:
            return web.Response(status=503)
        lines = [msgspec.json.decode(line) for line in body.splitlines()]
        self.calls.append(f"events {len(lines)}")
        self.events += lines
        return web.json_response({"accepted": len(lines), "duplicates": 0, "rejected": []}, status=202)

    async def _fleet(self, request: web.Request) -> web.Response:
        """The GPUs of the jobs that were told to run; the first `deaf` answers know of none yet."""
        self.deaf -= 1
        self.calls.append("deaf" if self.deaf >= 0 else "heard")
        started = [event for event in self.events if event["type"] == "started" and self.deaf < 0]
        gpus = sum(len(rank["gpus"]) for event in started for rank in event["ranks"])
        return web.json_response({"gpus": {"running": gpus}})

    async def _queue(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.calls.append("queue")
        return web.json_response({}, status=422 if self.refuses else 202)

    async def _placements(self, request: web.Request) -> web.Response:
        after = int(request.query["after"])
        rows = [row for row in self.rows if row["cursor"] > after]
        return web.json_response({"as_of_ms": 1, "rows": rows, "cursor": len(self.rows)})

    async def _node(self, request: web.Request) -> web.Response:
        answer = self.nodes.get(request.match_info["node"])
        return web.json_response(answer) if answer else web.Response(status=404)


def job(name: str, gpus: int = 8, run_s: float = 100.0, submit_ms: int = START_MS) -> TraceJob:
    return TraceJob(name, submit_ms, run_s, gpus, "ann", "training")


def ranks(*nodes: str) -> tuple[RankPlacement, ...]:
    return tuple(RankPlacement(rank, node, tuple(range(8))) for rank, node in enumerate(nodes))


class Stage:
    """A driver with its fleet, clock and product; `settle` lets posts and polls happen."""

    def __init__(self, product: FakeProduct, api: ProductApi, replay: TraceReplay, arrivals: list[TraceJob]) -> None:
        self.product = product
        self.fleet = FakeFleet()
        self.clock = ManualClock(START_MS)
        self.driver = Driver(self.fleet, api, self.clock, replay, arrivals, lambda _: PROFILE)

    async def until(self, claim: Callable[[], object]) -> None:
        for _ in range(6000):
            if claim():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came true")

    async def at(self, seconds: float) -> None:
        """Move the fleet to `seconds` after the start."""
        self.clock.time_ms = START_MS + round(seconds * 1000)
        await self.driver.advance(self.clock.time_ms)

    async def drained(self) -> None:
        await self.driver.outbox.wait_until_empty()


def play(
    scene: Callable[[Stage], Awaitable[None]],
    *,
    ongoing: tuple[OngoingJob, ...] = (),
    queue: tuple[TraceJob, ...] = (),
    history: tuple[Any, ...] = (),
    arrivals: tuple[TraceJob, ...] = (),
    product: FakeProduct | None = None,
    live: bool = True,
) -> FakeProduct:
    """Run a scene against a fake product; with `live` the driver already runs (its own tick moves nothing)."""
    product = product or FakeProduct()
    replay = TraceReplay(START_MS, history, ongoing, queue)

    async def run() -> None:
        server = TestServer(product.app)
        await server.start_server()
        async with aiohttp.ClientSession() as session:
            stage = Stage(product, ProductApi(session, str(server.make_url("/"))), replay, list(arrivals))
            stage.driver.start_ongoing_jobs()
            task = asyncio.create_task(stage.driver.run())
            if live:
                await asyncio.wait_for(stage.driver.live.wait(), 60)
            try:
                await scene(stage)
            finally:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        await server.close()

    asyncio.run(run())
    return product


def test_the_past_is_told_in_order_and_the_queue_only_when_the_product_is_ready():
    product = FakeProduct()
    product.unready = 2
    history = (Finished(job="old", sequence=2, time_ms=START_MS - 5000),)
    ongoing = (OngoingJob(job("runs", run_s=900.0), START_MS - 1000, 800.0, ranks("n1")),)

    async def scene(stage: Stage) -> None:
        assert stage.fleet.started_ms == {"runs": START_MS - 1000}
        await stage.until(lambda: product.requests)
        await stage.drained()

    play(scene, product=product, history=history, ongoing=ongoing, queue=(job("waits", 16),))
    told = [(event["job"], event["type"]) for event in product.events]
    past = [("old", "finished"), ("runs", "submitted"), ("runs", "started")]
    assert told[:3] == past
    assert ("waits", "queued") in told
    assert product.calls.index("queue") > product.calls.index("ready")
    (request,) = product.requests
    assert (request["request_id"], request["gang"], request["gpus_per_node"]) == ("waits", 2, 8)
    assert "limit_s" not in request


def test_a_trainer_tells_its_model_its_checkpoints_and_what_its_steps_are_made_of(monkeypatch):
    profile = replace(PROFILE, checkpoint_every_s=1000.0, loading_s=40.0)
    monkeypatch.setattr("tests.simulator.test_driver.PROFILE", profile)
    product = FakeProduct()
    ongoing = (OngoingJob(job("runs", run_s=9000.0), START_MS - 5_000_000, 4000.0, ranks("n1")),)

    async def scene(stage: Stage) -> None:
        await stage.at(31)
        await stage.drained()

    play(scene, product=product, ongoing=ongoing)
    told = [event for event in product.events if event["job"] == "runs"]
    assert [event["sequence"] for event in told] == list(range(len(told)))
    assert told[0]["labels"] == {"flops_per_token": "2.4e+10"}
    assert told[0]["checkpoint_cost_s"] == 10.0
    edges = [(event["edge"], (event["time_ms"] - START_MS) / 1000) for event in told if event["type"] == "checkpoint"]
    # steady since -4,900 s: a checkpoint every 1,000 s, 10 s each
    assert edges == [("begin", -2910), ("end", -2900), ("begin", -1910), ("end", -1900), ("begin", -910), ("end", -900)]
    step = [event for event in told if event["type"] == "step"][-1]
    assert sum(step["parts"].values()) == step["duration_s"] == 2.0
    flops = step["tokens"] * float(told[0]["labels"]["flops_per_token"]) / (step["duration_s"] * 8 * 989e12)
    assert 0.9 * PROFILE.tensor_active == pytest.approx(flops, rel=0.01)


def test_the_queue_is_sent_only_when_the_board_knows_what_runs():
    product = FakeProduct()
    product.deaf = 3
    ongoing = (OngoingJob(job("runs", run_s=900.0), START_MS - 1000, 800.0, ranks("n1")),)

    async def scene(stage: Stage) -> None:
        await stage.until(lambda: product.requests)

    play(scene, product=product, ongoing=ongoing, queue=(job("waits", 16),))
    assert product.calls.count("deaf") == 3
    assert product.calls.index("heard") < product.calls.index("queue")


def test_no_event_is_lost_while_the_product_is_down(monkeypatch):
    monkeypatch.setattr(fleetcast.simulator.outbox, "FIRST_PAUSE_S", 0.01)
    product = FakeProduct()
    product.broken = 3
    history = tuple(Finished(job=f"j{row}", sequence=2, time_ms=START_MS - row) for row in range(50))

    async def scene(stage: Stage) -> None:
        await stage.drained()
        assert stage.driver.api.retries >= 3

    play(scene, product=product, history=history)
    assert [event["job"] for event in product.events] == [f"j{row}" for row in range(50)]


def test_a_full_outbox_makes_the_driver_wait_instead_of_growing():
    async def scene() -> None:
        outbox = Outbox(None, limit=2)  # type: ignore[arg-type]
        event = Finished(job="a", sequence=0, time_ms=0)
        await outbox.put(event)
        await outbox.put(event)
        put = asyncio.create_task(outbox.put(event))
        await asyncio.sleep(0.02)
        assert not put.done()
        put.cancel()

    asyncio.run(scene())


def test_a_placed_job_starts_works_and_finishes_when_its_work_is_done():
    product = FakeProduct()

    async def scene(stage: Stage) -> None:
        await stage.at(0)
        await stage.until(lambda: product.requests)
        product.place("a", ("n1", 8), ("n2", 8))
        await stage.until(lambda: "a" in stage.fleet.running)
        await stage.at(STEP_EVERY_MS / 1000)
        await stage.at(103)
        await stage.drained()
        assert stage.driver.counters.finished == 1
        assert not stage.fleet.running

    play(scene, product=product, arrivals=(job("a", 16),))
    assert product.types() == ["submitted", "queued", "started", "phase", "step", "finished"]
    assert [event["sequence"] for event in product.events] == list(range(6))
    assert product.events[4]["duration_s"] == PROFILE.step_s
    assert product.events[-1]["time_ms"] == START_MS + 100_000  # not when somebody looked


def test_slow_steps_postpone_the_end():
    ongoing = (OngoingJob(job("a"), START_MS, 100.0, ranks("n1")),)

    async def scene(stage: Stage) -> None:
        stage.fleet.step_s["a"] = 2 * PROFILE.step_s
        await stage.at(60)
        assert stage.driver.running["a"].remaining_s == 70.0
        stage.fleet.step_s["a"] = math.inf
        await stage.at(600)
        assert stage.driver.running["a"].remaining_s == 70.0

    play(scene, ongoing=ongoing)


def test_a_killed_job_comes_back_with_the_work_since_its_checkpoint():
    product = FakeProduct()
    ongoing = (OngoingJob(job("a", run_s=1000.0), START_MS, 1000.0, ranks("n1", "n2")),)

    async def scene(stage: Stage) -> None:
        await stage.at(100)
        stage.fleet.phases["a"] = "checkpoint"
        await stage.at(110)
        stage.fleet.phases["a"] = "steady"
        await stage.at(120)  # the checkpoint is safe
        await stage.at(200)
        stage.fleet.dead = [("a", "node_lost", "n2", "no answer")]
        stage.fleet.down = {"n2"}
        await stage.at(201)
        await stage.until(lambda: product.requests)
        again = stage.driver.waiting["a.2"]
        assert (again.attempt, again.remaining_s) == (2, 880.0)
        stage.fleet.down = set()
        await stage.at(300)
        await stage.drained()

    play(scene, product=product, ongoing=ongoing)
    request = product.requests[0]
    assert (request["request_id"], request["job"], request["attempt"]) == ("a.2", "a", 2)
    assert product.types().count("checkpoint") == 2
    failed = next(event for event in product.events if event["type"] == "failed")
    assert (failed["category"], failed["node"]) == ("node_lost", "n2")
    site = [(event["node"], event["type"]) for event in product.events if "source" in event]
    assert site == [("n2", "lost"), ("n2", "returned")]


def test_a_decision_that_came_too_late_is_asked_for_again():
    product = FakeProduct()

    async def scene(stage: Stage) -> None:
        await stage.until(lambda: product.requests)
        product.place("a", ("n1", 8), expires_ms=START_MS - 1)
        await stage.until(lambda: len(product.requests) == 2)
        assert not stage.fleet.running

    play(scene, product=product, queue=(job("a"),))
    assert product.requests[1]["request_id"] == "a.2"


def test_a_job_that_somebody_else_sent_runs_too():
    product = FakeProduct()

    async def scene(stage: Stage) -> None:
        product.place("hello", ("n3", 4), expires_ms=START_MS + 300_000)
        await stage.until(lambda: "hello" in stage.fleet.running)
        await stage.drained()

    play(scene, product=product)
    assert [event["type"] for event in product.events if event["job"] == "hello"] == ["submitted", "queued", "started"]


def test_a_refused_request_is_forgotten():
    product = FakeProduct()
    product.refuses = True

    async def scene(stage: Stage) -> None:
        await stage.until(lambda: stage.driver.counters.refused == 1)
        assert not stage.driver.waiting

    play(scene, product=product, queue=(job("a"),))


def test_work_in_loading_and_checkpoints_is_not_slowed():
    live = LiveJob(job("a"), PROFILE, 100.0, 100.0, last_ms=0)
    live.advance_work("loading", math.nan, 10_000)
    live.advance_work("checkpoint", 12.0, 20_000)
    assert live.remaining_s == 80.0


def test_the_story_throttles_a_node_and_sends_the_next_gang(tmp_path):
    product = FakeProduct()
    ongoing = (
        OngoingJob(job("small", 16, 9000.0), START_MS, 9000.0, ranks("n4", "n5")),
        OngoingJob(job("big", 24, 9000.0), START_MS, 9000.0, ranks("n1", "n2", "n3")),
    )

    async def scene(stage: Stage) -> None:
        faults = FaultPlan([f"n{row}" for row in range(1, 7)], 8)
        story = Story(stage.driver, faults, tmp_path / "story.jsonl", begins_s=0.0, patience_s=0.8)
        reasons = [{"sentence": "SM clock 990 MHz, usual 1,980"}]
        product.nodes["n1"] = {"action": {"code": "avoid", "sentence": "avoid"}, "reasons": reasons}
        task = asyncio.create_task(story.run())
        await stage.until(lambda: product.requests)
        await stage.drained()
        product.place("story-gang", ("n2", 8), ("n3", 8), sentence="placed 2 x 8 GPUs; avoided n1")
        await asyncio.wait_for(task, 60)
        assert faults.list_faulty_nodes() == {"n1"}

    play(scene, product=product, ongoing=ongoing)
    lines = [msgspec.json.decode(line) for line in (tmp_path / "story.jsonl").read_bytes().splitlines()]
    assert [line["event"] for line in lines] == ["throttle", "flagged", "next", "avoided"]
    assert "990" in lines[1]["sentence"]
    (request,) = product.requests
    assert request["gang"] == {"min": 1, "desired": 3, "step": 1}
    assert request["priority"] > 0
    failed = next(event for event in product.events if event["type"] == "failed")
    assert (failed["job"], failed["category"]) == ("big", "cancelled")


def test_only_an_acted_on_node_counts_as_flagged_and_nobody_is_no_culprit():
    assert describe_flag(None) == ""
    assert describe_flag({"action": {"code": "watch", "sentence": "watch it"}, "reasons": []}) == ""
    assert describe_flag({"action": {"code": "drain_now", "sentence": "drain it"}, "reasons": []}) == "drain it"
    slow = {"slow": True, "culprit": {"kind": "nobody", "name": ""}, "sentence": "all are slow"}
    assert describe_culprit(slow) == ""
    assert describe_culprit(slow | {"culprit": {"kind": "worker", "name": "n1"}}) == "all are slow"
