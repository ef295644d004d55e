"""Training of the trees of one target: a set of quantile models for each band of leads.

LightGBM is imported only where it is used.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.features import DAY_S, FEATURES, HOUR_S, PanelPast, Rows, compute_features
from fleetcast.models.forecast import QUANTILES, Panel

Array = NDArray[np.float64]

LONG_S = 56 * DAY_S
"""With so much history all trees are fitted; below, the last LATE_SHARE of it says how many help."""
LATE_SHARE = 0.25
PARSIMONY = 0.005
DEPTH, LEAF_SHARE = 3, 0.01
"""Of a long history; a short one has a level more and leaves of `leaf_rows`: there the number of trees is held out."""
CHANGE = FEATURES.index("change")
# The usual change of a series that hardly moves, as a share of its scale.
SMALLEST_CHANGE = 0.005


@dataclass(frozen=True, slots=True)
class Band:
    """A band of leads up to `end_s`, which has its own model.

    leads_s: the leads that the model is fitted on. Some of them belong to the neighbouring bands.
    """

    name: str
    end_s: float
    leads_s: tuple[int, ...]


BANDS = (
    Band("near", HOUR_S, (60, 300, 600, 1200, 1800, 3600)),
    Band("mid", 6 * HOUR_S, tuple(hours * HOUR_S for hours in (1, 2, 3, 4, 6, 9))),
    Band("far", float("inf"), tuple(hours * HOUR_S for hours in (6, 9, 12, 18, 24, 36, 48, 72))),
)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings for fitting the demand trees.

    rows: the largest number of training rows for each band. threads: the number of quantiles that are fitted at
    once.

    A leaf holds at least `leaf_rows` rows. With a long history it also holds at least LEAF_SHARE of the rows,
    because neighbouring rows are nearly the same.
    """

    trees: int = 100
    learning_rate: float = 0.08
    leaf_rows: int = 80
    columns: float = 0.9
    row_share: float = 0.6
    rows: int = 40_000
    threads: int = 2


@dataclass(frozen=True, slots=True)
class BandModel:
    """The fitted quantile models of one band.

    boosters: one LightGBM booster for each of QUANTILES. by_change: whether the target is in units of the
    usual change over the lead, instead of the scale of the series.
    """

    boosters: Sequence[Any]
    by_change: bool


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The training rows of one band.

    x: (row, feature). z: (row,) the scaled changes to predict. early: (row,) whether the outcome lies before
    the split. late: (row,) whether the origin lies after the split.
    """

    x: Rows
    z: Array
    early: NDArray[np.bool_]
    late: NDArray[np.bool_]


Bands = dict[str, BandModel]


def fit_target(pasts: Sequence[PanelPast], settings: Settings, seed: int) -> Bands:
    """Fit a model for each band of one target, and return them by the band's name.

    Leaves out bands with fewer than 2 * `leaf_rows` rows.
    """
    found: Bands = {}
    long = max(past.panel.bins * past.panel.bin_s for past in pasts) >= LONG_S
    for number, band in enumerate(BANDS):
        rows = draw_training_rows(pasts, band, settings.rows, np.random.default_rng((seed, number)))
        if len(rows.z) < 2 * settings.leaf_rows:
            continue
        parameters = _make_parameters(settings, LEAF_SHARE * len(rows.z) if long else 0, DEPTH + (not long), seed)
        by_change, trees = not long, settings.trees
        if by_change and min(rows.early.sum(), rows.late.sum()) >= 2 * settings.leaf_rows:
            trees = _choose_tree_count(rows, settings.trees, parameters)
        boosters = _fit_quantile_boosters(rows.x, rows.z, by_change, trees, parameters, settings.threads)
        found[band.name] = BandModel(boosters, by_change)
    return found


def _fit_quantile_boosters(
    x: Rows, z: Array, by_change: bool, trees: int, parameters: dict[str, Any], threads: int
) -> list[Any]:
    """Fit one booster for each quantile. All of them share the binned columns."""
    import lightgbm

    data = _make_dataset(x, z, by_change, parameters).construct()

    def fit_level(level: float) -> Any:
        return lightgbm.train({**parameters, "alpha": level}, data, trees)

    return compute_each_level(fit_level, QUANTILES, threads)


def compute_each_level(work: Callable[[Any], Any], levels: Iterable[Any], threads: int) -> list[Any]:
    """Return work(level) for every level, computed on `threads` threads of one core each.

    LightGBM's own threads would wait for each other after every leaf.
    """
    if threads == 1:
        return [work(level) for level in levels]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, levels))


def _choose_tree_count(rows: TrainingRows, most: int, parameters: dict[str, Any]) -> int:
    """Return the smallest number of trees whose loss is within PARSIMONY of the smallest loss.

    The trees are fitted on the early rows, and the loss is measured on the late rows. The result is at most
    `most`. A single tree has almost no effect, because a leaf adds only its value times `learning_rate`.
    """
    import lightgbm

    early = _make_dataset(rows.x[rows.early], rows.z[rows.early], True, parameters)
    late = _make_dataset(rows.x[rows.late], rows.z[rows.late], True, parameters, early)
    losses = np.zeros(most)
    for level in QUANTILES:
        found: dict[str, Any] = {}
        recorders = [lightgbm.record_evaluation(found)]
        lightgbm.train({**parameters, "alpha": level}, early, most, [late], ["late"], callbacks=recorders)
        curve = np.array(found["late"]["quantile"])
        losses += np.pad(curve, (0, most - len(curve)), mode="edge")
    return int(np.flatnonzero(losses <= (1 + PARSIMONY) * losses.min())[0]) + 1


def _make_dataset(x: Rows, z: Array, by_change: bool, parameters: dict[str, Any], like: Any = None) -> Any:
    import lightgbm

    unit = compute_usual_change(x) if by_change else None
    label = z if unit is None else z / unit  # the weight makes the loss that of z again
    return lightgbm.Dataset(x, label, weight=unit, reference=like, params={**parameters, "feature_pre_filter": False})


def compute_usual_change(x: Rows) -> Array:
    """Return (...) the usual change over the lead, as a share of the series' scale. It is never 0.

    The target z can be in this unit. x: (..., feature).
    """
    return np.nan_to_num(x[..., CHANGE].astype(np.float64)) + SMALLEST_CHANGE


def _make_parameters(settings: Settings, leaf_rows: float, depth: int, seed: int) -> dict[str, Any]:
    return {
        "objective": "quantile",
        "learning_rate": settings.learning_rate,
        "num_leaves": 2**depth,
        "max_depth": depth,
        "min_data_in_leaf": max(settings.leaf_rows, round(leaf_rows)),
        "extra_trees": True,
        "feature_fraction": settings.columns,
        "bagging_fraction": settings.row_share,
        "bagging_freq": 1,
        "max_bin": 63,
        "seed": seed,
        "deterministic": True,
        "force_row_wise": True,
        "num_threads": 1,
        "verbosity": -1,
    }


def draw_training_rows(pasts: Sequence[PanelPast], band: Band, most: int, rng: np.random.Generator) -> TrainingRows:
    """Draw at most `most` rows of a band with known outcomes, spread evenly over the panels' origins.

    The near band has at most six origins per hour, and the others at most one. Origins that are closer together
    are nearly the same.
    """
    parts = [_draw_panel_rows(past, band, most, rng) for past in pasts]
    x, z, early, late = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    chosen = np.sort(rng.choice(len(z), most, replace=False)) if len(z) > most else np.arange(len(z))
    return TrainingRows(x[chosen], z[chosen], early[chosen], late[chosen])


def _draw_panel_rows(past: PanelPast, band: Band, most: int, rng: np.random.Generator) -> tuple[Any, ...]:
    """Draw rows from one panel, and return them as the columns of TrainingRows."""
    panel = past.panel
    steps = sorted({round(lead / panel.bin_s) for lead in band.leads_s} - {0})
    first, last = DAY_S // panel.bin_s, panel.bins - 1 - (steps[0] if steps else 0)
    if not steps or last < first or not len(panel.names):
        nothing = np.empty(0, np.bool_)
        return np.empty((0, len(FEATURES)), np.float32), np.empty(0), nothing, nothing
    dense = max(1, round((HOUR_S if band.end_s > HOUR_S else HOUR_S / 6) / panel.bin_s))
    sparse = -(-(last - first) * len(steps) * len(panel.names) // (2 * most))
    stride = max(dense, sparse)
    origins = np.arange(last - int(rng.integers(min(stride, last - first + 1))), first - 1, -stride)[::-1]
    x = compute_features(past, origins, steps)
    z = (_find_outcomes(panel, origins, steps) - past.compute_anchor(origins)) / past.compute_scale(origins)
    split = first + round((1 - LATE_SHARE) * (last - first))
    targets = np.broadcast_to((origins + np.array(steps)[:, None])[..., None], z.shape)
    late = np.broadcast_to((origins >= split)[:, None], z.shape)
    known = np.isfinite(z) & has_day_of_history(past, origins)
    return x[known], z[known], (targets < split)[known], late[known]


def _find_outcomes(panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
    """Return (step, origin, series) the values at the targets, NaN beyond the panel's end."""
    bins = origins + np.array(steps)[:, None]
    found = panel.values.T[np.minimum(bins, panel.bins - 1)]
    found[bins >= panel.bins] = np.nan
    return np.asarray(found)


def has_day_of_history(past: PanelPast, origins: NDArray[np.intp]) -> NDArray[np.bool_]:
    """Return (origin, series) whether the series has a day of history before the origin."""
    return np.asarray(np.isfinite(past.find_values_before(origins, past.count_bins(DAY_S) - 1)))
