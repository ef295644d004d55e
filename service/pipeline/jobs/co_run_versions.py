"""The promoted version of past co-runs. A pipeline uses it in addition to its own co-runs.

`fleetcast train interference` makes such versions.
"""

import logging
import math

from fleetcast.features.co_runs import CoRun
from fleetcast.fleet.errors import ModelError
from fleetcast.models.jobs.co_run_fit import CoRunFit
from fleetcast.models.jobs.interference import LOADS
from fleetcast.models.versions.registry import Registry

logger = logging.getLogger(__name__)

KIND = "interference"
CHECK_INTERVAL_MS = 10_000


class ServedCoRuns:
    """The past co-runs of the version in use. They are empty if no version is in use."""

    def __init__(self, registry: Registry | None) -> None:
        self.version = ""  # as interference-0002; empty when none serves
        self.co_runs: list[CoRun] = []
        self.alone: dict[int, tuple[float, ...]] = {}  # key -> loads, seconds of a step, share of communication
        self._registry = registry
        self._pointer: str | None = None
        self._looked_ms = -CHECK_INTERVAL_MS
        self._trouble = ""

    def refresh(self, now_ms: int) -> bool:
        """Load the version that was promoted or rolled back to. Returns whether the version changed.

        This polls the registry at most once in CHECK_INTERVAL_MS.
        """
        if self._registry is None or 0 <= now_ms - self._looked_ms < CHECK_INTERVAL_MS:
            return False
        self._looked_ms = now_ms
        try:
            wanted = self._registry.find_current_version(KIND)
            if wanted == self._pointer:
                return False
            folder = None if wanted is None else self._registry.find_serving_folder(KIND)
            self._apply_fit(None if folder is None else CoRunFit.load(folder))
        except (ModelError, OSError) as error:
            if str(error) != self._trouble:
                logger.warning("interference: %s; what was known before stays", error)
            self._trouble = str(error)
            return False
        self._pointer, self._trouble = wanted, ""
        self.version = "" if folder is None else f"{KIND}-{folder.name}"
        logger.info("interference: %s", f"{self.version} is known" if self.version else "no version serves")
        return True

    def _apply_fit(self, fit: CoRunFit | None) -> None:
        self.co_runs, self.alone = ([], {}) if fit is None else (fit.co_runs, {})
        if fit is not None:
            loads, unknown = fit.make_load_table(), (math.nan,) * len(LOADS)
            for key in {*loads, *fit.turns}:
                self.alone[key] = (*loads.get(key, unknown), *fit.turns.get(key, (math.nan, math.nan)))
