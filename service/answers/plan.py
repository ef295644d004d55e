"""The plan of the last pass: actions on running jobs, requests that start, what is promised, and what comes next."""

from collections.abc import Sequence

import msgspec

from fleetcast.fleet.requests import RankPlacement
from fleetcast.placement.actions.action import ActionCost
from fleetcast.service.answers.actions import ActionRow, ActionSwitches


class PlannedAction(ActionRow, kw_only=True):
    """An open action with its cost in GPU-seconds by term."""

    cost: ActionCost


class PlannedStart(msgspec.Struct, kw_only=True):
    """A request that the last pass has placed. until_ms: its GPUs are promised so long, or until its job runs."""

    request_id: str
    job: str
    queue: str
    ranks: Sequence[RankPlacement]
    until_ms: int


class NextRequest(msgspec.Struct, kw_only=True):
    """The first request that does not fit.

    start_ms: when it should fit without any action, because the job or window `waits_for` has ended. sentence: what
    the pass found about jobs to stop for it, "" if it did not search. ranks: its place after the proposed actions.
    """

    request_id: str
    job: str
    queue: str
    start_ms: int
    waits_for: str
    sentence: str
    ranks: Sequence[RankPlacement]


class PromisedPlace(msgspec.Struct, kw_only=True):
    """The place that actions free for a request, which is promised to it alone until `until_ms`.

    actions: their ids. number: 1 for the first set of actions for this request.
    """

    request_id: str
    job: str
    queue: str
    ranks: Sequence[RankPlacement]
    until_ms: int
    actions: Sequence[str]
    number: int


class CurrentPlan(msgspec.Struct, kw_only=True):
    """The present plan.

    pass_ms: when the last pass ran, null before the first one. stalled: why no pass runs now, or "". actions: the
    open ones, in the order of their last changes. has_more: whether older ones were left out. next: null if all
    requests fit, or if the caller is bound to queues.
    """

    as_of_ms: int
    pass_ms: int | None
    stalled: str
    actions: Sequence[PlannedAction]
    has_more: bool
    starts: Sequence[PlannedStart]
    next: NextRequest | None
    promised: Sequence[PromisedPlace]
    switches: ActionSwitches
