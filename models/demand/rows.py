"""The row of `/demand`, as the forecaster builds it and the API returns it."""

import msgspec
from msgspec import UNSET, UnsetType


class Prescale(msgspec.Struct):
    """When to scale up a served model.

    It is `lead_s` before the p90 of its rate passes the rate that its instances can serve now.
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
    """The forecast of one series of demand, of a queue or of a pool. `all` means that it is not divided.

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
