"""The protocol between Fleetcast and the systems that carry out actions on running jobs.

    placer: action sent → Executor.send → accept or refuse → telemetry and job events show that it happened

An executor decides nothing, and it never declares a GPU free: a GPU is free when the board shows it idle.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from fleetcast.fleet.requests import RankPlacement


class ActionOrder(NamedTuple):
    """An action that an executor carries out.

    kind: preempt, shrink, grow, move, replace or place. gpus: how many it frees, or adds to the job. ranks: the
    affected ranks, at their present places. places: where ranks go. payer: the request that gets the freed GPUs,
    or "". grace_s: seconds for a last checkpoint. by_ms: Unix ms at which the action expires.
    """

    action_id: str
    kind: str
    job: str
    attempt: int
    gpus: float
    ranks: Sequence[RankPlacement]
    places: Sequence[RankPlacement]
    payer: str
    grace_s: float
    by_ms: int


class SendOutcome(StrEnum):
    """The outcome of a call for one action.

    ACCEPTED: the system carries the action out. REFUSED: it will not. UNREACHABLE: it did not answer, so the caller
    repeats the call.
    """

    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNREACHABLE = "unreachable"


class SendReply(NamedTuple):
    """The reply of an executor about one action. why: the reason if it is not accepted, in the other system's words."""

    outcome: SendOutcome
    why: str = ""


ACCEPTED = SendReply(SendOutcome.ACCEPTED)


def make_refusal(why: str) -> SendReply:
    return SendReply(SendOutcome.REFUSED, why)


class Executor(Protocol):
    """A system that carries out actions on the jobs that it runs."""

    def explain_inability(self, kind: str, job: str) -> str:
        """Return why this executor cannot carry out a kind of action on a job, or "" if it can.

        This reads the configuration alone, so that the placer may call it in a pass.
        """

    async def send(self, order: ActionOrder) -> SendReply:
        """Begin to carry out an action. A repeated call for the same action does nothing twice."""

    async def follow(self, orders: Sequence[ActionOrder]) -> Sequence[SendReply]:
        """Continue the actions that were sent, and return one reply for each, in order.

        A step that must wait, for example for the end of the grace, is made in a later call. A reply with REFUSED ends
        the action.
        """

    async def close(self) -> None:
        """Close all connections. May be called twice."""
