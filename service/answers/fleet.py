"""The overview of the fleet, and the health, readiness and ingestion of the service."""

from collections.abc import Sequence
from typing import Any

import msgspec

from fleetcast.ingest.archive.archive import ArchiveHealth
from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.service.answers.risk import HeldBy, StateName

Quantiles = dict[str, float | None]  # p50, p99; null when there are no values
SourceHealth = dict[str, Any]  # `name`, and whatever the source reports; `records` are the counts of a `RecordTally`


class Ingestion(msgspec.Struct, kw_only=True):
    """The records received from each source, and how fast they reach the board.

    tick_ms, lag_ms: wall time. labels: the numbers of GPUs that exporters' labels describe as held by a job,
    held by several jobs (`shared`), or split into MIG instances (`divided`). noted: the numbers of valid
    records that no answer can show, by reason. One reason is an `unknown_job` without a submission or a
    start.
    """

    as_of_ms: int
    sources: list[SourceHealth]
    samples_per_s: float
    events_per_s: float
    newest_sample_ms: int | None
    bad_records: dict[str, int]
    bad_examples: dict[str, str] = {}
    bad_total: int = 0
    samples_total: int = 0
    late_total: int = 0
    events_total: int = 0
    duplicates_total: int = 0
    targets: dict[str, int]
    ticks: int = 0
    tick_ms: Quantiles = {}
    lag_ms: Quantiles = {}
    archive: ArchiveHealth | None = None
    limits: dict[str, dict[str, int]] = {}
    labels: dict[str, int] = {}
    noted: dict[str, int] = {}


class FleetGpu(msgspec.Struct, gc=False):
    """One GPU on the map. held_by: why a GPU without a job is not free.

    unknown: the GPU is busy, and no job is known. promise: it is promised to `request`. window, reservation:
    its node is in maintenance or reserved.
    """

    job: str | None
    usable: bool
    held_by: HeldBy | msgspec.UnsetType = msgspec.UNSET
    request: str | msgspec.UnsetType = msgspec.UNSET


class FleetNode(msgspec.Struct, kw_only=True):
    """A node on the console's map.

    `p`: the probability of the most likely kind of risk within `horizon_s`, null if unknown.
    """

    node: str
    rack: str | None
    rail_group: str | None = None
    block: str | None = None
    state: StateName
    flagged: bool
    placed: bool = True
    p: float | None
    reason: str | None = None
    gpus: Sequence[FleetGpu] = ()
    jobs: Sequence[str]


class GpuCounts(msgspec.Struct):
    """Numbers of GPUs by state. Each GPU is in one state, and the states add up to `total`.

    `running`: held by a job or in unknown use. `unknown_use`: the part of `running` in unknown use.
    `promised`: a request was placed there, and no event shows its job running yet. `unheard`: on nodes in
    service that telemetry has not confirmed lately, so the placer avoids them. `unusable`: vanished from the
    exporter's page, and not in use. `window`, `reservation`: on nodes that maintenance or a reservation
    withholds now. `out_of_service`: on nodes that are drained, lost or withheld.
    """

    running: int
    free: int
    unusable: int
    total: int
    unknown_use: int = 0
    promised: int = 0
    unheard: int = 0
    window: int = 0
    reservation: int = 0
    out_of_service: int = 0


class Warming(msgspec.Struct):
    """The length of the available history, and the length that the models need, in seconds."""

    have_s: int
    need_s: int


class BoardMeta(msgspec.Struct):
    """The board section `meta`: the fleet, its clock and the models of one board.

    `warming` is null once there is enough history. `stale_after_s`: the age at which a board or a sample
    becomes stale, in fleet seconds.
    """

    fleet: str
    generation: int
    now_ms: int
    speed: float
    tick_s: float
    occupancy_known: bool
    occupancy_unknown: str
    models: dict[str, str]
    warming: Warming | None
    stale_after_s: float = 60.0


class FleetAnswer(msgspec.Struct, kw_only=True):
    """The overview of the fleet.

    `no_telemetry`: if no exporter can be read, the reason of the first one as a sentence. Otherwise null.
    """

    as_of_ms: int
    fleet_time_ms: int = 0
    horizon_s: int = RISK_HORIZONS_S[0]
    gpus: GpuCounts
    queued_gpus: int
    queued_jobs: int
    at_risk: int
    nodes: Sequence[FleetNode]
    name: str
    speed: float = 1.0
    samples_per_s: float = 0.0
    newest_sample_ms: int | None = None
    no_telemetry: str | None = None
    warming: Warming | None = None
    stale_after_s: float = 60.0


class Health(msgspec.Struct):
    status: str


class ReadyCheck(msgspec.Struct):
    name: str
    ok: bool
    sentence: str


class Readiness(msgspec.Struct):
    """The readiness of the api, with one check for each condition.

    `warming`: the length of the history, or null once it is long enough for the models.
    """

    status: str
    as_of_ms: int
    warming: Warming | None
    checks: list[ReadyCheck]
