"""A promise expires upon a board that knows of everything that was acknowledged up to its expiry, and upon no other."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fleetcast.fleet.clock import ManualClock
from fleetcast.fleet.errors import ConflictError
from fleetcast.fleet.topology import NodeSpec, Topology
from fleetcast.ingest.inbox.inbox import InboxSource, InboxWriter, Position
from fleetcast.ingest.inbox.segments import RecordKind
from fleetcast.placement.ledger.ledger import IntentState
from fleetcast.service.board.board import BoardReader
from fleetcast.service.config import Config
from fleetcast.service.pipeline.pipeline import Pipeline
from tests.service.placer_world import NOW_MS, World

EXPIRES_S = 300


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    made.board.publish()
    made.place("a", gang=16, gpus_per_node=8)
    yield made
    made.close()


def started(job: str) -> bytes:
    event = {"job": job, "attempt": 1, "sequence": 1, "time_ms": NOW_MS, "type": "started", "nodes": ["n01"]}
    return msgspec.json.encode(event)


def acknowledge(folder: Path, *payloads: bytes, name: str = "api", kind: int = RecordKind.EVENT) -> Position:
    """Write as a process does that ends then."""

    async def append() -> Position:
        writer = InboxWriter(folder, name)
        position = await writer.append(payloads, NOW_MS, kind)
        await writer.close()
        return position

    return asyncio.run(append())


def pass_time(world: World, seconds: float, inbox: dict[str, int] | None = None) -> None:
    """A board as of then; without `inbox` it has folded what the one before had."""
    world.clock.advance(seconds)
    world.board.as_of_ms = world.clock.now_ms()
    world.board.inbox = world.board.inbox if inbox is None else inbox
    world.board.publish()


def state(world: World, request_id: str = "a") -> IntentState | None:
    """After the placer has looked, which it does where it decides."""
    world.place("look", gang=1, dry_run=True)
    return world.service.ledger.read_intent_state(request_id)


def test_a_start_that_was_acknowledged_in_time_and_is_not_folded_yet_keeps_the_gpus(world: World) -> None:
    at = acknowledge(world.config.inbox, started("a"))
    pass_time(world, EXPIRES_S + 1)
    assert state(world) is IntentState.ACTIVE
    assert world.place("b", gang=16, gpus_per_node=8)["outcome"] == "refused"
    world.board.jobs = {"a": range(16)}
    pass_time(world, 5, {at.segment: at.offset})
    assert state(world) is IntentState.SEEN
    assert world.place("c", gang=16, gpus_per_node=8)["outcome"] == "refused"


def test_what_was_started_is_not_cancelled_though_no_board_knows_it(world: World) -> None:
    acknowledge(world.config.inbox, started("other"), started("a"))
    with pytest.raises(ConflictError, match="runs already"):
        world.service.cancel("a", "test")
    assert state(world) is IntentState.ACTIVE


def test_what_was_only_submitted_is_cancelled(world: World) -> None:
    submitted = msgspec.json.encode({"job": "a", "attempt": 1, "sequence": 0, "time_ms": NOW_MS, "type": "submitted"})
    second = started("a").replace(b'"attempt":1', b'"attempt":2')
    acknowledge(world.config.inbox, submitted, started("other"), second, b"no event")
    world.service.cancel("a", "test")
    assert state(world) is IntentState.CANCELLED


def test_it_expires_at_the_first_board_that_knows_of_what_was_acknowledged_up_to_then(world: World) -> None:
    at = acknowledge(world.config.inbox, started("other"))
    pass_time(world, EXPIRES_S)
    assert state(world) is IntentState.ACTIVE
    acknowledge(world.config.inbox, started("later"))  # a segment of its own, after the expiry
    pass_time(world, 5, {at.segment: at.offset})
    assert state(world) is IntentState.EXPIRED
    assert world.place("b", gang=16, gpus_per_node=8)["outcome"] == "placed"


def test_a_board_from_before_the_expiry_is_no_word_about_it(world: World) -> None:
    pass_time(world, EXPIRES_S - 1)
    world.clock.advance(2)
    assert state(world) is IntentState.ACTIVE
    pass_time(world, 0)
    assert state(world) is IntentState.EXPIRED


def test_a_restarted_placer_looks_anew(world: World) -> None:
    at = acknowledge(world.config.inbox, started("other"))
    pass_time(world, EXPIRES_S)
    assert state(world) is IntentState.ACTIVE
    world.restart()
    assert state(world) is IntentState.ACTIVE
    pass_time(world, 5, {at.segment: at.offset})
    assert state(world) is IntentState.EXPIRED


def test_each_writer_of_events_is_waited_for_and_remote_writes_are_not(world: World) -> None:
    first = acknowledge(world.config.inbox, started("x"), name="api")
    second = acknowledge(world.config.inbox, started("y"), name="api.1")
    acknowledge(world.config.inbox, b"samples", name="writes", kind=RecordKind.WRITE)
    pass_time(world, EXPIRES_S, {first.segment: first.offset})
    assert state(world) is IntentState.ACTIVE
    pass_time(world, 5, {first.segment: first.offset, second.segment: second.offset})
    assert state(world) is IntentState.EXPIRED


def test_the_torn_tail_of_a_killed_writer_does_not_hold_a_promise_for_ever(world: World) -> None:
    at = acknowledge(world.config.inbox, started("other"))
    with (world.config.inbox / at.segment).open("ab") as segment:
        segment.write(started("a")[:40])
    pass_time(world, EXPIRES_S, {at.segment: at.offset})
    assert state(world) is IntentState.EXPIRED


def test_a_whole_record_behind_damage_is_waited_for(world: World) -> None:
    at = acknowledge(world.config.inbox, started("other"))
    path = world.config.inbox / at.segment
    whole = path.read_bytes()[16:]
    path.write_bytes(path.read_bytes() + b"\xff" * 40 + whole)
    pass_time(world, EXPIRES_S, {at.segment: at.offset})
    assert state(world) is IntentState.ACTIVE
    pass_time(world, 5, {at.segment: path.stat().st_size})
    assert state(world) is IntentState.EXPIRED


def test_a_segment_that_was_pruned_meanwhile_was_folded(world: World) -> None:
    at = acknowledge(world.config.inbox, started("other"))
    pass_time(world, EXPIRES_S)
    assert state(world) is IntentState.ACTIVE
    newer = acknowledge(world.config.inbox, started("later"))
    (world.config.inbox / at.segment).unlink()
    pass_time(world, 5, {newer.segment: 16})
    assert state(world) is IntentState.EXPIRED


def test_numbering_that_began_anew_is_not_taken_for_what_was_folded_before(world: World) -> None:
    acknowledge(world.config.inbox, started("other"))
    pass_time(world, EXPIRES_S, {"api-000000000007.seg": 5000})
    assert state(world) is IntentState.ACTIVE


def test_a_clock_that_is_set_back_takes_the_expiry_with_it(world: World) -> None:
    at = acknowledge(world.config.inbox, started("other"))
    pass_time(world, EXPIRES_S)
    assert state(world) is IntentState.ACTIVE
    world.clock.time_ms -= 7_200_000
    pass_time(world, 1)
    assert state(world) is IntentState.ACTIVE
    pass_time(world, 5, {at.segment: at.offset})
    assert state(world) is IntentState.EXPIRED


@pytest.fixture
def served(tmp_path: Path) -> Iterator[World]:
    """A placer on the board of a real pipeline, which has published one."""
    made = World(tmp_path)
    pipeline = open_pipeline(made)
    asyncio.run(pipeline.tick())
    made.place("a", gpus_per_node=8)
    yield made
    made.close()


def open_pipeline(world: World) -> Pipeline:
    config: Config = world.config
    topology = Topology.build([NodeSpec("n01", 8, "H100")])
    return Pipeline(config, world.clock, topology, lambda _: [InboxSource(config.inbox)])


def test_a_pipeline_that_stood_still_across_an_expiry_takes_nothing_from_a_job_that_was_started(served: World) -> None:
    """The board stays fresh enough to decide upon while the pipeline is stopped."""
    clock: ManualClock = served.clock
    clock.advance(EXPIRES_S - 20)
    pipeline = open_pipeline(served)
    asyncio.run(pipeline.tick())
    acknowledge(served.config.inbox, started("a"))
    clock.advance(40)  # stopped: nobody reads, nobody publishes
    answer: dict[str, Any] = served.place("b", gpus_per_node=8)
    assert answer["outcome"] == "refused"

    async def go_on() -> None:
        pipeline.apply_batch(await pipeline.sources[0].next())
        await pipeline.tick()

    asyncio.run(go_on())
    board = BoardReader(served.config.board).latest()
    assert board is not None
    assert board.standing is not None
    assert board.standing.inbox == pipeline.sources[0].position() != {}
    assert state(served) is IntentState.SEEN
    assert served.place("c", gpus_per_node=8)["outcome"] == "refused"


def test_a_tick_claims_what_was_folded_when_its_copies_were_taken(served: World) -> None:
    """A start that is folded while a tick scores is not on that tick's board, and its place is not, either."""
    pipeline = open_pipeline(served)

    async def fold_while_a_tick_scores() -> None:
        ticking = asyncio.create_task(pipeline.tick())
        while not pipeline._memory_free.locked():  # the copies are taken, the thread scores
            await asyncio.sleep(0)
        pipeline.apply_batch(await pipeline.sources[0].next())
        await ticking

    acknowledge(served.config.inbox, started("a"))
    asyncio.run(fold_while_a_tick_scores())
    board = BoardReader(served.config.board).latest()
    assert board is not None
    assert board.standing is not None
    assert board.standing.inbox == {}
    served.clock.advance(EXPIRES_S)
    assert state(served) is IntentState.ACTIVE
    asyncio.run(pipeline.tick())
    assert state(served) is IntentState.SEEN
