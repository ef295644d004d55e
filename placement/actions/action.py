"""An action on a running job: its kind, the request that it serves, its reason and its cost.

The id of an action depends on its kind, job, attempt, ranks and payer, but not on the pass that proposes
it. So a pass that repeats a proposal proposes nothing new.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from fleetcast.fleet.errors import RequestError
from fleetcast.fleet.requests import RankPlacement

RECOVERY = "recovery of "  # begins the payer of actions that free nodes for a gang that lost some
ATTEMPT = ", attempt "  # follows the job in such a payer
DIGITS = 24  # hexadecimal, of an action's key
AGENTS = "agents"  # the executor of a job whose own agent polls its actions


class ActionKind(StrEnum):
    PLACE = "place"
    SHRINK = "shrink"
    GROW = "grow"
    PREEMPT = "preempt"
    MOVE = "move"
    REPLACE = "replace"


STOPPING = frozenset({ActionKind.SHRINK, ActionKind.PREEMPT, ActionKind.MOVE, ActionKind.REPLACE})
"""Kinds that stop processes which run."""


class ActionCost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The cost of an action in GPU-seconds, by term. Only `gain`, the saving by the action, may be negative."""

    lost: float = 0.0  # work since the last whole checkpoint
    restart: float = 0.0
    wait: float = 0.0  # of a gang that lost nodes, until it runs again
    risk: float = 0.0
    slow: float = 0.0
    fragments: float = 0.0
    gain: float = 0.0

    @property
    def total(self) -> float:
        return sum(amount for _, amount in self.list_terms())

    def list_terms(self) -> Iterator[tuple[str, float]]:
        """Yield (term, GPU-seconds) for every term, including terms that are zero."""
        yield from ((name, getattr(self, name)) for name in self.__struct_fields__)


class ActionReason(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reason why an action is proposed: a code and its numbers. `describe_action` makes the sentence."""

    code: str
    numbers: dict[str, float] = {}


class RejectedSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A set of jobs that the search found but did not choose. code: the reason, such as "dearer"."""

    jobs: tuple[str, ...]
    gpus: float
    cost_gpu_s: float
    code: str = "dearer"


class JobAction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An action on a running job, as it is proposed.

    queue: the leaf that the job is charged to. gpus: the number of GPUs that the action frees, or adds to the job.
    lost_gpus: how many of those are on lost nodes, so that the job cannot use them any more.
    ranks: the affected ranks, at their present places. places: the new places of ranks that move. pinned: the ranks
    that stay where they are. payer: the request that gets the freed GPUs until `by_ms` (Unix ms), or "" without such
    a request. Without a payer, `places` and `pinned` are promised to the job from sending until the action ends. after:
    ids of the actions that free GPUs of `places`. They are sent when this action is proposed. This action is sent once
    all of them are seen. Its GPUs are promised from the proposal on.
    """

    kind: ActionKind
    job: str
    attempt: int
    queue: str
    gpus: float
    ranks: tuple[RankPlacement, ...]
    executor: str
    by_ms: int
    reason: ActionReason
    cost: ActionCost
    places: tuple[RankPlacement, ...] = ()
    pinned: tuple[RankPlacement, ...] = ()
    payer: str = ""
    grace_s: float = 0.0
    lost_gpus: float = 0.0
    rejected: tuple[RejectedSet, ...] = ()
    after: tuple[str, ...] = ()

    @property
    def taken_gpus(self) -> float:
        """The GPUs that the action takes from a job that could use them. The circuit breaker counts these."""
        return self.gpus - self.lost_gpus if self.kind in STOPPING else 0.0

    def compute_key(self) -> str:
        """Return the hash of what the action does: kind, job, attempt, ranks, places and payer."""
        parts = (self.kind, self.job, self.attempt, self.ranks, self.places, self.payer)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:DIGITS]


def make_recovery_payer(job: str, attempt: int) -> str:
    """Return the payer of actions that free nodes for a gang that lost some. No request can have this name."""
    return f"{RECOVERY}{job}{ATTEMPT}{attempt}"


def parse_recovery_payer(payer: str) -> str:
    """Return the job for which actions free nodes, or "" if the payer is a request.

    >>> parse_recovery_payer(make_recovery_payer("4711", 2)), parse_recovery_payer("4711")
    ('4711', '')
    """
    return payer.removeprefix(RECOVERY).rpartition(ATTEMPT)[0] if payer.startswith(RECOVERY) else ""


def make_action_id(key: str, number: int) -> str:
    """Return the id of an action. number: 1 for the first action with this key, 2 for the second, and so on.

    >>> make_action_id("0f", 2)
    '0f-2'
    """
    return f"{key}-{number}"


def check_action(action: JobAction) -> None:
    """Check an action before it is stored. Raises RequestError for an impossible amount."""
    for name, amount in action.cost.list_terms():
        if not math.isfinite(amount) or (amount < 0 and name != "gain"):
            raise RequestError(f"cost.{name} = {amount}: must be finite and not negative", f"cost.{name}")
    _check_finite("reason.numbers", action.reason.numbers.values())
    for lost in action.rejected:
        _check_finite("rejected", (lost.gpus, lost.cost_gpu_s))
    if not (math.isfinite(action.gpus) and action.gpus > 0):
        raise RequestError(f"gpus = {action.gpus}: must be above 0", "gpus")
    if not 0 <= action.lost_gpus <= action.gpus:
        raise RequestError(f"lost_gpus = {action.lost_gpus}: must be 0 to {action.gpus:g}", "lost_gpus")
    if not (math.isfinite(action.grace_s) and action.grace_s >= 0):
        raise RequestError(f"grace_s = {action.grace_s}: must not be negative", "grace_s")
    if not action.job or not action.executor:
        raise RequestError("an action needs a job and an executor", "job" if not action.job else "executor")
    if not action.ranks and not action.places:
        raise RequestError("an action needs ranks or places", "ranks")


def _check_finite(name: str, amounts: Iterable[float]) -> None:
    if not all(map(math.isfinite, amounts)):
        raise RequestError(f"{name}: all numbers must be finite", name)
