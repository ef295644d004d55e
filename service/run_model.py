"""The run-time model that serves: the registry's current version, or the quantiles of similar jobs.

A version that is damaged, of another version's features or gives nonsense is said once, counted (`trouble`), and the
baseline serves until `current` names another one.
"""

import logging
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from features.run_history import COLUMN, EMPIRICAL
from features.run_past import LEVELS as EMPIRICAL_LEVELS
from fleet.errors import ModelError
from models.registry import Registry

logger = logging.getLogger(__name__)

KIND = "duration"
BASELINE = "similar jobs"

Array = NDArray[np.float64]
Features = NDArray[np.float32]


class RunModel(Protocol):
    """What is asked of a model. features: (job, feature); the answers are seconds, (job, level), not falling."""

    def run_s(self, features: Features, levels: tuple[float, ...]) -> Array: ...

    def remaining_s(self, features: Features, elapsed_s: Array, levels: tuple[float, ...]) -> Array: ...


class ServedRunModel:
    """One reader: `refresh` and the forecasts may run in a thread, one at a time."""

    def __init__(self, registry: Registry) -> None:
        self.name = BASELINE
        self.trouble = ""  # why the version that should serve does not; empty when all is well
        self.fitted_until_ms: int | None = None
        self._registry = registry
        self._baseline: RunModel = SimilarJobs()
        self._model: RunModel = self._baseline
        self._version: str | None = None

    def refresh(self) -> bool:
        """Load the version that serves, where it is another one than before; True then. Blocks."""
        try:
            version = self._registry.current_version(KIND)
        except ModelError as error:
            self._fall_back(str(error))
            return False
        if version == self._version:
            return False
        self._version = version
        self._become(self._baseline, BASELINE, None)
        self.trouble = ""
        if version is not None:
            self._load()
        return True

    def _load(self) -> None:
        try:
            folder = self._registry.current(KIND)
            if folder is None:
                return
            card = self._registry.card(KIND, folder.name)
            self._become(load_model(folder), f"{KIND}-{folder.name}", card.fitted_until_ms)
        except (ModelError, OSError) as error:
            self._fall_back(str(error))
        else:
            logger.info("run times: %s serves", self.name)

    def run_s(self, features: Features, levels: tuple[float, ...]) -> Array:
        """(job, level) seconds from the start; NaN where nothing is known."""
        return self._checked(lambda model: model.run_s(features, levels), len(features), levels)

    def remaining_s(self, features: Features, elapsed_s: Array, levels: tuple[float, ...]) -> Array:
        """(job, level) seconds from now, of jobs that have run for `elapsed_s`; NaN where nothing is known."""
        return self._checked(lambda model: model.remaining_s(features, elapsed_s, levels), len(features), levels)

    def _checked(self, ask: "_Ask", jobs: int, levels: tuple[float, ...]) -> Array:
        """The model's answer; the baseline's, from now on, when it gives none or nonsense."""
        if not jobs:
            return np.zeros((0, len(levels)))
        if self._model is not self._baseline:
            try:
                answer = np.asarray(ask(self._model), np.float64)
            except ModelError as error:
                self._fall_back(str(error))
            else:
                if answer.shape == (jobs, len(levels)) and np.isfinite(answer).all() and (answer >= 0).all():
                    return _not_falling(answer)
                self._fall_back(f"{self.name} gives run times that are none")
        return _not_falling(ask(self._baseline))

    def _fall_back(self, why: str) -> None:
        if why != self.trouble:
            logger.warning("run times: %s; %s serve", why, BASELINE)
        self.trouble = why
        self._become(self._baseline, BASELINE, None)

    def _become(self, model: RunModel, name: str, fitted_until_ms: int | None) -> None:
        self._model, self.name, self.fitted_until_ms = model, name, fitted_until_ms


class SimilarJobs:
    """Quantiles of the jobs that are alike (`features.run_history`): straight lines between them in log time."""

    def run_s(self, features: Features, levels: tuple[float, ...]) -> Array:
        known = features[:, [COLUMN[name] for name in EMPIRICAL]].astype(np.float64)
        rows = [np.interp(levels, EMPIRICAL_LEVELS, row) for row in known]
        run_s: Array = np.exp(np.array(rows).reshape(len(rows), len(levels)))
        return run_s

    def remaining_s(self, features: Features, elapsed_s: Array, levels: tuple[float, ...]) -> Array:
        """Of the jobs that ran longer; past them all, as long again as it has run, or a share of that."""
        known = features[:, [COLUMN[name] for name in EMPIRICAL]].astype(np.float64)
        left = np.full((len(known), len(levels)), np.nan)
        for at, (row, ago_s) in enumerate(zip(known, elapsed_s.tolist(), strict=True)):
            if np.isfinite(row).all():
                passed = np.interp(np.log(max(ago_s, 1.0)), row, EMPIRICAL_LEVELS, left=0.0, right=1.0)
                run_s = np.exp(np.interp(passed + np.array(levels) * (1 - passed), EMPIRICAL_LEVELS, row))
                left[at] = run_s - ago_s if passed < EMPIRICAL_LEVELS[-1] else 2 * np.array(levels) * ago_s
        return left.clip(min=0.0)


def _not_falling(answer: Array) -> Array:
    """(job, level) sorted along the levels."""
    sorted_up: Array = np.maximum.accumulate(answer, axis=1)
    return sorted_up


class _Ask(Protocol):
    def __call__(self, model: RunModel) -> Array: ...


def load_model(folder: Path) -> RunModel:
    """The model of a version's folder; LightGBM is loaded with it. ModelError when it cannot be used."""
    from models.duration import DurationModel

    model: RunModel = DurationModel.load(folder)
    return model
