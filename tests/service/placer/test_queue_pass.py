"""A pass over the queue thinks while requests come and go: what it planned is checked again before it is kept."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.service.placer.queue_pass import QueuePass
from fleetcast.service.placer.view import add_intents
from tests.placement.runs import runs_of
from tests.service.placer_world import World

NODE = {"gang": 1, "gpus_per_node": 8}


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """Sixteen nodes; all but n15 and n16 are held."""
    world = World(tmp_path)
    world.board.jobs = {"a": range(8), "b": range(8, 14)}
    world.board.publish()
    yield world
    world.close()


def enqueue(world: World, *request_ids: str, **fields: Any) -> None:
    for request_id in request_ids:
        world.service.enqueue(PlacementRequest(request_id=request_id, **(NODE | fields)), "me")


def placed_gpus(world: World) -> Counter[tuple[str, int]]:
    intents = world.service.ledger.list_active_intents()
    return Counter((rank.node, gpu) for intent in intents for rank in intent.ranks for gpu in rank.gpus)


def queued(world: World) -> list[str]:
    return [entry.request.request_id for entry in world.service.ledger.list_queue_entries()]


def test_what_somebody_took_meanwhile_is_not_handed_out_twice(world: World) -> None:
    enqueue(world, "x", "y")
    begun = world.service.backlog.begin_pass()
    assert begun is not None
    thought = begun.compute_plan()
    assert world.place("quick", **NODE)["outcome"] == "placed"
    assert world.service.backlog.end_pass(begun, thought) == (1, 1)
    assert max(placed_gpus(world).values()) == 1
    assert len(placed_gpus(world)) == 16
    assert len(queued(world)) == 1


def test_a_placement_is_dated_when_it_is_kept_and_not_when_its_pass_began(world: World) -> None:
    enqueue(world, "x")
    begun = world.service.backlog.begin_pass()
    assert begun is not None
    thought = begun.compute_plan()
    world.clock.advance(0.2)  # meanwhile another job was placed on these GPUs and cancelled
    assert world.service.backlog.end_pass(begun, thought) == (1, 0)
    (intent,) = world.service.ledger.list_active_intents()
    assert intent.created_ms == world.clock.now_ms()


def test_a_plan_that_lost_is_made_again_at_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue(world, "x")
    think = QueuePass.compute_plan

    def rudely(self: QueuePass) -> Any:
        thought = think(self)
        if not world.service.ledger.list_active_intents():
            (decision,) = (decision for _, decision in thought.placed)
            others = [name for name in ("n15", "n16") if name != decision.ranks[0].node]
            loop.call_soon_threadsafe(
                world.service.place, PlacementRequest(request_id="quick", **NODE, avoid_nodes=tuple(others)), "me"
            )
            loop.call_soon_threadsafe(taken.set)
            taken.wait(5)
        return thought

    async def work() -> None:
        nonlocal loop
        loop = asyncio.get_running_loop()
        await world.worker.run_due_pass()
        assert queued(world) == ["x"]
        await world.worker.run_due_pass()  # the period is not over, but the plan was lost

    loop: asyncio.AbstractEventLoop
    taken = threading.Event()
    monkeypatch.setattr(QueuePass, "compute_plan", rudely)
    asyncio.run(work())
    assert queued(world) == []
    assert max(placed_gpus(world).values()) == 1


def test_a_request_that_was_withdrawn_meanwhile_is_not_placed(world: World) -> None:
    enqueue(world, "x", "y")
    begun = world.service.backlog.begin_pass()
    assert begun is not None
    thought = begun.compute_plan()
    world.service.withdraw("x", "me")
    assert world.service.backlog.end_pass(begun, thought) == (1, 0)
    assert [intent.request_id for intent in world.service.ledger.list_active_intents()] == ["y"]
    assert world.ask("GET", "/placements/x").json()["outcome"] == "refused"


def test_a_node_that_became_risky_meanwhile_is_left_alone(world: World) -> None:
    enqueue(world, "x", "y")
    begun = world.service.backlog.begin_pass()
    assert begun is not None
    thought = begun.compute_plan()
    world.board.risk = {14: (0.9, "too hot")}
    world.board.publish()
    assert world.service.backlog.end_pass(begun, thought) == (1, 1)
    assert {node for node, _ in placed_gpus(world)} == {"n16"}


def test_another_topology_makes_the_plan_anew(world: World) -> None:
    enqueue(world, "x")
    begun = world.service.backlog.begin_pass()
    assert begun is not None
    thought = begun.compute_plan()
    world.board.generation = 2
    world.board.publish()
    assert world.service.backlog.end_pass(begun, thought) == (0, 1)
    assert world.service.backlog.run_pass() == 1


def test_requests_are_answered_while_a_pass_thinks(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue(world, "x")
    think, thinking, answered = QueuePass.compute_plan, threading.Event(), threading.Event()

    def slowly(self: QueuePass) -> Any:
        thinking.set()
        assert answered.wait(10), "nobody was answered"
        return think(self)

    async def work() -> None:
        step = asyncio.ensure_future(world.worker.run_due_pass())
        while not thinking.is_set():
            await asyncio.sleep(0.001)
        assert b'"placed"' in world.service.place(PlacementRequest(request_id="quick", **NODE), "me")
        answered.set()
        await step  # both wanted the same node
        await world.worker.run_due_pass()

    monkeypatch.setattr(QueuePass, "compute_plan", slowly)
    asyncio.run(work())
    assert queued(world) == []
    assert len(placed_gpus(world)) == 16


def test_a_view_with_one_more_promise_is_that_of_all_promises(world: World) -> None:
    for number in range(4):
        world.place(f"r{number}", gang=2, gpus_per_node=2)
    one_by_one = world.service.view.observe_fleet()
    base = world.service.view.view_without_promises
    assert base is not None
    at_once = add_intents(base, world.service.ledger.list_active_intents())
    assert np.array_equal(one_by_one.view.free, at_once.view.free)
    assert np.array_equal(one_by_one.view.holders, at_once.view.holders)
    assert np.array_equal(one_by_one.view.free_cpus, at_once.view.free_cpus)
    assert one_by_one.view.jobs == at_once.view.jobs
    assert runs_of(one_by_one.running) == runs_of(at_once.running)


def test_a_cancelled_promise_leaves_the_view(world: World) -> None:
    world.place("r1", **NODE)
    world.place("r2", **NODE)
    assert world.place("r3", **NODE)["outcome"] == "refused"
    world.service.cancel("r1", "me")
    assert world.place("r4", **NODE)["outcome"] == "placed"
    assert max(placed_gpus(world).values()) == 1


def test_a_board_is_decoded_once_by_whoever_sees_it_first(world: World) -> None:
    async def look() -> list[bool]:
        both = [
            asyncio.ensure_future(world.service.view.refresh_in_thread()),
            asyncio.ensure_future(world.service.view.refresh_in_thread()),
        ]
        return list(await asyncio.gather(*both))

    assert asyncio.run(look()) == [True, False]
    assert world.service.view.refresh() is False
