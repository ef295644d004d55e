"""What the API answers: the keys that a program reads. Others may be there, and more may come.

Times are Unix milliseconds (`_ms`), durations seconds (`_s`), ratios 0..1. What is not known is None.
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
    """`urgent`: hard signals that came after the scores."""

    node: str
    as_of_ms: int
    state: str
    placed: bool
    risk: list[Probability]
    reasons: list[Reason]
    action: Action
    jobs: list[str]
    gpus: list[dict[str, Any]]
    model: str
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


class Risk(TypedDict):
    as_of_ms: int
    model: str
    rows: list[RiskRow]


class DemandSeries(TypedDict, total=False):
    """`values`: one list a quantile, one number a horizon."""

    pool: str
    target: str
    now: float | None
    model: str
    issued_ms: int
    horizons_s: list[int]
    quantiles: list[float]
    values: list[list[float | None]]
    record: dict[str, Any] | None


class Demand(TypedDict):
    as_of_ms: int
    series: list[DemandSeries]


class Job(TypedDict, total=False):
    """`placement` and `events` come with one job, not in the list."""

    job: str
    attempt: int
    state: str
    user: str
    queue: str
    gpus: int
    nodes: list[str]
    submitted_ms: int | None
    started_ms: int | None
    ended_ms: int | None
    remaining_s: dict[str, float] | None
    slow: bool
    placement: list[dict[str, Any]]
    events: list[dict[str, Any]]


class Jobs(TypedDict):
    as_of_ms: int
    rows: list[Job]


class Stragglers(TypedDict, total=False):
    slow: bool | None
    since_ms: int | None
    observed_step_s: float | None
    expected_step_s: float | None
    ratio: float | None
    culprit: dict[str, Any]
    cause: str
    sentence: str


class Rank(TypedDict):
    rank: int
    node: str
    gpus: list[int]


class Decision(TypedDict, total=False):
    """outcome: placed, refused, queued."""

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
    expires_ms: int


class Refusal(TypedDict):
    index: int
    reason: str


class Taken(TypedDict):
    """What became of a batch of events; the good ones of a bad batch are kept."""

    accepted: int
    duplicates: int
    rejected: list[Refusal]
