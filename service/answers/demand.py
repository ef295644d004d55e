"""Demand: forecasts, the accuracy of earlier forecasts, and the demand model."""

import msgspec
from msgspec import UNSET, UnsetType

from fleetcast.models.demand.rows import DemandRow, Prescale, WaitsFor

__all__ = ["DemandRow", "Prescale", "WaitsFor"]


class Demand(msgspec.Struct):
    """The demand forecasts of all series that match a query.

    `note`: how to correct a query that used `pool` for the name of a queue.
    """

    as_of_ms: int
    series: list[DemandRow]
    note: str | UnsetType = UNSET


class DemandRecord(msgspec.Struct):
    """The past demand of one series, its present forecast, and an older forecast for comparison.

    history: rows of [time_ms, value]. forecast, old: rows of [time_ms, quantiles …].
    """

    as_of_ms: int
    pool: str
    target: str
    history: list[list[float | None]]
    forecast: list[list[float | None]]
    old: list[list[float | None]]
    class_: str = msgspec.field(name="class", default="all")
    queue: str = "all"
    note: str | UnsetType = UNSET


class DemandBand(msgspec.Struct):
    """A number of GPUs, and the share of the time during which at least that many are in use."""

    share_of_time: float
    gpus: float


class DemandBurst(msgspec.Struct):
    """The bursts of demand in the last day.

    ceiling_gpus: the highest level of the bursts. shortest_s: the length of the shortest burst that is not
    noise. noise_share: the share of noise.
    """

    ceiling_gpus: float
    shortest_s: float | None
    noise_share: float | None


class Residency(msgspec.Struct):
    """Shares of the time for which jobs held GPUs: with data in GPU memory, and while the GPU computed."""

    loaded_share: float
    active_share: float


class RunDurations(msgspec.Struct):
    p50: float
    p90: float
    p99: float
    cv: float


class ToleratedWait(msgspec.Struct):
    """A tolerated wait in seconds, and the number of queued jobs that start within that time."""

    s: float
    jobs: float | None


class ColdStart(msgspec.Struct):
    p50: float
    p90: float


class DemandModelRow(msgspec.Struct):
    """One part of the demand model. Unknown values are null, and `reasons` has a sentence for each of them."""

    queue: str
    pool: str
    class_: str = msgspec.field(name="class")
    window_s: int
    stood_still_s: int
    floor_gpus: float | None
    bands: list[DemandBand] | None
    burst: DemandBurst | None
    mix: dict[str, float] | None
    residency: Residency | None
    duration_s: RunDurations | None
    tolerated_wait: ToleratedWait | None
    cold_start_s: ColdStart | None
    reasons: dict[str, str]


class DemandModel(msgspec.Struct):
    """The demand model by queue. `note`: as in `Demand`."""

    as_of_ms: int
    rows: list[DemandModelRow]
    note: str | UnsetType = UNSET
