"""Sets of demand: tables below `demand/` and `serving/` as panels of regular series of ten minutes.

The columns of a table decide its layout, whatever the folders are called. A column `vc` or
`cluster` splits a table into series:

    flows    time, submit_gpu_num, start_gpu_num, end_gpu_num [, submit_gpu_job, running_gpu_num]  sums per bin
    states   time, running_gpu_num, pending_gpu_num [, total_gpu_num]                              levels
    nodes    time, active                                                                          levels; 0 is unknown
    requests t_s or time, model, rate_rps [, client]                                    mean rate; clients add up

Job histories below `jobs/` with start times also become flows and levels of their partitions
(`job_demand.py`). The level of a bin is that at its end. Unreadable rows are skipped and counted.
If two rows have the same time, the second one counts. Bins without a row are NaN. The history of a
forecast is in both folders.

    train folder     ├───── set a ─────┤
                  ├────────── set b ──────────┤
    test folder                        ├──────┼─ a ───────────┤    judged after its own train part ends
                     ├─ c, never seen before ─┼──┤                 judged after a week, and after a and b end
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.models.forecast import Panel
from fleetcast.training.sets.data_folders import convert_to_seconds, convert_to_text, is_table, read_table
from fleetcast.training.sets.job_demand import JobDemand, read_job_demand

Array = NDArray[np.float64]
Say = Callable[[str], None]

BIN_S = 600
PARENTS = ("demand", "jobs", "serving")
SERIES_COLUMNS = ("cluster", "vc", "model")
ALL, UNKNOWN = "all", "unknown"
MOST_BINS = 2_000_000
MINUTE_S, DAY_S = 60, 86_400
ALONE_DAYS = 7  # of its own history (half of a short one) before a set without a train part is judged
HOLE_S, FEW = 60 * DAY_S, 0.01  # rows beyond such a hole that are so few have a wrong time


@dataclass(frozen=True, slots=True)
class DemandSet:
    """A panel of one target from one data set.

    train_bins: the number of bins, at the beginning, that come from the train folder. alone_bins: the number of
    bins before the judged ones, used only if `train_bins` is 0.
    """

    dataset: str
    panel: Panel
    train_bins: int
    alone_bins: int = 0

    @property
    def bins_before_judging(self) -> int:
        """The number of bins that have ended when the first judged forecast is issued."""
        return self.train_bins or self.alone_bins


@dataclass(frozen=True, slots=True)
class _SetRows:
    """The rows of one set in one layout.

    train_end_s: the end of the set's train part, None if it has no train part.
    """

    dataset: str
    layout: "DemandColumns"
    rows: pd.DataFrame
    train_end_s: float | None

    @property
    def first_s(self) -> float:
        return float(self.rows["time_s"].min())

    @property
    def last_s(self) -> float:
        return float(self.rows["time_s"].max())


@dataclass(frozen=True, slots=True)
class DemandColumns:
    """A layout of a table of demand.

    needs: the columns that identify the layout. sums, levels: column -> name in the panel. Other columns are not
    read.
    """

    name: str
    needs: frozenset[str]
    sums: Mapping[str, str]
    levels: Mapping[str, str]


LAYOUTS = (
    DemandColumns(
        "flows",
        frozenset({"time", "submit_gpu_num", "start_gpu_num", "end_gpu_num"}),
        {
            "submit_gpu_job": "arriving_jobs",
            "submit_gpu_num": "arriving",
            "start_gpu_num": "started",
            "end_gpu_num": "ended",
            "start_gpu_job": "started_jobs",
            "end_gpu_job": "ended_jobs",
        },
        {"running_gpu_num": "running"},
    ),
    DemandColumns(
        "states",
        frozenset({"time", "running_gpu_num", "pending_gpu_num"}),
        {},
        {
            "running_gpu_num": "running",
            "pending_gpu_num": "queued",
            "total_gpu_num": "capacity",
            "running_gpujob_num": "running_jobs",
            "pending_gpujob_num": "queued_jobs",
        },
    ),
    DemandColumns("nodes", frozenset({"time", "active"}), {}, {"active": "active_nodes", "total": "total_nodes"}),
    DemandColumns("requests", frozenset({"model", "rate_rps"}), {}, {"rate_rps": "request_rate"}),
)
TARGETS = {
    "flows": ("arriving_jobs", "arriving", "running", "queued", "wanted"),
    "states": ("running", "queued", "wanted"),
    "nodes": ("active_nodes",),
    "requests": ("request_rate",),
}


def read_panels(
    train: Path, test: Path | None, say: Say = lambda line: None, wanted: Callable[[str], bool] = lambda name: True
) -> list[DemandSet]:
    """Read the wanted sets of both folders, by name and target. `say` receives a line for each skipped part."""
    folders = [folder for folder in (train, test) if folder is not None]
    names = sorted({name for folder in folders for name in _list_set_names(folder)})
    found = [one for name in names if wanted(name) for one in _read_set_or_jobs(name, train, test, say)]
    trained = [(one.first_s, one.train_end_s) for one in found if one.train_end_s is not None]
    return [panel for one in found for panel in _make_panels(one, _find_judging_start(one, trained), say)]


def _read_set_or_jobs(name: str, train: Path, test: Path | None, say: Say) -> "Sequence[_SetRows | JobDemand]":
    if not name.startswith("jobs/"):
        return _read_set(name, train, test, say)
    jobs = read_job_demand(name, train, test, say)
    return [jobs] if jobs is not None else []


def _find_judging_start(one: "_SetRows | JobDemand", trained: Sequence[tuple[float, float]]) -> float:
    """Return the time, in seconds, from which a set without a train part is judged.

    Some history of the set and the train folder come before this time. Train sets that begin after this set
    ends do not count, because they have another clock or cover other years.
    """
    own_s = one.first_s + min(ALONE_DAYS * DAY_S, (one.last_s - one.first_s) / 2)
    return max([own_s, *(end_s for first_s, end_s in trained if first_s < one.last_s)])


def set_known_capacity(panel: Panel, bins: int) -> Panel:
    """Return the panel with the newest capacity that was known at the end of bin `bins` - 1.

    Only panels of running GPUs with a known capacity change.
    """
    known = panel.covariates.get("capacity")
    if known is None or panel.target != "running":
        return panel
    return replace(panel, capacity=np.array([_find_last_known_value(row[:bins]) for row in known]))


def _find_last_known_value(row: Array) -> float:
    known = row[np.isfinite(row)]
    return float(known[-1]) if len(known) else float("nan")


def _list_set_names(folder: Path) -> list[str]:
    return [
        path.relative_to(folder).as_posix()
        for parent in PARENTS
        for path in sorted((folder / parent).glob("*"))
        if path.is_dir()
    ]


def _read_set(name: str, train: Path, test: Path | None, say: Say) -> list[_SetRows]:
    before = _read_tables(train / name, say)
    after = _read_tables(test / name, say) if test is not None else {}
    if not before and not after:
        say(f"skipped {name}: no table of it has the columns of a demand series")
    sets = []
    for layout in LAYOUTS:
        clean = [_clean_table(tables.get(layout.name), layout, name, say) for tables in (before, after)]
        parts = [rows for rows in clean if len(rows)]
        if parts:
            rows = pd.concat(parts, ignore_index=True).drop_duplicates(["time_s", "series", "client"], keep="last")
            rows = rows.sort_values(["series", "client", "time_s"], kind="stable", ignore_index=True)
            sets.append(_SetRows(name, layout, rows, float(clean[0]["time_s"].max()) if len(clean[0]) else None))
        elif layout.name in before or layout.name in after:
            say(f"skipped {name}: no row of it can be read")
    return sets


def _read_tables(folder: Path, say: Say) -> dict[str, pd.DataFrame]:
    """Read all tables of a folder that have a known layout. Returns layout name -> rows."""
    found: dict[str, list[pd.DataFrame]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and is_table(path)):
        try:
            table = read_table(path)
        except RecordError as error:
            say(f"skipped {error.detail}")
            continue
        layout = next((layout for layout in LAYOUTS if layout.needs <= set(table.columns)), None)
        if layout is not None and not table.empty:
            found.setdefault(layout.name, []).append(table)
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items()}


def _clean_table(table: pd.DataFrame | None, layout: DemandColumns, name: str, say: Say) -> pd.DataFrame:
    """Return the good rows of a table as (time_s, series, client, values)."""
    if table is None:
        return pd.DataFrame()
    rows = pd.DataFrame({"time_s": _read_seconds(table)}, index=table.index)
    rows["series"] = _name_series(table)
    rows["client"] = convert_to_text(table["client"]) if "client" in table else ""
    known = dict(layout.sums) | dict(layout.levels)
    for column, called in known.items():
        if column in table:
            rows[called] = pd.to_numeric(table[column], errors="coerce").astype(np.float64)
    numbers = rows[rows.columns.difference(["time_s", "series", "client"])].to_numpy()
    main = next(called for column, called in known.items() if column in layout.needs)
    bad = _find_stray_times(rows["time_s"].to_numpy()) | ~np.isfinite(rows[main].to_numpy())
    bad |= np.isinf(numbers).any(axis=1) | (numbers < 0).any(axis=1)
    if bad.any():
        say(f"{name}: {int(bad.sum()):,} of {len(rows):,} rows have no time, no number or a negative one: skipped")
    return rows[~bad]


def _find_stray_times(time_s: Array) -> NDArray[np.bool_]:
    """Return (row,) whether each time is missing, or is one of few times that are far from all others.

    Such times come from a clock that was wrong.
    """
    strays = ~np.isfinite(time_s)
    rows = np.flatnonzero(~strays)
    rows = rows[np.argsort(time_s[rows], kind="stable")]
    part = np.cumsum(np.diff(time_s[rows], prepend=time_s[rows[:1]]) > HOLE_S)
    if len(rows):
        strays[rows] = np.bincount(part)[part] < FEW * len(rows)
    return strays


def _read_seconds(table: pd.DataFrame) -> Array:
    """Return (row,) the times of a table in seconds.

    A column `time` is converted into Unix seconds. A column `t_s` is on the table's own clock.
    """
    if "time" in table:
        return convert_to_seconds(table["time"])
    if "t_s" not in table:
        return np.full(len(table), np.nan)
    return np.asarray(pd.to_numeric(table["t_s"], errors="coerce"), np.float64)


def _name_series(table: pd.DataFrame) -> "pd.Series[str]":
    """Return the name of each row's series: `cluster/vc` if the table has both columns."""
    named = pd.Series(ALL, index=table.index)
    for number, column in enumerate(column for column in SERIES_COLUMNS if column in table):
        own = np.where(table[column].isna(), UNKNOWN, convert_to_text(table[column]))
        named = pd.Series(own, index=table.index) if not number else named + "/" + own
    return named


def _make_panels(one: "_SetRows | JobDemand", alone_from_s: float, say: Say) -> list[DemandSet]:
    begin_s = alone_from_s if one.train_end_s is None else one.train_end_s
    bin_s, shift_s = (BIN_S, 0) if isinstance(one, JobDemand) else _choose_binning(one, begin_s)
    first, last = (int((time_s + shift_s) // bin_s) for time_s in (one.first_s, one.last_s))
    if last - first > MOST_BINS:
        say(f"skipped {one.dataset}: its times reach from {one.first_s:.0f} s to {one.last_s:.0f} s")
        return []
    begin = max(1, min(int((begin_s + shift_s) // bin_s), last) - first + 1)
    names, columns = _make_series_columns(one, first, last - first + 1, bin_s, shift_s)
    sets = []
    for target in TARGETS["flows" if isinstance(one, JobDemand) else one.layout.name]:
        if target in columns:
            others = {key: values for key, values in columns.items() if key != target}
            bound = np.full(len(names), np.nan)
            panel = Panel(target, names, bin_s, first * bin_s * 1000, columns[target], bound, others)
            parts = (0, begin) if one.train_end_s is None else (begin, 0)
            sets.append(DemandSet(one.dataset, set_known_capacity(panel, begin), *parts))
    return sets


def _choose_binning(one: _SetRows, begin_s: float) -> tuple[int, int]:
    """Return the length of a bin in seconds, and the seconds to add to the rows' times.

    The seconds are needed because the timestamp of a row may lie a little before its bin begins.
    """
    early = one.rows[one.rows["time_s"] <= begin_s]
    steps = early.groupby(["series", "client"])["time_s"].diff()
    step_s = float(steps.median()) if steps.notna().any() else 0.0
    bin_s = max(BIN_S, round(step_s / MINUTE_S) * MINUTE_S)
    return (
        bin_s,
        MINUTE_S if step_s > BIN_S - MINUTE_S else 0,
    )  # a row a bin: one that came a little early is of its bin


def _make_series_columns(
    one: "_SetRows | JobDemand", first: int, size: int, bin_s: int, shift_s: int
) -> tuple[tuple[str, ...], dict[str, Array]]:
    """Return the names of the series, and column -> (series, bin)."""
    if isinstance(one, JobDemand):
        columns = one.make_columns(one.list_series_names(), first, size, bin_s)
        return one.list_series_names(), columns | {"wanted": columns["running"] + columns["queued"]}
    names = tuple(sorted(one.rows["series"].unique()))
    bins = np.floor((one.rows["time_s"].to_numpy() + shift_s) / bin_s).astype(np.int64)
    columns = _bin_rows(one.layout, one.rows, bins - first, size, names)
    _add_derived_columns(one.layout, columns)
    return names, columns


def _bin_rows(
    layout: DemandColumns, rows: pd.DataFrame, bins: NDArray[np.int64], size: int, names: tuple[str, ...]
) -> dict[str, Array]:
    """Sort the rows into bins. Returns name → (series, bin), summed over clients.

    The level of a bin is the level of its last row. A sum covers all rows of the bin.
    """
    at = np.searchsorted(names, rows["series"].to_numpy(str))
    known = [called for called in (dict(layout.sums) | dict(layout.levels)).values() if called in rows]
    keys = pd.DataFrame({"series": at, "client": rows["client"], "bin": bins})
    sums = set(layout.sums.values())
    grouped = pd.concat([keys, rows[known]], axis=1).groupby(["series", "client", "bin"], sort=False)
    table = grouped.agg({called: "sum" if called in sums else "last" for called in known}).reset_index()
    if layout.name == "requests":
        table = grouped[known].mean().reset_index()
    table = table.groupby(["series", "bin"])[known].sum(min_count=1).reset_index()
    columns = {called: np.full((len(names), size), np.nan) for called in known}
    for called, values in columns.items():
        values[table["series"], table["bin"]] = table[called]
    return columns


def _add_derived_columns(layout: DemandColumns, columns: dict[str, Array]) -> None:
    """Add the columns that can be computed from the others, in place.

    These are the queued and running GPUs of flows, and the wanted GPUs. Zeros of nodes become unknown.
    """
    if layout.name == "nodes":
        columns["active_nodes"][columns["active_nodes"] == 0] = np.nan
        return
    if layout.name == "flows":
        if "running" not in columns:
            columns["running"] = _accumulate_changes(columns["started"] - columns["ended"])
        columns["queued"] = _accumulate_changes(columns["arriving"] - columns["started"])
    if "queued" in columns:
        columns["wanted"] = columns["running"] + columns["queued"]


def _accumulate_changes(changes: Array) -> Array:
    """Return (series, bin) the levels that follow from the changes in each bin.

    The level at the beginning is unknown. So the lowest level so far counts as 0.
    """
    level = np.nancumsum(changes, axis=1)
    level -= np.minimum(np.minimum.accumulate(level, axis=1), 0.0)
    return np.where(np.isfinite(changes), level, np.nan)
