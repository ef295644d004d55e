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


class DemandRow(msgspec.Struct, kw_only=True):
    """`values`: one list a quantile, one number a horizon. `models`: who served each horizon."""

    pool: str
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
