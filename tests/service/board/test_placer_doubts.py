"""A placer whose clock is set, and one whose board does not know what runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fleetcast.placement.ledger.ledger import IntentState
from fleetcast.service.board.board import Section
from tests.service.placer_world import NOW_MS, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.board.publish()
    yield made
    made.close()


@pytest.mark.parametrize("by_ms", [7_200_000, -7_200_000])
def test_a_promise_lasts_as_long_as_it_was_to_when_the_clock_is_set(world: World, by_ms: int) -> None:
    world.place("r1", gang=1)
    for seconds, state in ((100, IntentState.ACTIVE), (250, IntentState.EXPIRED)):
        if seconds == 100:
            world.clock.time_ms += by_ms
        world.clock.advance(seconds)
        world.board.as_of_ms = world.clock.now_ms()
        world.board.publish()
        world.place("dry", gang=1, dry_run=True)
        assert world.service.ledger.read_intent_state("r1") is state
    world.place("r2", gang=1)
    world.clock.advance(200)
    world.board.as_of_ms = world.clock.now_ms()
    world.board.publish()
    world.place("dry", gang=1, dry_run=True)
    assert world.service.ledger.read_intent_state("r2") is IntentState.ACTIVE


def test_a_promise_of_the_process_before_lasts_to_its_stamp_when_the_clock_is_set_back(world: World) -> None:
    world.place("r1", gang=1)
    for by_ms in (7_200_000, -7_200_000):
        world.clock.time_ms += by_ms
        world.board.as_of_ms = world.clock.now_ms()
        world.board.publish()
        world.place("dry", gang=1, dry_run=True)
        assert world.service.ledger.read_intent_state("r1") is IntentState.ACTIVE
        world.restart()


def test_nothing_is_placed_while_nobody_knows_what_runs(world: World) -> None:
    why = "what runs is not known: all is lost"
    world.board.writer.publish([_meta(world, why)], NOW_MS)
    answer = world.ask("POST", "/placements", {"request_id": "r1", "gang": 1})
    assert (answer.status_code, answer.json()["detail"]) == (503, why)
    world.ask("POST", "/queue", {"request_id": "r2", "gang": 1})
    world.step()
    assert why in world.ask("GET", "/queue").json()["rows"][0]["why"]
    world.board.writer.publish([_meta(world, "")], NOW_MS + 1)
    assert world.place("r1", gang=1)["outcome"] == "placed"


def _meta(world: World, why: str) -> Section:
    meta = world.board.sections()["meta"][:-1] + f',"occupancy_unknown":"{why}"}}'.encode()
    return Section("meta", meta, NOW_MS)
