"""Demand: quantiles of arriving, running, queued and wanted GPUs, from ten minutes to a day ahead.

`DemandDesk` is the capability: histories in, rows of `/demand` out. At a new bin the gates grow by what matured.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.forecast import QUANTILES, Forecaster, Panel
from models.gate import Gate
from models.naive import FORECASTERS, forward_filled

Array = NDArray[np.float64]
Key = tuple[str, str]  # pool, target

BIN_S = 600
BIN_MS = BIN_S * 1000
HORIZONS_S = (600, 1800, 3600, 10800, 21600, 43200, 86400)
STEPS = tuple(horizon_s // BIN_S for horizon_s in HORIZONS_S)
TARGETS = ("arriving", "running", "queued", "wanted")
OLD_MS = 3_600_000
ISSUED_KEPT = 10  # forecasts, one a bin: a good hour and a half
DRAWN_BINS = 144
WARM_BINS = 144
ORIGIN_BINS = 12  # the gate tests an origin every two hours
FAN = tuple(QUANTILES.index(level) for level in (0.05, 0.25, 0.5, 0.75, 0.95))
OLD_FAN = tuple(QUANTILES.index(level) for level in (0.05, 0.5, 0.95))


@dataclass(slots=True)
class Series:
    """What is kept of one series: its known history, its last forecast, and what was forecast lately."""

    history: Array = field(default_factory=lambda: np.zeros(0))
    values: Array = field(default_factory=lambda: np.zeros((len(QUANTILES), len(STEPS))))
    issued: deque[tuple[int, list[list[float]]]] = field(default_factory=lambda: deque(maxlen=ISSUED_KEPT))
    old: tuple[int, list[list[float]]] | None = None


@dataclass(slots=True)
class Target:
    """The gate of all series of a target; `done`: the absolute bin of the last origin that it saw."""

    gate: Gate
    done: int = -1
    bin: int = -1


class DemandDesk:
    """Forecasts of all series of a fleet. One writer. `challengers` are tried beside the built-in forecasters."""

    def __init__(self, challengers: Sequence[Forecaster] = ()) -> None:
        self._forecasters = (*FORECASTERS, *challengers)
        self._series: dict[Key, Series] = {}
        self._targets: dict[str, Target] = {}
        self._now_ms = 0

    def update(
        self, series: Mapping[Key, Array], now_ms: int, capacity: Mapping[str, int] | None = None
    ) -> list[dict[str, Any]]:
        """Rows of `/demand`, in the order of `series`; a series without any known value has no row.

        series: (pool, target) -> (bin,) of ten minutes, the last one is now. capacity: pool -> GPUs, the ceiling of
        `running` (unknown or 0: no ceiling).
        """
        self._now_ms = now_ms
        rows: dict[Key, dict[str, Any]] = {}
        for target in dict.fromkeys(target for _, target in series):
            known = {
                pool: np.asarray(history, np.float64)
                for (pool, name), history in series.items()
                if name == target and np.isfinite(history).any()
            }
            if known:
                rows |= self._rows(target, _panel(target, known, now_ms, capacity or {}))
        return [rows[key] for key in series if key in rows]

    def _target(self, panel: Panel) -> Target:
        """The gate of a target; with other pools than before it keeps what it knows of those that stayed."""
        state = self._targets.get(panel.target)
        if state is None or state.gate.series != panel.names:
            names = [forecaster.name for forecaster in self._forecasters]
            gate = Gate(names, STEPS, panel.names, BIN_S)
            if state is not None and set(state.gate.series) >= set(panel.names):
                gate.load(*state.gate.dump())
                state.gate = gate
            else:  # a pool is new: all are tested again, from their histories
                state = self._targets[panel.target] = Target(gate)
        state.gate.ceiling = np.where(np.isfinite(panel.capacity), panel.capacity, np.inf)
        return state

    def _extend(self, state: Target, panel: Panel, now_bin: int) -> None:
        """Test the origins that have matured since the last call."""
        first_bin = now_bin - panel.bins + 1  # absolute number of bin 0
        start = max(state.done + 1, first_bin + WARM_BINS)
        # The newest bin is not over yet.
        bins = np.arange(start, now_bin)
        origins = bins[(bins + 1) % ORIGIN_BINS == 0] - first_bin
        raw = self._raw(panel, origins)
        waiting = dict(zip((origins + first_bin).tolist(), range(len(origins)), strict=True))
        for bin in bins.tolist():
            state.gate.mature(bin, panel.values[:, bin - first_bin])
            if bin in waiting:
                state.gate.issue(bin, raw[:, :, :, waiting[bin]])
        state.done = max(state.done, now_bin - 1)

    def _raw(self, panel: Panel, origins: NDArray[np.intp]) -> Array:
        """(forecaster, quantile, step, origin, series)."""
        return np.stack([forecaster.forecast(panel, origins, STEPS) for forecaster in self._forecasters])

    def _rows(self, target: str, panel: Panel) -> dict[Key, dict[str, Any]]:
        now_ms, now_bin = self._now_ms, self._now_ms // BIN_MS
        state = self._target(panel)
        is_new = now_bin != state.bin
        if is_new:
            self._extend(state, panel, now_bin)
        served = state.gate.serve(self._raw(panel, np.array([panel.bins - 1]))[:, :, :, 0])
        records = state.gate.record()
        rows = {}
        for n, pool in enumerate(panel.names):
            series = self._series.setdefault((pool, target), Series())
            series.history = _known(panel.values[n])
            series.values = served.values[:, :, n]
            if is_new:
                series.old = self._old(series, state, panel, n)
                series.issued.append((now_ms, _points(series.values, now_ms, OLD_FAN)))
            rows[pool, target] = _row((pool, target), series, served.model[:, n].tolist(), now_ms, records[n])
        state.bin = now_bin
        return rows

    def _old(self, series: Series, state: Target, panel: Panel, n: int) -> tuple[int, list[list[float]]] | None:
        """The forecast of about an hour ago: as it was issued, or, after a start, from what was known then."""
        kept = [row for row in series.issued if self._now_ms - row[0] >= OLD_MS]
        if kept:
            return kept[-1]
        origin = panel.bins - 1 - OLD_MS // BIN_MS
        if origin < 0 or not np.isfinite(panel.values[n, : origin + 1]).any():
            return None
        values = state.gate.serve(self._raw(panel, np.array([origin]))[:, :, :, 0]).values[:, :, n]
        issued_ms = self._now_ms - OLD_MS
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
            series = self._series.setdefault((row["pool"], row["target"]), Series())
            series.issued.extend((int(issued_ms), points) for issued_ms, points in row["rows"])


def forecast_demand(
    series: Mapping[Key, Array], now_ms: int, capacity: Mapping[str, int] | None = None
) -> list[dict[str, Any]]:
    """The rows of `/demand` for (pool, target) -> history, from nothing; `DemandDesk` keeps what can be kept."""
    return DemandDesk().update(series, now_ms, capacity)


def _panel(target: str, known: Mapping[str, Array], now_ms: int, capacity: Mapping[str, int]) -> Panel:
    """Histories that end now, as one panel; shorter ones begin later."""
    bins = max(len(history) for history in known.values())
    values = np.full((len(known), bins), np.nan)
    for row, history in zip(values, known.values(), strict=True):
        row[bins - len(history) :] = history
    ceilings = [capacity.get(pool, 0) if target == "running" else 0 for pool in known]
    first_ms = (now_ms // BIN_MS - bins + 1) * BIN_MS
    return Panel(
        target, tuple(known), BIN_S, first_ms, values, np.array([ceiling or np.nan for ceiling in ceilings], np.float64)
    )


def _known(values: Array) -> Array:
    """From the first known value on, without gaps."""
    return forward_filled(values[None])[0, int(np.isfinite(values).argmax()) :]


def _row(
    key: Key, series: Series, models: list[str], now_ms: int, record: dict[str, float | int | None]
) -> dict[str, Any]:
    return {
        "pool": key[0],
        "class": "all",
        "group": "all",
        "target": key[1],
        "now": round(float(series.history[-1]), 2),
        "model": "+".join(dict.fromkeys(models)),
        "models": models,
        "issued_ms": now_ms,
        "horizons_s": list(HORIZONS_S),
        "quantiles": list(QUANTILES),
        "values": np.round(series.values, 1).tolist(),
        "record": record,
    }


def _points(values: Array, issued_ms: int, levels: tuple[int, ...]) -> list[list[float]]:
    """[[time_ms, quantile...]...], a point a horizon."""
    rows = np.round(values[list(levels)].T, 1).tolist()
    return [[issued_ms + horizon_s * 1000, *row] for horizon_s, row in zip(HORIZONS_S, rows, strict=True)]
