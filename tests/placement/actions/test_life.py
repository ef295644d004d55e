"""Which state of an action follows which."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.placement.actions.action import ActionKind
from fleetcast.placement.actions.life import (
    OPEN,
    ActionRecord,
    ActionState,
    IllegalTransition,
    LifeStep,
    may_return,
)
from tests.placement.actions.action_world import make_action

S = ActionState
LEGAL = {
    *((S.PROPOSED, state) for state in (S.SENT, S.WITHDRAWN, S.EXPIRED)),
    *((S.SENT, state) for state in (S.ACCEPTED, S.SEEN, S.REFUSED, S.EXPIRED, S.WITHDRAWN)),
    *((S.ACCEPTED, state) for state in (S.SEEN, S.REFUSED, S.EXPIRED, S.WITHDRAWN)),
    *((S.REFUSED, S.LATE), (S.EXPIRED, S.LATE)),
}


def in_state(*states: ActionState, kind: ActionKind = ActionKind.PREEMPT) -> ActionRecord:
    return ActionRecord("a-1", make_action(kind=kind), tuple(LifeStep(state, at) for at, state in enumerate(states)))


@pytest.mark.parametrize("before", ActionState)
@pytest.mark.parametrize("after", ActionState)
def test_a_state_follows_only_those_that_it_may(before: ActionState, after: ActionState) -> None:
    record = in_state(before)
    if before is after:
        assert record.enter(after, 9) is record
    elif (before, after) in LEGAL:
        entered = record.enter(after, 9, "why")
        assert (entered.life, entered.why) == ((LifeStep(before, 0), LifeStep(after, 9)), "why")
    else:
        with pytest.raises(IllegalTransition, match=f"action a-1 is {before}: it cannot become {after}"):
            record.enter(after, 9)


@given(st.lists(st.sampled_from(ActionState), max_size=20))
def test_every_life_ends_and_never_opens_again(wanted: list[ActionState]) -> None:
    record = in_state(S.PROPOSED)
    for time_ms, state in enumerate(wanted):
        before = record
        try:
            record = record.enter(state, time_ms)
        except IllegalTransition:
            assert record is before
        assert before.is_open or not record.is_open
    assert len(record.life) <= 5
    assert len({step.state for step in record.life}) == len(record.life)


def test_an_open_action_may_still_end_and_an_ended_one_is_told_why() -> None:
    assert {S.PROPOSED, S.SENT, S.ACCEPTED} == OPEN
    refused = in_state(S.PROPOSED, S.SENT).enter(S.REFUSED, 5, "no checkpoint")
    with pytest.raises(IllegalTransition, match=r"is refused \(no checkpoint\): it cannot become seen"):
        refused.enter(S.SEEN, 6)
    assert (refused.find_time_ms(S.REFUSED), refused.find_time_ms(S.SEEN)) == (5, None)


@pytest.mark.parametrize("kind", ActionKind)
@pytest.mark.parametrize(
    ("executor", "states", "expected"),
    [
        ("agents", (), False),
        ("agents", (S.SENT,), False),
        ("agents", (S.SENT, S.ACCEPTED), True),
        ("slurm", (), False),
        ("slurm", (S.SENT,), True),
        ("slurm", (S.SENT, S.ACCEPTED), True),
    ],
)
def test_an_agent_begins_after_its_reply_and_any_other_executor_before_it(
    kind: ActionKind, executor: str, states: tuple[ActionState, ...], expected: bool
) -> None:
    record = in_state(S.PROPOSED, *states, kind=kind)
    record = replace(record, action=msgspec.structs.replace(record.action, executor=executor))
    assert record.may_have_begun is expected
    assert may_return(record.enter(S.WITHDRAWN, 9))


def test_a_key_may_be_proposed_again_unless_its_executor_failed_it() -> None:
    assert may_return(in_state(S.PROPOSED, S.WITHDRAWN))
    assert may_return(in_state(S.PROPOSED, S.EXPIRED))
    assert may_return(in_state(S.PROPOSED, S.SENT, S.SEEN))
    assert not may_return(in_state(S.PROPOSED, S.SENT, S.REFUSED))
    assert not may_return(in_state(S.PROPOSED, S.SENT, S.ACCEPTED, S.EXPIRED))
    assert not may_return(in_state(S.PROPOSED, S.SENT, S.EXPIRED, S.LATE))
