"""Demand forecasts by gradient-boosted quantile trees.

One model per target serves all its series, even those that it was not fitted on.

    x      = features at the origin (models/demand/features.py), with the lead as one of them
    z      = (value at the target - anchor) / scale          the scaled change from the last value
    bands  = leads up to an hour, up to six, and longer ones: each has a model of each quantile

Most jobs that run now will still run in an hour, so the trees learn the change. Counts of arrivals are
new in every bin, so their anchor is the level of the past week (`flows.FLOW_TARGETS`). For a history
below eight weeks, z is in units of the usual change over the lead. Then a model without
trees equals persistence. The last quarter of such a history is first held out, to find how many trees help.

A saved model is LightGBM's own text: one file for each band and quantile, next to `model.json` with
their checksums.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.decode_faults import explain_json_error
from fleetcast.fleet.errors import ModelError
from fleetcast.models.demand.boosting import (
    BANDS,
    Band,
    BandModel,
    Bands,
    Settings,
    compute_each_level,
    compute_usual_change,
    fit_target,
    has_day_of_history,
)
from fleetcast.models.demand.features import DAY_S, FEATURES, PanelPast, Rows, compute_features
from fleetcast.models.demand.flows import FLOW_TARGETS
from fleetcast.models.demand.job_survival import JobSurvival
from fleetcast.models.forecast import QUANTILES, Panel

Array = NDArray[np.float64]

__all__ = ["DemandTrees", "Settings"]

MODEL_FILE = "model.json"
LAYOUT = 1
CHUNK_ROWS = 60_000
FEW_ROWS = 500  # a thread is not worth its start
STAND_INS = ("running", "active_nodes", "wanted", "queued", "request_rate")
"""Levels by how much they are alike: a target without a model of its own is forecast by the first of these."""
SURVIVAL_S = 60 * DAY_S


class _SavedSurvival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    bin_s: int
    hazard: tuple[float, ...]
    mix: tuple[float, ...]


class _SavedBand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model of one band in model.json. files: (name, SHA-256) of each quantile's file."""

    by_change: bool
    files: list[tuple[str, str]]


class _SavedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of model.json. bands: target -> name of a band -> the saved band."""

    layout: int
    seed: int
    fitted_until_ms: int
    features: tuple[str, ...]
    quantiles: tuple[float, ...]
    settings: Settings
    survival: _SavedSurvival | None
    bands: dict[str, dict[str, _SavedBand]]


@dataclass(slots=True)
class DemandTrees:
    """The forecaster `trees`. It can be fitted, saved and loaded. Before it is fitted, its forecasts are NaN."""

    seed: int = 0
    settings: Settings = field(default_factory=Settings)
    fitted_until_ms: int = 0
    models: dict[str, Bands] = field(default_factory=dict)
    survival: JobSurvival | None = None
    name: str = "trees"

    def fit(
        self, panels: Sequence[Panel], until: Sequence[int], say: Callable[[str], None] = lambda line: None
    ) -> Self:
        """Fit a model of each target, reading only the bins before until[k] of panel k.

        A target with too few known outcomes gets no model. Raises ModelError if no target gets one.
        """
        known = [panel.until(max(bins, 0)) for panel, bins in zip(panels, until, strict=True)]
        self.models = {}
        self.survival = _fit_survival(known)
        targets = dict.fromkeys(panel.target for panel in known)
        for done, target in enumerate(targets):
            say(f"fitting {target}: {done} of {len(targets)} targets done")
            pasts = [PanelPast.from_panel(panel, self.survival) for panel in known if panel.target == target]
            bands = fit_target(pasts, self.settings, self.seed)
            if bands:
                self.models[target] = bands
        if not self.models:
            raise ModelError(f"nothing to fit on: {len(panels)} series panels hold no day of history with an outcome")
        self.fitted_until_ms = max(panel.end_ms(panel.bins - 1) for panel in known if panel.bins)
        return self

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        """Return (quantile, step, origin, series) the forecasts.

        They are NaN for series with less than a day of history, and without a model of the target.
        """
        found = np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.nan)
        bands = self._find_bands(panel.target)
        if bands is None or not len(panel.names):
            return found
        past = PanelPast.from_panel(panel, self.survival, origins)
        for part in _split_into_chunks(origins, len(steps) * len(panel.names)):
            x = compute_features(past, origins[part], steps)
            for band, rows in _split_by_band(steps, panel.bin_s):
                if band.name in bands:
                    found[:, rows, part] = _predict_band(bands[band.name], past, origins[part], x[rows], self.settings)
        found.sort(axis=0)
        return found

    def _find_bands(self, target: str) -> Bands | None:
        if target in self.models or target in FLOW_TARGETS:
            return self.models.get(target)
        return next((self.models[other] for other in STAND_INS if other in self.models), None)

    def save(self, folder: Path) -> None:
        """Write the model into a folder, which may exist. model.json is written last."""
        folder.mkdir(parents=True, exist_ok=True)
        saved_bands: dict[str, dict[str, _SavedBand]] = {}
        for number, (target, bands) in enumerate(self.models.items()):
            saved_bands[target] = {
                name: _SavedBand(band.by_change, _write_boosters(band.boosters, folder, f"{number}-{name}"))
                for name, band in bands.items()
            }
        jobs = self.survival
        survival = None
        if jobs is not None:
            survival = _SavedSurvival(jobs.bin_s, tuple(jobs.hazard.tolist()), tuple(jobs.mix.tolist()))
        saved = _SavedModel(
            LAYOUT, self.seed, self.fitted_until_ms, FEATURES, QUANTILES, self.settings, survival, saved_bands
        )
        (folder / MODEL_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(saved)))

    @classmethod
    def load(cls, folder: Path) -> "DemandTrees":
        """Load a model that `save` wrote. Raises ModelError that names a missing or damaged file."""
        saved = _read_saved_model(folder / MODEL_FILE)
        models = {
            target: {
                name: BandModel([_read_booster(folder / file, digest) for file, digest in band.files], band.by_change)
                for name, band in bands.items()
            }
            for target, bands in saved.bands.items()
        }
        jobs = saved.survival
        survival = None if jobs is None else JobSurvival(jobs.bin_s, np.array(jobs.hazard), np.array(jobs.mix))
        return cls(saved.seed, saved.settings, saved.fitted_until_ms, models, survival)


def _fit_survival(panels: Sequence[Panel]) -> JobSurvival | None:
    """Fit how long GPUs stay, from the last two months of the panel with the most values.

    Only panels with starts, ends and running GPUs are considered. Returns None if there is no such panel.
    """
    able = [panel for panel in panels if {"started", "ended", "running"} <= {*panel.covariates, panel.target}]
    if not able:
        return None
    panel = max(able, key=lambda panel: panel.values.size)
    recent = slice(-SURVIVAL_S // panel.bin_s, None)
    known = {**panel.covariates, panel.target: panel.values}
    started, ended, running = (known[name][:, recent] for name in ("started", "ended", "running"))
    return JobSurvival.fit(started, ended, running, panel.bin_s)


def _predict_band(model: BandModel, past: PanelPast, origins: NDArray[np.intp], x: Rows, settings: Settings) -> Array:
    """Return (quantile, step, origin, series) the model's forecasts in the unit of the series.

    x: (step, origin, series, feature).
    """
    flat = x.reshape(-1, x.shape[-1])
    threads = settings.threads if len(flat) >= FEW_ROWS else 1
    levels = compute_each_level(lambda booster: booster.predict(flat, num_threads=1), model.boosters, threads)
    z = np.stack(levels).reshape(len(levels), *x.shape[:-1])
    unit = past.compute_scale(origins) * compute_usual_change(x) if model.by_change else past.compute_scale(origins)
    return np.asarray(np.where(has_day_of_history(past, origins), past.compute_anchor(origins), np.nan) + unit * z)


def _split_by_band(steps: Sequence[int], bin_s: int) -> Iterator[tuple[Band, list[int]]]:
    """Yield each band that these steps need, with the indices of its steps."""
    start_s = 0.0
    for band in BANDS:
        rows = [row for row, step in enumerate(steps) if start_s < step * bin_s <= band.end_s]
        if rows:
            yield band, rows
        start_s = band.end_s


def _split_into_chunks(origins: NDArray[np.intp], rows_each: int) -> Iterator[slice]:
    size = max(1, CHUNK_ROWS // max(rows_each, 1))
    for start in range(0, len(origins), size):
        yield slice(start, min(start + size, len(origins)))


def _write_boosters(boosters: Sequence[Any], folder: Path, stem: str) -> list[tuple[str, str]]:
    """Write one file for each quantile, and return the files' names and SHA-256 digests."""
    written = []
    for level, booster in zip(QUANTILES, boosters, strict=True):
        name, text = f"{stem}-{round(100 * level):02d}.txt", booster.model_to_string().encode()
        (folder / name).write_bytes(text)
        written.append((name, _compute_digest(text)))
    return written


def _compute_digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _read_saved_model(path: Path) -> _SavedModel:
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_SavedModel)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}): train demand again") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: damaged ({explain_json_error(error)}): train demand again") from error
    if saved.layout != LAYOUT or saved.features != FEATURES or saved.quantiles != QUANTILES:
        raise ModelError(f"{path}: made by another version of Fleetcast: train demand again")
    return saved


def _read_booster(path: Path, digest: str) -> Any:
    import lightgbm

    try:
        text = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror}): train demand again") from error
    if _compute_digest(text) != digest:
        raise ModelError(f"{path}: damaged (its checksum is not the one in {MODEL_FILE}): train demand again")
    return lightgbm.Booster(model_str=text.decode())
