"""Placements, the queue, the audit trail, and the health of the placer."""

from collections.abc import Sequence

import msgspec

from fleetcast.fleet.requests import Decision, Gang, RankPlacement
from fleetcast.placement.ahead.reservation import FreeWindow, JobRelease, RequestReservation
from fleetcast.placement.ahead.start_time import RoomForecast, StartBasis
from fleetcast.placement.fragmentation import PoolFragments
from fleetcast.placement.ledger.chain import ChainHead
from fleetcast.service.answers.actions import PreviewedAction
from fleetcast.service.state_identity import Doubt


class QueueRow(msgspec.Struct, kw_only=True):
    """A waiting request.

    `ignored`: keys of the request that had no effect, as in the decision. by: the basis of the start time.
    It is "room" (the request starts now), "runs" (ended jobs or a fitted model) or "limit" (time limits
    alone). It is null if `start_ms` is null, and `why` then states the reason.
    """

    request_id: str
    position: int
    tenant: str
    queue: str
    user: str
    gang: Gang | int
    gpus_per_node: int
    priority: int
    waiting_s: float
    why: str
    start_ms: dict[str, int] | None
    job: str = ""
    ignored: Sequence[str] = ()
    by: StartBasis | None = None


class FirstAnswers(msgspec.Struct):
    """The accuracy of the first start times shown to users, with the fields of `StartTimesRecord`.

    unanswered: number of requests that started although their first answer had no start time.
    """

    n: int
    by_p10: float | None = None
    by_p50: float | None = None
    by_p90: float | None = None
    unanswered: int = 0
    n_p50: int = 0
    n_p90: int = 0


class AnswersAtAge(msgspec.Struct):
    """The accuracy of the start times shown `age_s` seconds after a request's first answer."""

    age_s: float
    n: int
    by_p10: float | None = None
    by_p50: float | None = None
    by_p90: float | None = None
    n_p50: int = 0
    n_p90: int = 0


class StartTimesRecord(msgspec.Struct):
    """The accuracy of start times: shares of requests that had started by the quantiles shown to users.

    A quantile is judged once its time has passed, whether or not the request has started. So `by_p10` is a
    share of `n` requests, `by_p50` of `n_p50` and `by_p90` of `n_p90`. A share is null if no request is
    judged. The shares are means over the answers at all ages, in which each request has a weight of one.
    `first` covers only first answers. Users plan with them, and they are the hardest to get right. `by_age`
    has the shares for each age. since_ms: when the first judged answer was shown.
    """

    n: int
    by_p10: float | None = None
    by_p50: float | None = None
    by_p90: float | None = None
    since_ms: int | None = None
    first: FirstAnswers = msgspec.field(default_factory=lambda: FirstAnswers(0))
    by_age: Sequence[AnswersAtAge] = ()
    n_p50: int = 0
    n_p90: int = 0


class Queue(msgspec.Struct):
    """The waiting requests of the placement engine, with the facts that decide when they start.

    reservations: those of the first requests, as many as the policy of the queues allows. reservation: the first of
    them, null if there is none. backfill: free GPUs, and until when other requests may use them. releases: running
    jobs with p10, p50 and p90 of their ends, the earliest first. room: when a new request would find a GPU.
    starts_as_of_ms: when the start times of the rows were sampled, null before the first sampling.
    """

    as_of_ms: int
    rows: Sequence[QueueRow]
    reservation: RequestReservation | None = None
    reservations: Sequence[RequestReservation] = ()
    backfill: Sequence[FreeWindow] = ()
    releases: Sequence[JobRelease] = ()
    room: RoomForecast | None = None
    record: StartTimesRecord = msgspec.field(default_factory=lambda: StartTimesRecord(0))
    starts_as_of_ms: int | None = None


class MovesAdvice(msgspec.Struct, kw_only=True):
    """The cheapest moves of running jobs that let the largest waiting gang in. No job is moved.

    code: "found", "none_waits" if no waiting gang lacks only the right shape, or the reason why no moves help. moves:
    each with the present and the new places of its job, and its cost. ranks: the place of the gang afterwards.
    gain_gpu_s: the GPUs of the gang times the seconds that it would wait otherwise. It is null if its start time is
    unknown.
    """

    code: str
    sentence: str
    request_id: str = ""
    job: str = ""
    gpus: int = 0
    moves: Sequence[PreviewedAction] = ()
    cost_gpu_s: float = 0.0
    gain_gpu_s: float | None = None
    ranks: Sequence[RankPlacement] = ()


class Fragmentation(msgspec.Struct):
    """The fragmentation of pools. requests: the number of newest requests that the demand is estimated from.

    moves: only if the file of queues asks for advice on moves.
    """

    as_of_ms: int
    requests: int
    rows: Sequence[PoolFragments]
    moves: MovesAdvice | msgspec.UnsetType = msgspec.UNSET


class Settled(msgspec.Struct):
    """A cancelled placement or a withdrawn request."""

    request_id: str
    state: str
    sentence: str


class StoredDecision(Decision, frozen=True, kw_only=True):
    """A placement decision as the client received it, with its job and its attempt.

    cursor: the decision's position in the list of all decisions.
    """

    cursor: int
    time_ms: int = 0
    job: str
    attempt: int


class Placements(msgspec.Struct):
    """The decisions after a cursor, each with job and attempt."""

    as_of_ms: int
    rows: list[StoredDecision]
    cursor: int


class AuditLine(msgspec.Struct):
    """One line of the audit trail: caller, action and decision. `previous`: the hash of the line before."""

    audit_id: int
    time_ms: int
    caller: str
    action: str
    request_id: str
    decision_id: str
    board_as_of_ms: int
    models: dict[str, str]
    sentence: str
    stored: str
    previous: str
    hash: str


class Audit(msgspec.Struct):
    as_of_ms: int
    head: ChainHead
    rows: list[AuditLine]


class PlacerHealth(msgspec.Struct):
    """The answer of the placer's `/healthz`.

    `doubts`: the parts of the state that lack facts which another part has seen.
    """

    ok: bool = True
    warming: bool = False
    board_as_of_ms: int | None = None
    queued: int = 0
    doubts: Sequence[Doubt] = ()
