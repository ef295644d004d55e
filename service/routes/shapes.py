"""Bodies of the answers as types: what OpenAPI shows, and what a test holds every example against.

The pipeline writes most of these bodies; unknown further keys are allowed everywhere (additions are free).
"""

from typing import Any, Literal

import msgspec

from models.part_risk import UsualPart
from models.risk_record import Calibration
from service.routes.estimate_shapes import RunQuantiles

RiskKind = Literal["fail", "drain", "slow"]
NodeState = Literal["ok", "degraded", "drained", "lost", "stale", "unknown"]
JobState = Literal["queued", "running", "finished", "failed", "preempted"]


class Action(msgspec.Struct):
    """What to do about a node."""

    code: str
    sentence: str


class RiskPart(msgspec.Struct):
    """A GPU, link, port or rail that something speaks against; `p`: within 1 h, 5 h, 24 h and 7 d."""

    entity: str
    part: Literal["gpu", "link", "port", "rail"]
    p: list[float]


class RiskRow(msgspec.Struct):
    """One node at one horizon; `p` is null where nothing is known."""

    node: str
    rack: str | None
    p: float | None
    kind: RiskKind | None
    horizon_s: int
    state: NodeState
    placed: bool
    reason: str | None
    action: Action
    parts: list[RiskPart] = []


class RiskNodes(msgspec.Struct):
    """`calibration`: how true the service's own forecasts were; `usual`: the parts that no row names."""

    as_of_ms: int
    model: str
    rows: list[RiskRow]
    usual: list[UsualPart] = []
    calibration: list[Calibration] = []
    history: dict[str, Any] = {}


class NodeRisk(msgspec.Struct):
    kind: RiskKind
    horizon_s: int
    p: float | None


class NodeReason(msgspec.Struct):
    """A measured value that speaks for a risk, beside its usual value."""

    feature: str
    entity: str
    value: float | None
    usual: float | None
    unit: str
    share: float
    since_ms: int | None
    sentence: str


class HardSignal(msgspec.Struct):
    """A node event or an XID that the scores do not know of yet."""

    node: str
    gpu: int | None
    type: str
    code: int | str | None
    time_ms: int
    sentence: str
    taken_ms: int
    fatal: bool = False
    advice: str = ""


class NodeAnswer(msgspec.Struct):
    node: str
    as_of_ms: int
    state: NodeState
    placed: bool
    risk: list[NodeRisk]
    reasons: list[NodeReason]
    action: Action
    jobs: list[str]
    gpus: list[dict[str, Any]]
    model: str
    host: dict[str, float] | None = None  # what node_exporter tells of it; null where nothing
    urgent: list[HardSignal] = []


class Prescale(msgspec.Struct):
    """When to scale a served model up: `lead_s` before the p90 of its rate passes what its instances now serve."""

    instances: int
    serves_per_s: float | None
    passes_ms: int | None
    lead_s: float | None
    scale_ms: int | None
    reason: str | None


class DemandSeries(msgspec.Struct):
    """`values`: one list a quantile, one number a horizon."""

    pool: str
    class_: str = msgspec.field(name="class")
    group: str
    target: str
    now: float | None
    model: str
    issued_ms: int
    horizons_s: list[int]
    quantiles: list[float]
    values: list[list[float | None]]
    record: dict[str, Any] | None
    models: list[str] = []  # who served each horizon
    prescale: Prescale | None = None


class Demand(msgspec.Struct):
    as_of_ms: int
    series: list[DemandSeries]


class DemandRecord(msgspec.Struct):
    """What was forecast and what then happened: [time_ms, value] and [time_ms, quantiles …] rows."""

    as_of_ms: int
    pool: str
    target: str
    history: list[list[float | None]]
    forecast: list[list[float | None]]
    old: list[list[float | None]]
    class_: str = msgspec.field(name="class", default="all")


class Band(msgspec.Struct):
    """GPUs that are in use for at least this share of the time."""

    share_of_time: float
    gpus: float


class Burst(msgspec.Struct):
    """Of the last day: the highest level, the shortest burst that is no noise, and how much of them is noise."""

    ceiling_gpus: float
    shortest_s: float | None
    noise_share: float | None


class Residency(msgspec.Struct):
    """Shares of held GPU time: something in the GPU's memory, and computing."""

    loaded_share: float
    active_share: float


class RunDurations(msgspec.Struct):
    p50: float
    p90: float
    p99: float
    cv: float


class ToleratedWait(msgspec.Struct):
    """In seconds, and in queued jobs that start within them."""

    s: float
    jobs: float | None


class ColdStart(msgspec.Struct):
    p50: float
    p90: float


class DemandModelRow(msgspec.Struct):
    """What the data cannot tell is null, with a sentence in `reasons`."""

    pool: str
    class_: str = msgspec.field(name="class")
    window_s: int
    floor_gpus: float | None
    bands: list[Band] | None
    burst: Burst | None
    mix: dict[str, float] | None
    residency: Residency | None
    duration_s: RunDurations | None
    tolerated_wait: ToleratedWait | None
    cold_start_s: ColdStart | None
    reasons: dict[str, str]


class DemandModel(msgspec.Struct):
    as_of_ms: int
    rows: list[DemandModelRow]


class RemainingTime(msgspec.Struct):
    p50: float
    p90: float


class JobRow(msgspec.Struct, kw_only=True):
    job: str
    attempt: int
    state: JobState
    class_: str = msgspec.field(name="class")
    user: str
    gpus: int
    nodes: list[str]
    submitted_ms: int | None
    started_ms: int | None
    remaining_s: RemainingTime | None
    slow: bool


class Jobs(msgspec.Struct):
    as_of_ms: int
    rows: list[JobRow]


class JobAnswer(JobRow, kw_only=True):
    """A row, and where it runs and what it last said."""

    as_of_ms: int
    placement: list[dict[str, Any]]
    events: list[dict[str, Any]]
    run_s: RunQuantiles | None = None  # as told at its submission
    model: str | None = None  # that told it
    start_ms: dict[str, int] | None = None  # of a job that waits, where known
    source: Literal["board", "archive"] = "board"  # archive: of a job that ended longer ago, without its steps
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
    "unknown",
]


class Stragglers(msgspec.Struct):
    """`slow` is null while there are no step times or peers to compare.

    `expected_step_s`: of steps such as these (by their sequence lengths, where told), or if all members were alike;
    `ratio`: to the job's own past, else to that. `cause` is told of long steps that are nobody's fault, too.
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


class Refusal(msgspec.Struct):
    index: int
    reason: str


class EventsAnswer(msgspec.Struct):
    accepted: int
    duplicates: int
    rejected: list[Refusal]


class QueueRow(msgspec.Struct):
    """`ignored`: as in the decision, keys of the request that were read and changed nothing."""

    request_id: str
    position: int
    tenant: str
    queue: str
    user: str
    gang: Any
    gpus_per_node: int
    priority: int
    waiting_s: float
    why: str
    start_ms: dict[str, int] | None
    ignored: list[str] = []


class Queue(msgspec.Struct):
    """reservation: the head's, null while nobody waits for one. backfill: free GPUs by until when others may use them.
    releases: running jobs, the soonest to end first, by their p10, p50 and p90."""

    as_of_ms: int
    rows: list[QueueRow]
    reservation: dict[str, Any] | None = None
    backfill: list[dict[str, Any]] = []
    releases: list[dict[str, Any]] = []


class Placements(msgspec.Struct):
    """Decisions since a cursor, with job and attempt."""

    as_of_ms: int
    rows: list[dict[str, Any]]
    cursor: Any


class Audit(msgspec.Struct):
    as_of_ms: int
    head: dict[str, Any]
    rows: list[dict[str, Any]]


class Ingestion(msgspec.Struct):
    as_of_ms: int
    sources: list[dict[str, Any]]
    samples_per_s: float
    events_per_s: float
    newest_sample_ms: int | None
    bad_records: dict[str, int]
    targets: dict[str, int]
    archive: dict[str, Any] | None = None
    limits: dict[str, dict[str, int]] = {}


class Fleet(msgspec.Struct):
    as_of_ms: int
    name: str
    gpus: dict[str, int]
    queued_gpus: int
    queued_jobs: int
    at_risk: int
    nodes: list[dict[str, Any]]


class Health(msgspec.Struct):
    status: str


class ReadyCheck(msgspec.Struct):
    name: str
    ok: bool
    sentence: str


class Readiness(msgspec.Struct):
    """`warming` says how much history there is while it is less than the models want."""

    status: str
    as_of_ms: int
    warming: dict[str, Any] | None
    checks: list[ReadyCheck]


class ServedInstance(msgspec.Struct):
    """One engine behind one port; null where its pages do not say."""

    instance: str
    age_s: float
    requests_running: float | None
    requests_waiting: float | None
    kv_cache_used: float | None


class TimeToFirstToken(msgspec.Struct):
    """Seconds, of the last two minutes; null without requests, and beyond the histogram's last edge."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


class ServedModel(msgspec.Struct):
    """A model in a pool: sums over its instances, of the KV cache the mean."""

    pool: str
    model: str
    instances: list[ServedInstance]
    requests_running: float | None
    requests_waiting: float | None
    kv_cache_used: float | None
    kv_cache_used_max: float | None
    requests_per_s: float | None
    prompt_tokens_per_s: float | None
    generated_tokens_per_s: float | None
    ttft_s: TimeToFirstToken


class ServedModels(msgspec.Struct):
    as_of_ms: int
    rows: list[ServedModel]
