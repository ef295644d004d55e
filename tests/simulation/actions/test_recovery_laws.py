"""Check that each law of gangs that leave nodes can be broken."""

from typing import Any

import pytest

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import ActionKind, make_recovery_payer
from fleetcast.placement.actions.breaker import BreakerLimits
from fleetcast.placement.actions.life import ActionRecord, ActionState, LifeStep
from tests.placement.actions.action_world import make_action
from tests.service.placer_world import GPUS, RACK
from tests.simulation.actions.fleet import FleetJob, format_node
from tests.simulation.actions.laws import ActionLaws
from tests.simulation.actions.recovery_laws import RecoveryLaws
from tests.simulation.oracle import Broken

SHRINK, REPLACE = ActionKind.SHRINK, ActionKind.REPLACE


def make_ranks(*nodes: int) -> tuple[RankPlacement, ...]:
    return tuple(RankPlacement(rank, format_node(node), tuple(range(GPUS))) for rank, node in enumerate(nodes))


@pytest.mark.parametrize(("kind", "leaves", "places", "changes", "law"), [
    (SHRINK, (2, 3), (), {}, ""),
    (SHRINK, (3,), (), {}, "size"),
    (SHRINK, (1, 2, 3), (), {}, "size"),
    (SHRINK, (2, 3), (), {"gang": None}, "size"),
    (SHRINK, (1, 2), (), {}, "leaves"),
    (SHRINK, (3, 9), (), {}, "leaves"),
    (REPLACE, (3,), (RACK,), {}, ""),
    (REPLACE, (3,), (RACK, RACK + 1), {}, "size"),
    (REPLACE, (2,), (RACK,), {}, "leaves"),
    (REPLACE, (3,), (RACK,), {"is_in_rack": True}, "domain"),
])  # fmt: skip
def test_an_action_of_recovery_breaks_a_law(
    kind: ActionKind, leaves: tuple[int, ...], places: tuple[int, ...], changes: dict[str, Any], law: str
) -> None:
    job = FleetJob("a", 1, "owed", (0, 1, 2, 3), 0, 0, **{"gang": (2, 6, 2), **changes})
    laws = RecoveryLaws({"a": job}, frozenset({3}))
    fields = {"kind": kind, "gpus": float(GPUS * len(leaves)), "payer": ""}
    action = make_action("a", ranks=make_ranks(*leaves), places=make_ranks(*places), **fields)
    record = ActionRecord("x-1", action, (LifeStep(ActionState.PROPOSED, 0), LifeStep(ActionState.SENT, 0)))
    if not law:
        laws.check_sending(record)
        return
    with pytest.raises(Broken) as broken:
        laws.check_sending(record)
    assert broken.value.law == law


@pytest.mark.parametrize(("job", "leaves", "sent", "law"), [
    ("b", (4,), True, ""),
    ("b", (4,), False, "borrowed"),
    ("a", (4,), True, "borrowed"),
    ("b", (5,), True, "borrowed"),
])  # fmt: skip
def test_a_replacement_that_waits_for_nodes_breaks_a_law(
    job: str, leaves: tuple[int, ...], sent: bool, law: str
) -> None:
    laws = RecoveryLaws({"a": FleetJob("a", 1, "owed", (0, 1, 2, 3), 0, 0)}, frozenset({3}))
    fields = {"kind": REPLACE, "gpus": float(GPUS), "payer": ""}
    action = make_action("a", ranks=make_ranks(3), places=make_ranks(4), after=("y-1",), **fields)
    stop = make_action(job, kind=ActionKind.PREEMPT, ranks=make_ranks(*leaves), payer=make_recovery_payer("a", 1))
    steps = [LifeStep(ActionState.PROPOSED, 0), LifeStep(ActionState.SENT, 0)]
    record = ActionRecord("x-1", action, (steps[0],))
    stopping = ActionRecord("y-1", stop, tuple(steps if sent else steps[:1]))
    if not law:
        laws.check_borrowing(record, [stopping])
        return
    with pytest.raises(Broken) as broken:
        laws.check_borrowing(record, [stopping])
    assert broken.value.law == law


def test_a_stop_for_a_gang_needs_a_replacement_that_follows_it() -> None:
    payer = make_recovery_payer("a", 1)
    stop = make_action("b", kind=ActionKind.PREEMPT, ranks=make_ranks(4), payer=payer, by_ms=10**6)
    life = LifeStep(ActionState.PROPOSED, 0), LifeStep(ActionState.SENT, 0)
    row = ActionRecord(f"{stop.compute_key()}-1", stop, life)
    with pytest.raises(Broken) as broken:
        ActionLaws(BreakerLimits(1.0, 1.0), 128).check_actions([row], 0, 0, may_send=True)
    assert broken.value.law == "with its payer"
