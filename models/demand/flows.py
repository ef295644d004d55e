"""Helpers for flows: quantities counted within each bin, such as arriving GPUs.

The next bin starts from zero again. So the persistence of a flow is the median of its last hours. A single bin
above all earlier demand does not shape the forecast of the next bins.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.forecast import Panel

Array = NDArray[np.float64]

FLOW_TARGETS = ("arriving", "arriving_jobs", "started", "ended")
"""Targets that are counts within a bin."""
FLOW_BIN_S = 600  # by the minute, a flow is the sum of the last ten minutes, which moves as a level does
MEDIAN_S = 4 * 3600
DAY_S = 86_400
CHUNK = 1_000_000  # values that are sorted at once


def is_flow(panel: Panel) -> bool:
    """Return whether the values of a panel are quantities per bin, in bins that do not overlap."""
    return panel.target in FLOW_TARGETS and panel.bin_s >= FLOW_BIN_S


def cap_lone_spikes(panel: Panel) -> Panel:
    """Return the panel of a flow with each bin capped at the highest earlier bin.

    Other panels are returned unchanged. Within the first day, or without earlier demand, the cap is at least
    the capacity. No bin depends on a later one.
    """
    if panel.target not in FLOW_TARGETS:
        return panel
    lag = max(1, FLOW_BIN_S // panel.bin_s)
    highest = np.zeros_like(panel.values)
    highest[:, lag:] = np.maximum.accumulate(np.nan_to_num(panel.values), axis=1)[:, :-lag]
    is_young = np.isfinite(panel.values).cumsum(axis=1) <= DAY_S // panel.bin_s
    capacity = np.where(np.isfinite(panel.capacity), panel.capacity, np.inf)[:, None]
    limit = np.where(is_young | (highest == 0), np.maximum(capacity, highest), highest)
    return replace(panel, values=np.minimum(panel.values, limit))


def compute_recent_medians(filled: Array, window: int) -> Array:
    """Return (series, bin) the median of the known values in the last `window` bins of a flow.

    The median is NaN before the first known value. filled: (series, bin), not negative, without gaps after the
    first known value.

    >>> compute_recent_medians(np.array([[np.nan, 9.0, 1.0, 2.0, 3.0]]), 3).tolist()
    [[nan, 9.0, 5.0, 2.0, 2.0]]
    """
    known = np.minimum(np.isfinite(filled).cumsum(axis=1), window)
    found = np.where(known > 0, 0.0, np.nan)
    sums = np.pad((filled > 0).cumsum(axis=1), ((0, 0), (window, 0)))
    rows, bins = np.nonzero((known > 0) & (2 * (sums[:, window:] - sums[:, :-window]) >= known))  # elsewhere it is 0
    padded = np.pad(filled, ((0, 0), (window - 1, 0)), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(padded, window, axis=1)
    size = max(1, CHUNK // window)
    for first in range(0, len(rows), size):
        at = rows[first : first + size], bins[first : first + size]
        ordered, count = np.sort(windows[at], axis=1), known[at]  # NaN last
        low, high = (np.take_along_axis(ordered, (where // 2)[:, None], axis=1)[:, 0] for where in (count - 1, count))
        found[at] = (low + high) / 2
    return found
