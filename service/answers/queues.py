"""Queues: how they stand, why a request waits, and charges."""

from collections.abc import Sequence
from typing import Literal

import msgspec


class QueueState(msgspec.Struct, kw_only=True):
    """A queue, or a user in it. Amounts are GPUs by resource: a model, or `gpu` for any.

    share: of the fleet, by weight, as the order counts it; 0 within the guarantee. lent: what of its guarantee others
    hold now. decayed, banked: GPU-seconds, of past use and in the bank. wait_s: quantiles of the requests that were
    placed within seven days. share_7d: of all GPU-seconds that queues of the same parent held within seven days;
    share_days: of each day, the oldest first, null where none of them held anything.
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
    """`generation`: for If-Match; "" where all wait in one line. `refused`: why a newer file does not serve."""

    as_of_ms: int
    generation: str
    rows: Sequence[QueueState]
    capacity: dict[str, float] = {}
    notes: Sequence[str] = ()
    refused: str = ""


class QueueChange(msgspec.Struct):
    """The changes of another file. `applied` is false for a dry run.

    stranded: queue → requests that wait in it and do not start until a file names it again.
    """

    applied: bool
    generation: str
    added: Sequence[str]
    removed: Sequence[str]
    changed: Sequence[str]
    notes: Sequence[str] = ()
    stranded: dict[str, int] = {}


WhyCode = Literal["stale", "before", "limit", "lent_out", "window", "room", "kept", "untried", "gone", "ends", "start"]


class WhyStep(msgspec.Struct):
    """A step of the ladder. requests: some of those before it.

    stale: nothing is placed now; before: who comes first; limit, lent_out: its queue may hold, or borrow, no more;
    window: nodes that a reservation or maintenance keeps; room: what is short; kept: what is kept for the head;
    untried: the last pass had tried enough others; gone: the file does not name its queue any more; ends: the jobs that
    it waits for; start: when it starts.
    """

    code: WhyCode
    sentence: str
    requests: Sequence[str] = ()


class WhyWaiting(msgspec.Struct):
    """The reasons why a request waits. sentence: of the last step. start_ms: p10, p50, p90, where known.

    starts_as_of_ms: when start times were sampled, null before the first sampling.
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
    """GPU-seconds of one queue, user, class or pool within a time.

    granted = used + idle where telemetry saw the GPUs. promised: from the placement until the job began. lost: since
    the last checkpoint of jobs that failed. waited: GPUs wanted times how long. money: of what was granted.
    unseen: why used and idle are not all of it, or null.
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
    """From `from_ms` until `to_ms`; what runs is counted until `as_of_ms`."""

    as_of_ms: int
    from_ms: int
    to_ms: int
    by: str
    rows: Sequence[ChargeRow]
    currency: str = ""
