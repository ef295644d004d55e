"""Rolling windows: equal parts of a test span. Each one judges a model that was fitted on all earlier data.

    train folder ├── fit ──┤─ window 1 ─┤
                 ├──────── fit ─────────┤─ window 2 ─┤
                 ├───────────────── fit ─────────────┤─ window 3 ─┤

A single span may be too easy. The mean and the worst window are more reliable
(`training/reports/window_rows.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

DAY_S = 86_400
UNITS_S = (28 * DAY_S, 7 * DAY_S, DAY_S)  # a month, a week, a day: the longest of which there are FEWEST
FEWEST, MOST = 3, 6


@dataclass(frozen=True, slots=True)
class RollingWindow:
    """One window of a test span.

    Models use only data up to `begin_s`. Forecasts issued from `begin_s` until before `end_s` are judged.
    """

    begin_s: float
    end_s: float

    @property
    def begin_ms(self) -> int:
        return round(self.begin_s * 1000)

    @property
    def end_ms(self) -> int:
        return round(self.end_s * 1000)


def make_rolling_windows(begin_s: float, end_s: float, count: int = 0) -> tuple[RollingWindow, ...]:
    """Split a span into `count` windows, at most one for each day.

    If `count` is 0, there is a window for each month, week or day of the span, but at least three and at most six.

    >>> [window.begin_s / DAY_S for window in make_rolling_windows(0.0, 90 * DAY_S)]
    [0.0, 30.0, 60.0]
    >>> [len(make_rolling_windows(0.0, end_s)) for end_s in (21 * DAY_S, 5 * DAY_S, 60.0)]
    [3, 5, 1]
    """
    if not end_s > begin_s:
        return ()
    span_s = end_s - begin_s
    if not count:
        found = [int(span_s // unit_s) for unit_s in UNITS_S]
        count = min(MOST, next((many for many in found if many >= FEWEST), found[-1]))
    count = max(1, min(count, int(span_s // DAY_S)))
    edges = [begin_s + span_s * at / count for at in range(count)] + [end_s]
    return tuple(RollingWindow(*pair) for pair in pairwise(edges))


def find_window_numbers(windows: Sequence[RollingWindow], times_s: ArrayLike) -> NDArray[np.intp]:
    """Return (time,) the number of the window that each time lies in.

    The number is -1 before the first window, and from the end of the last window on.

    >>> find_window_numbers(make_rolling_windows(0.0, 2.0 * DAY_S), [-1.0, 0.0, DAY_S, 2 * DAY_S]).tolist()
    [-1, 0, 1, -1]
    """
    times = np.asarray(times_s, np.float64)
    if not windows:
        return np.full(times.shape, -1, np.intp)
    found = np.searchsorted([window.begin_s for window in windows], times, side="right") - 1
    return np.where(times < windows[-1].end_s, found, -1)
