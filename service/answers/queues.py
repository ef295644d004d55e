"""Queues: their state, the reasons why a request waits, and charges."""

from collections.abc import Sequence
from typing import Literal

import msgspec


class QueueState(msgspec.Struct, kw_only=True):
    """The state of a queue, or of a user in a queue.

    Amounts are GPUs by resource: a model, or `gpu` for any model. share: the queue's share of the fleet
    divided by its weight. It determines the order of queues, and is 0 within the guarantee. lent: the part
    of the guarantee that other queues hold now. decayed: GPU-seconds of past use, in which older use counts
    less. banked: GPU-seconds that the queue has saved as credits. wait_s: quantiles of the waits of requests
    that were placed within seven days. share_7d: share of all GPU-seconds that queues with the same parent
    held within seven days. share_days: the same for each day, the oldest first. A day is null if no queue of
    that parent held anything.
    """

    queue: str
    parent: str | None
    weight: float
    class_: str | None = msgspec.field(name="class", default=None)
    priority: int = 0
    per_user: bool = False
    held: dict[str, float] = {}
    guaranteed: dict[str, float] = {}
    limit: dict[str, float] = {}
    borrowed: dict[str, float] = {}
    lent: dict[str, float] = {}
    share: float = 0.0
    share_7d: float | None = None
    share_days: Sequence[float | None] | None = None
    decayed: float = 0.0
    banked: float | None = None
    waiting: int = 0
    waiting_gpus: float = 0.0
    running: int = 0
    wait_s: dict[str, float] | None = None


class QueuesAnswer(msgspec.Struct):
    """The state of all queues.

    `generation`: the value for If-Match, or "" if all requests wait in one line. `refused`: why a newer
    queue file is not in use.
    """

    as_of_ms: int
    generation: str
    rows: Sequence[QueueState]
    capacity: dict[str, float] = {}
    notes: Sequence[str] = ()
    refused: str = ""


class QueueChange(msgspec.Struct):
    """The changes that a new queue file makes. `applied` is false for a dry run.

    stranded: queue → number of its waiting requests that cannot start until a queue file has the queue again.
    """

    applied: bool
    generation: str
    added: Sequence[str]
    removed: Sequence[str]
    changed: Sequence[str]
    notes: Sequence[str] = ()
    stranded: dict[str, int] = {}


WhyCode = Literal[
    "stale", "before", "limit", "lent_out", "window", "room", "kept", "untried", "gone", "reclaim", "ends", "start"
]


class WhyStep(msgspec.Struct):
    """One reason why a request waits.

    The reasons form a list, from the requests ahead of it to its start time. requests: some of the requests
    ahead. The codes are:

    stale: nothing is placed now. before: other requests come first. limit: the queue is at its limit.
    lent_out: the queue may borrow no more. window: a reservation or maintenance withholds nodes, or the request is next
    when it ends. room: a resource is short. kept: room is reserved for the first request. untried: the last pass had
    already tried enough others. gone: the queue file no longer has the request's queue. reclaim: which running jobs
    would be stopped for it, or why none would be. ends: the request waits for these jobs to end. start: when the
    request starts.
    """

    code: WhyCode
    sentence: str
    requests: Sequence[str] = ()


class WhyWaiting(msgspec.Struct):
    """The reasons why a request waits. sentence: the sentence of the last step.

    start_ms: p10, p50 and p90 of the start time, if known. starts_as_of_ms: when start times were sampled,
    null before the first sampling.
    """

    as_of_ms: int
    request_id: str
    queue: str
    position: int
    position_in_queue: int
    share: float | None
    sentence: str
    ladder: Sequence[WhyStep]
    start_ms: dict[str, int] | None = None
    starts_as_of_ms: int | None = None


class ChargeRow(msgspec.Struct):
    """The GPU-seconds of one queue, user, class or pool within a period.

    granted: used + idle on the GPUs that telemetry observed. promised: from the placement until the job
    began. lost: since the last checkpoint of jobs that failed. waited: requested GPUs times the waiting
    time. money: the price of granted GPU-seconds. unseen: why used and idle do not add up to granted, or
    null.
    """

    name: str
    jobs: int
    granted_gpu_s: float
    promised_gpu_s: float
    used_gpu_s: float | None
    idle_gpu_s: float | None
    lost_gpu_s: float
    waited_gpu_s: float
    money: float | None = None
    unseen: str | None = None


class Charges(msgspec.Struct):
    """The charges from `from_ms` until `to_ms`. Jobs that still run count until `as_of_ms`."""

    as_of_ms: int
    from_ms: int
    to_ms: int
    by: str
    rows: Sequence[ChargeRow]
    currency: str = ""
