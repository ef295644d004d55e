"""The run-time model in use.

It is the registry's version. If this version is unusable, it is the quantiles of similar jobs.
"""

import logging
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.past_runs import COLUMN, EMPIRICAL
from fleetcast.features.run_past import LEVELS
from fleetcast.fleet.errors import ModelError
from fleetcast.models.run_times.duration import DurationModel
from fleetcast.models.versions.registry import Registry

logger = logging.getLogger(__name__)

KIND = "duration"
BASELINE = "similar jobs"
UNREADABLE = "?"  # no version has this name

SHORTEST_LOG = -7.0  # of a millisecond; less is nonsense

_SIMILAR = [COLUMN[name] for name in EMPIRICAL]

Array = NDArray[np.float64]
Features = NDArray[np.float32]


class RunModel(Protocol):
    """A model of run times.

    features: (job, feature). The results are (job, level), and no value is below the value of a lower level.
    `predict_log_run` returns log seconds, which no limit caps.
    """

    def predict_log_run(self, features: Features) -> Array: ...

    def predict_remaining_s(self, features: Features, elapsed_s: Array, levels: tuple[float, ...]) -> Array: ...


class ServedRunModel:
    """The run-time model of a pipeline.

    `refresh` and the forecasts may run in a thread, but only one call at a time.
    """

    def __init__(self, registry: Registry) -> None:
        self.name = BASELINE
        self.trouble = ""  # why the version that should serve does not; empty when all is well
        self.fitted_until_ms: int | None = None
        self._registry = registry
        self._baseline: RunModel = DurationModel()  # not fitted: the quantiles of similar jobs
        self._model: RunModel = self._baseline
        self._version: str | None = None

    def refresh(self) -> bool:
        """Load the version that should be used. Returns whether it has changed.

        This blocks on files.
        """
        try:
            version = self._registry.find_current_version(KIND)
        except ModelError as error:
            self._fall_back(str(error))
            self._version = UNREADABLE
            return False
        if version == self._version:
            return False
        self._version = version
        self._set_model(self._baseline, BASELINE, None)
        self.trouble = ""
        if version is not None:
            self._load_version()
        return True

    def _load_version(self) -> None:
        try:
            folder = self._registry.find_serving_folder(KIND)
            if folder is None:
                return
            card = self._registry.read_version_card(KIND, folder.name)
            self._set_model(load_model(folder), f"{KIND}-{folder.name}", card.fitted_until_ms)
        except (ModelError, OSError) as error:
            self._fall_back(str(error))
        else:
            logger.info("run times: %s serves", self.name)

    def predict_log_run(self, features: Features) -> Array:
        """Predict logarithms of run times in seconds: (job, LEVELS), NaN if nothing is known.

        No limit caps them.
        """
        return self._ask_model(lambda model: model.predict_log_run(features), features, len(LEVELS), SHORTEST_LOG)

    def predict_remaining_s(self, features: Features, elapsed_s: Array, levels: tuple[float, ...]) -> Array:
        """Predict the remaining seconds of jobs that have run for `elapsed_s`: (job, level), NaN if unknown."""
        return self._ask_model(
            lambda model: model.predict_remaining_s(features, elapsed_s, levels), features, len(levels), 0.0
        )

    def _ask_model(self, ask: "_ModelQuestion", features: Features, levels: int, least: float) -> Array:
        """Return the model's answer if it is plausible: (job, level).

        If it is missing or implausible, the baseline answers from now on. levels: number of levels. least: the
        smallest plausible value.
        """
        jobs = len(features)
        if not jobs:
            return np.zeros((0, levels))
        if self._model is not self._baseline:
            try:
                answer = np.asarray(ask(self._model), np.float64)
            except ModelError as error:
                self._fall_back(str(error))
            else:
                if answer.shape == (jobs, levels) and np.isfinite(answer).all() and (answer >= least).all():
                    return _make_non_decreasing(answer)
                self._fall_back(f"{self.name} gives run times that are none")
        answer = _make_non_decreasing(ask(self._baseline))
        answer[np.isnan(features[:, _SIMILAR]).any(axis=1)] = np.nan
        return answer

    def _fall_back(self, why: str) -> None:
        if why != self.trouble:
            logger.warning("run times: %s; %s serve", why, BASELINE)
        self.trouble = why
        self._set_model(self._baseline, BASELINE, None)

    def _set_model(self, model: RunModel, name: str, fitted_until_ms: int | None) -> None:
        self._model, self.name, self.fitted_until_ms = model, name, fitted_until_ms


def _make_non_decreasing(answer: Array) -> Array:
    """Raise each value to at least the values at lower levels: (job, level)."""
    sorted_up: Array = np.maximum.accumulate(answer, axis=1)
    return sorted_up


class _ModelQuestion(Protocol):
    def __call__(self, model: RunModel) -> Array: ...


def load_model(folder: Path) -> RunModel:
    """Load the model from a version's folder. Raises ModelError if it is unusable.

    This imports LightGBM.
    """
    return DurationModel.load(folder)
