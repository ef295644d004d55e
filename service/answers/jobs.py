"""Jobs that run, wait or ended recently, and the causes of slow jobs."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from fleetcast.fleet.events import Failed, JobEvent
from fleetcast.fleet.requests import Gang, RankPlacement
from fleetcast.service.answers.estimates import RunQuantiles

JobState = Literal["queued", "promised", "blocked", "running", "finished", "failed", "preempted"]


class RemainingTime(msgspec.Struct, gc=False):
    """Quantiles of the remaining time, in seconds from now."""

    p50: float
    p90: float


class JobRow(msgspec.Struct, kw_only=True):
    """One attempt in a list of jobs.

    `remaining_s`: the remaining time of a running job, null if unknown. `source`: "board" if job events
    report the job. It is "labels" or "sdk" if only exporters' labels or its training loop report it, and
    "archive" if it ended longer ago. `queues`: all queues, if the job waits in several. `tasks`: the number
    of attempts that wait under this name. It is more than 1 for the rest of a large array.
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
    """The request of a submitted attempt, under the keys of a placement request.

    request_id: the id of the request if it waits in our own queue.
    """

    request_id: str | msgspec.UnsetType = msgspec.UNSET
    gang: Gang | int | msgspec.UnsetType = msgspec.UNSET
    gpus_per_node: int | msgspec.UnsetType = msgspec.UNSET
    priority: int | msgspec.UnsetType = msgspec.UNSET
    preemptible: bool | None = None
    gpu_model: str = ""
    gpu_models: tuple[str, ...] = ()
    gpu_share: int | None = None
    pool: str = ""
    cpus: int | None = None
    limit_s: float | None = None


class PlacedRank(msgspec.Struct):
    """A rank of a job, with its node and its GPUs on this node.

    If no event says which rank runs where, only the node is set.
    """

    node: str
    rank: int | msgspec.UnsetType = msgspec.UNSET
    gpus: Sequence[int] | msgspec.UnsetType = msgspec.UNSET


class QueuedRequest(Asks, kw_only=True):
    """A waiting job in the form of a placement request."""

    request_id: str
    attempt: int
    queue: str
    class_: str = msgspec.field(name="class")
    user: str


class QueuedJob(msgspec.Struct):
    """A waiting job in the form that the placer reads."""

    submitted_ms: int | None
    request: QueuedRequest


class RunningJobRow(msgspec.Struct):
    """A running job in the form that the placer reads.

    gpus: number of GPUs that it runs on. held: node → thousandths of GPUs that it holds there, according to
    the board's occupancy. For nodes outside the fleet and for ended attempts, `held` comes from the job's
    events. It is empty on boards of earlier versions. placed_ms: since when it runs on these GPUs.
    checkpoint_ms: when its last checkpoint was complete. old_checkpoint_ms: the same on a board of the
    version before. Its value moves to `checkpoint_ms` at once. displaced: other jobs hold some of its GPUs,
    so the report of its end is late. members: number of members that run, 0 if unknown. gang: of an elastic
    gang only. gpus_per_member, cpus, host_memory_gib: of each member. checkpoint_cost_s: seconds that a
    checkpoint takes, measured or stated. Boards of earlier versions lack the fields from `priority` on.
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
    checkpoint_ms: int | None = None
    held: dict[str, int] = {}
    displaced: bool = False
    priority: int = 0
    preemptible: bool | None = None
    members: int = 0
    gang: Gang | None = None
    gpus_per_member: int = 0
    cpus: float | None = None
    host_memory_gib: float | None = None
    checkpoint_cost_s: float | None = None
    old_checkpoint_ms: int | msgspec.UnsetType | None = msgspec.field(default=msgspec.UNSET, name="kept_ms")

    def __post_init__(self) -> None:
        if self.old_checkpoint_ms is not msgspec.UNSET:
            self.checkpoint_ms, self.old_checkpoint_ms = self.old_checkpoint_ms, msgspec.UNSET


class EndedJobRow(RunningJobRow):
    """An ended job in the form that the placer reads."""

    ended_ms: int = 0
    outcome: str = ""


class GpuTimeRow(msgspec.Struct):
    """The GPU-seconds of an attempt in the form that the placer reads.

    used_gpu_s: busy GPU-seconds. seen_gpu_s: GPU-seconds that telemetry observed.
    """

    job: str
    attempt: int
    used_gpu_s: float
    seen_gpu_s: float


class LearntTimes(msgspec.Struct, frozen=True, omit_defaults=True):
    """The times of a running job that were learnt from events, in the form that the placer reads. None: too few events.

    restart_s: seconds from a start to useful work. resize_pause_s: seconds that it stands still while its size
    changes. speed_exponent: its speed is members ** exponent.
    """

    restart_s: float | None = None
    resize_pause_s: float | None = None
    speed_exponent: float | None = None


class ChangeTimes(msgspec.Struct):
    """The expected costs of a stop and of a change of size of a running job. Fields as in `LearntTimes`.

    learnt: the fields that events of this job or of similar jobs gave. The others are defaults.
    """

    restart_s: float
    resize_pause_s: float
    speed_exponent: float
    learnt: Sequence[str]


class KnownAttempts(msgspec.Struct):
    """The board section `occupancy`: the attempts that run or ended recently.

    position: all events before this position in the inbox are included. running: (job, attempt). ended:
    (job, attempt, time of the end).
    """

    position: int
    running: Sequence[tuple[str, int]]
    ended: Sequence[tuple[str, int, int | None]]


class JobDetail(msgspec.Struct, kw_only=True):
    """The fields of a job's answer that its row in a list lacks.

    `asks` is set while the job waits or runs. The API does not serve it.
    """

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
    """A job's row with its placement and its last events."""

    as_of_ms: int
    placement: list[PlacedRank]
    phase: str | None = None
    phase_since_ms: int | None = None
    queued_reason: str | None = None
    failure: Failed | None = None
    run_s: RunQuantiles | None = None  # as told at its submission
    model: str | None = None  # that told it
    change_times: ChangeTimes | None = None  # of a running job
    events: list[JobEvent]
    start_ms: dict[str, int] | None = None  # of a job that waits, where known
    reasons: dict[str, str] = {}  # why run_s, remaining_s and start_ms are null, where they are


class Culprit(msgspec.Struct):
    """The worker, link, stage or node that slows a job.

    `name` depends on the kind. Worker: NODE/GPU, or else its node or rank. Link: its port. Stage: its
    number.
    """

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


class SlowVerdict(msgspec.Struct):
    """The fields of a row in `doc.stragglers` that the placer and adapters read."""

    slow: bool | None
    since_ms: int | None
    culprit: Culprit
    sentence: str

    @property
    def node(self) -> str:
        """The node that slows the job, or "" if none does."""
        is_node = self.slow and self.culprit.kind in ("worker", "node")
        return (self.culprit.name or "").partition("/")[0] if is_node else ""


class Stragglers(msgspec.Struct):
    """The verdict on a job's pace. `slow` is null while there are no step times or peers to compare.

    `judged_ms`: the time of the verdict. For an ended job, it is the last verdict before the end. It is null
    if there was none. `expected_step_s`: the expected step time, for the reported sequence lengths if there
    are any. If a member is slower than its peers, it is the step time without that delay. `ratio`: relative
    to the job's own past, or else to `expected_step_s`. `cause` is also given for long steps without a
    culprit. `not_observed`: inputs that no member reports, so that their effects are unknown.
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
