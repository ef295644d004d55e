"""What a job will draw and send some minutes from now: its template read ahead, or its level goes on."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.job_window import JobWindow
from models.template import ahead, locked

Array = NDArray[np.float64]

AHEAD_S = (300, 900)
RECENT_S = 600.0
LEVELS = (0.1, 0.5, 0.9)
METRICS = ("power_w", "nvlink_tx_bytes_per_s", "ib_tx_bytes_per_s")


def series_of(window: JobWindow) -> dict[str, Array]:
    """METRICS (slot,) of the whole job: what the GPUs that were heard of read, for all that it holds."""
    means = {name: window.mean(name) * window.gpus for name in METRICS[:2]}
    return {**means, "ib_tx_bytes_per_s": window.sent.astype(np.float64)}


def expected_of(window: JobWindow, period_s: float | None) -> list[dict[str, Any]]:
    """Rows of metric and horizon: p10, p50 and p90 of the reading at that time, not of the highest one up to it.

    period_s: with which its readings repeat; None: they stay at the level of the last ten minutes.
    """
    rows = []
    for metric, values in series_of(window).items():
        lately = values[-max(1, round(RECENT_S / window.interval_s)) :]
        lately = lately[np.isfinite(lately)]
        if not len(lately):
            continue
        level = np.quantile(lately, LEVELS).tolist()
        lock = locked(values, period_s / window.interval_s) if period_s else None
        for ahead_s in AHEAD_S:
            told = level
            if lock is not None:
                told = ahead(values, lock, ahead_s / window.interval_s, window.interval_s, LEVELS)
            p10, p50, p90 = (round(value, 1) for value in told)
            basis = "level" if lock is None else "template"
            about = {"metric": metric, "horizon_s": ahead_s, "basis": basis}
            rows.append({**about, "p10": p10, "p50": p50, "p90": p90})
    return rows
