"""Defects that the simulation of actions must find: `--world actions --mutation NAME`."""

import hashlib
from typing import Any

import msgspec

from fleetcast.placement.actions import life
from fleetcast.placement.actions.action import DIGITS, JobAction
from fleetcast.placement.actions.breaker import CircuitBreaker
from fleetcast.placement.ledger.actions import ActionTable
from fleetcast.placement.reclaim.fairness import FairnessVerdict
from fleetcast.service.placer import action_follow
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.promised_sets import PromisedSets
from tests.simulation.mutations import Mutation


def _hash_job_alone(self: JobAction) -> str:
    """Return an id that does not depend on the attempt, the ranks and the payer."""
    return hashlib.sha256(msgspec.json.encode((self.kind, self.job))).hexdigest()[:DIGITS]


def _judge_before_the_stops(self: FairnessVerdict, victims: Any) -> Any:
    """Return the standing before anything has been stopped or placed."""
    return self.queues.standing.copy()


def _accept_any_attempt(self: ActionControl, action_id: str, *_: Any) -> Any:
    return self.get_action(action_id)


ACTION_MUTATIONS = {
    "freed-when-sent": Mutation(1, ("seen",), action_follow, "has_happened", lambda action, observed: True),
    "believe-the-scheduler": Mutation(
        1, ("seen",), action_follow, "judge_freed_gpus", lambda *_: action_follow.Finding.SEEN_BY_SCHEDULER
    ),
    "promise-nothing": Mutation(
        1, ("to the payer", "given once", "seen"), PromisedSets, "add_holds", lambda self, observed, now_ms: observed
    ),
    "hold-no-new-nodes": Mutation(
        1, ("to the gang", "given once"), PromisedSets, "_list_gang_actions", lambda self: []
    ),
    "an-id-without-its-inputs": Mutation(1, ("ids", "not twice"), JobAction, "compute_wish", _hash_job_alone),
    "shares-checked-too-early": Mutation(1, ("fair",), FairnessVerdict, "_make_final", _judge_before_the_stops),
    "count-no-stops": Mutation(1, ("within bounds",), CircuitBreaker, "count", lambda self, action, now_ms: self),
    "reply-for-another-attempt": Mutation(1, ("lives",), ActionControl, "_find_own_action", _accept_any_attempt),
    "any-state-may-follow": Mutation(
        1, ("lives",), life, "FOLLOWED_BY", {state: frozenset(life.ActionState) for state in life.ActionState}
    ),
    "never-expire": Mutation(1, ("ends",), ActionControl, "_expire_due", lambda *_: []),
    "forget-open-actions": Mutation(
        1, ("not twice", "lives", "no end"), ActionTable, "find_open_action_of", lambda *_: None
    ),
}
