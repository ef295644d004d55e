"""The numbers of each rolling window, and their summaries: the mean and the worst window.

A single span may have been easy, and a mean alone may hide a bad month.
"""

from collections.abc import Iterable, Sequence

import msgspec

from fleetcast.training.reports.contests import MORE_IS_BETTER, OURS
from fleetcast.training.reports.results import ResultRow, WindowRow
from fleetcast.training.windows import RollingWindow

NOMINAL = {"coverage_50": 0.5, "coverage_80": 0.8, "coverage_90": 0.9, "bound_90_correct": 0.9}  # beside it is worse


class WindowSummary(msgspec.Struct, frozen=True):
    """The mean of one number over all windows, and its worst window.

    worst_begin_ms: when the worst window began.
    """

    dataset: str
    target: str
    series: str
    horizon_s: int | None
    method: str
    metric: str
    windows: int
    mean: float
    worst: float
    worst_begin_ms: int


def make_window_rows(window: RollingWindow, rows: Iterable[ResultRow]) -> list[WindowRow]:
    """Return the rows of one window. rows: the numbers that were computed for the window.

    Numbers without a value are left out.
    """
    return [
        WindowRow(
            *(row.dataset, row.target, row.series, row.horizon_s, row.method, row.metric),
            *(window.begin_ms, window.end_ms, row.value, row.n),
        )
        for row in rows
        if row.value is not None
    ]


def summarise_windows(rows: Iterable[WindowRow]) -> list[WindowSummary]:
    """Return the mean and the worst value of each number. All windows have the same weight.

    If several windows are equally bad, the first one counts as the worst.
    """
    groups: dict[tuple[str, str, str, int | None, str, str], list[WindowRow]] = {}
    for row in rows:
        groups.setdefault((row.dataset, row.target, row.series, row.horizon_s, row.method, row.metric), []).append(row)
    return [
        WindowSummary(
            *key,
            windows=len(group),
            mean=sum(row.value for row in group) / len(group),
            worst=(bad := max(group, key=lambda row: compute_badness(row.metric, row.value))).value,
            worst_begin_ms=bad.begin_ms,
        )
        for key, group in groups.items()
    ]


def compute_badness(metric: str, value: float) -> float:
    """Return a number that is larger the worse the metric's value is.

    For coverage, this number is the distance from the promised share.
    """
    if metric in NOMINAL:
        return abs(value - NOMINAL[metric])
    return -value if metric in MORE_IS_BETTER else value


def compute_gains(rows: Sequence[WindowRow], rivals: Sequence[str], ours: str = OURS) -> list[float]:
    """Return, for each window, our value divided by the best rival's, minus one. A result below 0 is better.

    rows: the rows of one metric, target and horizon. Windows that lack one of the two values are left out.
    """
    values = {(row.begin_ms, row.method): row.value for row in rows}
    found = []
    for begin_ms in sorted({row.begin_ms for row in rows}):
        others = [value for name in rivals if (value := values.get((begin_ms, name))) is not None]
        own = values.get((begin_ms, ours))
        if own is not None and others and min(others) > 0:
            found.append(own / min(others) - 1)
    return found
