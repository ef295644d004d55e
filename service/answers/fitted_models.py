"""Fitted models that serve, and challengers that are scored beside them."""

import msgspec


class BandShare(msgspec.Struct):
    """Share of outcomes inside the 10 to 90 % band: when the model was judged, and lately."""

    card: float
    recent: float | None


class FittedModel(msgspec.Struct):
    """A version that serves. retrain: condition (coverage, loss, age) -> why; empty while it is fine.

    `coverage_80` is null for probabilities and speeds, which have no band. `loss_vs_best_naive` of risk is the Brier
    score of failing within a day over that of the share that came. Of interference no forecast is recorded.
    """

    kind: str
    version: str
    fitted_until_ms: int
    age_days: float
    gate: str | None
    coverage_80: BandShare | None
    loss_vs_best_naive: float | None
    forecasts: int
    retrain: dict[str, str]


class ShadowModel(msgspec.Struct, frozen=True):
    """A version that is scored and never serves.

    Losses are over persistence's on the same forecasts: below 1 is better. Of risk they are Brier scores over that of
    the share that came.

    `serving_vs_persistence`: of the version that serves. null where none does.
    """

    kind: str
    version: str
    loss_vs_persistence: float
    serving_vs_persistence: float | None
    forecasts: int


class FittedModels(msgspec.Struct):
    as_of_ms: int
    rows: list[FittedModel]
    shadows: list[ShadowModel]
