"""Demand: quantiles of arriving, running, queued and wanted GPUs, from ten minutes to a day ahead.

`DemandDesk` is the capability: histories in, rows of `/demand` out. Between two bins a call only adds the newest value
to what the last bin worked out; at a new bin the back-tests grow by the origins that matured.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.backtest import SeriesTest
from models.forecast import QUANTILES, Forecaster
from models.naive import BIN_MS, BIN_S, FORECASTERS, error_quantiles, filled, trimmed

Array = NDArray[np.float64]
Key = tuple[str, str]  # pool, target

HORIZONS_S = (600, 1800, 3600, 10800, 21600, 43200, 86400)
STEPS = tuple(horizon_s // BIN_S for horizon_s in HORIZONS_S)
TARGETS = ("arriving", "running", "queued", "wanted")
OLD_MS = 3_600_000
ISSUED_KEPT = 10  # forecasts, one a bin: a good hour and a half
DRAWN_BINS = 144
FAN = tuple(QUANTILES.index(level) for level in (0.05, 0.25, 0.5, 0.75, 0.95))
OLD_FAN = tuple(QUANTILES.index(level) for level in (0.05, 0.5, 0.95))


@dataclass(slots=True)
class Series:
    """What is kept of one series: its back-test, this bin's error quantiles, and what was forecast lately."""

    test: SeriesTest
    bin: int = -1
    models: tuple[str, ...] = ()
    spread: Array = field(default_factory=lambda: np.zeros((len(QUANTILES), len(STEPS))))
    history: Array = field(default_factory=lambda: np.zeros(0))
    values: Array = field(default_factory=lambda: np.zeros((len(QUANTILES), len(STEPS))))
    issued: deque[tuple[int, list[list[float]]]] = field(default_factory=lambda: deque(maxlen=ISSUED_KEPT))
    old: tuple[int, list[list[float]]] | None = None
    record: dict[str, float | int | None] = field(default_factory=dict)


class DemandDesk:
    """Forecasts of all series of a fleet. One writer. `challengers` are tried beside the built-in forecasters."""

    def __init__(self, challengers: Sequence[Forecaster] = ()) -> None:
        self._forecasters = (*FORECASTERS, *challengers)
        self._series: dict[Key, Series] = {}
        self._now_ms = 0

    def update(
        self, series: Mapping[Key, Array], now_ms: int, capacity: Mapping[str, int] | None = None
    ) -> list[dict[str, Any]]:
        """Rows of `/demand`, in the order of `series`; a series without any known value has no row.

        series: (pool, target) -> (bin,) of ten minutes, the last one is now. capacity: pool -> GPUs, the ceiling of
        `running` (unknown or 0: no ceiling).
        """
        self._now_ms = now_ms
        rows = []
        for key, history in series.items():
            known = trimmed(np.asarray(history, np.float64))
            if len(known):
                rows.append(self._row(key, filled(known), now_ms, (capacity or {}).get(key[0], 0)))
        return rows

    def _of(self, key: Key) -> Series:
        state = self._series.get(key)
        if state is None:
            state = self._series[key] = Series(SeriesTest(STEPS, self._forecasters))
        return state

    def _row(self, key: Key, history: Array, now_ms: int, capacity: int) -> dict[str, Any]:
        state = self._of(key)
        ceiling = float(capacity) if key[1] == "running" and capacity > 0 else np.inf
        now_bin = now_ms // BIN_MS
        state.history = history
        if now_bin != state.bin:
            state.test.extend(history, now_bin)
            state.models, state.spread = _choose(state.test, history)
            state.record = state.test.record()
            state.old = self._old(state, history, now_ms, ceiling)
        state.values = _clipped(_bases(state.test, state.models, history) + state.spread, ceiling)
        if now_bin != state.bin:
            state.issued.append((now_ms, _points(state.values, now_ms, OLD_FAN)))
            state.bin = now_bin
        return {
            "pool": key[0],
            "class": "all",
            "group": "all",
            "target": key[1],
            "now": round(float(history[-1]), 2),
            "model": "+".join(dict.fromkeys(state.models)),
            "models": list(state.models),
            "issued_ms": now_ms,
            "horizons_s": list(HORIZONS_S),
            "quantiles": list(QUANTILES),
            "values": np.round(state.values, 1).tolist(),
            "record": state.record,
        }

    def _old(self, state: Series, history: Array, now_ms: int, ceiling: float) -> tuple[int, list[list[float]]] | None:
        """The forecast of about an hour ago: as it was issued, or, after a start, from what was known then."""
        kept = [row for row in state.issued if now_ms - row[0] >= OLD_MS]
        if kept:
            return kept[-1]
        past = history[: len(history) - OLD_MS // BIN_MS]
        if not len(past):
            return None
        models, spread = _choose(state.test, past)
        issued_ms = now_ms - OLD_MS
        values = _clipped(_bases(state.test, models, past) + spread, ceiling)
        return issued_ms, _points(values, issued_ms, OLD_FAN)

    def record(self) -> dict[str, Any]:
        """`pool|target` -> history, the forecast as a fan, and the one of an hour ago to hold against the outcome.

        Points are [time_ms, value] and [time_ms, p05, p25, p50, p75, p95]; of `old` [time_ms, p05, p50, p95].
        """
        document = {}
        for (pool, target), state in self._series.items():
            drawn = state.history[-DRAWN_BINS:]
            times = [self._now_ms - BIN_MS * back for back in range(len(drawn) - 1, -1, -1)]
            document[f"{pool}|{target}"] = {
                "history": [[time_ms, round(value, 1)] for time_ms, value in zip(times, drawn.tolist(), strict=True)],
                "forecast": _points(state.values, self._now_ms, FAN),
                "old": state.old[1] if state.old else [],
                "old_issued_ms": state.old[0] if state.old else None,
            }
        return document

    def dump(self) -> dict[str, Any]:
        """JSON-able: what was forecast lately. Back-tests are worked out again from the histories."""
        return {
            "issued": [
                {"pool": pool, "target": target, "rows": [[issued_ms, points] for issued_ms, points in state.issued]}
                for (pool, target), state in self._series.items()
            ]
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """The inverse of `dump`, into this desk."""
        for row in state.get("issued", ()):
            series = self._of((row["pool"], row["target"]))
            series.issued.extend((int(issued_ms), points) for issued_ms, points in row["rows"])


def forecast_demand(
    series: Mapping[Key, Array], now_ms: int, capacity: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """The rows of `/demand` for (pool, target) -> history, from nothing; `DemandDesk` keeps what can be kept."""
    return DemandDesk().update(series, now_ms, capacity)


def _choose(test: SeriesTest, history: Array) -> tuple[tuple[str, ...], Array]:
    """Who serves each lead, and (quantile, horizon) their calibrated error quantiles as of this history."""
    names, columns = [], []
    for lead in test.leads:
        at = lead.chosen()
        forecaster = test.forecasters[at]
        errors = error_quantiles(forecaster.errors(history, lead.step), QUANTILES, history, lead.step)
        names.append(forecaster.name)
        columns.append(lead.trackers[at].apply(errors))
    return tuple(names), np.stack(columns, axis=1)


def _bases(test: SeriesTest, models: tuple[str, ...], history: Array) -> Array:
    """(horizon,) what the serving forecasters bet on."""
    pairs = zip(test.leads, models, strict=True)
    return np.array([test.forecasters[test.names.index(name)].base(history, lead.step) for lead, name in pairs])


def _clipped(values: Array, ceiling: float) -> Array:
    """Non-negative, at most the ceiling, non-decreasing along the quantiles."""
    return np.sort(np.clip(values, 0.0, ceiling), axis=0)


def _points(values: Array, issued_ms: int, levels: tuple[int, ...]) -> list[list[float]]:
    """[[time_ms, quantile...]...], a point a horizon."""
    rows = np.round(values[list(levels)].T, 1).tolist()
    return [[issued_ms + horizon_s * 1000, *row] for horizon_s, row in zip(HORIZONS_S, rows, strict=True)]
