"""Sets of demand: tables below `demand/` and `serving/` as panels of regular series of ten minutes.

A layout is known by its columns, so folders and clusters may have any name; a column `vc` or `cluster` parts a table
into series:

    flows    time, submit_gpu_num, start_gpu_num, end_gpu_num [, submit_gpu_job, running_gpu_num]  sums per bin
    states   time, running_gpu_num, pending_gpu_num [, total_gpu_num]                              levels
    nodes    time, active                                                                          levels; 0 is unknown
    requests t_s or time, model, rate_rps [, client]                                    mean rate; clients add up

A level is that of the end of a bin. Rows that cannot be read are skipped and counted; a second row for the same moment
replaces the first; bins without a row are NaN. History is the train and the test folder together.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from models.forecast import Panel
from training.data_folders import is_table, read_table

Array = NDArray[np.float64]
Say = Callable[[str], None]

BIN_S = 600
PARENTS = ("demand", "serving")
SERIES_COLUMNS = ("vc", "cluster")
ALL = "all"
MOST_BINS = 2_000_000


@dataclass(frozen=True, slots=True)
class DemandSet:
    """A panel of one target. train_bins: bins of the train folder, at the beginning; 0 where it has none of the set."""

    dataset: str
    panel: Panel
    train_bins: int


@dataclass(frozen=True, slots=True)
class Layout:
    """needs: columns that tell it. sums, levels: column -> name in the panel; the others are not read."""

    name: str
    needs: frozenset[str]
    sums: Mapping[str, str]
    levels: Mapping[str, str]


LAYOUTS = (
    Layout(
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
    Layout(
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
    Layout("nodes", frozenset({"time", "active"}), {}, {"active": "active_nodes", "total": "total_nodes"}),
    Layout("requests", frozenset({"model", "rate_rps"}), {}, {"rate_rps": "request_rate"}),
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
    """The wanted sets of both folders, by name and target; `say` is told what is skipped."""
    folders = [folder for folder in (train, test) if folder is not None]
    names = sorted({name for folder in folders for name in _set_names(folder)})
    return [one for name in names if wanted(name) for one in _read_set(name, train, test, say)]


def _set_names(folder: Path) -> list[str]:
    return [
        path.relative_to(folder).as_posix()
        for parent in PARENTS
        for path in sorted((folder / parent).glob("*"))
        if path.is_dir()
    ]


def _read_set(name: str, train: Path, test: Path | None, say: Say) -> list[DemandSet]:
    before = _read_tables(train / name, say)
    after = _read_tables(test / name, say) if test is not None else {}
    sets = []
    for layout in LAYOUTS:
        parts = [tables[layout.name] for tables in (before, after) if layout.name in tables]
        if not parts:
            continue
        rows = _clean(pd.concat(parts, ignore_index=True), layout, name, say)
        if rows.empty:
            say(f"skipped {name}: no row of it can be read")
            continue
        known = _clean(before[layout.name], layout, name, lambda line: None) if layout.name in before else None
        sets += _panels(name, layout, rows, None if known is None or known.empty else known["time_s"].max())
    if not before and not after:
        say(f"skipped {name}: no table of it has the columns of a demand series")
    return sets


def _read_tables(folder: Path, say: Say) -> dict[str, pd.DataFrame]:
    """Layout name -> rows of all tables of a folder that have it."""
    found: dict[str, list[pd.DataFrame]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and is_table(path)):
        try:
            table = read_table(path)
        except (ValueError, OSError) as error:
            say(f"skipped {path}: {str(error).splitlines()[0]}")
            continue
        layout = next((layout for layout in LAYOUTS if layout.needs <= set(table.columns)), None)
        if layout is not None and not table.empty:
            found.setdefault(layout.name, []).append(table)
    return {name: pd.concat(tables, ignore_index=True) for name, tables in found.items()}


def _clean(table: pd.DataFrame, layout: Layout, name: str, say: Say) -> pd.DataFrame:
    """Sorted rows (time_s, series, client, values) without bad ones and doubles."""
    rows = pd.DataFrame({"time_s": _seconds(table)})
    rows["series"] = _series(table)
    rows["client"] = table["client"].astype(str) if "client" in table else ""
    for column, called in (dict(layout.sums) | dict(layout.levels)).items():
        if column in table:
            rows[called] = pd.to_numeric(table[column], errors="coerce").astype(np.float64)
    values = rows.columns.difference(["time_s", "series", "client"])
    numbers = rows[values].to_numpy()
    main = next(iter((layout.levels if not layout.sums else layout.sums).values()))
    bad = rows["time_s"].isna() | ~np.isfinite(rows[main]) | np.isinf(numbers).any(axis=1) | (numbers < 0).any(axis=1)
    if bad.any():
        say(f"{name}: {int(bad.sum()):,} of {len(rows):,} rows have no time, no number or a negative one: skipped")
    rows = rows[~bad].drop_duplicates(["time_s", "series", "client"], keep="last")
    return rows.sort_values(["series", "client", "time_s"], kind="stable", ignore_index=True)


def _seconds(table: pd.DataFrame) -> "pd.Series[float]":
    """Seconds: since 1970 of a time column, else as the table counts them."""
    if "time" not in table:
        seconds = table["t_s"] if "t_s" in table else pd.Series(np.nan, index=table.index)
        return pd.to_numeric(seconds, errors="coerce").astype(np.float64)
    times = table["time"]
    if pd.api.types.is_numeric_dtype(times):
        return times.astype(np.float64)
    moments = pd.to_datetime(times, errors="coerce", utc=True, format=None if times.dtype.kind == "M" else "mixed")
    seconds = moments.dt.tz_convert(None).to_numpy().astype("datetime64[ms]").astype(np.float64) / 1000
    return pd.Series(np.where(moments.isna(), np.nan, seconds), index=table.index)


def _series(table: pd.DataFrame) -> "pd.Series[str]":
    column = next((column for column in (*SERIES_COLUMNS, "model") if column in table), None)
    return pd.Series(ALL, index=table.index) if column is None else table[column].astype(str)


def _panels(name: str, layout: Layout, rows: pd.DataFrame, train_end_s: float | None) -> list[DemandSet]:
    steps = rows.groupby(["series", "client"])["time_s"].diff()
    bin_s = max(BIN_S, int(steps.median()) if steps.notna().any() else BIN_S)
    bins = np.floor(rows["time_s"].to_numpy() / bin_s).astype(np.int64)
    first, last = int(bins.min()), int(bins.max())
    if last - first > MOST_BINS:
        raise ValueError(f"{name}: times from {rows['time_s'].min():.0f} s to {rows['time_s'].max():.0f} s")
    train_bins = 0 if train_end_s is None else int(train_end_s // bin_s) - first + 1
    names = tuple(sorted(rows["series"].unique()))
    columns = _binned(layout, rows, bins - first, last - first + 1, names)
    _derive(layout, columns)
    capacity = columns.pop("capacity", None)
    ceiling = np.full(len(names), np.nan)
    if capacity is not None:  # the last that was known when the test began
        known = capacity[:, :train_bins] if train_bins else capacity
        ceiling = np.array([row[np.isfinite(row)][-1] if np.isfinite(row).any() else np.nan for row in known])
    sets = []
    for target in TARGETS[layout.name]:
        if target in columns:
            others = {key: values for key, values in columns.items() if key != target}
            bound = ceiling if target == "running" else np.full(len(names), np.nan)
            panel = Panel(target, names, bin_s, first * bin_s * 1000, columns[target], bound, others)
            sets.append(DemandSet(name, panel, min(train_bins, panel.bins)))
    return sets


def _binned(
    layout: Layout, rows: pd.DataFrame, bins: NDArray[np.int64], size: int, names: tuple[str, ...]
) -> dict[str, Array]:
    """Name -> (series, bin): levels as of the last row of a bin, sums over its rows; clients added up."""
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


def _derive(layout: Layout, columns: dict[str, Array]) -> None:
    """Add what follows from the columns: queue and running of flows, and what is wanted. Zeros of nodes are unknown."""
    if layout.name == "nodes":
        columns["active_nodes"][columns["active_nodes"] == 0] = np.nan
        return
    if layout.name == "flows":
        if "running" not in columns:
            columns["running"] = _level(columns["started"] - columns["ended"])
        columns["queued"] = _level(columns["arriving"] - columns["started"])
    if "queued" in columns:
        columns["wanted"] = columns["running"] + columns["queued"]


def _level(changes: Array) -> Array:
    """(series, bin) the level that changes add up to. What there was at first is not told: the lowest so far is 0."""
    level = np.nancumsum(changes, axis=1)
    level -= np.minimum(np.minimum.accumulate(level, axis=1), 0.0)
    return np.where(np.isfinite(changes), level, np.nan)
