"""The life of an action: its states, and the possible changes between them.

    proposed ─→ sent ─→ accepted ─→ seen
        │         ├────────┴─────────→ seen | refused | expired | withdrawn
        ├→ withdrawn
        └→ expired              refused | expired ─→ late: it happened all the same

The ledger stores `proposed` before anything is published. `sent` means that the executor may carry out the
action. An action is withdrawn only while no executor may have begun it (`ActionRecord.may_have_begun`), or once its
attempt has ended.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

import msgspec

from fleetcast.fleet.errors import ConflictError
from fleetcast.placement.actions.action import AGENTS, JobAction


class ActionState(StrEnum):
    PROPOSED = "proposed"
    SENT = "sent"  # its executor may carry it out
    ACCEPTED = "accepted"  # its executor said that it does
    SEEN = "seen"  # occupancy and telemetry show that it happened
    REFUSED = "refused"
    EXPIRED = "expired"
    WITHDRAWN = "withdrawn"  # its reason went away before it happened
    LATE = "late"  # it happened after its end: nobody gets what it freed by it


OPEN = frozenset({ActionState.PROPOSED, ActionState.SENT, ActionState.ACCEPTED})
_AFTER_SENDING = frozenset({ActionState.SEEN, ActionState.REFUSED, ActionState.EXPIRED, ActionState.WITHDRAWN})
FOLLOWED_BY = {
    ActionState.PROPOSED: frozenset({ActionState.SENT, ActionState.WITHDRAWN, ActionState.EXPIRED}),
    ActionState.SENT: _AFTER_SENDING | {ActionState.ACCEPTED},
    ActionState.ACCEPTED: _AFTER_SENDING,
    ActionState.REFUSED: frozenset({ActionState.LATE}),
    ActionState.EXPIRED: frozenset({ActionState.LATE}),
}


class IllegalTransition(ConflictError):
    """The error for an action that cannot change from its present state to another one."""


class LifeStep(msgspec.Struct, frozen=True):
    """A state that an action entered, and the time in Unix ms."""

    state: ActionState
    time_ms: int


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """A stored action with its life.

    why: the reason for its last state, in words. It is "" if that state needs no reason. changed: the number of
    the audit line about its last state. This number grows with each change.
    """

    action_id: str
    action: JobAction
    life: tuple[LifeStep, ...]
    why: str = ""
    changed: int = 0

    @property
    def state(self) -> ActionState:
        return self.life[-1].state

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    @property
    def was_sent(self) -> bool:
        return self.find_time_ms(ActionState.SENT) is not None

    @property
    def is_underway(self) -> bool:
        """Whether the action was sent, or actions that free GPUs for it were. From then on its GPUs are promised."""
        return self.was_sent or bool(self.action.after)

    @property
    def may_have_begun(self) -> bool:
        """Whether an executor may have begun the action by now, so that the placer can no longer withdraw it.

        A job's own agent begins only after its reply was recorded. Any other executor begins before it replies.
        """
        return self.was_sent and (self.state is not ActionState.SENT or self.action.executor != AGENTS)

    def find_time_ms(self, state: ActionState) -> int | None:
        """Return when the action entered a state in Unix ms, or None if it never did."""
        return next((step.time_ms for step in self.life if step.state is state), None)

    def enter(self, state: ActionState, now_ms: int, why: str = "") -> "ActionRecord":
        """Return the record after the action enters a state. Nothing changes if it already has this state.

        Raises IllegalTransition if the state cannot follow the present one.
        """
        if self.state is state:
            return self
        if state not in FOLLOWED_BY.get(self.state, ()):
            because = f" ({self.why})" if self.why else ""
            raise IllegalTransition(f"action {self.action_id} is {self.state}{because}: it cannot become {state}")
        return replace(self, life=(*self.life, LifeStep(state, now_ms)), why=why)


def may_return(last: ActionRecord) -> bool:
    """Return whether an action with the same key may be proposed again after this one has ended.

    It may not if the executor refused that action or let it expire. Another set of jobs must then be proposed.
    """
    return not last.was_sent or last.state in (ActionState.SEEN, ActionState.WITHDRAWN)
