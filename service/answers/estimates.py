"""Estimates of what a job would take and when it would start."""

from collections.abc import Sequence

import msgspec

from placement.start_time import Blocker, StartBasis


class RunQuantiles(msgspec.Struct):
    """Seconds from the start."""

    p50: float
    p90: float
    p99: float


class Similar(msgspec.Struct):
    """By which kind of job it was told; `runs_seen`: ended runs of the kind behind `run_s`."""

    run_s: str | None
    needs: str | None
    runs_seen: int


class Estimate(msgspec.Struct):
    """The estimate of a job. A null has its reason, by its name, in `reasons`.

    `power_w`: of all GPUs of the request.

    `ignored`: keys of the request that were read and changed nothing. `start_as_of_ms`: when start times were sampled.
    `by`: how `start_ms` is known, "room" (it starts now), "runs" (ended jobs or a fitted model) or "limit".
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
