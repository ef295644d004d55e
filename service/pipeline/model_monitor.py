"""The comparison of the recent accuracy of models in use with their model cards.

It reports which models should be fitted again (`fleetcast train demand --if-drift`).
"""

import logging
from collections.abc import Mapping, Sequence

from fleetcast.fleet.errors import ModelError, UnknownEntity
from fleetcast.models.demand.rows import DemandRow
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.models.versions.card import Card
from fleetcast.models.versions.drift import DAY_MS, Drift, DriftLimits, RecentAccuracy, judge_drift, merge_records
from fleetcast.models.versions.registry import KINDS, Registry
from fleetcast.service.answers.fitted_models import BandShare, FittedModel, FittedModels, ShadowModel
from fleetcast.service.board.board import Section
from fleetcast.service.config import Config
from fleetcast.service.exposition import Page
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.demand.forecasts import DemandForecasts
from fleetcast.service.pipeline.jobs.interference import InterferenceLearner
from fleetcast.service.pipeline.publish import encode
from fleetcast.service.pipeline.run_times.forecasts import RunForecasts
from fleetcast.service.pipeline.served_risk import make_risk_shadow, summarise_recent_risk
from fleetcast.service.pipeline.tick import Tick

logger = logging.getLogger(__name__)

CONDITIONS = ("coverage", "loss", "age")
BANDED = ("demand", "duration")


class ModelMonitor:
    """A monitor of the drift of the models in use.

    It polls the registry at each review. When another version comes into use, it reads the card of this
    version.
    """

    def __init__(self, registry: Registry, limits: DriftLimits) -> None:
        self.page = b""
        self._registry = registry
        self._limits = limits
        self._cards: dict[str, Card] = {}
        self._logged: dict[str, str] = {}

    @classmethod
    def from_config(cls, config: Config) -> "ModelMonitor":
        return cls(Registry(config.models_folder), make_drift_limits(config))

    def review(
        self,
        demand: Sequence[DemandRow],
        now_ms: int,
        shadow: ShadowModel | None = None,
        runs: RecentAccuracy | None = None,
        risk: RecentAccuracy | None = None,
        risk_shadow: ShadowModel | None = None,
        loaded: Mapping[str, str] | None = None,
    ) -> FittedModels:
        """Return the answer of `GET /v1/models`: a row for each kind of model with a version in use.

        demand: rows of `/v1/demand`. runs, risk: recent outcomes of run times and of risk. loaded: kind → the
        model that really forecasts, such as `demand-0003`. It differs from the registry's version if that
        version is damaged.
        """
        recent = {
            "demand": merge_records(row.record for row in demand),
            "duration": runs or RecentAccuracy(),
            "risk": risk or RecentAccuracy(),
        }
        cards = [card for kind in KINDS if (card := self._read_card(kind, (loaded or {}).get(kind))) is not None]
        drifts = [judge_drift(card, recent.get(card.kind, RecentAccuracy()), now_ms, self._limits) for card in cards]
        shadows = [one for one in (shadow, risk_shadow) if one is not None]
        self.page = make_drift_page(drifts, shadows)
        rows = [_make_model_row(card, drift) for card, drift in zip(cards, drifts, strict=True)]
        return FittedModels(now_ms, rows, shadows)

    def _read_card(self, kind: str, loaded: str | None) -> Card | None:
        try:
            version = self._registry.find_current_version(kind)
            if loaded is not None:
                version = loaded.removeprefix(f"{kind}-") if loaded.startswith(f"{kind}-") else None
            if version is None:
                return None
            if kind not in self._cards or self._cards[kind].version != version:
                self._cards[kind] = self._registry.read_version_card(kind, version)
        except (ModelError, UnknownEntity, OSError) as error:
            if self._logged.get(kind) != str(error):
                self._logged[kind] = str(error)
                logger.warning("the card of %s cannot be read: %s", kind, error)
            return None
        return self._cards[kind]


class ServingModels(Capability):
    """The capability that publishes the model versions in use, with the outcomes of their own forecasts."""

    def __init__(
        self,
        config: Config,
        demand: DemandForecasts,
        runs: RunForecasts,
        watch: FleetWatch,
        sharing: InterferenceLearner,
    ) -> None:
        self._monitor = ModelMonitor.from_config(config)
        self._demand, self._runs, self._watch, self._sharing = demand, runs, watch, sharing

    def make_sections(self, tick: Tick) -> list[Section]:
        demand, runs, memory = self._demand, self._runs, self._watch.memory
        loaded = {"demand": demand.version, "duration": runs.model.name, "risk": tick.fleet.risk.model}
        loaded |= {"interference": self._sharing.version}
        risk = summarise_recent_risk(memory), make_risk_shadow(memory, self._watch.shadow)
        found = self._monitor.review(demand.rows, tick.now_ms, demand.shadow, runs.recent, *risk, loaded)
        return [Section("doc.models", encode(found), tick.now_ms)]

    def make_page(self, tick: Tick) -> bytes:
        return self._monitor.page


def make_drift_limits(config: Config) -> DriftLimits:
    own = config.models
    return DriftLimits(own.retrain_coverage_off, own.retrain_loss_ratio, own.retrain_after_days)


def _make_model_row(card: Card, drift: Drift) -> FittedModel:
    return FittedModel(
        kind=card.kind,
        version=card.version,
        fitted_until_ms=card.fitted_until_ms,
        age_days=round(drift.age_days, 2),
        gate=card.gate.sentence if card.gate else None,
        coverage_80=_make_band_share(drift),
        loss_vs_best_naive=_round_or_none(drift.recent.loss_ratio),
        forecasts=drift.recent.n,
        retrain=drift.reasons,
    )


def _make_band_share(drift: Drift) -> BandShare | None:
    if drift.kind not in BANDED:
        return None
    return BandShare(round(drift.card_coverage_80, 3), _round_or_none(drift.recent.coverage_80))


def _round_or_none(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def make_drift_page(drifts: Sequence[Drift], shadows: Sequence[ShadowModel]) -> bytes:
    """Make the metrics page of drifts and shadows."""
    page = Page()
    rows = [({"kind": drift.kind}, drift) for drift in drifts]
    page.add_gauge(
        "model_age_seconds",
        "How long ago the data ended that a serving model was fitted on.",
        [(labels, drift.age_days * DAY_MS / 1000) for labels, drift in rows],
    )
    page.add_gauge(
        "model_drift_coverage_ratio",
        "Share of recent outcomes inside the 10 to 90 % band of what was served, and what the card says.",
        [({**labels, "of": "recent"}, drift.recent.coverage_80) for labels, drift in rows]
        + [({**labels, "of": "card"}, drift.card_coverage_80) for labels, drift in rows if drift.kind in BANDED],
    )
    page.add_gauge(
        "model_drift_loss_ratio",
        "Recent weighted quantile loss of what was served over that of the best naive forecast; below 1 is better.",
        [(labels, drift.recent.loss_ratio) for labels, drift in rows],
    )
    page.add_gauge(
        "model_retrain_wanted",
        "1 while a condition asks for a new fit of a serving model.",
        [
            ({**labels, "condition": condition}, float(condition in drift.reasons))
            for labels, drift in rows
            for condition in CONDITIONS
        ],
    )
    page.add_gauge(
        "model_version_info",
        "Which version of a model serves.",
        [({**labels, "version": drift.version}, 1) for labels, drift in rows],
    )
    page.add_gauge(
        "model_shadow_loss_ratio",
        "Loss of a challenger in the shadow, and of the version that serves, over persistence's; below 1 is better.",
        [
            ({"kind": shadow.kind, "of": whose}, loss)
            for shadow in shadows
            for whose, loss in (("shadow", shadow.loss_vs_persistence), ("serving", shadow.serving_vs_persistence))
        ],
    )
    return page.encode()
