"""The rows of `/demand`, as the forecaster builds them and the API returns them."""

import msgspec
from msgspec import UNSET, UnsetType


class Prescale(msgspec.Struct):
    """The time at which to scale up a served model, so that new instances are warm when they are needed.

    The p90 of the request rate will exceed the rate that the present instances can serve. The time to scale up
    lies `lead_s` before that.
    """

    instances: int
    serves_per_s: float | None = None
    passes_ms: int | None = None
    lead_s: float | None = None
    scale_ms: int | None = None
    reason: str | None = None


class WaitsFor(msgspec.Struct):
    """The GPUs of waiting jobs, divided into those that wait for a quota and those that wait for machines."""

    quota: float
    machines: float


class DemandRow(msgspec.Struct, kw_only=True):
    """The forecast of one demand series of a queue or a pool. `all` means all queues, pools or classes.

    `values`: one list for each quantile, with one number for each horizon. `models`: the forecaster of
    each horizon. `waits_for`: the GPUs that wait now. `capacity`: the GPUs that the series may use,
    None if no inventory states it.
    """

    queue: str = "all"
    pool: str = "all"
    class_: str = msgspec.field(name="class")
    group: str
    target: str
    now: float
    model: str
    models: list[str] | UnsetType = UNSET
    issued_ms: int
    horizons_s: list[int]
    quantiles: list[float]
    values: list[list[float | None]]
    record: dict[str, float | int | None] | None
    prescale: Prescale | UnsetType = UNSET
    waits_for: WaitsFor | UnsetType = UNSET
    capacity: float | UnsetType | None = UNSET
