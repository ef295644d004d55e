"""The demand trees in use: the registry's current version.

If no version is usable, `trouble` says why, and the other forecasters are used.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.errors import ModelError
from fleetcast.models.demand.largest import find_largest_rows, select_panel_rows
from fleetcast.models.forecast import QUANTILES, Forecaster, Panel
from fleetcast.models.versions.card import read_card
from fleetcast.models.versions.registry import Registry
from fleetcast.service.answers.fitted_models import ShadowModel

logger = logging.getLogger(__name__)

Array = NDArray[np.float64]

KIND = "demand"
MOST_SERIES = 64
UNREAD = "?"  # no version has this name


class ServedTrees:
    """The forecaster `trees` of a pipeline.

    `refresh` and `forecast` may run in a thread, but only one call at a time.
    """

    name = "trees"
    withholds = True  # targets that the version lost in its back-test

    def __init__(self, registry: Registry) -> None:
        self.version = ""  # of the model that forecasts; empty when none does
        self.trouble = ""  # why the version that should forecast does not; empty when all is well
        self._registry = registry
        self._pointer: str | None = None  # the version that was looked at last
        self._spoke = ""  # the model that forecast last
        self._model: Forecaster | None = None
        self._fitted_until_ms = 0
        self._withheld: frozenset[str] = frozenset()

    def refresh(self) -> bool:
        """Load the version that should be used. Returns whether the trees in use have changed.

        This blocks on files.
        """
        try:
            wanted = self._read_wanted_version()
            if wanted == self._pointer:
                return False
            self._pointer, self._model, self.version = wanted, None, ""
            if wanted is not None:
                self._load_version(wanted)
        except (ModelError, OSError) as error:
            self._stop_serving(str(error))
            self._pointer = UNREAD
            return False
        spoke = self._spoke
        if wanted is None or self.version:
            self._spoke = self.version
        if wanted is None:
            self.trouble = ""
        return self._spoke != spoke

    def _read_wanted_version(self) -> str | None:
        """Return the name of the version that should be used. Raises ModelError if the registry is unreadable."""
        return self._registry.find_current_version(KIND)

    def _load_version(self, version: str) -> None:
        """Load the trees of the current version. Raises OSError, after which `refresh` tries again.

        A damaged version is not tried again.
        """
        try:
            folder = self._registry.find_serving_folder(KIND)
            if folder is not None:
                self._use_folder(folder)
        except ModelError as error:
            self._stop_serving(f"version {version}: {error}")

    def _use_folder(self, folder: Path) -> None:
        gate = read_card(folder).gate if self.withholds else None
        self._model, self._fitted_until_ms = load_trees(folder)
        self._withheld = gate.withheld_targets if gate else frozenset()
        self.version, self.trouble = f"{KIND}-{folder.name}", ""
        but = f", but not {', '.join(sorted(self._withheld))}, which it lost" if self._withheld else ""
        logger.info("demand: the trees of %s forecast%s", self.version, but)

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        """Return the forecasts: (quantile, step, origin, series).

        They are NaN in four cases: for small series, for targets that the version forecast worse than its rivals
        in its back-test, for origins within its training data, and while no model is loaded.
        """
        found = np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.nan)
        ends = panel.first_ms + (origins + 1) * panel.bin_s * 1000
        later, rows = np.flatnonzero(ends >= self._fitted_until_ms), find_largest_rows(panel, MOST_SERIES)
        if self._model is None or not len(later) or panel.target in self._withheld:
            return found
        try:
            answer = self._model.forecast(select_panel_rows(panel, rows), origins[later], steps)
        except (ModelError, ValueError) as error:
            self._stop_serving(f"{self.version}: {error}")
            return found
        if answer.shape != (len(QUANTILES), len(steps), len(later), len(rows)) or np.isinf(answer).any():
            self._stop_serving(f"{self.version} gives forecasts that are none")
            return found
        found[:, :, later[:, None], rows] = np.sort(answer, axis=0)
        return found

    def _stop_serving(self, why: str) -> None:
        if why != self.trouble:
            logger.warning("demand: %s; the other forecasters serve", why)
        self._model, self.version, self.trouble = None, "", why


def load_trees(folder: Path) -> tuple[Forecaster, int]:
    """Load the model from a version's folder. Returns it with the end of its training data in Unix ms.

    This imports LightGBM. Raises ModelError.
    """
    from fleetcast.models.demand.trees import DemandTrees

    trees = DemandTrees.load(folder)
    return trees, trees.fitted_until_ms


class ShadowTrees(ServedTrees):
    """The trees of the registry's challenger, with the interface of `ServedTrees`."""

    name = "shadow"
    withholds = False  # its record says how it would do in all of them

    def _read_wanted_version(self) -> str | None:
        return self._registry.find_challenger(KIND)

    def _load_version(self, version: str) -> None:
        damage = self._registry.find_damage(KIND, version)
        if damage is not None:
            self._stop_serving(f"the challenger {version} is damaged: {damage}")
            return
        try:
            self._use_folder(self._registry.find_folder(KIND, version))
        except ModelError as error:
            self._stop_serving(f"the challenger {version}: {error}")


def make_shadow_model(
    losses: Mapping[str, Mapping[str, tuple[float, int]]], shadow: ServedTrees, serving: ServedTrees
) -> ShadowModel | None:
    """Return the shadow's record over all targets, or None if there is no shadow.

    losses: target → forecaster → (mean loss relative to persistence, number of losses).
    """
    if not shadow.version:
        return None

    def compute_mean_loss(name: str) -> tuple[float, int]:
        rows_found = [rows[name] for rows in losses.values() if name in rows]
        n = sum(count for _, count in rows_found)
        return (sum(loss * count for loss, count in rows_found) / n if n else 1.0), n

    loss, n = compute_mean_loss(shadow.name)
    champion = round(compute_mean_loss(serving.name)[0], 4) if serving.version else None
    return ShadowModel(KIND, shadow.version.rpartition("-")[2], round(loss, 4), champion, n)
