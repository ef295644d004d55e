"""Actions whose clock is set, and actions that happen after they have expired."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.placement.ledger.verify import verify_ledger
from fleetcast.placement.machines.view import Hearing
from fleetcast.service.placer.action_follow import LATE_MS
from tests.service.placer.test_act import ACT_LATE_S, ActWorld, send_stop

HOUR_MS = 3_600_000
TRY = {"request_id": "now", "queue": "lender", "gang": 1, "gpus_per_node": 8, "dry_run": True}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[ActWorld]:
    world = ActWorld(tmp_path)
    yield world
    world.close()
    assert verify_ledger(world.config.ledger).is_intact


def promised_s(world: ActWorld) -> float:
    """Return for how many seconds GPUs are still promised to p."""
    return (world.service.view.promised_sets.read()["p"].by_ms - world.clock.now_ms()) / 1000


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS])
def test_a_promise_lasts_as_long_as_before_when_the_clock_is_set(world: ActWorld, by_ms: int) -> None:
    send_stop(world)
    before_s = promised_s(world)
    world.clock.time_ms += by_ms
    world.agents_pass_at(10)
    assert promised_s(world) == pytest.approx(before_s - 10, abs=1)
    assert world.states() == {"a": "sent"}
    world.restart()
    world.pass_at(10)
    assert promised_s(world) == pytest.approx(before_s - 20, abs=1)


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS])
def test_gpus_of_a_promise_that_is_over_are_free_at_once_after_the_clock_was_set(world: ActWorld, by_ms: int) -> None:
    send_stop(world)
    world.end("a")
    world.board.jobs["x"], world.board.queue_of["x"] = range(4, 7), "lender"  # so p does not fit
    world.pass_at(10)
    assert world.ask("POST", "/placements", json=TRY)["outcome"] == "refused"
    world.clock.time_ms += by_ms
    world.pass_at(10)
    assert world.ask("POST", "/placements", json=TRY)["outcome"] == "refused"
    world.pass_at(ACT_LATE_S)
    assert "p" not in world.placed()
    assert promised_s(world) <= 0


def test_a_clock_that_is_set_ahead_is_no_minute_of_idle_readings(world: ActWorld) -> None:
    world.board.hearing = Hearing.FRESH
    send_stop(world)
    world.end("a")
    world.pass_at(10)
    world.clock.time_ms += 200_000
    world.pass_at(10)
    assert world.states() == {"a": "sent"}
    world.pass_at(80)
    assert world.states() == {"a": "seen"}


@pytest.mark.parametrize("restarts", [False, True])
def test_a_stop_that_happens_after_it_expired_is_late(world: ActWorld, restarts: bool) -> None:
    send_stop(world)
    world.pass_at(ACT_LATE_S + 1)
    assert world.states()["a"] == "expired"
    world.pass_at(60)
    if restarts:
        world.restart()
    assert world.states()["a"] == "expired"
    world.end("a")
    world.pass_at(30)
    assert world.states()["a"] == "late"
    world.pass_at(30)
    assert world.states()["a"] == "late"


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_that_ends_long_after_an_action_expired_is_not_late(world: ActWorld, restarts: bool) -> None:
    send_stop(world)
    world.pass_at(ACT_LATE_S + 1)
    world.pass_at(LATE_MS / 1000)
    if restarts:
        world.restart()
    world.end("a")
    world.pass_at(30)
    assert world.states()["a"] == "expired"


def test_a_proposal_that_was_never_sent_is_never_late(world: ActWorld) -> None:
    world.ask("POST", "/actions/pause")
    world.fill(own=("owed", 4), a=("lender", 4), b=("lender", 8))
    world.wait_for("p", "owed", 4)
    world.agents_pass_at(1000)
    (job,) = world.states()
    assert world.states() == {job: "proposed"}
    world.ask("DELETE", "/queue/p")
    world.pass_at(ACT_LATE_S * 5)
    world.restart()
    world.end(job)
    world.pass_at(30)
    assert world.states()[job] in ("expired", "withdrawn")
