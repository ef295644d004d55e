"""The stops that start times know: those that were sent, and those that passes will send."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fleetcast.placement.machines.view import Hearing
from fleetcast.service.placer.stops_ahead import make_stops_ahead
from tests.service.placer.test_act import ActWorld, send_stop
from tests.service.placer.test_reclaim import OLD_S
from tests.service.placer_world import GPUS


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ActWorld]:
    world = ActWorld(tmp_path)
    yield world
    world.close()


def test_a_payer_starts_when_its_stop_should_be_seen(world: ActWorld) -> None:
    send_stop(world)
    world.pass_at(10)
    ahead = make_stops_ahead(world.service, world.service.view.observe_fleet())
    assert ahead.sent.keys() == {"p"}
    assert (ahead.sent["p"].since_s, ahead.sent["p"].jobs, ahead.stop_s) == (10.0, {"a"}, 120.0)  # as long as the grace
    assert ahead.reclaim is not None
    paths = asyncio.run(world.starts.refresh())
    assert np.median(paths.starts_s["p"]) == pytest.approx(110, rel=0.1)
    assert world.service.backlog.starts["p"][1] < world.clock.now_ms() + 300_000


def test_the_time_of_a_stop_is_learnt_from_those_that_were_seen(world: ActWorld) -> None:
    send_stop(world)
    world.reply("a", "accept")
    world.end("a")
    world.pass_at(45)
    assert world.states() == {"a": "seen"}
    assert world.service.actions.estimate_stop_s(120.0) == 45.0


def test_while_actions_are_paused_only_stops_that_were_sent_count(world: ActWorld) -> None:
    send_stop(world)
    world.service.actions.pause(world.clock.now_ms(), "ops")
    ahead = make_stops_ahead(world.service, world.service.view.observe_fleet())
    assert (ahead.reclaim, [*ahead.sent]) == (None, ["p"])


def test_a_job_that_stops_may_lose_all_its_gpus_before(world: ActWorld) -> None:
    send_stop(world)
    world.board.broken = [(node, gpu) for node in world.board.jobs["a"] for gpu in range(GPUS)]
    world.pass_at(10)
    assert world.states() == {"a": "sent"}
    paths = asyncio.run(world.starts.refresh())
    assert np.median(paths.starts_s["p"]) > 300, "the GPUs of a free nothing for p"


def test_start_times_are_due_again_once_jobs_are_asked_to_stop(world: ActWorld) -> None:
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.wait_for("p", "owed", 4)
    world.pass_at(OLD_S)
    asyncio.run(world.starts.refresh())
    world.starts._took_s = 0.0
    assert not world.starts._is_due()
    world.agents_pass_at(0)
    assert world.states() == {"a": "sent"}
    assert world.starts._is_due()


def test_a_next_attempt_may_start_while_the_stop_of_the_last_one_is_not_seen(world: ActWorld) -> None:
    world.board.hearing = Hearing.FRESH
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 6), c=("lender", 2))
    world.board.more = {"a": {"checkpoint_ms": world.clock.now_ms() + 1000 * (OLD_S - 10)}}
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(OLD_S)
    assert world.states() == {"a": "sent"}
    world.end("a")
    world.end("c")
    world.beat(1000)
    world.wait_for("again", "owed", 2, job="a", attempt=2, limit_s=600, priority=5)
    assert world.states() == {"a": "sent"}
    paths = asyncio.run(world.starts.refresh())
    assert np.median(paths.starts_s["again"]) == 0
    assert np.median(paths.starts_s["p"]) > 0
