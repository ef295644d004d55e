"""Fingerprints of jobs from their telemetry, the GPU use of jobs, and future load peaks."""

from typing import Literal

import msgspec

from fleetcast.models.jobs.spikes import Spike
from fleetcast.models.jobs.utilisation import Verdict


class TimeQuantiles(msgspec.Struct):
    """Quantiles of a point in time, in Unix ms."""

    p10: int
    p50: int
    p90: int


class ExpectedReading(msgspec.Struct):
    """A forecast reading of the whole job, `horizon_s` seconds from now.

    basis: `template` if the forecast follows the job's cycle, or `level` if it follows its recent level.
    """

    metric: str
    horizon_s: int
    basis: Literal["template", "level"]
    p10: float
    p50: float
    p90: float


class Fingerprint(msgspec.Struct, kw_only=True):
    """The fingerprint of a job.

    `class`: the class that telemetry suggests. `class_told`: the class stated at submission. Each is null if
    unknown. looked_ms: when the job was evaluated, null if it was not. last_checkpoint_ms: when the last
    completed checkpoint began. checkpoint_every_basis: `telemetry` if the job reports no checkpoints and its
    readings show a rhythm of pauses. pause_every_s: how often telemetry shows a pause, independent of the
    job's reports. pause_reason: why pause_every_s is null. unheard_reason: why telemetry does not cover the
    job, for example because too few of its GPUs report here.
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
    """The use of a job's GPUs over the last `span_s` seconds, at most ten minutes.

    Unknown values are null, and `reason` says why. `busy`: GPU utilisation from 0 to 1.
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
    """The GPU use of the running jobs.

    jobs_looked: how many running jobs have been evaluated so far. The others will be evaluated next.
    """

    as_of_ms: int
    jobs_looked: int
    jobs_running: int
    rows: list[UseRow]


class Spikes(msgspec.Struct):
    """Future load peaks, from the jobs that have a fingerprint so far.

    jobs_looked: how many running jobs have been evaluated so far. In a row, `jobs` is the number of them
    that contribute to the peak.
    """

    as_of_ms: int
    jobs_looked: int
    jobs_running: int
    rows: list[Spike]
