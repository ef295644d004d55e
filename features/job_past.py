"""JobPast: the power and activity of one job over the last hours, which the rings no longer contain."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.job_window import JobWindow

LONGEST_MS = 3 * 3_600_000  # four pauses that come every 40 minutes
ACTIVITIES = ("sm_active", "tensor_active", "gpu_util")  # the first that its GPUs report
LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, slots=True)
class JobPast:
    """The power and the activity of one job by slot, oldest first.

    values: (2, slot) float16, watts per GPU and activity, NaN if unknown. averaged: (2,) bool, whether
    each row has means over a slot instead of momentary readings.
    """

    first_ms: int
    values: NDArray[np.float16]
    averaged: NDArray[np.bool_]

    def compute_end_ms(self, interval_s: float) -> int:
        """Return the time at which the last slot ends, in Unix ms."""
        slots: int = self.values.shape[1]
        return self.first_ms + round(slots * interval_s * 1000)


def extend_past(past: JobPast | None, window: JobWindow) -> JobPast:
    """Return `past` with its last slots replaced by those of `window`, at most LONGEST_MS long.

    The window's slots replace older ones, because late samples may have reached the rings. The result begins
    with its first reading. If `past` ends before the window begins, it is dropped.
    """
    watts, is_mean = compute_watts(window)
    newest = np.stack([watts, compute_activity(window)])
    averaged = np.array([is_mean, False])
    first_ms, values = window.first_ms, np.clip(newest, -LARGEST, LARGEST).astype(np.float16)
    if past is not None and past.first_ms < first_ms <= past.compute_end_ms(window.interval_s):
        older = round((first_ms - past.first_ms) / (window.interval_s * 1000))
        values = np.concatenate([past.values[:, :older], values], axis=1)
        first_ms = past.first_ms
        averaged &= past.averaged
    is_known = np.isfinite(values).any(axis=0)
    spare = max(int(is_known.argmax()), values.shape[1] - round(LONGEST_MS / (window.interval_s * 1000)))
    return JobPast(first_ms + round(spare * window.interval_s * 1000), values[:, spare:].copy(), averaged)


def compute_watts(window: JobWindow) -> tuple[NDArray[np.float64], bool]:
    """Return (slot,) watts per GPU, and whether they are means over a slot.

    Means come from the energy counter, which misses no pause between scrapes.
    """
    energy = window.mean("energy_j")
    is_mean = bool(np.isfinite(energy).mean() >= 0.5) if len(energy) else False
    return (energy, True) if is_mean else (window.mean("power_w"), False)


def compute_activity(window: JobWindow) -> NDArray[np.float64]:
    """Return (slot,) the mean activity of the job's GPUs, NaN if they report no activity."""
    for name in ACTIVITIES:
        values = window.mean(name)
        if np.isfinite(values).any():
            return values
    return window.mean(ACTIVITIES[-1])
