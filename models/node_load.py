"""Forecast of how busy each node's GPUs and host are over the next minutes.

The forecast uses the present load of the GPUs, and which of them are held by jobs:

a GPU held by a job      the newest reading or the mean of two minutes, whichever is higher, because the
                         dip of a checkpoint is short
a GPU held below 2 min   at least the usual load of held GPUs in the fleet, because its job is still loading
a free GPU               the newest reading. The placer knows best which work it places there
spread                   that of the last half hour, as if the GPUs of a node moved together

The forecast leaves out the ends of jobs. Even if they are known exactly, they make the median worse, because
other jobs take their place within minutes. `fleetcast evaluate node_load` compares this forecast with the
last value.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.frame import FeatureFrame
from fleetcast.features.sums import divide

Array = NDArray[np.float64]

LOADS = ("gpu", "cpu", "memory")
LEVELS = (0.5, 0.9)
WINDOWS = ("", "_mean_2m", "_std_30m")
GPU_FEATURES = tuple(name + window for name in ("gpu_util", "sm_active") for window in WINDOWS)
AHEAD_S = 600.0
LATELY_S = 120.0
Z_90 = 1.2816  # standard deviations of a normal distribution from its median to its p90


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of each node's GPUs: (n, g) shares of time in which they work, NaN if unknown.

    held_s: (n, g) seconds since the present job got the GPU, NaN if the GPU is free.
    """

    newest: Array
    mean_2m: Array
    std_30m: Array
    held_s: Array

    @classmethod
    def from_frame(cls, frame: FeatureFrame, rows: NDArray[np.int32], held_s: Array) -> "GpuUse":
        """Build the use of each node's GPUs from a frame. rows: (n, g) rows of `frame`, -1 if unknown.

        If no exporter reports utilisation, SM activity is used instead.
        """

        def estimate_window(window: str) -> Array:
            busy, active = (_place_by_row(frame, name + window, rows) for name in ("gpu_util", "sm_active"))
            return np.where(np.isfinite(busy), busy, active)

        newest, mean_2m, std_30m = map(estimate_window, WINDOWS)
        return cls(newest, mean_2m, std_30m, held_s)

    def forecast_use(self) -> Array:
        """Forecast the GPU use of each node: (level, n) at LEVELS, from 0 to 1.

        The forecast is NaN for a node whose GPUs all report no use.
        """
        recent = np.fmax(self.newest, self.mean_2m)
        held = np.isfinite(self.held_s)
        settled = recent[(self.held_s >= LATELY_S) & np.isfinite(recent)]
        usual = float(np.median(settled)) if len(settled) else np.nan
        expected = np.where(held, recent, self.newest)
        expected = np.where(self.held_s < LATELY_S, np.fmax(recent, usual), expected)
        middle = _compute_row_means(expected)
        high = middle + Z_90 * np.nan_to_num(_compute_row_means(self.std_30m))
        levels: Array = np.clip(np.stack([middle, high]), 0.0, 1.0)
        return levels


def forecast_host_shares(frame: FeatureFrame, n: int) -> Array:
    """Forecast the shares of CPU and of memory in use on each host, (2, n), NaN if unknown.

    The forecast is the newest reading, because no history of a host's use is stored.
    """
    idle, free, total = (
        _pad_rows(frame.column(name), n) for name in ("cpu_idle_share", "memory_available_bytes", "memory_total_bytes")
    )
    used = 1.0 - divide(free, total)
    shares: Array = np.clip(np.stack([1.0 - idle, used]), 0.0, 1.0)
    return shares


def compute_node_loads(gpus: GpuUse, hosts: FeatureFrame) -> NDArray[np.float32]:
    """Return (level, load, n) the forecast loads of each node at LEVELS and for LOADS, NaN if unknown.

    The spread of a host's load is unknown, so its p90 equals its median.
    """
    forecast_of = gpus.forecast_use()
    host = forecast_host_shares(hosts, forecast_of.shape[1])
    return np.stack([np.concatenate([row[None], host]) for row in forecast_of]).astype(np.float32)


def _place_by_row(frame: FeatureFrame, name: str, rows: NDArray[np.int32]) -> Array:
    """Return (n, g) the values of the frame's column `name`, NaN where `rows` is -1. rows: (n, g)."""
    known = (rows >= 0) & (rows < len(frame.values))
    if not known.any():
        return np.full(rows.shape, np.nan)
    return np.where(known, frame.column(name)[np.where(known, rows, 0)].astype(np.float64), np.nan)


def _pad_rows(column: NDArray[np.float32], n: int) -> Array:
    padded = np.full(n, np.nan)
    padded[: len(column)] = column[:n]
    return padded


def _compute_row_means(values: Array) -> Array:
    """Return (n,) the mean of the known values of each row, NaN if there are none. values: (n, g)."""
    known = np.isfinite(values)
    count = known.sum(axis=1)
    total = np.where(known, values, 0.0).sum(axis=1)
    mean: Array = np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)
    return mean
