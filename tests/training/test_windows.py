"""Rolling windows: how many a span gives, and that together they are the span."""

import pytest

from fleetcast.training.reports.results import ResultRow, WindowRow
from fleetcast.training.reports.window_rows import compute_gains, make_window_rows, summarise_windows
from fleetcast.training.windows import DAY_S, RollingWindow, find_window_numbers, make_rolling_windows


@pytest.mark.parametrize(
    ("days", "windows"), [(92, 3), (365, 6), (84, 3), (83, 6), (21, 3), (20, 6), (5, 5), (2, 2), (0.5, 1)]
)
def test_a_span_has_months_else_weeks_else_days(days: float, windows: int) -> None:
    assert len(make_rolling_windows(0.0, days * DAY_S)) == windows


def test_windows_follow_each_other_and_are_the_whole_span() -> None:
    windows = make_rolling_windows(1e9, 1e9 + 30.3 * DAY_S)
    assert (windows[0].begin_s, windows[-1].end_s) == (1e9, 1e9 + 30.3 * DAY_S)
    assert [one.end_s for one in windows[:-1]] == [one.begin_s for one in windows[1:]]
    assert len({round(one.end_s - one.begin_s, 3) for one in windows}) == 1


def test_as_many_as_are_asked_for_but_none_below_a_day() -> None:
    assert len(make_rolling_windows(0.0, 90.0 * DAY_S, count=12)) == 12
    assert len(make_rolling_windows(0.0, 2.5 * DAY_S, count=12)) == 2
    assert make_rolling_windows(5.0, 5.0) == ()


def test_each_moment_is_in_one_window() -> None:
    windows = make_rolling_windows(0.0, 3.0 * DAY_S)
    assert find_window_numbers(windows, [0, DAY_S - 1, DAY_S, 3 * DAY_S - 1, 3 * DAY_S, -1]).tolist() == [
        0,
        0,
        1,
        2,
        -1,
        -1,
    ]
    assert find_window_numbers((), [1.0]).tolist() == [-1]


def row(metric: str, value: float | None, method: str = "ours") -> ResultRow:
    return ResultRow("a", "running", "all", 3600, method, "", metric, value, None, None, 9)


def told(metric: str, values: list[float | None], method: str = "ours") -> list[WindowRow]:
    windows = [RollingWindow(at * DAY_S, (at + 1) * DAY_S) for at in range(len(values))]
    return [
        found
        for window, value in zip(windows, values, strict=True)
        for found in make_window_rows(window, [row(metric, value, method)])
    ]


@pytest.mark.parametrize(
    ("metric", "values", "worst"),
    [("wql", [0.1, 0.4, 0.1], 0.4), ("within_10min", [0.9, 0.2, 1.0], 0.2), ("coverage_80", [0.78, 0.95, 0.85], 0.95)],
)
def test_the_worst_window_is_that_of_the_metric(metric: str, values: list[float | None], worst: float) -> None:
    (found,) = summarise_windows(told(metric, values))
    assert (found.worst, found.windows, found.worst_begin_ms) == (worst, 3, 86_400_000)
    assert found.mean == pytest.approx(sum(value or 0.0 for value in values) / 3)


def test_a_window_without_outcomes_counts_for_nothing() -> None:
    (found,) = summarise_windows(told("wql", [None, 0.2]))
    assert (found.windows, found.mean) == (1, 0.2)


def test_gains_are_over_the_best_rival_of_each_window() -> None:
    rows = [*told("wql", [0.9, 1.2]), *told("wql", [1.0, 1.0], "persistence"), *told("wql", [1.5, 0.8], "theta")]
    assert compute_gains(rows, ["persistence", "theta"]) == pytest.approx([-0.1, 0.5])
    assert compute_gains(rows, ["ets"]) == []
