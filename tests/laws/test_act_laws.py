"""Laws of stops that are carried out: random replies, ends, restarts and pauses around one placer.

One job holds a GPU, a freed GPU goes to the request that paid for it, and a restart in the middle changes nothing.
"""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import ConflictError
from fleetcast.placement.ledger.verify import verify_ledger
from tests.fuzz.bounds import examples
from tests.service.placer.test_act import ACT, OLD_S, ActWorld

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["accept", "refuse", "end", "lie", "restart", "pause", "resume", "late", "wait"]),
        st.integers(0, 3),
    ),
    max_size=10,
)


def fill_world(folder: Path, text: str = ACT) -> ActWorld:
    """Return a full fleet in which p is owed 4 nodes, and a rival waits for as many."""
    folder.mkdir()
    world = ActWorld(folder, text)
    world.fill(own=("owed", 4), a=("lender", 2), b=("lender", 2), c=("lender", 2), d=("lender", 2), e=("lender", 4))
    world.wait_for("p", "owed", 4)
    world.wait_for("rival", "lender", 2)
    world.agents_pass_at(OLD_S)
    return world


def carry_out(world: ActWorld, verb: str, at: int) -> None:
    """Make one random step."""
    job = "abcd"[at]
    control = world.service.actions
    record = world.service.ledger.actions.find_open_action_of(job)
    if verb in ("accept", "refuse", "lie") and record is not None:
        about = record.action_id, job, 1
        with suppress(ConflictError):
            if verb == "refuse":
                control.refuse(*about, "cannot", world.clock.now_ms(), "agent")
            else:
                control.accept(*about, world.clock.now_ms(), "agent")
    elif verb == "end" and job in world.board.jobs and record is not None:
        world.end(job)
    elif verb == "restart":
        world.restart()
    elif verb in ("pause", "resume"):
        getattr(control, verb)(world.clock.now_ms(), "ada")


def check_laws(world: ActWorld) -> None:
    held: dict[tuple[str, int], str] = {}
    for intent in world.service.ledger.list_active_intents():
        for rank in intent.ranks:
            for gpu in rank.gpus:
                assert held.setdefault((rank.node, gpu), intent.request_id) == intent.request_id, "one holder"
    for nodes in world.board.jobs.values():
        for node in nodes:
            assert (f"n{node + 1:02d}", 0) not in held, "a running job and a promise on one GPU"
    rows = world.service.ledger.actions.read_after(0, 10_000)
    assert len({row.action.job for row in rows if row.is_open}) == sum(row.is_open for row in rows)
    asked = {row.action.job for row in rows if row.was_sent and row.action.payer == "p"}
    assert sum(row.was_sent for row in rows) == len(asked), "no job is asked twice for one request"
    waits = world.service.ledger.is_queued("p")
    freed = {
        rank.node
        for found in world.service.view.promised_sets.list_followed(world.clock.now_ms())
        if found.is_live
        for record in found.records
        for rank in record.action.ranks
    }
    for node, _ in held:
        assert not (waits and node in freed), "what was freed for p went to another request"


@examples(30)
@given(STEPS)
def test_laws_hold_through_replies_ends_restarts_and_pauses(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    world = fill_world(tmp_path_factory.mktemp("act") / "w")
    check_laws(world)
    for verb, at in steps:
        sent = sum(row.was_sent for row in world.service.ledger.actions.read_after(0, 10_000))
        carry_out(world, verb, at)
        world.agents_pass_at(721 if verb == "late" else 20)
        check_laws(world)
        now_sent = sum(row.was_sent for row in world.service.ledger.actions.read_after(0, 10_000))
        assert now_sent == sent or not world.service.actions.explain_stop(), "nothing is sent while paused"
    world.close()
    assert verify_ledger(world.config.ledger).is_intact


@examples(10)
@given(st.lists(st.integers(0, 3), max_size=4), st.integers(0, 60))
def test_without_any_executor_the_placements_are_those_of_reclaim_off(
    tmp_path_factory: pytest.TempPathFactory, ends: list[int], step_s: int
) -> None:
    placed = []
    for text in (ACT, ACT.replace('"act"', '"off"')):
        world = ActWorld(tmp_path_factory.mktemp("off"), text)
        world.fill(own=("owed", 4), a=("lender", 2), b=("lender", 2), c=("lender", 2), d=("lender", 6))
        world.wait_for("p", "owed", 4)
        world.wait_for("rival", "lender", 2)
        world.pass_at(OLD_S)
        for at in ends:
            if "abcd"[at] in world.board.jobs:
                world.end("abcd"[at])
            world.pass_at(step_s + 1)
        placed.append(world.placed())
        world.close()
    assert placed[0] == placed[1]
