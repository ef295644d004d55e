"""`fleetcast evaluate risk`: which nodes fail within a day and within a week, from the history of faults alone.

A row is a node at the beginning of a day on which it works; the label says whether a fault of it begins within the
horizon. Fitted once on the train folder; in the test span history moves on with each day, coefficients do not. Nodes
that no file lists never had a fault: they are filled up to the stated size of the fleet.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from models.hazard import FaultHistory, HorizonFit, features, in_repair, own_rate
from training.data_folders import read_table
from training.fit_hazard import fit_horizon
from training.results import Results, Row
from training.risk_metrics import METRICS, NodeDays, Ranked, with_intervals
from training.risk_runs import judge_runs

Array = NDArray[np.float64]
Say = Callable[[str], None]

FILE = "fault_intervals.parquet"
STATED_NODES = {"faults/infinitehbd": 400}
HORIZONS_DAYS = (1, 7)
WARM_UP_DAYS = 14  # of history before the first row that is fitted on
CENSORED_DAYS = max(HORIZONS_DAYS)
DAY_S, DAY_MS = 86_400, 86_400_000
NEVER_DAYS = 1e6


@dataclass(frozen=True, slots=True)
class FaultSet:
    """Faults of both folders; the first `train_faults` are of the train folder. names: of nodes that ever fail.

    Days of the trace's own clock: first_day, where watching begins; cut_day, where the train folder ends; end_day,
    where all is known until.
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
        """Of a node's row; nodes that never fail are numbered."""
        return self.names[node] if node < len(self.names) else f"never failed {node - len(self.names)}"

    @property
    def train(self) -> FaultHistory:
        """What was known at the end of the train folder."""
        some, whole = slice(self.train_faults), self.history
        return FaultHistory(whole.node[some], whole.start_day[some], whole.end_day[some]).until(self.cut_day)


@dataclass(frozen=True, slots=True)
class Panel:
    """Rows of many days: columns (n, feature), day (n,), and what baselines go by, each (n,)."""

    columns: Array
    day: NDArray[np.int64]
    node: NDArray[np.int64]
    recency: Array
    count: Array
    rate: Array

    def labels(self, history: FaultHistory, horizon_days: int) -> NDArray[np.bool_]:
        """(n,) a fault of the node begins in (day, day + horizon]."""
        found = np.zeros(len(self.day), bool)
        for node, start_day in zip(history.node.tolist(), history.start_day.tolist(), strict=True):
            found |= (self.node == node) & (self.day < start_day) & (start_day <= self.day + horizon_days)
        return found


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
    judge_runs(results, test, seed, say)
    return results


def read_set(dataset: str, train: Path, test: Path) -> FaultSet | str:
    """The faults of both folders; or why they cannot be judged."""
    tables = [read_table(path) for path in (train, test)]
    missing = {"node", "start_day", "end_day"} - set(tables[0].columns) - set(tables[1].columns)
    if missing:
        return f"no column {', '.join(sorted(missing))}"
    tables[0] = tables[0].drop_duplicates()
    table = pd.concat(tables, ignore_index=True).drop_duplicates()  # a later copy may hold the train rows, too
    sizes = len(tables[0]), len(table) - len(tables[0])
    names, node = np.unique(table["node"].astype(str).to_numpy(), return_inverse=True)
    start, end = (np.asarray(table[name], np.float64) for name in ("start_day", "end_day"))
    if not min(sizes) or not np.isfinite(start).all():
        return "no faults, or faults without a start"
    history = FaultHistory(node.astype(np.int64), start, end)
    cut = int(np.ceil(start[: sizes[0]].max()))
    until = int(np.floor(np.nanmax(np.concatenate((start, end)))))
    if until - CENSORED_DAYS < cut:
        return f"the test folder ends on day {until}, the train folder on day {cut}: no day has an outcome"
    nodes = max(len(names), STATED_NODES.get(dataset, 0))
    return FaultSet(dataset, tuple(names.tolist()), nodes, history, sizes[0], int(np.floor(start.min())), cut, until)


def panel(history: FaultHistory, days: range, since_day: float, nodes: int) -> Panel:
    """The working nodes on each day, with what was known at its beginning."""
    parts = []
    for day in days:
        known = history.until(day)
        works = np.flatnonzero(~in_repair(known, nodes))
        rate = own_rate(known, day - since_day, nodes)
        recency = np.maximum(known.latest(known.start_day, nodes) - day, -NEVER_DAYS)
        returned = known.latest(known.end_day, nodes) - day
        whole = features(-recency, -returned)
        count = known.counts(nodes)
        parts.append((whole[works], np.full(len(works), day), works, recency[works], count[works], rate[works]))
    return Panel(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def judge_set(results: Results, one: FaultSet, seed: int, say: Say) -> None:
    """Fit on the train days, judge on the days after."""
    inside = one.train
    trained = panel(inside, range(one.first_day + WARM_UP_DAYS, one.cut_day), one.first_day, one.nodes)
    test_days = range(one.cut_day, one.end_day - CENSORED_DAYS + 1)
    judged = panel(one.history, test_days, one.first_day, one.nodes)
    say(f"{one.dataset}: fitting on {len(trained.day):,} node-days, judging {len(judged.day):,}")
    share, faults = first_faults(one.history, test_days)
    say(f"{one.dataset}: {share:.0%} of the {faults} faults judged hit a node that never had one")
    results.rows.append(
        Row(one.dataset, "fault", "all", None, "trace", "", "first_fault_share", share, None, None, faults)
    )
    for horizon in HORIZONS_DAYS:
        fit = fit_on(trained, inside, horizon, one.cut_day)
        _judge_horizon(results, one, judged, fit, _base_rate(trained, inside, horizon, one.cut_day), horizon, seed)


def fit_on(trained: Panel, history: FaultHistory, horizon_days: int, cut_day: int) -> HorizonFit:
    """Coefficients from the rows whose outcome was known by the cut."""
    known = trained.day + horizon_days <= cut_day
    return fit_horizon(trained.columns[known], trained.labels(history, horizon_days)[known])


def first_faults(history: FaultHistory, days: range) -> tuple[float, int]:
    """Share of the faults of these days that are their node's first, and how many faults there are."""
    first = np.full(int(history.node.max()) + 1, np.inf)
    np.minimum.at(first, history.node, history.start_day)
    judged = (history.start_day > days.start) & (history.start_day <= days.stop - 1 + CENSORED_DAYS)
    count = int(judged.sum())
    firsts = (history.start_day == first[history.node]) & judged
    return float(firsts.sum()) / max(count, 1), count


def _judge_horizon(
    results: Results, one: FaultSet, judged: Panel, fit: HorizonFit, base: float, horizon: int, seed: int
) -> None:
    rows = NodeDays(
        judged.day - one.cut_day, judged.labels(one.history, horizon), int(judged.day.max()) - one.cut_day + 1
    )
    ours = fit.predict(judged.columns)
    rate = 1 - np.exp(-judged.rate * horizon)
    methods = {
        "ours": Ranked(rows, ours, ours, base),
        "recency": Ranked(rows, judged.recency),
        "count": Ranked(rows, judged.count),
        "empirical_bayes": Ranked(rows, judged.rate, rate, base),
        "base_rate": Ranked(rows, np.zeros(len(rate)), np.full(len(rate), base), base),
    }
    events = int(rows.labels.sum())
    for method, ranked in methods.items():
        model = "fault_history" if method == "ours" else ""
        found = with_intervals(ranked, rows.days, seed)
        for metric in METRICS:
            if metric in found:
                value, low, high = found[metric]
                given = (one.dataset, "fault", "all", horizon * DAY_S, method, model, metric, value, low, high, events)
                results.rows.append(Row(*given))
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


def _base_rate(trained: Panel, history: FaultHistory, horizon_days: int, cut_day: int) -> float:
    known = trained.day + horizon_days <= cut_day
    return float(trained.labels(history, horizon_days)[known].mean())
