"""Train and test folders of one data set, with the layout and columns of the original.

Rows before a time T go to `train`, later ones to `test`. The rows that a hold-out names (a cluster,
user or model) go to `test` alone, together with their past. The history at an origin is then both
folders up to it. A row is split by when it began. So a fit on `train` may use only what had ended
by T. Files without a time column go whole to both folders.
"""

import shutil
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.errors import ConfigError, RecordError
from fleetcast.training.sets.public_sets import TIME_COLUMNS, find_public_set

Array = NDArray[np.float64]
Names = NDArray[np.object_]
HoldOut = Sequence[tuple[str, str]]  # (column, value) pairs
TABLES = (".parquet", ".csv", ".csv.gz")
EPOCH = pd.Timestamp(0, tz="UTC")
UNITS = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3))  # a time as large as this is in so many parts of a second


@dataclass(frozen=True, slots=True)
class FileSplit:
    """The number of rows of one file that went to each folder. Both numbers are None if the file was copied whole."""

    file: str
    train: int | None
    test: int | None


@dataclass(frozen=True, slots=True)
class FileSpan:
    """The number of rows of a file, and its first and last time as text ("" without a time column)."""

    rows: int
    first: str = ""
    last: str = ""


def is_table(path: Path) -> bool:
    return path.name.endswith(TABLES)


def list_set_names(data: Path) -> tuple[str, ...]:
    """Return the names of the sets below a data folder.

    A set is a folder that holds files, at most two levels deep.
    """
    folders = [path for depth in ("*", "*/*") for path in sorted(data.glob(depth)) if path.is_dir()]
    return tuple(sorted(path.relative_to(data).as_posix() for path in folders if _holds_set(path, data)))


def _holds_set(path: Path, data: Path) -> bool:
    if any(child.is_file() for child in path.iterdir()):
        return True
    return path.parent != data and any(path.iterdir())


def find_set(data: Path, name: str) -> Path:
    """Return the folder of a set by its name (`jobs/venus`) or by the last part of its name (`ricc`).

    Raises ConfigError if there is no such set, or if several sets have this last part.
    """
    names = list_set_names(data)
    matches = [row for row in names if name in (row, row.rsplit("/", 1)[-1])]
    exact = [row for row in matches if row == name]
    if len(exact or matches) == 1:
        return data / (exact or matches)[0]
    if matches:
        raise ConfigError(f"{name!r} is one of {', '.join(matches)}: name it in full")
    raise ConfigError(f"no data set {name!r} in {data}; there are: {', '.join(names) or 'none'}")


def split_set(data: Path, name: str, at: str | None, hold_out: HoldOut, out: Path) -> list[FileSplit]:
    """Split a set into `out/train/NAME` and `out/test/NAME`. Refuses to write into folders that exist.

    at: an ISO time, a number (`submit_s`, days), or None to split by hold-out alone. Raises ConfigError
    for a bad time, column or value.
    """
    source = find_set(data, name)
    name = source.relative_to(data).as_posix()
    folders = out / "train" / name, out / "test" / name
    for folder in folders:
        if folder.exists():
            raise ConfigError(f"{folder} exists: choose another --out or remove it")
    files = sorted(path for path in source.rglob("*") if path.is_file())
    tables = {path: read_table(path) for path in files if is_table(path)}
    _check_hold_out(tables, hold_out)
    if at is not None and all(find_time_column(name, table) is None for table in tables.values()):
        raise ConfigError(f"{name} has no time column: leave out --at and use --hold-out")
    if at is None and not hold_out:
        raise ConfigError("nothing to split by: give --at T, --hold-out KEY=VALUE or both")
    masks = {
        path: _find_test_rows(table, find_time_column(name, table), at, hold_out) for path, table in tables.items()
    }
    targets = {path: [folder / path.relative_to(source) for folder in folders] for path in files}
    return [_write_split(path, tables.get(path), masks.get(path), targets[path]) for path in files]


def _find_test_rows(
    table: pd.DataFrame, column: str | None, at: str | None, hold_out: HoldOut
) -> "pd.Series[bool] | None":
    """Return (row,) whether each row is a test row.

    Returns None if neither the time nor the hold-out applies to this table.
    """
    held = _find_held_out_rows(table, hold_out)
    later = None if at is None or column is None else _find_later_rows(table[column], at)
    if held is None or later is None:
        return later if held is None else held
    return held | later


def _write_split(
    path: Path, table: pd.DataFrame | None, in_test: "pd.Series[bool] | None", to: list[Path]
) -> FileSplit:
    for target in to:
        target.parent.mkdir(parents=True, exist_ok=True)
    if table is None or in_test is None:
        for target in to:
            shutil.copyfile(path, target)
        return FileSplit(path.name, None, None)
    write_table(table[~in_test], to[0])
    write_table(table[in_test], to[1])
    return FileSplit(path.name, int((~in_test).sum()), int(in_test.sum()))


def find_time_column(name: str, table: pd.DataFrame) -> str | None:
    """Return the name of the time column by which this set is split, or None if it has none.

    An unknown set is split by the first column whose name is one for times.
    """
    known = find_public_set(name)
    if known:
        return known.time if known.time in table.columns else None
    return next((column for column in TIME_COLUMNS if column in table.columns), None)


def _find_later_rows(times: "pd.Series[Any]", at: str) -> "pd.Series[bool]":
    if pd.api.types.is_numeric_dtype(times):
        try:
            return times >= float(at)
        except ValueError:
            span = f"{times.min():g} to {times.max():g}"
            raise ConfigError(f"--at {at}: column {times.name!r} is a number from {span}, so T is one, too") from None
    try:
        moment = pd.Timestamp(at)
    except ValueError:
        raise ConfigError(f"--at {at}: expected a time like 2020-07-01T00:00") from None
    moment = moment.tz_localize("UTC") if moment.tzinfo is None else moment
    return pd.Series(convert_to_seconds(times) >= moment.timestamp(), index=times.index)


def _find_held_out_rows(table: pd.DataFrame, hold_out: HoldOut) -> "pd.Series[bool] | None":
    masks = [table[key].astype(str) == value for key, value in hold_out if key in table.columns]
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask |= other
    return mask


def _check_hold_out(tables: Mapping[Path, pd.DataFrame], hold_out: HoldOut) -> None:
    for key, value in hold_out:
        columns = [table[key].astype(str) for table in tables.values() if key in table.columns]
        if not columns:
            there = sorted({column for table in tables.values() for column in table.columns})
            raise ConfigError(f"--hold-out {key}=…: no column {key!r}; there are: {', '.join(there)}")
        if not any((column == value).any() for column in columns):
            some = sorted({item for column in columns for item in column.unique()})[:20]
            raise ConfigError(f"--hold-out {key}={value}: no row has it; values are: {', '.join(some)}")


def read_table(path: Path) -> pd.DataFrame:
    """Read the rows of a Parquet or CSV file. Raises RecordError if the file is neither."""
    try:
        return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, low_memory=False)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        said = str(error).strip().splitlines()
        raise RecordError("no table", f"{path}: {said[0] if said else type(error).__name__}") from None


def convert_to_seconds(times: "pd.Series[Any]") -> Array:
    """Convert dates or numbers into Unix seconds. Values that cannot be read become NaN.

    Dates without a zone are in UTC. The size of the numbers decides whether they are in s, ms, µs or ns.

    >>> convert_to_seconds(pd.Series(["1970-01-01 00:01", "1970-01-01T01:00:00+01:00", "soon"])).tolist()
    [60.0, 0.0, nan]
    >>> convert_to_seconds(pd.Series([1.6e12])).tolist()
    [1600000000.0]
    """
    dated = times.dtype.kind == "M"
    if not dated:
        numbers = np.asarray(pd.to_numeric(times, errors="coerce"), np.float64)
        known = np.isfinite(numbers)
        if known.sum() > len(known) / 2 or pd.api.types.is_numeric_dtype(times):
            usual = float(np.median(np.abs(numbers[known]))) if known.any() else 0.0
            return np.where(known, numbers, np.nan) / next((unit for least, unit in UNITS if usual >= least), 1.0)
    moments = pd.to_datetime(times, errors="coerce", utc=True, format=None if dated else "mixed")
    return np.asarray((moments - EPOCH) / pd.Timedelta(1, "s"), np.float64)


def convert_to_text(column: "pd.Series[Any]") -> Names:
    """Convert names into text, "" where a name is missing.

    Gaps turn a column of whole numbers into floats. Such a number loses its fraction: 1.0 becomes "1".

    >>> convert_to_text(pd.Series([1.0, None])).tolist()
    ['1', '']
    """
    if column.dtype.kind == "f":
        whole = column.dropna() % 1 == 0
        column = column.astype("Int64") if whole.all() else column
    return np.asarray(np.where(column.isna(), "", column.astype(str)), object)


def write_table(table: pd.DataFrame, path: Path) -> None:
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False)


def measure_file_span(name: str, path: Path) -> FileSpan:
    """Return the number of rows and the time span of one table."""
    table = read_table(path)
    column = find_time_column(name, table)
    if column is None or table.empty:
        return FileSpan(len(table))
    return FileSpan(len(table), _format_value(table[column].min()), _format_value(table[column].max()))


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value[:19]
    if not isinstance(value, pd.Timestamp) and 1e9 < value < 4e9:  # Unix seconds of this age
        value = pd.Timestamp(value, unit="s")
    return f"{value:%Y-%m-%d}" if isinstance(value, pd.Timestamp) else f"{value:,.6g}"
