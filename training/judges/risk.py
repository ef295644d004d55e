"""`fleetcast evaluate risk`: which nodes fail within a day and within a week, from the history of faults alone.

A row is a working node at the beginning of a day, labelled by whether a fault of it begins within the horizon. The fit
is the train folder's; history moves on with each day. Nodes without a fault fill up to the stated size of the fleet.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleet.errors import RecordError
from models.risk.hazard import (
    HORIZONS_DAYS,
    WARM_UP_DAYS,
    FaultHistory,
    HistoryFit,
    PastDays,
    fit_history,
    in_repair,
    own_rate,
    past_days,
)
from training.judges.risk_metrics import METRICS, NodeDays, Ranked, differences, with_intervals
from training.judges.risk_runs import judge_runs
from training.reports.results import ResultRow, Results
from training.sets.data_folders import read_table

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


@dataclass(frozen=True, slots=True)
class FaultSet:
    """Faults of both folders; the first `train_faults` are of the train folder. names: of nodes that ever fail.

    Days of the trace's clock: watching begins at first_day, the train folder ends at cut_day, all is known to end_day.
    """

    dataset: str
    names: tuple[str, ...]
    nodes: int
    history: FaultHistory
    train_faults: int
    first_day: int
    cut_day: int
    end_day: int

    def name(self, node: int) -> str:
        """The name of a node's row; nodes that never fail are numbered."""
        return self.names[node] if node < len(self.names) else f"never failed {node - len(self.names)}"

    @property
    def train(self) -> FaultHistory:
        """What was known at the end of the train folder."""
        some, whole = slice(self.train_faults), self.history
        node, start, end, hardware = whole.node[some], whole.start_day[some], whole.end_day[some], whole.hardware[some]
        return FaultHistory(node, start, end, hardware).until(self.cut_day)


@dataclass(frozen=True, slots=True)
class Baselines:
    """Other scores that rank the rows of some days, each (n,)."""

    recency: Array
    count: Array
    rate: Array


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Judge every trace of faults that is in both folders."""
    results = Results("risk")
    for path in sorted(test.glob(f"faults/*/{FILE}")):
        dataset = path.parent.relative_to(test).as_posix()
        if not (train / dataset / FILE).is_file():
            results.skipped.append(f"{dataset}: not in the train folder")
            continue
        found = read_set(dataset, train / dataset / FILE, path)
        if isinstance(found, str):
            results.skipped.append(f"{dataset}: {found}")
        else:
            judge_set(results, found, seed, say)
    judge_runs(results, train, test, seed, say)
    return results


def read_set(dataset: str, train: Path, test: Path) -> FaultSet | str:
    """The faults of both folders; or why they cannot be judged."""
    try:
        tables = [read_table(path) for path in (train, test)]
    except RecordError as error:
        return str(error)
    missing = set(NEEDED) - (set(tables[0].columns) & set(tables[1].columns))
    if missing:
        return f"no column {', '.join(sorted(missing))}"
    tables = [_faults(table) for table in tables]
    table = pd.concat(tables, ignore_index=True)
    table["end_day"] = table.groupby(["node", "start_day"])["end_day"].transform("max")  # a later copy may know more
    table = table.drop_duplicates(["node", "start_day"])  # and may hold the train rows, too
    sizes = len(tables[0]), len(table) - len(tables[0])
    if not min(sizes):
        return f"{sizes[0]} faults with a start in the train folder, {sizes[1]} others in the test folder"
    history, names = _history(table)
    start = history.start_day
    cut = int(np.ceil(start[: sizes[0]].max()))
    first, until = int(np.floor(start.min())), int(np.floor(np.nanmax(np.concatenate((start, history.end_day)))))
    if until - first > LONGEST_DAYS:
        return f"start_day and end_day span {until - first:,} days: they are no days"
    if until - CENSORED_DAYS < cut:
        return f"the test folder ends on day {until}, the train folder on day {cut}: no day has an outcome"
    if cut - first <= WARM_UP_DAYS + CENSORED_DAYS:
        return f"the train folder has {cut - first} days: at least {WARM_UP_DAYS + CENSORED_DAYS + 1} are fitted on"
    nodes = max(len(names), STATED_NODES.get(dataset, 0))
    return FaultSet(dataset, names, nodes, history, sizes[0], first, cut, until)


def fit_file(path: Path, until_day: int | None, nodes: int) -> HistoryFit:
    """The history hazard of a table of faults (NEEDED) begun by `until_day`, of all `nodes`. Raises RecordError."""
    table = read_table(path)
    missing = set(NEEDED) - set(table.columns)
    if missing:
        raise RecordError("no faults", f"{path}: no column {', '.join(sorted(missing))}")
    history, names = _history(_faults(table))
    if not len(names):
        raise RecordError("no faults", f"{path}: no row with a start_day")
    first, last = math.floor(history.start_day.min()), math.floor(history.start_day.max())
    if last - first > LONGEST_DAYS:
        raise RecordError("no faults", f"{path}: start_day spans {last - first:,} days: they are no days")
    try:
        return fit_history(history, first, last if until_day is None else until_day, max(nodes, len(names)))
    except ValueError as error:
        raise RecordError("no faults", f"{path}: {error}") from None


def _faults(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a start, as numbers, each fault once: NEEDED, and whether a part was at fault."""
    start, end = (pd.to_numeric(table[name], errors="coerce").astype(float) for name in NEEDED[1:])
    level = table["level"].astype(str) if "level" in table else pd.Series("", table.index)
    hardware = level.str.contains("hardware", case=False)
    end = end.where(np.isfinite(end)).clip(lower=start)
    found = pd.DataFrame({"node": table["node"].astype(str), "start_day": start, "end_day": end, "hardware": hardware})
    return found[np.isfinite(start)].drop_duplicates(["node", "start_day"])


def _history(table: pd.DataFrame) -> tuple[FaultHistory, tuple[str, ...]]:
    """The faults in the table's order, and the nodes' names."""
    names, node = np.unique(table["node"].to_numpy(str), return_inverse=True)
    start, end = (np.asarray(table[name], np.float64) for name in NEEDED[1:])
    return FaultHistory(node.astype(np.int64), start, end, table["hardware"].to_numpy(bool)), tuple(names.tolist())


def baselines(history: FaultHistory, days: range, since_day: float, nodes: int) -> Baselines:
    """Of the same rows as `past_days`."""
    parts = []
    for day in days:
        known = history.until(day)
        works = np.flatnonzero(~in_repair(known, nodes))
        recency = np.maximum(known.latest(known.start_day, nodes) - day, -NEVER_DAYS)
        parts.append((recency[works], known.counts(nodes)[works], own_rate(known, day - since_day, nodes)[works]))
    return Baselines(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def judge_set(results: Results, one: FaultSet, seed: int, say: Say) -> None:
    """Fit on the train days, judge on the days after."""
    inside = one.train
    fit = fit_history(inside, one.first_day, one.cut_day, one.nodes)
    trained = past_days(inside, range(one.first_day + WARM_UP_DAYS, one.cut_day), one.nodes)
    test_days = range(one.cut_day, one.end_day - CENSORED_DAYS + 1)
    judged = past_days(one.history, test_days, one.nodes)
    beside = baselines(one.history, test_days, one.first_day, one.nodes)
    say(f"{one.dataset}: fitting on {len(trained.day):,} node-days, judging {len(judged.day):,}")
    share, faults = first_faults(one.history, test_days)
    say(f"{one.dataset}: {share:.0%} of the {faults} faults judged hit a node that never had one")
    results.rows.append(
        ResultRow(one.dataset, "fault", "all", None, "trace", "", "first_fault_share", share, None, None, faults)
    )
    for horizon in HORIZONS_DAYS:
        known = trained.day + horizon <= one.cut_day
        base = float(trained.begins(inside, horizon)[known].mean())
        _judge_horizon(results, one, judged, beside, fit, base, horizon, seed)


def above_names(rival: str) -> list[str]:
    """What ours has more than a rival, by the name of its row."""
    return [f"{metric}_above_{rival}" for metric in DIFFERENCES]


def first_faults(history: FaultHistory, days: range) -> tuple[float, int]:
    """Share of the faults of these days that are their node's first, and how many faults there are."""
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
    fit: HistoryFit,
    base: float,
    horizon: int,
    seed: int,
) -> None:
    labels = judged.begins(one.history, horizon)
    rows = NodeDays(judged.day - one.cut_day, labels, int(judged.day.max()) - one.cut_day + 1)
    ours = 1 - np.exp(-fit.hazard(judged.columns, (horizon * DAY_S,))[0])
    rate = 1 - np.exp(-beside.rate * horizon)
    methods = {
        "ours": Ranked(rows, ours, ours, base),
        "recency": Ranked(rows, beside.recency),
        "count": Ranked(rows, beside.count),
        "empirical_bayes": Ranked(rows, beside.rate, rate, base),
        "base_rate": Ranked(rows, np.zeros(len(rate)), np.full(len(rate), base), base),
    }
    events = int(labels.sum())

    def tell(method: str, found: dict[str, tuple[float, float | None, float | None]], metrics: Sequence[str]) -> None:
        model = "fault_history" if method == "ours" else ""
        for metric in metrics:
            if metric in found:
                given = (one.dataset, "fault", "all", horizon * DAY_S, method, model, metric, *found[metric], events)
                results.rows.append(ResultRow(*given))

    for method, ranked in methods.items():
        tell(method, with_intervals(ranked, rows.days, seed), METRICS)
    for rival in PAIRED:
        above = differences(methods["ours"], methods[rival], rows.days, seed)
        tell("ours", {f"{metric}_above_{rival}": above[metric] for metric in above}, above_names(rival))
    results.predictions.append(
        {
            "dataset": [one.dataset] * len(ours),
            "issued_ms": (judged.day * DAY_MS).tolist(),
            "target": ["fault"] * len(ours),
            "series": [one.name(node) for node in judged.node.tolist()],
            "horizon_s": [horizon * DAY_S] * len(ours),
            "value": ours.tolist(),
            "actual": rows.labels.astype(np.float64).tolist(),
            "model": ["fault_history"] * len(ours),
        }
    )
