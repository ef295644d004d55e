"""An expanding-window back-test: each window judges a model that was fitted on all earlier data.

    ├──── fit ────┤─ judge 1 ─┤
    ├────────── fit ──────────┤─ judge 2 ─┤          windows of equal length over the last `share` of the history
    ├──────────────── fit ────────────────┤─ judge 3 ─┤

A window carries its data and its seed, so every machine gets the same result. The windows are
evaluated by the code of `fleetcast evaluate`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, log

import msgspec
import numpy as np

from fleetcast.fleet.errors import FleetcastError
from fleetcast.models.forecast import Forecaster
from fleetcast.models.versions.card import GateVerdict, TargetVerdict
from fleetcast.training.fits.fan_out import map_items
from fleetcast.training.reports.contests import MAIN, Comparison, format_metric, make_comparisons
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets.demand_sets import DemandSet, set_known_capacity
from fleetcast.training.sets.job_sets import HistoryJobs, JobHistory

Say = Callable[[str], None]

SHARE = 0.3
WIN = 0.99  # a model that is as good as the best baseline is not worth a change


@dataclass(frozen=True, slots=True)
class BacktestWindow:
    """The data of one back-test window: the sets that a model is fitted on and judged by.

    All sets belong to one task. Each set ends where the window ends, and states where the fit ends. own: further
    forecasters of demand.
    """

    seed: int
    demand: tuple[DemandSet, ...] = ()
    jobs: tuple[JobHistory, ...] = ()
    own: tuple[Forecaster, ...] = ()


def make_demand_windows(
    sets: Sequence[DemandSet],
    count: int,
    seed: int = 0,
    share: float = SHARE,
    own: Sequence[Forecaster] = (),
) -> list[BacktestWindow]:
    """Return windows of equal length over the last `share` of each panel's bins."""
    parts = []
    for number in range(count):
        cuts = [_compute_window_cut(row.panel.bins, number, count, share) for row in sets]
        pairs = zip(sets, cuts, strict=True)
        rows = [DemandSet(row.dataset, set_known_capacity(row.panel.until(end), cut), cut) for row, (cut, end) in pairs]
        judged = tuple(row for row in rows if row.panel.bins > row.train_bins > 0)
        parts.append(BacktestWindow(seed, demand=judged, own=tuple(own)))
    return [window for window in parts if window.demand]


def make_duration_windows(
    tables: Sequence[tuple[str, HistoryJobs]], count: int, seed: int = 0, share: float = SHARE
) -> list[BacktestWindow]:
    """Return windows with equal numbers of jobs over the last `share` of each history's submissions."""
    parts = []
    for number in range(count):
        rows = []
        for name, table in tables:
            cut, end = _compute_window_cut(len(table), number, count, share)
            if 0 < cut < end:
                train_end_s = float(table.submit_s[cut - 1])
                rows.append(JobHistory(name, table.select_rows(np.arange(end)), np.arange(end) >= cut, train_end_s))
        parts.append(BacktestWindow(seed, jobs=tuple(rows)))
    return [window for window in parts if window.jobs]


def _compute_window_cut(rows: int, number: int, count: int, share: float) -> tuple[int, int]:
    """Return the row at which the fit of a window ends, and the row at which the window itself ends."""
    first = rows * (1 - share)
    return round(first + rows * share * number / count), round(first + rows * share * (number + 1) / count)


def backtest(
    task: str,
    windows: Sequence[BacktestWindow],
    *,
    address: str | None = None,
    processes: int = 1,
    say: Say = lambda line: None,
) -> Results:
    """Fit and judge all windows, and return their merged results.

    task: demand or duration. address: a Dask scheduler that runs the windows. Raises FleetcastError if
    there is no window.
    """
    if not windows:
        raise FleetcastError("too little history for a back-test: no window has something before and something in it")
    judge = {"demand": judge_demand, "duration": judge_duration}[task]
    return merge_results(task, map_items(judge, windows, address, say, processes))


def judge_demand(window: BacktestWindow) -> Results:
    """Fit the demand model on the history before the window, and evaluate it on the window."""
    from fleetcast.training.judges.demand import DemandModels, add_set_results, draw_judged_origins

    results = Results("demand")
    sets = [one for one in window.demand if len(draw_judged_origins(one, window.seed))]
    known = [DemandSet(one.dataset, one.panel.until(one.train_bins), one.train_bins) for one in sets]
    models = DemandModels.fit(known, sets, window.seed, _drop_progress_line, windows=1)
    for one in sets:
        add_set_results(results, one, models, window.seed, own=window.own)
    return results


def judge_duration(window: BacktestWindow) -> Results:
    """Fit the run-time model on the history before the window, and evaluate it on the window."""
    from fleetcast.training.judges.duration import evaluate_sets

    return evaluate_sets(window.jobs, window.seed, _drop_progress_line, windows=1)


def _drop_progress_line(line: str) -> None:
    """Drop a progress line. The back-test reports a window only when it is done."""


def merge_results(task: str, parts: Sequence[Results]) -> Results:
    """Return the mean of each number over the windows, weighted by outcomes.

    The intervals assume that the windows are independent.
    """
    groups: dict[tuple[object, ...], list[ResultRow]] = {}
    for part in parts:
        for row in part.rows:
            key = (row.dataset, row.target, row.series, row.horizon_s, row.method, row.metric)
            groups.setdefault(key, []).append(row)
    whole = Results(task, [_average_rows(rows) for rows in groups.values()])
    whole.skipped = list(dict.fromkeys(line for part in parts for line in part.skipped))
    whole.windows = [row for part in parts for row in part.windows]
    whole.predictions = [block for part in parts for block in part.predictions]
    return whole


def _average_rows(rows: Sequence[ResultRow]) -> ResultRow:
    known = [row for row in rows if row.value is not None and row.n]
    if len(known) < 2:
        return known[0] if known else rows[0]
    n = sum(row.n for row in known)
    weights = [row.n / n for row in known]
    value = sum(weight * (row.value or 0.0) for weight, row in zip(weights, known, strict=True))
    model = "+".join(dict.fromkeys(name for row in known for name in row.model.split("+")))
    bounds: tuple[float | None, float | None] = (None, None)
    if all(row.low is not None and row.high is not None for row in known):
        bounds = (
            value - _compute_interval_reach(known, weights, "low"),
            value + _compute_interval_reach(known, weights, "high"),
        )
    return msgspec.structs.replace(known[0], model=model, value=value, n=n, low=bounds[0], high=bounds[1])


def _compute_interval_reach(rows: Sequence[ResultRow], weights: Sequence[float], side: str) -> float:
    """Return the distance from a weighted mean to the low or high end of its interval.

    The numbers are assumed to be independent. side: "low" or "high".
    """
    off = [weight * (getattr(row, side) - (row.value or 0.0)) for weight, row in zip(weights, rows, strict=True)]
    return float(np.sqrt(np.square(off).sum()))


def make_verdict(task: str, results: Results) -> GateVerdict | None:
    """Return the gate's verdict: whether our numbers beat the best baseline's in geometric mean.

    Returns None if nothing was judged. The best baseline of each number is chosen in hindsight.
    For forecasts of demand, each target gets its own verdict as well. The whole verdict then has the numbers of the
    targets that won.
    """
    metric = MAIN[task][0]
    found = [one for one in make_comparisons(results.rows, (metric,)) if one.ours.value and one.rival.value]
    if not found:
        return None
    targets = _judge_targets(found, metric) if task == "demand" else ()
    won = {one.target for one in targets if one.won}
    judged = [one for one in found if one.ours.target in won] if won else found
    ours, rival = (
        _compute_geometric_mean(rows) for rows in ([one.ours for one in judged], [one.rival for one in judged])
    )
    ratio = ours / rival
    names = [one.rival.method for one in judged]
    most = max(dict.fromkeys(names), key=names.count)
    word = "below" if ratio < 1 else "above"
    sentence = (
        f"{format_metric(metric)} {abs(1 - ratio):.1%} {word} the best baseline ({most.replace('_', ' ')} most often), "
        f"geometric mean over {len(judged)} numbers out of sample; {1 - WIN:.0%} below is asked for"
    )
    if len(targets) > 1 or (targets and not won):
        lost = [f"{one.target} ({one.why})" for one in targets if not one.won]
        sentence += f"; serves {', '.join(sorted(won)) or 'nothing'}" + (f", not {', '.join(lost)}" if lost else "")
    is_won = bool(won) if targets else ratio <= WIN
    return GateVerdict(is_won, sentence, metric, most, ours, rival, sum(one.ours.n for one in judged), targets)


def _judge_targets(found: Sequence[Comparison], metric: str) -> tuple[TargetVerdict, ...]:
    """Return a verdict for each target.

    A target wins if the geometric mean of our errors is far enough below that of the best baselines. In addition,
    none of our intervals may lie entirely above the baseline's error.
    """
    groups: dict[str, list[Comparison]] = {}
    for one in found:
        groups.setdefault(one.ours.target, []).append(one)
    verdicts = []
    for target, rows in groups.items():
        ratio = _compute_geometric_mean([one.ours for one in rows]) / _compute_geometric_mean(
            [one.rival for one in rows]
        )
        worse = [one for one in rows if one.ours.low is not None and one.ours.low > (one.rival.value or 0.0)]
        why = ""
        if worse:
            worst = min(worse, key=lambda one: one.relative_gain)
            at = f" at {worst.ours.horizon_s / 3600:g} h" if worst.ours.horizon_s else ""
            why = f"{format_metric(metric)}{at} {-worst.relative_gain:.1%} above {worst.rival.method.replace('_', ' ')}"
        elif ratio > WIN:
            why = f"{format_metric(metric)} {abs(1 - ratio):.1%} {'below' if ratio < 1 else 'above'} the best baselines"
        verdicts.append(TargetVerdict(target, not why, ratio, why))
    return tuple(verdicts)


def _compute_geometric_mean(rows: Sequence[ResultRow]) -> float:
    return exp(sum(log(row.value or 1.0) for row in rows) / len(rows))
