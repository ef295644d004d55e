"""Estimates of a job's needs and of its start time."""

from collections.abc import Sequence

import msgspec

from fleetcast.placement.ahead.start_time import Blocker, StartBasis


class RunQuantiles(msgspec.Struct):
    """Quantiles of a run time, in seconds from the start."""

    p50: float
    p90: float
    p99: float


class Similar(msgspec.Struct):
    """The kinds of past jobs that an estimate is based on.

    `run_s`: the kind for the run time. `needs`: the kind for the needs. Each is null if there is none.
    `runs_seen`: the number of ended runs behind the run time.
    """

    run_s: str | None
    needs: str | None
    runs_seen: int


class Estimate(msgspec.Struct):
    """The estimate of a job. `reasons` maps the name of each null field to a reason.

    `power_w`: power of all GPUs of the request. `ignored`: keys of the request that had no effect.
    `start_as_of_ms`: when start times were sampled. `by`: the basis of `start_ms`. It is "room" (the job
    starts now), "runs" (ended jobs or a fitted model) or "limit" (time limits).
    """

    as_of_ms: int
    request_id: str
    run_s: RunQuantiles | None
    peak_gpu_memory_gib: float | None
    power_w: float | None
    start_ms: dict[str, int] | None
    blocked_by: Sequence[Blocker]
    constraint: str | None
    sentence: str
    model: str | None
    similar: Similar
    reasons: dict[str, str]
    ignored: Sequence[str] = ()
    start_as_of_ms: int | None = None
    by: StartBasis | None = None
