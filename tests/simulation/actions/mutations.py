"""Defects that the simulation of actions must find: `--world actions --mutation NAME`."""

import hashlib
from typing import Any

import msgspec
import numpy as np

from fleetcast.placement.actions import life
from fleetcast.placement.actions.action import DIGITS, ActionKind, JobAction
from fleetcast.placement.actions.breaker import CircuitBreaker
from fleetcast.placement.actions.life import ActionRecord
from fleetcast.placement.elastic import grow
from fleetcast.placement.ledger.actions import ActionTable
from fleetcast.placement.reclaim.fairness import FairnessVerdict
from fleetcast.placement.recovery import replacement
from fleetcast.service.placer import action_follow, growth
from fleetcast.service.placer.actions import ActionControl
from fleetcast.service.placer.borrowing import BorrowingPass
from fleetcast.service.placer.promised_sets import PromisedSets
from tests.simulation.mutations import Mutation


def _hash_job_alone(self: JobAction) -> str:
    """Return an id that does not depend on the attempt, the ranks and the payer."""
    return hashlib.sha256(msgspec.json.encode((self.kind, self.job))).hexdigest()[:DIGITS]


_is_fair = FairnessVerdict._is_fair


def _judge_before_the_stops(self: FairnessVerdict, final: Any, giver: str, resources: Any) -> bool:
    """Return whether a queue may give GPUs, by what the queues hold before anything has been stopped or placed."""
    return _is_fair(self, self.queues.standing, giver, resources)


def _accept_any_attempt(self: ActionControl, action_id: str, *_: Any) -> Any:
    return self.get_action(action_id)


def _grow_without_end(self: Any) -> tuple[int, float]:
    """Return a step more than the present size, up to eight steps, whatever the gang wants."""
    return (self.size + self.step, 1.0) if self.size < self.begun + 8 * self.step else (self.size, 0.0)


def _grow_at_once(*state: Any) -> Any:
    """Return the growths as if no gang had just changed its size."""
    return grow.propose_growth(*state[:-1], 0)


def _list_actions_but_growth(self: PromisedSets) -> list[Any]:
    rows = [row for row in self._ledger.actions.list_open() if row.was_sent]
    return [row for row in rows if not row.action.payer and row.action.kind is not ActionKind.GROW]


def _list_all_nodes(self: Any) -> Any:
    """Yield all nodes as the domain in which a gang gets new ones, whatever it requires."""
    yield np.ones(len(self.view), bool)


_find_nodes = BorrowingPass._find_nodes


def _borrow_anywhere(self: BorrowingPass, row: int, view: Any, loss_ms: int, missing: Any, options: Any) -> Any:
    """Return the nodes that other jobs would leave, in whatever domain they are."""
    return _find_nodes(self, row, view, loss_ms, missing, self.options)


def _shrink_by_what_was_lost(self: Any) -> int:
    """Return the members on healthy nodes of an elastic gang, whatever sizes it may have."""
    sizes, each = self.gang.request.members, self.gang.gpus_per_member
    return sum(len(rank.gpus) for rank in self.pinned) // each if sizes.min < sizes.desired and each else 0


ACTION_MUTATIONS = {
    "recovery-out-of-its-domain": Mutation(
        6, ("domain",), replacement._RecoverySearch, "_list_domains", _list_all_nodes
    ),
    "borrowing-out-of-its-domain": Mutation(7, ("domain",), BorrowingPass, "_find_nodes", _borrow_anywhere),
    "recovery-to-any-size": Mutation(
        3, ("size",), replacement._RecoverySearch, "_count_members_after_shrink", _shrink_by_what_was_lost
    ),
    "growth-held-for-nobody": Mutation(
        1, ("to the gang", "given once"), PromisedSets, "_list_gang_actions", _list_actions_but_growth
    ),
    "growth-above-the-wanted-size": Mutation(1, ("size",), grow._GrowingGang, "find_next_size", _grow_without_end),
    "growth-out-of-its-domain": Mutation(
        5, ("domain",), grow, "_mask_alike_nodes", lambda view, held, level: view.is_open & (view.advice == 0)
    ),
    "growth-without-a-rest": Mutation(1, ("dwell",), growth, "propose_growth", _grow_at_once),
    "growth-asked-again": Mutation(1, ("asked once",), ActionControl, "has_failed", lambda *_: False),
    "growth-before-requests": Mutation(
        1, ("nobody waits",), ActionRecord, "may_have_begun", property(lambda record: record.was_sent)
    ),
    "accepted-action-withdrawn": Mutation(
        1, ("begun",), ActionRecord, "may_have_begun", property(lambda record: False)
    ),
    "freed-when-sent": Mutation(1, ("seen",), action_follow, "has_happened", lambda action, observed: True),
    "believe-the-scheduler": Mutation(
        1, ("seen",), action_follow, "judge_freed_gpus", lambda *_: action_follow.Finding.SEEN_BY_SCHEDULER
    ),
    "promise-nothing": Mutation(
        1,
        ("to the payer", "to the gang", "given once", "seen"),
        PromisedSets,
        "add_holds",
        lambda self, observed, now_ms: observed,
    ),
    "hold-no-new-nodes": Mutation(
        1, ("to the gang", "given once"), PromisedSets, "_list_gang_actions", lambda self: []
    ),
    "an-id-without-its-inputs": Mutation(1, ("ids", "not twice"), JobAction, "compute_key", _hash_job_alone),
    "shares-checked-too-early": Mutation(1, ("fair",), FairnessVerdict, "_is_fair", _judge_before_the_stops),
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
