"""A row of `/demand`, as the forecaster makes it and the API answers."""

import msgspec
from msgspec import UNSET, UnsetType


class Prescale(msgspec.Struct):
    """When to scale a served model up: `lead_s` before the p90 of its rate passes what its instances now serve."""

    instances: int
    serves_per_s: float | None = None
    passes_ms: int | None = None
    lead_s: float | None = None
    scale_ms: int | None = None
    reason: str | None = None


class WaitsFor(msgspec.Struct):
    """GPUs of jobs that wait: for a quota, and for machines."""

    quota: float
    machines: float


class DemandRow(msgspec.Struct, kw_only=True):
    """A series of demand: of a queue, or of a pool of machines. `all` is where it is not divided.

    `values`: one list a quantile, one number a horizon. `models`: the forecaster of each horizon. `waits_for`: of GPUs
    that wait now. `capacity`: GPUs that the series may use, None where no inventory says.
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
