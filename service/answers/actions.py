"""Actions on running jobs: what is done to a job, for whom, at what cost, and how far it has come."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from fleetcast.fleet.requests import Decision, RankPlacement
from fleetcast.models.risk.record import Calibration
from fleetcast.placement.actions.action import ActionCost, ActionKind, RejectedSet
from fleetcast.placement.actions.life import ActionState, LifeStep
from fleetcast.placement.plan.reclaiming import ReclaimCode
from fleetcast.placement.queues.tree import ReclaimMode


class ActionRow(msgspec.Struct, kw_only=True):
    """An action on a running job, in a list.

    since_ms: when the action entered its state. queue: the queue that the job is charged to. gpus: how many the
    action frees, or adds. ranks: the ranks that it concerns, where they hold GPUs now. places: where ranks go to.
    payer: the request that gets what it frees until `by_ms`. An action that has not happened by then expires.
    grace_s: how long the job may take to write a checkpoint before it ends. why: the reason of its last state.
    changed: grows with each change of any action.
    """

    action_id: str
    kind: ActionKind
    state: ActionState
    since_ms: int
    job: str
    attempt: int
    queue: str
    gpus: float
    ranks: Sequence[RankPlacement]
    places: Sequence[RankPlacement]
    payer: str
    executor: str
    by_ms: int
    grace_s: float
    cost_gpu_s: float
    sentence: str
    why: str
    changed: int


class ActionNotice(ActionRow, kw_only=True):
    """The body of a webhook's request. user: the owner of the job as its request states it, "" if unknown."""

    user: str = ""


class ActionDetails(ActionRow, kw_only=True):
    """One action. cost: GPU-seconds by term. reason: the code and the numbers of `sentence`.

    rejected: the sets of jobs that were found and not chosen. life: each state and when it was entered. after: ids of
    the actions that must be seen before this one is sent.
    """

    cost: ActionCost
    reason: str
    numbers: dict[str, float]
    rejected: Sequence[RejectedSet]
    life: Sequence[LifeStep]
    after: Sequence[str] = ()


class ActionSwitches(msgspec.Struct, kw_only=True):
    """The switches that decide whether actions are sent. paused_ms and opened_ms: since when nothing is, or null.

    mode: `reclaim` in the policy, "off" without a file of queues. Only "act" sends actions. act_in: the queues to
    which "act" is limited. It is empty if there is no limit. A caller bound to queues gets what holds for them.
    why: why the circuit breaker is open.
    """

    mode: ReclaimMode = "off"
    act_in: Sequence[str] = ()
    paused_ms: int | None = None
    paused_by: str = ""
    opened_ms: int | None = None
    why: str = ""


class ActionList(msgspec.Struct):
    """A page of actions in the order of their last changes.

    `cursor`: the value of `after` for the next page, and for what changes later. `foreseen`: how often nodes failed
    after advice to replace them early, null for callers who may read only some queues.
    """

    as_of_ms: int
    rows: Sequence[ActionRow]
    cursor: int
    switches: ActionSwitches
    foreseen: Calibration | None = None


class ActionReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A reply of an agent to an action on its job. why: the reason of a refusal."""

    job: str
    attempt: int
    why: str = ""


class PreviewedAction(msgspec.Struct, kw_only=True):
    """An action that a pass would propose, with its cost in GPU-seconds by term. It has no id: nothing is recorded.

    ranks: the places that it frees. places: where a moved job goes.
    """

    kind: ActionKind
    job: str
    attempt: int
    queue: str
    gpus: float
    ranks: Sequence[RankPlacement]
    places: Sequence[RankPlacement]
    executor: str
    cost: ActionCost
    cost_gpu_s: float
    sentence: str


class ReclaimPreview(msgspec.Struct, kw_only=True):
    """The actions that a pass would propose for a request if it waited in the queue.

    code: "found" if `actions` would make room. "starts" if the request would start without any. "waits" if the
    pass would not search, because other requests come first. Else the search ended without a set: "patience", "bound"
    or "none". sentence: the reason. ranks: the request's place after the actions. not_before_ms: since when it has
    waited long enough for a stop.
    """

    code: ReclaimCode | Literal["starts", "waits"]
    sentence: str
    actions: Sequence[PreviewedAction] = ()
    cost_gpu_s: float = 0.0
    ranks: Sequence[RankPlacement] = ()
    not_before_ms: int | None = None


class PlacementAnswer(Decision, frozen=True, kw_only=True):
    """A decision now. reclaim: what a pass would stop for the request, only in a refused dry run."""

    reclaim: ReclaimPreview | msgspec.UnsetType = msgspec.UNSET
