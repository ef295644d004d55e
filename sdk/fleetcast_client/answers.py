"""The types of the API's answers, with the keys that programs read. Answers may have further keys.

Times are Unix milliseconds (`_ms`), durations seconds (`_s`), ratios 0..1. An unknown value is
None.
"""

from __future__ import annotations

from typing import Any, TypedDict


class ActionRow(TypedDict):
    """An action on a running job.

    `kind`: place, shrink, grow, preempt, move or replace. `state`: proposed, sent, accepted, seen, refused,
    expired, withdrawn or late, since `since_ms`. `ranks`: the ranks that it concerns. `places`: where they go
    to. `grace_s`: how long the job may take to write a checkpoint. It expires at `by_ms`.
    """

    action_id: str
    kind: str
    state: str
    since_ms: int
    job: str
    attempt: int
    queue: str
    gpus: float
    ranks: list[Rank]
    places: list[Rank]
    payer: str
    executor: str
    by_ms: int
    grace_s: float
    cost_gpu_s: float
    sentence: str
    why: str
    changed: int


class ActionSwitches(TypedDict):
    """The switches that decide whether actions are sent. `paused_ms` and `opened_ms`: since when nothing is, or None.

    `mode`: off, advise or act. `act_in`: the queues to which act is limited, empty if there is no limit.
    """

    mode: str
    act_in: list[str]
    paused_ms: int | None
    paused_by: str
    opened_ms: int | None
    why: str


class ActionList(TypedDict):
    """A page of actions. `cursor`: the value of `after` for the next page.

    `foreseen`: how often nodes failed after advice to replace them early. None without a right to read all queues.
    """

    as_of_ms: int
    rows: list[ActionRow]
    cursor: int
    switches: ActionSwitches
    foreseen: dict[str, Any] | None


class PlannedAction(ActionRow):
    """An open action. `cost`: GPU-seconds by term."""

    cost: dict[str, float]


class PlannedStart(TypedDict):
    """A request that the last pass has placed. Its GPUs are promised until `until_ms`, or until its job runs."""

    request_id: str
    job: str
    queue: str
    ranks: list[Rank]
    until_ms: int


class NextRequest(TypedDict):
    """The first request that does not fit.

    `start_ms`: when it should fit without any action. `sentence`: what was found about jobs to stop for it. `ranks`:
    its place after the proposed actions.
    """

    request_id: str
    job: str
    queue: str
    start_ms: int
    waits_for: str
    sentence: str
    ranks: list[Rank]


class PromisedPlace(TypedDict):
    """The place that actions free for a request, which is promised to it alone until `until_ms`."""

    request_id: str
    job: str
    queue: str
    ranks: list[Rank]
    until_ms: int
    actions: list[str]
    number: int


class CurrentPlan(TypedDict):
    """The plan of the last pass, which ran at `pass_ms`. `has_more`: older actions were left out."""

    as_of_ms: int
    pass_ms: int | None
    stalled: str
    actions: list[PlannedAction]
    has_more: bool
    starts: list[PlannedStart]
    next: NextRequest | None
    promised: list[PromisedPlace]
    switches: ActionSwitches


class Probability(TypedDict):
    """The probability of one `kind` (fail, drain, slow) within a horizon."""

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
    """An advised action. code: none, watch, avoid, drain_at_job_end, drain_now, replace_part."""

    code: str
    sentence: str


class Node(TypedDict, total=False):
    """One node of the fleet.

    `urgent`: hard signals that are newer than the scores. `withheld`: the reason why schedulers withhold the node
    from other work.
    """

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
    """The ranking of nodes by risk.

    `calibration`: how accurate the service's own forecasts were. `usual`: the probabilities of parts
    without evidence against them.
    """

    as_of_ms: int
    model: str
    rows: list[RiskRow]
    usual: list[dict[str, Any]]
    calibration: list[dict[str, Any]]
    history: dict[str, Any]


class Prescale(TypedDict):
    """The advice when to start instances of a served model, so that they are warm in time.

    `reason`: the reason why a value is None.
    """

    instances: int
    serves_per_s: float | None
    passes_ms: int | None
    lead_s: float | None
    scale_ms: int | None
    reason: str | None


_Class = TypedDict("_Class", {"class": str}, total=False)


class DemandSeries(_Class, total=False):
    """One series of demand and its forecast.

    `values`: one list for each quantile, with one number for each horizon. `models`: the model of each horizon.
    """

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


class _NotedAnswer(TypedDict, total=False):
    """An answer with a note.

    note: how to correct the query, if it used `pool` for the name of a queue.
    """

    note: str


class Demand(_NotedAnswer):
    as_of_ms: int
    series: list[DemandSeries]


class DemandRecord(_Class, total=False):
    """Past demand as [time_ms, value], and two forecasts as [time_ms, five quantiles].

    `forecast` is the present forecast, and `old` was issued an hour ago.
    """

    as_of_ms: int
    queue: str
    pool: str
    target: str
    history: list[list[float | None]]
    forecast: list[list[float | None]]
    old: list[list[float | None]]
    note: str


class DemandModelRow(_Class, total=False):
    """One part of the demand model. Unknown values are None, and `reasons` has a sentence for each."""

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


class DemandModel(_NotedAnswer):
    as_of_ms: int
    rows: list[DemandModelRow]


class FittedModel(TypedDict, total=False):
    """A model version that serves.

    `retrain`: condition (coverage, loss, age) → reason, for the conditions that are met.
    """

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
    """A model version that is scored and never serves.

    Losses are relative to the loss of persistence. A loss below 1 is better than persistence.
    """

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
    """One job. Some keys are present only if a single job was requested.

    These are `as_of_ms`, `placement`, `events`, `run_s`, `start_ms` and `reasons` (why one of these is None).

    `state`: queued, blocked (it may not start yet, `queued_reason` says why), running, finished, failed
    or preempted. `remaining_s` (p50, p90): set while it runs. `start_ms` (p10, p50, p90): set while it
    waits. `source`: usually "board". It is "labels" or "sdk" if only exporters' labels or the job's own
    steps report the job. It is "archive" for a job that ended more than an hour ago (without its steps).
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
    change_times: dict[str, Any] | None
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
    """A job that holds the GPUs for which a request waits. `ends_ms`: p10, p50 and p90 of their release."""

    job: str
    node: str
    ends_ms: dict[str, int]


class Estimate(TypedDict, total=False):
    """The estimate for a job that is not submitted yet.

    `run_s`: p50, p90, p99. `start_ms`: p10, p50, p90. `power_w`: the power of all its GPUs.
    `constraint`: the requirement that delays it most. `by`: the basis of the start. `start_as_of_ms`:
    when starts were sampled. `ignored`: keys of the request that changed nothing. `reasons`: the reason why a
    value is None.
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

    `start_ms`: p10, p50 and p90, None while unknown. `why`: a sentence that says why the request waits.
    `ignored`: as in the decision.
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
    """The waiting requests of the placement engine, with the facts that decide when they start.

    reservations: those of the first requests. reservation: the first of them, None if there is none. backfill: free
    GPUs, and until when other requests may use them. releases: running jobs, in the order of their ends. room: when a
    new request would find a GPU. record: how accurate start times were.
    """

    as_of_ms: int
    rows: list[QueueRow]
    reservation: dict[str, Any] | None
    reservations: list[dict[str, Any]]
    backfill: list[dict[str, Any]]
    releases: list[dict[str, Any]]
    room: dict[str, Any] | None
    record: dict[str, Any]
    starts_as_of_ms: int | None


class QueueState(_Class, total=False):
    """The state of a queue. Amounts are GPUs by resource (a model, or `gpu` for any model).

    The queues are ordered by share, borrowed and lent.
    """

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
    """The state of all queues.

    generation: the value for If-Match when another file is sent. refused: why a newer file is not in
    use.
    """

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
    """The reasons why a request waits.

    ladder: the reasons in order. It begins with the requests ahead of it, continues with the missing resource and
    ends with its start. starts_as_of_ms: when starts were sampled.
    """

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
    """The GPU-seconds of one queue, user, class or pool. Unknown values are None."""

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
    """The place of one gang member. gpu_share: thousandths of its one GPU, absent if the member has whole GPUs."""

    rank: int
    node: str
    gpus: list[int]
    gpu_share: int


class Decision(TypedDict, total=False):
    """The answer to a placement request. outcome: placed, refused, queued.

    ignored: keys of the request that changed nothing. reclaim: only in a refused dry run, where jobs may be stopped.
    """

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
    reclaim: ReclaimPreview


class PreviewedAction(TypedDict):
    """An action that a pass would propose. `cost`: GPU-seconds by term. `ranks`: the places that it frees.

    `places`: where a moved job goes.
    """

    kind: str
    job: str
    attempt: int
    queue: str
    gpus: float
    ranks: list[Rank]
    places: list[Rank]
    executor: str
    cost: dict[str, float]
    cost_gpu_s: float
    sentence: str


class ReclaimPreview(TypedDict):
    """The actions that would make room for a refused dry run, if it waited in the queue.

    `code`: found, starts, waits, patience, bound or none. `ranks`: its place after the actions. `not_before_ms`:
    when it will have waited long enough for a stop.
    """

    code: str
    sentence: str
    actions: list[PreviewedAction]
    cost_gpu_s: float
    ranks: list[Rank]
    not_before_ms: int | None


class Refusal(TypedDict):
    index: int
    reason: str


class Taken(TypedDict):
    """The outcome of a batch of events. The service stores the good events even if others are bad."""

    accepted: int
    duplicates: int
    rejected: list[Refusal]
