"""`GET /v1/jobs/{id}/stragglers`, from step events at the door to the answer."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.inbox import InboxSource
from fleetcast.service.api.app import create_app
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.service.api_world import Client, config

NOW_MS = 1_789_000_000_000
REPLICAS, STAGES = 4, 2
NODES = tuple(f"n{rank}" for rank in range(REPLICAS * STAGES))
STEP_MS = 1_500


class World:
    """A pipeline that reads what the API wrote down, and the API over its board. Ranks count as the client does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = ManualClock(NOW_MS)
        self.topology = Topology.build([NodeSpec(name, 1) for name in NODES])
        self.inbox = InboxSource(Config(state=str(folder)).inbox)
        self.pipeline = Pipeline(Config(state=str(folder)), self.clock, self.topology, lambda _: [self.inbox])
        ranks = [{"rank": rank, "node": name, "gpus": [0]} for rank, name in enumerate(NODES)]
        self.post([self.event("started", 0, ranks=ranks)])

    def event(self, type: str, sequence: int, **fields: Any) -> dict[str, Any]:
        return {"job": "train", "type": type, "sequence": sequence, "time_ms": self.clock.now_ms(), **fields}

    def post(self, events: list[dict[str, Any]]) -> None:
        with Client(create_app(config(self.folder), self.clock)) as client:
            answer = client.post("/v1/events", json=events)
            assert (answer.status_code, answer.json()["accepted"]) == (202, len(events)), answer.text
        self.pipeline.apply_batch(asyncio.run(self.inbox.next()))
        asyncio.run(self.pipeline.tick())

    def steps(self, compute: np.ndarray, first: int = 0) -> None:
        """Every rank tells of each step of `compute` (step, replica, stage) seconds."""
        told = []
        for number, rows in enumerate(compute, first):
            self.clock.advance(STEP_MS / 1000)
            duration_s = float(rows.max()) + 0.1
            for rank, seconds in enumerate(rows.ravel().tolist()):
                parts = {"compute": seconds, "communication": duration_s - seconds}
                of_rank = {"rank": rank, "stage": rank % STAGES, "duration_s": duration_s, "parts": parts}
                told.append(self.event("step", ((rank + 1) << 32) + number, step=number, **of_rank))
        self.post(told)

    def ask(self) -> dict[str, Any]:
        with Client(create_app(config(self.folder), self.clock)) as client:
            answer = client.get("/v1/jobs/train/stragglers")
        assert answer.status_code == 200
        body: dict[str, Any] = answer.json()
        return body


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    found = World(tmp_path)
    yield found
    asyncio.run(found.pipeline.close())


def gang(steps: int) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(0, 0.01, (steps, REPLICAS, STAGES)))


def test_the_worker_is_named_three_steps_after_it_slowed_down(world: World) -> None:
    world.steps(gang(40))
    assert (world.ask()["slow"], world.ask()["culprit"]["kind"]) == (False, "nobody")
    slow = gang(3)
    slow[:, 2, 1] *= 1.25
    world.steps(slow, 40)
    body = world.ask()
    assert (body["slow"], body["culprit"]["kind"], body["culprit"]["name"]) == (True, "worker", "n5/0")
    assert body["cause"] == "compute"
    assert body["culprit"]["share"] > 0.8
    assert body["since_ms"] == pytest.approx(NOW_MS + 41 * STEP_MS, abs=STEP_MS)


def test_a_stage_is_named_that_became_slower_and_none_that_always_was(world: World) -> None:
    compute = gang(20)
    compute[:, :, 1] *= 1.6
    world.steps(compute)
    body = world.ask()
    assert (body["slow"], body["culprit"]["kind"]) == (False, "nobody")
    assert "stage 1 computes longest; even stages would take 1.42 s" in body["sentence"]
    slower = gang(10)
    slower[:, :, 1] *= 2.6
    world.steps(slower, 20)
    body = world.ask()
    assert (body["slow"], body["culprit"]["kind"], body["culprit"]["name"]) == (True, "stage", "1")


def test_all_slowed_is_a_slow_job_and_nobodys_fault(world: World) -> None:
    world.steps(gang(40))
    world.steps(1.3 * gang(4), 40)
    body = world.ask()
    assert (body["slow"], body["culprit"]["kind"], body["cause"]) == (True, "nobody", "compute")


def test_long_steps_under_a_checkpoint_have_that_as_their_cause(world: World) -> None:
    world.steps(gang(40))
    world.post([world.event("checkpoint", 1, edge="begin")])
    world.steps(3.0 * gang(1), 40)
    body = world.ask()
    assert (body["slow"], body["culprit"]["kind"], body["cause"]) == (False, "nobody", "checkpoint")
    assert "a checkpoint ran" in body["sentence"]


def test_the_verdict_stays_when_the_job_is_over(world: World) -> None:
    world.steps(gang(40))
    slow = gang(3)
    slow[:, 2, 1] *= 1.25
    world.steps(slow, 40)
    before = world.ask()
    assert before["slow"] is True
    assert before["judged_ms"] == before["as_of_ms"]
    world.clock.advance(10)
    world.post([world.event("finished", (99 << 32))])
    after = world.ask()
    assert after["as_of_ms"] > after["judged_ms"] == before["judged_ms"]
    assert {**after, "as_of_ms": 0} == {**before, "as_of_ms": 0}
