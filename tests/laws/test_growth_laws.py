"""Laws of growth that is sent: random replies, requests, ends, restarts and pauses around one placer with a gang.

A GPU has one holder, a gang keeps its sizes, and accepted growth keeps its GPUs until it ends.
"""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import ConflictError
from fleetcast.placement.ledger.verify import verify_ledger
from tests.fuzz.bounds import examples
from tests.service.placer.test_act import ACT_LATE_S
from tests.service.placer.test_growth_acts import GANG, GrowthWorld
from tests.service.placer.test_reclaim import OLD_S
from tests.service.placer_world import GPUS

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["accept", "refuse", "grow", "end", "ask", "ask", "restart", "pause", "resume", "late", "wait"]
        ),
        st.integers(1, 4),
    ),
    max_size=10,
)


def carry_out(world: GrowthWorld, verb: str, number: int, at: int) -> None:
    """Make one random step. number: nodes. at: the number of the step."""
    control, now_ms = world.service.actions, world.clock.now_ms()
    record = control.find_open_action_of("wide")
    if verb in ("accept", "refuse") and record is not None:
        with suppress(ConflictError):
            if verb == "accept":
                control.accept(record.action_id, "wide", 1, now_ms, "agent")
            else:
                control.refuse(record.action_id, "wide", 1, "cannot", now_ms, "agent")
    elif verb == "grow" and record is not None and record.state == "accepted":
        world.grow()
    elif verb == "end" and "wide" in world.board.jobs:
        world.end("wide")
    elif verb == "ask":
        world.wait_for(f"r{at}", "batch", number)
    elif verb == "restart":
        world.restart()
    elif verb in ("pause", "resume"):
        getattr(control, verb)(now_ms, "ada")


def check_laws(world: GrowthWorld) -> None:
    held = {node: job for job, nodes in world.board.jobs.items() for node in nodes}
    for intent in world.service.ledger.list_active_intents():
        for node in {int(rank.node[1:]) - 1 for rank in intent.ranks}:
            assert held.setdefault(node, intent.request_id) == intent.request_id, "one holder"
    rows = world.service.ledger.actions.read_after(0, 10_000, job="wide")
    for row in rows:
        action = row.action
        size = 8 + len(action.places)
        assert action.gpus == GPUS * len(action.places)
        assert size <= GANG["gang"]["desired"]
        assert size % GANG["gang"]["step"] == 0
        if row.is_open and row.was_sent:
            places = {int(place.node[1:]) - 1 for place in action.places}
            assert all(held.get(node, "wide") == "wide" for node in places), "growth keeps its GPUs while it is open"
    asked = [row for row in rows if row.was_sent]
    failed = [at for at, row in enumerate(asked) if row.state in ("refused", "expired")]
    assert failed in ([], [len(asked) - 1]), "an attempt that failed to grow is not asked again"


@examples(40)
@given(STEPS)
def test_laws_of_growth_hold_through_replies_requests_ends_restarts_and_pauses(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    folder = tmp_path_factory.mktemp("growth") / "w"
    folder.mkdir()
    world = GrowthWorld(folder)
    world.agents_pass_at(OLD_S)
    assert world.states() == {"wide": "sent"}
    for at, (verb, number) in enumerate(steps):
        carry_out(world, verb, number, at)
        world.agents_pass_at(ACT_LATE_S + 1 if verb == "late" else 20)
        check_laws(world)
    world.close()
    assert verify_ledger(world.config.ledger).is_intact
