"""Fingerprints of jobs from their telemetry, their use of GPUs, and load peaks ahead."""

from typing import Literal

import msgspec

from models.jobs.spikes import Spike
from models.jobs.utilisation import Verdict


class TimeQuantiles(msgspec.Struct):
    """Unix ms."""

    p10: int
    p50: int
    p90: int


class ExpectedReading(msgspec.Struct):
    """A reading of the whole job at that time from now; template: of the phase that its cycle will be in then."""

    metric: str
    horizon_s: int
    basis: Literal["template", "level"]
    p10: float
    p50: float
    p90: float


class Fingerprint(msgspec.Struct, kw_only=True):
    """`class` is what telemetry looks like, `class_told` what the job was submitted as; null where nobody knows.

    looked_ms: null where it was not looked at. last_checkpoint_ms: when the last one that ended began.
    checkpoint_every_basis: `telemetry` if the job reports no checkpoints and its readings show a rhythm of pauses.
    pause_every_s: how often telemetry shows a pause, whatever the job reports; pause_reason says why it is null.
    unheard_reason: why telemetry tells nothing of it, where it does not: too few of its GPUs are heard of here.
    """

    job: str
    attempt: int
    as_of_ms: int
    looked_ms: int | None = None
    class_: str | None = msgspec.field(name="class", default=None)
    class_p: float | None = None
    class_told: str
    gpus_heard: int = 0
    unheard_reason: str
    period_s: float | None = None
    period_basis: Literal["steps", "telemetry"] | None = None
    period_reason: str
    phase: str | None = None
    phase_since_ms: int | None = None
    phase_ends_ms: TimeQuantiles | None = None
    next_checkpoint_ms: TimeQuantiles | None = None
    last_checkpoint_ms: int | None = None
    checkpoint_every_s: float | None = None
    checkpoint_every_basis: Literal["told", "telemetry"] | None = None
    pause_every_s: float | None = None
    pause_reason: str = ""
    checkpoint_cost_s: float | None = None
    checkpoint_cost_basis: Literal["measured", "told"] | None = None
    next_evaluation_ms: TimeQuantiles | None = None
    expected: list[ExpectedReading] = []


class UseRow(msgspec.Struct, kw_only=True):
    """The use over the last `span_s`, at most ten minutes. null if unknown, and `reason` why.

    `busy` is GPU utilisation.
    """

    job: str
    class_: str = msgspec.field(name="class")
    gpus: int
    gpus_heard: int
    looked_ms: int
    user: str
    span_s: float | None
    loaded_share: float | None
    busy: float | None
    sm_active: float | None
    tensor_active: float | None
    data_share: float | None
    communication_share: float | None
    idle_s: float | None
    held_gpu_memory_gib: float | None
    verdict: Verdict
    mfu: float | None
    mfu_reason: str
    reason: str


class Utilisation(msgspec.Struct):
    """jobs_looked: of those that run, how many were looked at so far; the others come next."""

    as_of_ms: int
    jobs_looked: int
    jobs_running: int
    rows: list[UseRow]


class Spikes(msgspec.Struct):
    """Load peaks of the jobs with a fingerprint so far. jobs: how many of them add to the row."""

    as_of_ms: int
    jobs_looked: int
    jobs_running: int
    rows: list[Spike]
