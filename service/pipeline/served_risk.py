"""The site's own fits of the risk model: the version in use, and the challenger that is scored with it."""

import logging
from collections.abc import Callable

from fleetcast.fleet.errors import ModelError
from fleetcast.models.risk.record import RiskRecord
from fleetcast.models.risk.scores import RISK_HORIZONS_S
from fleetcast.models.risk.site_risk import SiteFit, SiteRisk
from fleetcast.models.risk.state import RiskState
from fleetcast.models.risk.watch import FleetWatch
from fleetcast.models.versions.drift import RecentAccuracy
from fleetcast.models.versions.registry import Registry
from fleetcast.service.answers.fitted_models import ShadowModel

logger = logging.getLogger(__name__)

KIND = "risk"
DAY = RISK_HORIZONS_S.index(86_400)


class ServedRisk:
    """The loader that sets `watch.site` and `watch.shadow` to versions of the registry.

    If no version is usable, the shipped fit is used.
    """

    def __init__(self, registry: Registry, watch: FleetWatch) -> None:
        self.trouble = ""  # why the version that should serve does not
        self._registry, self._watch = registry, watch
        self._serving: str | None = None
        self._challenger: str | None = None

    def refresh(self) -> None:
        """Load versions that were promoted, rolled back or chosen as challenger since the last call.

        Each call reads two small files.
        """
        self._serving = self._load_if_changed(self._registry.find_current_version, self._serving, self._serve_version)
        self._challenger = self._load_if_changed(self._registry.find_challenger, self._challenger, self._load_shadow)

    def _load_if_changed(
        self, ask: Callable[[str], str | None], known: str | None, load: Callable[[str | None], None]
    ) -> str | None:
        try:
            wanted = ask(KIND)
            if wanted != known:
                load(wanted)
        except (ModelError, OSError) as error:
            if str(error) != self.trouble:
                logger.warning("risk: %s; the fit before it serves", error)
            self.trouble = str(error)
            return known
        return wanted

    def _serve_version(self, version: str | None) -> None:
        """Use a version. If it is damaged, use the intact version before it."""
        folder = None if version is None else self._registry.find_serving_folder(KIND)
        self._watch.site = None if folder is None else SiteRisk(SiteFit.load(folder), f"{KIND}-{folder.name}")
        self.trouble = ""
        logger.info("risk: %s serves", f"{KIND}-{folder.name}" if folder else "the shipped fit")

    def _load_shadow(self, version: str | None) -> None:
        self._watch.shadow = None
        if version is None:
            return
        damage = self._registry.find_damage(KIND, version)
        if damage is not None:
            logger.warning("risk: the challenger %s is damaged: %s", version, damage)
            return
        self._watch.shadow = SiteRisk(SiteFit.load(self._registry.find_folder(KIND, version)), f"{KIND}-{version}")


def summarise_recent_risk(memory: RiskState) -> RecentAccuracy:
    """Return the recent accuracy of one-day risk: its Brier score divided by the base rate's Brier score."""
    loss, n = _compute_loss(memory.record)
    return RecentAccuracy(None, loss, n)


def make_risk_shadow(memory: RiskState, challenger: SiteRisk | None) -> ShadowModel | None:
    """Return the records of the challenger and of the version in use. Returns None without a challenger."""
    if challenger is None or memory.shadow.model != challenger.name:
        return None
    loss, n = _compute_loss(memory.shadow)
    serving, _ = _compute_loss(memory.record)
    rounded = None if serving is None else round(serving, 4)
    return ShadowModel(KIND, challenger.name.rpartition("-")[2], 1.0 if loss is None else round(loss, 4), rounded, n)


def _compute_loss(record: RiskRecord) -> tuple[float | None, int]:
    day = record.list_calibrations()[DAY]
    return None if day.brier_skill is None else 1 - day.brier_skill, day.matured
