"""The answers of the API: the keys that a program reads. Others may be present, and more may come.

Times are Unix milliseconds (`_ms`), durations seconds (`_s`), ratios 0..1. An unknown value is None.
"""

from __future__ import annotations

from typing import Any, TypedDict


class Probability(TypedDict):
    """One `kind` (fail, drain, slow) within a horizon."""

    kind: str
    horizon_s: int
    p: float | None


class Reason(TypedDict, total=False):
    feature: str
    entity: str
    value: float
    usual: float | None
    unit: str
    share: float
    since_ms: int | None
    sentence: str


class Action(TypedDict):
    """code: none, watch, avoid, drain_at_job_end, drain_now, replace_part."""

    code: str
    sentence: str


class Node(TypedDict, total=False):
    """`urgent`: hard signals that came after the scores. `withheld`: why schedulers keep it from other work."""

    node: str
    as_of_ms: int
    state: str
    placed: bool
    withheld: str | None
    risk: list[Probability]
    reasons: list[Reason]
    action: Action
    jobs: list[str]
    gpus: list[dict[str, Any]]
    model: str
    rack: str | None
    gpu_model: str
    host: dict[str, float] | None
    urgent: list[dict[str, Any]]


class RiskRow(TypedDict, total=False):
    node: str
    rack: str | None
    p: float | None
    kind: str | None
    horizon_s: int
    state: str
    placed: bool
    reason: str | None
    action: Action
    parts: list[dict[str, Any]]


class Risk(TypedDict, total=False):
    """`calibration`: how true the service's own forecasts were; `usual`: the parts that no row names."""

    as_of_ms: int
    model: str
    rows: list[RiskRow]
    usual: list[dict[str, Any]]
    calibration: list[dict[str, Any]]
    history: dict[str, Any]


class Prescale(TypedDict):
    """When instances of a served model must be asked for, so that they are warm in time; `reason` where null."""

    instances: int
    serves_per_s: float | None
    passes_ms: int | None
    lead_s: float | None
    scale_ms: int | None
    reason: str | None


_Class = TypedDict("_Class", {"class": str}, total=False)


class DemandSeries(_Class, total=False):
    """`values`: one list a quantile, one number a horizon; `models`: who served each horizon."""

    queue: str
    pool: str
    group: str
    target: str
    now: float | None
    model: str
    issued_ms: int
    horizons_s: list[int]
    quantiles: list[float]
    values: list[list[float | None]]
    record: dict[str, Any] | None
    models: list[str]
    prescale: Prescale | None
    waits_for: dict[str, float]
    capacity: float | None


class _Noted(TypedDict, total=False):
    """note: what to ask instead, where the question used `pool` for the name of a queue."""

    note: str


class Demand(_Noted):
    as_of_ms: int
    series: list[DemandSeries]


class DemandRecord(_Class, total=False):
    """Rows of [time_ms, value], and of [time_ms, five quantiles] of the forecast now and one an hour old."""

    as_of_ms: int
    queue: str
    pool: str
    target: str
    history: list[list[float | None]]
    forecast: list[list[float | None]]
    old: list[list[float | None]]
    note: str


class DemandModelRow(_Class, total=False):
    """One part of the demand model. An unknown value is None, with a sentence under its name in `reasons`."""

    queue: str
    pool: str
    window_s: int
    stood_still_s: int
    floor_gpus: float | None
    bands: list[dict[str, float]] | None
    burst: dict[str, float | None] | None
    mix: dict[str, float] | None
    residency: dict[str, float] | None
    duration_s: dict[str, float] | None
    tolerated_wait: dict[str, float | None] | None
    cold_start_s: dict[str, float] | None
    reasons: dict[str, str]


class DemandModel(_Noted):
    as_of_ms: int
    rows: list[DemandModelRow]


class FittedModel(TypedDict, total=False):
    """A version that serves. `retrain`: condition (coverage, loss, age) to why; empty while it is fine."""

    kind: str
    version: str
    fitted_until_ms: int
    age_days: float
    gate: str | None
    coverage_80: dict[str, float | None] | None
    loss_vs_best_naive: float | None
    forecasts: int
    retrain: dict[str, str]


class ShadowModel(TypedDict, total=False):
    """A version that is scored and never serves; losses over persistence's, below 1 is better."""

    kind: str
    version: str
    loss_vs_persistence: float
    serving_vs_persistence: float | None
    forecasts: int


class FittedModels(TypedDict):
    as_of_ms: int
    rows: list[FittedModel]
    shadows: list[ShadowModel]


class Job(_Class, total=False):
    """`as_of_ms`, `placement`, `events`, `run_s`, `start_ms` and `reasons` (why one is None) come with one job alone.

    `state`: queued, blocked (it may not start yet, `queued_reason` says why), running, finished, failed or preempted.
    `remaining_s` (p50, p90) while it runs, `start_ms` (p10, p50, p90) while it waits. `source`: "board"; "labels" or
    "sdk" where only exporters' labels or its own steps tell of it; "archive" for one that ended more than an hour ago
    (without its steps).
    """

    as_of_ms: int
    job: str
    attempt: int
    state: str
    user: str
    queue: str
    queues: list[str]
    tasks: int
    gpus: int
    nodes: list[str]
    submitted_ms: int | None
    started_ms: int | None
    ended_ms: int | None
    remaining_s: dict[str, float] | None
    slow: bool
    placement: list[dict[str, Any]]
    phase: str | None
    phase_since_ms: int | None
    queued_reason: str | None
    failure: dict[str, Any] | None
    events: list[dict[str, Any]]
    run_s: dict[str, float] | None
    start_ms: dict[str, int] | None
    model: str | None
    reasons: dict[str, str]
    source: str


class Jobs(TypedDict):
    as_of_ms: int
    rows: list[Job]


class Stragglers(TypedDict, total=False):
    as_of_ms: int
    slow: bool | None
    since_ms: int | None
    observed_step_s: float | None
    expected_step_s: float | None
    ratio: float | None
    culprit: dict[str, Any]
    cause: str
    judged_ms: int | None
    sentence: str
    not_observed: list[str]


class Blocker(TypedDict):
    """A job that holds what a request waits for; `ends_ms`: p10, p50 and p90 of when it gives it back."""

    job: str
    node: str
    ends_ms: dict[str, int]


class Estimate(TypedDict, total=False):
    """The estimate of a job that is not submitted yet.

    `run_s`: p50, p90, p99; `start_ms`: p10, p50, p90; `power_w`: of all its GPUs; `constraint`: what it waits for
    most; `by`: how the start is known; `start_as_of_ms`: when starts were sampled; `ignored`: keys of the request
    that changed nothing. A value that is None has its reason in `reasons`.
    """

    as_of_ms: int
    request_id: str
    run_s: dict[str, float] | None
    peak_gpu_memory_gib: float | None
    power_w: float | None
    start_ms: dict[str, int] | None
    blocked_by: list[Blocker]
    constraint: str | None
    sentence: str
    model: str | None
    similar: dict[str, Any]
    reasons: dict[str, str]
    ignored: list[str]
    start_as_of_ms: int | None
    by: str | None


class QueueRow(TypedDict, total=False):
    """One waiting request.

    `start_ms`: p10, p50 and p90, None while unknown; `why`: what it waits for, as a sentence; `ignored`: as in the
    decision.
    """

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
    job: str
    ignored: list[str]
    by: str | None


class Queue(TypedDict, total=False):
    """The queue of the placement engine.

    reservation: the head's, None if no request waits for one; backfill: free GPUs by until when others may use them;
    releases: running jobs, the soonest to end first; room: when a newcomer would find a GPU; record: how often start
    times held.
    """

    as_of_ms: int
    rows: list[QueueRow]
    reservation: dict[str, Any] | None
    backfill: list[dict[str, Any]]
    releases: list[dict[str, Any]]
    room: dict[str, Any] | None
    record: dict[str, Any]
    starts_as_of_ms: int | None


class QueueState(_Class, total=False):
    """GPUs by resource (a model, or gpu for any) of one queue; share, borrowed and lent as the order counts them."""

    queue: str
    parent: str | None
    weight: float
    priority: int
    per_user: bool
    held: dict[str, float]
    guaranteed: dict[str, float]
    limit: dict[str, float]
    borrowed: dict[str, float]
    lent: dict[str, float]
    share: float
    share_7d: float | None
    share_days: list[float | None] | None
    decayed: float
    banked: float | None
    waiting: int
    waiting_gpus: float
    running: int
    wait_s: dict[str, float] | None


class QueuesAnswer(TypedDict, total=False):
    """generation: for If-Match of another file; refused: why a newer file does not serve."""

    as_of_ms: int
    generation: str
    rows: list[QueueState]
    capacity: dict[str, float]
    notes: list[str]
    refused: str


class WhyStep(TypedDict, total=False):
    code: str
    sentence: str
    requests: list[str]


class WhyWaiting(TypedDict, total=False):
    """ladder: who comes before, what is short, and when it starts; starts_as_of_ms: when starts were sampled."""

    as_of_ms: int
    request_id: str
    queue: str
    position: int
    position_in_queue: int
    share: float | None
    sentence: str
    ladder: list[WhyStep]
    start_ms: dict[str, int] | None
    starts_as_of_ms: int | None


class ChargeRow(TypedDict, total=False):
    """GPU-seconds of one queue, user, class or pool; None where nobody knows."""

    name: str
    jobs: int
    granted_gpu_s: float
    promised_gpu_s: float
    used_gpu_s: float | None
    idle_gpu_s: float | None
    lost_gpu_s: float
    waited_gpu_s: float
    money: float | None
    unseen: str | None


class Charges(TypedDict, total=False):
    as_of_ms: int
    from_ms: int
    to_ms: int
    by: str
    rows: list[ChargeRow]
    currency: str


class Rank(TypedDict, total=False):
    """gpu_share: thousandths of its one GPU, absent where it has whole ones."""

    rank: int
    node: str
    gpus: list[int]
    gpu_share: int


class Decision(TypedDict, total=False):
    """outcome: placed, refused, queued; ignored: keys of the request that were read and changed nothing."""

    request_id: str
    decision_id: str
    outcome: str
    sentence: str
    ranks: list[Rank]
    score: float
    parts: dict[str, float]
    nodes: int
    candidates: int
    rejected: dict[str, int]
    runners_up: list[dict[str, Any]]
    topology_level: str
    generation: int
    board_as_of_ms: int
    models: dict[str, str]
    expires_ms: int
    ignored: list[str]


class Refusal(TypedDict):
    index: int
    reason: str


class Taken(TypedDict):
    """The outcome of a batch of events. The service stores the good ones of a bad batch."""

    accepted: int
    duplicates: int
    rejected: list[Refusal]
