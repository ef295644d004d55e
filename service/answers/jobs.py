"""Jobs: what runs, waits and lately ended, and who slows a job down."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from fleet.events import Failed, JobEvent
from fleet.requests import Gang, RankPlacement
from service.answers.estimates import RunQuantiles

JobState = Literal["queued", "promised", "blocked", "running", "finished", "failed", "preempted"]


class RemainingTime(msgspec.Struct, gc=False):
    """Seconds from now."""

    p50: float
    p90: float


class JobRow(msgspec.Struct, kw_only=True):
    """One attempt in a list of jobs. `remaining_s` is of a job that runs, null if unknown.

    `source`: board, of job events; labels or sdk, where exporters' labels or the training loop alone report it;
    archive,
    of a job that ended longer ago. `queues`: of a job that waits in several, all of them. `tasks`: attempts that wait
    under this name, more than 1 for the rest of a big array.
    """

    job: str
    attempt: int
    state: JobState
    class_: str = msgspec.field(name="class")
    user: str
    queue: str = ""
    queues: Sequence[str] = ()
    tasks: int = 1
    gpus: int
    nodes: Sequence[str]
    submitted_ms: int | None
    started_ms: int | None
    ended_ms: int | None = None
    remaining_s: RemainingTime | None
    slow: bool
    source: Literal["board", "labels", "sdk", "queue", "archive"] = "board"


class Jobs(msgspec.Struct):
    as_of_ms: int
    rows: list[JobRow]


class Asks(msgspec.Struct, omit_defaults=True, kw_only=True):
    """The submission of an attempt, by the keys of a placement request. request_id: of one in our own queue."""

    request_id: str | msgspec.UnsetType = msgspec.UNSET
    gang: Gang | int | msgspec.UnsetType = msgspec.UNSET
    gpus_per_node: int | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    gpu_model: str = ""
    gpu_models: tuple[str, ...] = ()
    gpu_share: int | None = None
    pool: str = ""
    cpus: int | None = None
    limit_s: float | None = None


class PlacedRank(msgspec.Struct):
    """A rank, its node and its GPUs there; the node alone where nobody says which rank is where."""

    node: str
    rank: int | msgspec.UnsetType = msgspec.UNSET
    gpus: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class QueuedRequest(Asks, kw_only=True):
    """A job that waits as a placement request."""

    request_id: str
    attempt: int
    queue: str
    class_: str = msgspec.field(name="class")
    user: str


class QueuedJob(msgspec.Struct):
    """A waiting job, as the placer reads it."""

    submitted_ms: int | None
    request: QueuedRequest


class RunningJobRow(msgspec.Struct):
    """A running job, as the placer reads it.

    gpus: how many GPUs it is on. held: node → thousandths of GPUs that it holds there, by the occupancy. For nodes
    outside the fleet, and once the attempt is over, its events say it. A board of an earlier version has none.
    placed_ms: since when it is on these GPUs. kept_ms: when its last checkpoint was whole.
    displaced: others hold GPUs of it, so some end is reported late.
    """

    job: str
    attempt: int
    gpus: int
    started_ms: int | None
    queue: str = ""
    limit_s: float | None = None
    user: str = ""
    class_: str = msgspec.field(default="training", name="class")
    placed_ms: int | None = None
    kept_ms: int | None = None
    held: dict[str, int] = {}
    displaced: bool = False


class EndedJobRow(RunningJobRow):
    """A job that has ended, as the placer reads it."""

    ended_ms: int = 0
    outcome: str = ""


class GpuTimeRow(msgspec.Struct):
    """The use of an attempt's GPUs, as the placer reads it: busy GPU-seconds of those seen by telemetry."""

    job: str
    attempt: int
    used_gpu_s: float
    seen_gpu_s: float


class KnownAttempts(msgspec.Struct):
    """`occupancy`: attempts (job, attempt) that run, or ended (with when) lately, as of a position of the events."""

    position: int
    running: Sequence[tuple[str, int]]
    ended: Sequence[tuple[str, int, int | None]]


class JobDetail(msgspec.Struct, kw_only=True):
    """The part of one job's answer beside its row. `asks` while it waits or runs. The API does not serve it."""

    placement: Sequence[RankPlacement] | Sequence[PlacedRank]
    phase: str | None
    phase_since_ms: int | None
    queued_reason: str | None
    failure: Failed | None
    run_s: RunQuantiles | None
    model: str | None
    events: Sequence[JobEvent]
    asks: Asks | msgspec.UnsetType = msgspec.UNSET


class JobAnswer(JobRow, kw_only=True):
    """A row, and where it runs and what it last said."""

    as_of_ms: int
    placement: list[PlacedRank]
    phase: str | None = None
    phase_since_ms: int | None = None
    queued_reason: str | None = None
    failure: Failed | None = None
    run_s: RunQuantiles | None = None  # as told at its submission
    model: str | None = None  # that told it
    events: list[JobEvent]
    start_ms: dict[str, int] | None = None  # of a job that waits, where known
    reasons: dict[str, str] = {}  # why run_s, remaining_s and start_ms are null, where they are


class Culprit(msgspec.Struct):
    """`name` of a worker: NODE/GPU, or its node or rank; of a link: its port; of a stage: its number."""

    kind: Literal["worker", "link", "stage", "node", "nobody"]
    name: str | None
    share: float | None


StragglerCause = Literal[
    "compute",
    "communication",
    "data",
    "sequence_length",
    "checkpoint",
    "garbage_collection",
    "interference",
    "power_cap",
    "unknown",
]


class Stragglers(msgspec.Struct):
    """The verdict on a job's pace. `slow` is null while there are no step times or peers to compare.

    `judged_ms`: as of when it is. Of a job that is over, the last moment before. null if it was never judged.

    `expected_step_s`: of steps such as these (by their sequence lengths, where reported), or if all members were alike.
    `ratio`: to the job's own past, else to that. `cause` is given for long steps without a culprit, too.
    `not_observed`: inputs that no member reports, so that what they show is unknown.
    """

    as_of_ms: int
    slow: bool | None
    since_ms: int | None
    observed_step_s: float | None
    expected_step_s: float | None
    ratio: float | None
    culprit: Culprit
    cause: StragglerCause
    sentence: str
    judged_ms: int | None = None
    not_observed: list[str] = []
