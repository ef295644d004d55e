"""The fitted models in use, and the shadow models that are only scored."""

import msgspec


class BandShare(msgspec.Struct):
    """The share of outcomes that lie inside the 10 to 90 % band of a model's forecasts.

    card: the share when the model was judged before its use. recent: the share lately, null without recent
    outcomes.
    """

    card: float
    recent: float | None


class FittedModel(msgspec.Struct):
    """A model version that makes the served forecasts.

    retrain: condition (coverage, loss, age) → reason to fit again. It is empty if no condition is met.
    `coverage_80` is null for probabilities and speeds, which have no band. For risk, `loss_vs_best_naive`
    compares the Brier score of failing within a day with that of a constant forecast. The constant is the
    observed share of failures. Forecasts of interference are not recorded.
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
    """A model version that is scored but never used for answers.

    A loss below 1 is better than the baseline on the same forecasts. The baseline is persistence. For risk,
    losses are Brier scores, and the baseline is a constant forecast of the observed share.
    `serving_vs_persistence`: the loss of the version in use, null if there is none.
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
