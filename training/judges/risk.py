"""`fleetcast evaluate risk`: which nodes fail within a day and a week, by the history of faults alone.

A row is a working node at the beginning of a day. Its label is whether a fault of the node begins
within the horizon. The model is fitted on the train folder. In the test folder, the faults of each
day join the history before the next day is predicted. Nodes without a fault are added up to the
stated size of the fleet. A log of faults alone (`evaluate_fault_log`) is judged on windows, each
with a fit on the faults known when it began.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.models.risk.hazard import (
    HORIZONS_DAYS,
    WARM_UP_DAYS,
    FaultHistory,
    HistoryFit,
    PastDays,
    compute_own_rates,
    fit_history,
    is_in_repair,
    make_past_days,
)
from fleetcast.training.judges.risk_metrics import (
    METRICS,
    Interval,
    NodeDays,
    RankedScores,
    compute_differences,
    compute_metric_intervals,
)
from fleetcast.training.judges.risk_runs import judge_runs
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets.data_folders import read_table
from fleetcast.training.sets.fault_logs import FaultLogFile, read_fault_log

Array = NDArray[np.float64]
Say = Callable[[str], None]

FILE = "fault_intervals.parquet"
STATED_NODES = {"faults/infinitehbd": 400}
NEEDED = ("node", "start_day", "end_day")
LONGEST_DAYS = 20_000  # a trace that spans more is in another unit
CENSORED_DAYS = max(HORIZONS_DAYS)
DAY_S, DAY_MS = 86_400, 86_400_000
NEVER_DAYS = 1e6
PAIRED = ("recency", "count")  # whose difference from ours is told with an interval of its own
DIFFERENCES = ("auroc", "precision_top20")
LOG_WINDOWS, LOG_SHARE = 3, 0.4  # a log's last share is judged, in so many windows
FEWEST_DAYS = WARM_UP_DAYS + CENSORED_DAYS + 1  # that a fit takes


@dataclass(frozen=True, slots=True)
class FaultSet:
    """The faults of one trace in both folders.

    The first `train_faults` faults are those of the train folder.

    names: the nodes that ever fail. Days are those of the trace's clock. Observation begins at
    first_day, the train folder ends at cut_day, and all faults are known up to end_day.
    """

    dataset: str
    names: tuple[str, ...]
    nodes: int
    history: FaultHistory
    train_faults: int
    first_day: int
    cut_day: int
    end_day: int

    def name_node(self, node: int) -> str:
        """Return the name of a node's row. A node that never fails has a number instead."""
        return self.names[node] if node < len(self.names) else f"never failed {node - len(self.names)}"

    def select_train_faults(self, until_day: int) -> FaultHistory:
        """Return the faults of the train folder as they were known on `until_day`."""
        some, whole = slice(self.train_faults), self.history
        node, start, end, hardware = whole.node[some], whole.start_day[some], whole.end_day[some], whole.hardware[some]
        return FaultHistory(node, start, end, hardware).truncate(until_day)

    def list_window_cuts(self, windows: int) -> list[int]:
        """Return the first day of each window, and the day after the last one that has an outcome."""
        edges = np.linspace(self.cut_day, self.end_day - CENSORED_DAYS + 1, windows + 1)
        return list(dict.fromkeys(edges.round().astype(int).tolist()))


@dataclass(frozen=True, slots=True)
class Baselines:
    """The scores by which each baseline ranks nodes. All are (n,), with one value for each row."""

    recency: Array
    count: Array
    rate: Array


def evaluate(train: Path, test: Path, seed: int, say: Say, drop: Collection[str] = ()) -> Results:
    """Evaluate every trace of faults that is in both folders, and the simulated runs.

    drop: telemetry that the evaluation of runs leaves out.
    """
    results = Results("risk")
    for path in sorted(test.glob(f"faults/*/{FILE}")):
        dataset = path.parent.relative_to(test).as_posix()
        if not (train / dataset / FILE).is_file():
            results.skipped.append(f"{dataset}: not in the train folder")
            continue
        found = read_fault_set(dataset, train / dataset / FILE, path)
        if isinstance(found, str):
            results.skipped.append(f"{dataset}: {found}")
        else:
            judge_fault_set(results, found, seed, say)
    judge_runs(results, train, test, seed, say, drop)
    return results


def read_fault_set(dataset: str, train: Path, test: Path) -> FaultSet | str:
    """Read the faults of both folders, or return the reason why they cannot be judged."""
    try:
        tables = [read_table(path) for path in (train, test)]
    except RecordError as error:
        return str(error)
    missing = set(NEEDED) - (set(tables[0].columns) & set(tables[1].columns))
    if missing:
        return f"no column {', '.join(sorted(missing))}"
    tables = [_clean_faults(table) for table in tables]
    table = pd.concat(tables, ignore_index=True)
    table["end_day"] = table.groupby(["node", "start_day"])["end_day"].transform("max")  # a later copy may know more
    table = table.drop_duplicates(["node", "start_day"])  # and may hold the train rows, too
    sizes = len(tables[0]), len(table) - len(tables[0])
    if not min(sizes):
        return f"{sizes[0]} faults with a start in the train folder, {sizes[1]} others in the test folder"
    history, names = _make_history(table)
    start = history.start_day
    cut = int(np.ceil(start[: sizes[0]].max()))
    first, until = int(np.floor(start.min())), int(np.floor(np.nanmax(np.concatenate((start, history.end_day)))))
    if until - first > LONGEST_DAYS:
        return f"start_day and end_day span {until - first:,} days: they are no days"
    if until - CENSORED_DAYS < cut:
        return f"the test folder ends on day {until}, the train folder on day {cut}: no day has an outcome"
    if cut - first < FEWEST_DAYS:
        return f"the train folder has {cut - first} days: at least {FEWEST_DAYS} are fitted on"
    nodes = max(len(names), STATED_NODES.get(dataset, 0))
    return FaultSet(dataset, names, nodes, history, sizes[0], first, cut, until)


def fit_history_file(path: Path, until_day: int | None, nodes: int) -> HistoryFit:
    """Fit the history hazard to a table of faults with the columns NEEDED.

    Only faults that began by `until_day` count. nodes: the size of the fleet. Raises RecordError if the
    table cannot be read, or has too few faults.
    """
    table = read_table(path)
    missing = set(NEEDED) - set(table.columns)
    if missing:
        raise RecordError("no faults", f"{path}: no column {', '.join(sorted(missing))}")
    history, names = _make_history(_clean_faults(table))
    if not len(names):
        raise RecordError("no faults", f"{path}: no row with a start_day")
    first, last = math.floor(history.start_day.min()), math.floor(history.start_day.max())
    if last - first > LONGEST_DAYS:
        raise RecordError("no faults", f"{path}: start_day spans {last - first:,} days: they are no days")
    try:
        return fit_history(history, first, last if until_day is None else until_day, max(nodes, len(names)))
    except ValueError as error:
        raise RecordError("no faults", f"{path}: {error}") from None


def _clean_faults(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that have a start, converted to numbers. Each fault occurs once.

    The columns are NEEDED and `hardware`, which says whether a part was at fault.
    """
    start, end = (pd.to_numeric(table[name], errors="coerce").astype(float) for name in NEEDED[1:])
    level = table["level"].astype(str) if "level" in table else pd.Series("", table.index)
    hardware = level.str.contains("hardware", case=False)
    end = end.where(np.isfinite(end)).clip(lower=start)
    found = pd.DataFrame({"node": table["node"].astype(str), "start_day": start, "end_day": end, "hardware": hardware})
    return found[np.isfinite(start)].drop_duplicates(["node", "start_day"])


def _make_history(table: pd.DataFrame) -> tuple[FaultHistory, tuple[str, ...]]:
    """Return the faults in the table's order, and the nodes' names."""
    names, node = np.unique(table["node"].to_numpy(str), return_inverse=True)
    start, end = (np.asarray(table[name], np.float64) for name in NEEDED[1:])
    return FaultHistory(node.astype(np.int64), start, end, table["hardware"].to_numpy(bool)), tuple(names.tolist())


def compute_baselines(history: FaultHistory, days: range, since_day: float, nodes: int) -> Baselines:
    """Return the scores of the baselines, for the rows that `make_past_days` makes."""
    parts = []
    for day in days:
        known = history.truncate(day)
        works = np.flatnonzero(~is_in_repair(known, nodes))
        recency = np.maximum(known.find_latest(known.start_day, nodes) - day, -NEVER_DAYS)
        parts.append(
            (recency[works], known.count_faults(nodes)[works], compute_own_rates(known, day - since_day, nodes)[works])
        )
    return Baselines(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def evaluate_fault_log(path: Path, nodes: int, seed: int, say: Say) -> Results:
    """Evaluate a log of faults (`node,start,end,kind`) of a fleet of `nodes`.

    Raises FleetcastError if the log cannot be read or is too short.
    """
    results = Results("risk")
    log = read_fault_log(path, nodes)
    results.skipped += [f"{count:,} rows of {path.name}: {reason}" for reason, count in sorted(log.skipped.items())]
    judge_fault_set(results, split_fault_log(log), seed, say, LOG_WINDOWS)
    return results


def split_fault_log(log: FaultLogFile) -> FaultSet:
    """Split one fault log by time. The last LOG_SHARE of its days is judged.

    Raises RecordError if the log is too short to fit on and to judge.
    """
    start, ends = log.history.start_day, log.history.end_day
    first, end = math.floor(start.min()), math.floor(max(start.max(), np.nanmax(ends, initial=-np.inf)))
    cut = max(first + FEWEST_DAYS, round(end - CENSORED_DAYS - LOG_SHARE * (end - first)))
    if end - CENSORED_DAYS < cut:
        raise RecordError(
            "no faults",
            f"{log.path}: {end - first} days of faults; {FEWEST_DAYS} to fit on, {CENSORED_DAYS} for outcomes needed",
        )
    return FaultSet(log.path.name, log.names, log.nodes, log.history, len(start), first, cut, end)


def judge_fault_set(results: Results, one: FaultSet, seed: int, say: Say, windows: int = 1) -> None:
    """Fit on the days before each window, and evaluate the forecasts of the window's days."""
    cuts = one.list_window_cuts(windows)
    test_days = range(one.cut_day, one.end_day - CENSORED_DAYS + 1)
    judged = make_past_days(one.history, test_days, one.nodes)
    beside = compute_baselines(one.history, test_days, one.first_day, one.nodes)
    say(f"{one.dataset}: {len(cuts) - 1} fits, judging {len(judged.day):,} node-days")
    share, faults = count_first_faults(one.history, test_days)
    say(f"{one.dataset}: {share:.0%} of the {faults} faults judged hit a node that never had one")
    results.rows.append(
        ResultRow(one.dataset, "fault", "all", None, "trace", "", "first_fault_share", share, None, None, faults)
    )
    forecasts = make_rolling_forecasts(one, judged, cuts)
    for horizon in HORIZONS_DAYS:
        _judge_horizon(results, one, judged, beside, forecasts[horizon], cuts, horizon, seed)


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """The probabilities of rows, (n,) each: our model's, and the base rate of the days that it was fitted on."""

    p: Array
    base: Array


def make_rolling_forecasts(one: FaultSet, judged: PastDays, cuts: Sequence[int]) -> dict[int, ScoredRows]:
    """Return horizon in days → the forecasts of all judged rows.

    The rows of a window are forecast by a fit on the faults known when the window began.
    """
    forecasts = {days: ScoredRows(np.zeros(len(judged.day)), np.zeros(len(judged.day))) for days in HORIZONS_DAYS}
    for cut, until in pairwise(cuts):
        known = one.select_train_faults(cut)
        fit = fit_history(known, one.first_day, cut, one.nodes)
        trained = make_past_days(known, range(one.first_day + WARM_UP_DAYS, cut), one.nodes)
        rows = (judged.day >= cut) & (judged.day < until)
        for days in HORIZONS_DAYS:
            matured = trained.day + days <= cut
            forecasts[days].p[rows] = 1 - np.exp(-fit.compute_hazard(judged.columns[rows], (days * DAY_S,))[0])
            forecasts[days].base[rows] = float(trained.has_new_fault(known, days)[matured].mean())
    return forecasts


def list_lead_metrics(rival: str) -> list[str]:
    """Return the names of the metrics that compare our scores with a rival's."""
    return [f"{metric}_above_{rival}" for metric in DIFFERENCES]


def count_first_faults(history: FaultHistory, days: range) -> tuple[float, int]:
    """Return the share of these days' faults that are the first fault of their node, and the number of faults."""
    first = np.full(int(history.node.max()) + 1, np.inf)
    np.minimum.at(first, history.node, history.start_day)
    judged = (history.start_day > days.start) & (history.start_day <= days.stop - 1 + CENSORED_DAYS)
    count = int(judged.sum())
    firsts = (history.start_day == first[history.node]) & judged
    return float(firsts.sum()) / max(count, 1), count


def _judge_horizon(
    results: Results,
    one: FaultSet,
    judged: PastDays,
    beside: Baselines,
    forecasts: ScoredRows,
    cuts: Sequence[int],
    horizon: int,
    seed: int,
) -> None:
    labels = judged.has_new_fault(one.history, horizon)
    rows = NodeDays(judged.day - one.cut_day, labels, int(judged.day.max()) - one.cut_day + 1)
    rate = 1 - np.exp(-beside.rate * horizon)
    methods = {
        "ours": RankedScores(rows, forecasts.p, forecasts.p, forecasts.base),
        "recency": RankedScores(rows, beside.recency),
        "count": RankedScores(rows, beside.count),
        "empirical_bayes": RankedScores(rows, beside.rate, rate, forecasts.base),
        "base_rate": RankedScores(rows, np.zeros(len(rate)), forecasts.base, forecasts.base),
    }

    def add_rows(series: str, method: str, found: Mapping[str, Interval], metrics: Sequence[str], events: int) -> None:
        model = "fault_history" if method == "ours" else ""
        for metric in metrics:
            if metric in found:
                given = (one.dataset, "fault", series, horizon * DAY_S, method, model, metric, *found[metric], events)
                results.rows.append(ResultRow(*given))

    events = int(labels.sum())
    for method, ranked in methods.items():
        add_rows("all", method, compute_metric_intervals(ranked, rows.days, seed), METRICS, events)
    for rival in PAIRED:
        above = compute_differences(methods["ours"], methods[rival], rows.days, seed)
        add_rows(
            "all",
            "ours",
            {f"{metric}_above_{rival}": above[metric] for metric in above},
            list_lead_metrics(rival),
            events,
        )
    for number, (cut, until) in enumerate(pairwise(cuts)):
        inside = (judged.day >= cut) & (judged.day < until)
        weight = np.zeros(rows.days)
        weight[cut - one.cut_day : until - one.cut_day] = 1.0
        for method, ranked in methods.items() if len(cuts) > 2 else ():
            found = {metric: (value, None, None) for metric, value in ranked.compute_metrics(weight).items()}
            add_rows(f"window {number + 1} of {len(cuts) - 1}", method, found, METRICS, int(labels[inside].sum()))
    results.predictions.append(
        {
            "dataset": [one.dataset] * len(forecasts.p),
            "issued_ms": (judged.day * DAY_MS).tolist(),
            "target": ["fault"] * len(forecasts.p),
            "series": [one.name_node(node) for node in judged.node.tolist()],
            "horizon_s": [horizon * DAY_S] * len(forecasts.p),
            "value": forecasts.p.tolist(),
            "actual": rows.labels.astype(np.float64).tolist(),
            "model": ["fault_history"] * len(forecasts.p),
        }
    )
