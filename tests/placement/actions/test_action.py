"""What an action is: its id, its bounds, and the sentence about it."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import (
    ActionCost,
    ActionKind,
    ActionReason,
    JobAction,
    RejectedSet,
    check_action,
    make_action_id,
)
from fleetcast.placement.actions.words import describe_action
from tests.placement.actions.action_world import KINDS, make_action

WISHED: dict[str, Any] = {
    "kind": ActionKind.SHRINK,
    "job": "other",
    "attempt": 2,
    "ranks": (RankPlacement(1, "n2", (0, 1)),),
    "places": (RankPlacement(0, "n3", (0, 1)),),
    "payer": "another",
}
OTHER: dict[str, Any] = {
    "queue": "prod",
    "gpus": 2.0,
    "executor": "slurm",
    "by_ms": 1,
    "reason": ActionReason("class"),
    "cost": ActionCost(gain=-5.0),
    "grace_s": 0.0,
    "lost_gpus": 1.0,
    "rejected": (),
    "pinned": (RankPlacement(0, "n1", (2,)),),
    "after": ("0f-1",),
}


def test_the_key_is_made_of_kind_job_attempt_ranks_and_payer_alone() -> None:
    plain = make_action().compute_key()
    assert {make_action(**{name: value}).compute_key() == plain for name, value in WISHED.items()} == {False}
    assert {make_action(**{name: value}).compute_key() for name, value in OTHER.items()} == {plain}
    assert WISHED.keys() | OTHER.keys() == set(JobAction.__struct_fields__)
    assert make_action_id(plain, 1) == f"{plain}-1"


@given(KINDS, st.text(min_size=1), st.integers(0, 9), st.text())
def test_an_action_is_read_as_it_was_written(kind: ActionKind, job: str, attempt: int, payer: str) -> None:
    action = make_action(job, kind=kind, attempt=attempt, payer=payer)
    check_action(action)
    assert msgspec.json.decode(msgspec.json.encode(action), type=JobAction) == action
    assert job in describe_action(action)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("cost.lost", {"cost": ActionCost(lost=float("nan"))}),
        ("cost.restart", {"cost": ActionCost(restart=-1.0)}),
        ("cost.gain", {"cost": ActionCost(gain=float("-inf"))}),
        ("gpus", {"gpus": 0.0}),
        ("gpus", {"gpus": float("nan")}),
        ("grace_s", {"grace_s": -1.0}),
        ("lost_gpus", {"lost_gpus": 1e9}),
        ("lost_gpus", {"lost_gpus": float("nan")}),
        ("job", {"job": ""}),
        ("executor", {"executor": ""}),
        ("ranks", {"ranks": ()}),
        ("reason.numbers", {"reason": ActionReason("guarantee", {"held": float("inf")})}),
        ("rejected", {"rejected": (RejectedSet(("a",), 1.0, float("nan")),)}),
    ],
)
def test_an_amount_that_no_action_can_have_is_refused(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        check_action(make_action(**changes))
    assert refused.value.field == field


def test_the_cost_is_the_sum_of_its_terms_and_only_gain_may_be_negative() -> None:
    cost = ActionCost(lost=100.0, restart=20.0, gain=-30.0)
    assert cost.total == 90.0
    assert dict(cost.list_terms())["gain"] == -30.0
    check_action(make_action(cost=cost))


def test_the_sentence_says_what_for_whom_and_why() -> None:
    assert describe_action(make_action()) == (
        "stops attempt 1 of big (4 GPUs) for request urgent: a queue gets back what it is guaranteed "
        "(guaranteed 8, held 4)"
    )
    grown = make_action(kind=ActionKind.GROW, payer="", reason=ActionReason("a_new_code"))
    assert describe_action(grown) == "grows attempt 1 of big by 4 GPUs: a_new_code"
    numbers = {"nodes": 2.0, "p": 0.9961, "wait_gpu_s": 7200.0, "spare_gpu_s": 36.0, "new": 1.5}
    moved = make_action(kind=ActionKind.REPLACE, gpus=1.0, reason=ActionReason("foreseen_spare", numbers), payer="")
    assert describe_action(moved) == (
        "replaces nodes of attempt 1 of big (1 GPU): nodes are likely to fail, and spare nodes join "
        "(new 1.5, 2 nodes, probability 99.6%, GPU-hours: spare nodes 0.01, waiting 2.00)"
    )
