"""Hazards that the nodes of a gang share: heat from earlier jobs, cooling, power, switches.

Forecasts and placements use this module.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FAULTS_PER_DAY = {"rack": 2e-4, "power": 1e-4, "rail": 2e-4}  # of what a whole domain shares
HIGHEST_P = 1 - 1e-9
HOT_C, HOTTEST_C = 75.0, 90.0  # of a GPU: no carry-over below, all of it above
CARRY_OVER = 0.05  # slow hazard that a node at HOTTEST_C brings into its next job
COOLS_S = 600.0
SPREADS = 0.1  # of a member's own hazard above the usual, what its domain has in common with it


def compute_shared_hazard(level: str, excess: Array, duration_s: float) -> Array:
    """Return (domain,) the hazard that domains with two or more members add to a gang.

    excess: (domain,) the amount by which the hazard of the worst member exceeds the usual hazard.

    >>> compute_shared_hazard("rack", np.array([0.0, 0.5]), 86_400).tolist()
    [0.0002, 0.0502]
    """
    return np.asarray(FAULTS_PER_DAY[level] * duration_s / 86_400 + SPREADS * excess)


def compute_hazard(p: Array) -> Array:
    """Convert probabilities to hazards, of the same shape."""
    return np.asarray(-np.log1p(-np.clip(p, 0.0, HIGHEST_P)))


def interpolate_hazard(p: Array, horizons_s: Sequence[float], duration_s: float) -> Array:
    """Return the hazard (..., n) within `duration_s`, from probabilities (..., horizon, n).

    A longer duration never has a smaller hazard.

    >>> p, horizons_s = 1 - np.exp(-np.array([[0.1], [0.2], [0.3], [0.3]])), (3600, 18_000, 86_400, 604_800)
    >>> [interpolate_hazard(p, horizons_s, span_s).round(3).tolist() for span_s in (1800, 10_800)]
    [[0.05], [0.15]]
    """
    hazard = np.maximum.accumulate(compute_hazard(p), axis=-2)
    times = np.array((0, *horizons_s), np.float64)
    hazard = np.concatenate((np.zeros_like(hazard[..., :1, :]), hazard), axis=-2)
    at = int(np.clip(np.searchsorted(times, duration_s), 1, len(horizons_s)))
    slope = (hazard[..., at, :] - hazard[..., at - 1, :]) / (times[at] - times[at - 1])
    return np.asarray(hazard[..., at - 1, :] + slope * (duration_s - times[at - 1]))


def compute_carried_heat(gpu_temp_c: Array, duration_s: float) -> Array:
    """Return (n,) the hazard of being slow because of heat from the previous job.

    gpu_temp_c: (n,) temperature of each node's hottest GPU. NaN adds no hazard.

    >>> compute_carried_heat(np.array([60.0, 90.0, np.nan]), 1e6).tolist()
    [0.0, 0.05, 0.0]
    """
    hot = np.clip((np.nan_to_num(gpu_temp_c) - HOT_C) / (HOTTEST_C - HOT_C), 0.0, 1.0)
    return np.asarray(CARRY_OVER * hot * (1 - np.exp(-duration_s / COOLS_S)))
