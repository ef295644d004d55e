"""The selection of the forecasts to plot, so that their fans do not overlap.

The module also counts how often each model made the forecast.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.training.reports.plots import Course, Fan

MOST_FANS = 7
NEEDED = ("dataset", "target", "series", "issued_ms", "horizon_s", "quantile", "value", "actual")
Columns = dict[str, NDArray[Any]]
Block = Mapping[str, Sequence[Any]]
Shares = dict[int, Counter[str]]  # horizon_s -> how many forecasts were of which model


def make_courses(predictions: Sequence[Block]) -> dict[tuple[str, str], Course]:
    """Return (dataset, target) → an observed series and some of its forecasts, for plotting.

    The series is the largest series among the predictions.
    """
    sets: dict[tuple[str, str], list[Columns]] = {}
    for block in predictions:
        if any(name not in block for name in NEEDED) or not len(block["issued_ms"]):
            continue
        columns = {name: np.asarray(block[name]) for name in NEEDED}
        for key in sorted(_list_sets(block)):
            own = (columns["dataset"] == key[0]) & (columns["target"] == key[1])
            sets.setdefault(key, []).append({name: columns[name][own] for name in NEEDED[2:]})
    made = {}
    for key, parts in sets.items():
        course = _make_series_course({name: np.concatenate([part[name] for part in parts]) for name in NEEDED[2:]})
        if course is not None:
            made[key] = course
    return made


def count_served_models(predictions: Sequence[Block]) -> dict[tuple[str, str], Shares]:
    """Return (dataset, target) → horizon → how often each model made the forecast."""
    found: dict[tuple[str, str], Shares] = {}
    for block in predictions:
        if "model" not in block or any(name not in block for name in NEEDED) or not len(block["model"]):
            continue
        once = np.asarray(block["quantile"]) == 0.5
        horizons, models = np.asarray(block["horizon_s"])[once], np.asarray(block["model"])[once]
        for dataset, target in sorted(_list_sets(block)):
            own = ((np.asarray(block["dataset"]) == dataset) & (np.asarray(block["target"]) == target))[once]
            counts = found.setdefault((dataset, target), {})
            for horizon in np.unique(horizons[own]).tolist():
                names, n = np.unique(models[own & (horizons == horizon)], return_counts=True)
                counts.setdefault(int(horizon), Counter()).update(dict(zip(names.tolist(), n.tolist(), strict=True)))
    return found


def _list_sets(block: Block) -> set[tuple[str, str]]:
    return {(str(dataset), str(target)) for dataset, target in set(zip(block["dataset"], block["target"], strict=True))}


def _make_series_course(columns: Columns) -> Course | None:
    """Return the last part of the largest series, with forecasts that do not overlap.

    Returns None if no forecast has several horizons.
    """
    names, number = np.unique(columns["series"], return_inverse=True)
    size = np.bincount(number, np.nan_to_num(np.abs(columns["actual"].astype(float))))
    own = number == int(np.argmax(size / np.bincount(number)))
    columns = {name: column[own] for name, column in columns.items()}
    issued, horizon_ms = columns["issued_ms"].astype(np.int64), columns["horizon_s"].astype(np.int64) * 1000
    horizons = np.unique(horizon_ms)
    if len(horizons) < 2:
        return None
    fans = [
        fan
        for start in _choose_origins(issued, horizon_ms)
        if (fan := _make_fan(columns, int(start), horizons)) is not None
    ]
    if not fans:
        return None
    at_ms, first = np.unique(issued + horizon_ms, return_index=True)
    seen = (at_ms >= fans[0].issued_ms - horizons[-1] // 2) & (at_ms <= fans[-1].at_ms[-1])
    actual = columns["actual"].astype(float)[first]
    return Course(str(names[number[own][0]]), at_ms[seen], actual[seen], fans)


def _choose_origins(issued: NDArray[np.int64], horizon_ms: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return (k,) the times of the last forecasts whose fans do not overlap.

    Only forecasts with the longest horizon are chosen, at least that horizon apart.
    """
    longest = int(horizon_ms.max())
    origins = np.unique(issued[horizon_ms == longest])
    shown = [int(origins[-1])]
    for origin in origins[::-1].tolist():
        if shown[-1] - origin >= longest and len(shown) < MOST_FANS:
            shown.append(origin)
    return np.array(shown[::-1], np.int64)


def _make_fan(columns: Columns, issued_ms: int, horizons: NDArray[np.int64]) -> Fan | None:
    """Return the forecast that was issued at one time.

    Returns None if one of its horizons or quantiles is missing.
    """
    own = columns["issued_ms"] == issued_ms
    levels = np.unique(columns["quantile"][own].astype(float))
    place = {int(horizon): at for at, horizon in enumerate(horizons)}
    values = np.full((len(levels), len(horizons)), np.nan)
    rows = np.searchsorted(levels, columns["quantile"][own].astype(float))
    lanes = [place[int(horizon) * 1000] for horizon in columns["horizon_s"][own]]
    values[rows, lanes] = columns["value"][own].astype(float)
    if not np.isfinite(values).all():
        return None
    return Fan(issued_ms, issued_ms + horizons, tuple(levels.tolist()), values)
