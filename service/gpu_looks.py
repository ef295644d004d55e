"""What the GPUs that jobs hold have in their memory, and whether they compute: one look, by pool and class."""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from features.gpu_residency import Key, Look
from service.publish import Tick

LOADED_SHARE = 0.05  # of a GPU's memory: more than a bare context takes
ACTIVE_SHARE = 0.05  # of the time
ACTIVITY = ("sm_active", "gpu_util")  # the first that is known


def gpu_looks(tick: Tick) -> dict[Key, Look]:
    """(pool, class) -> GPUs held whose memory and activity are known, of those loaded, and of those active."""
    used, free = _reading(tick, "fb_used_bytes"), _reading(tick, "fb_free_bytes")
    total = _reading(tick, "fb_total_bytes")
    total = np.where(np.isfinite(total), total, used + free)
    active = _reading(tick, ACTIVITY[0])
    active = np.where(np.isfinite(active), active, _reading(tick, ACTIVITY[1]))
    holder = tick.occupancy.holder
    known = (holder >= 0) & np.isfinite(used) & (total > 0) & np.isfinite(active)
    loaded, busy = known & (used > LOADED_SHARE * total), known & (active > ACTIVE_SHARE)
    counts = [np.bincount(holder[mask], minlength=len(tick.running)).tolist() for mask in (known, loaded, busy)]
    looks: dict[Key, Look] = defaultdict(lambda: (0.0, 0.0, 0.0))
    for attempt, *seen in zip(tick.running, *counts, strict=True):
        if seen[0]:
            key = attempt.queue, attempt.class_
            before = looks[key]
            looks[key] = before[0] + seen[0], before[1] + seen[1], before[2] + seen[2]
    return dict(looks)


def _reading(tick: Tick, feature: str) -> NDArray[np.float64]:
    """(n, g) the last fresh value of each GPU, NaN unknown."""
    rows = tick.gpu_rows
    if tick.gpu is None or feature not in tick.gpu.names:
        return np.full(rows.shape, np.nan)
    known = (rows >= 0) & (rows < len(tick.gpu.values))
    values = tick.gpu.column(feature).astype(np.float64)
    return np.where(known, values[np.where(known, rows, 0)], np.nan) if len(values) else np.full(rows.shape, np.nan)
