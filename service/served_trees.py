"""The demand trees that serve: the registry's current version, reloaded when it is another one.

A version that is missing, damaged or sick is said once and counted (`trouble`); the other forecasters serve meanwhile.
What the disk does not give now is asked for again at every look.
Trees forecast the largest series; what they learnt from says nothing about them, so there they forecast nothing.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet.errors import ModelError
from models.forecast import QUANTILES, Forecaster, Panel
from models.largest import largest, panel_of
from models.registry import Registry

logger = logging.getLogger(__name__)

Array = NDArray[np.float64]

KIND = "demand"
MOST_SERIES = 64
UNREAD = "?"  # no version has this name


class ServedTrees:
    """The forecaster `trees` of a pipeline. One reader: `refresh` and forecasts may run in a thread, one at a time."""

    name = "trees"

    def __init__(self, registry: Registry) -> None:
        self.version = ""  # of the model that forecasts; empty when none does
        self.trouble = ""  # why the version that should forecast does not; empty when all is well
        self._registry = registry
        self._pointer: str | None = None  # the version that was looked at last
        self._spoke = ""  # the model that forecast last
        self._model: Forecaster | None = None
        self._fitted_until_ms = 0

    def refresh(self) -> bool:
        """Load the version that is wanted; True when another one forecasts than did last, or none is to. Blocks."""
        try:
            wanted = self._wanted()
            if wanted == self._pointer:
                return False
            self._pointer, self._model, self.version = wanted, None, ""
            if wanted is not None:
                self._load(wanted)
        except (ModelError, OSError) as error:
            self._fail(str(error))
            self._pointer = UNREAD
            return False
        spoke = self._spoke
        if wanted is None or self.version:
            self._spoke = self.version
        if wanted is None:
            self.trouble = ""
        return self._spoke != spoke

    def _wanted(self) -> str | None:
        """The version's name; ModelError where nobody can tell."""
        return self._registry.current_version(KIND)

    def _load(self, version: str) -> None:
        """OSError where the disk does not give it now; a version that is damaged or sick is not tried again."""
        try:
            folder = self._registry.current(KIND)
            if folder is not None:
                self._use(folder)
        except ModelError as error:
            self._fail(f"version {version}: {error}")

    def _use(self, folder: Path) -> None:
        self._model, self._fitted_until_ms = load_trees(folder)
        self.version, self.trouble = f"{KIND}-{folder.name}", ""
        logger.info("demand: the trees of %s forecast", self.version)

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        """(quantile, step, origin, series); NaN for small series, where it learnt, and while there is no model."""
        found = np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.nan)
        ends = panel.first_ms + (origins + 1) * panel.bin_s * 1000
        later, rows = np.flatnonzero(ends >= self._fitted_until_ms), largest(panel, MOST_SERIES)
        if self._model is None or not len(later):
            return found
        try:
            answer = self._model.forecast(panel_of(panel, rows), origins[later], steps)
        except (ModelError, ValueError) as error:
            self._fail(f"{self.version}: {error}")
            return found
        if answer.shape != (len(QUANTILES), len(steps), len(later), len(rows)) or np.isinf(answer).any():
            self._fail(f"{self.version} gives forecasts that are none")
            return found
        found[:, :, later[:, None], rows] = np.sort(answer, axis=0)
        return found

    def _fail(self, why: str) -> None:
        if why != self.trouble:
            logger.warning("demand: %s; the other forecasters serve", why)
        self._model, self.version, self.trouble = None, "", why


def load_trees(folder: Path) -> tuple[Forecaster, int]:
    """The model of a version's folder, and until when it learnt; LightGBM is loaded with it. ModelError when sick."""
    from models.demand_trees import DemandTrees

    trees = DemandTrees.load(folder)
    return trees, trees.fitted_until_ms
