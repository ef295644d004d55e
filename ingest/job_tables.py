"""Readers of published job tables (Helios CSV, SWF, `sacct -P`) into the columns that training uses.

Unreadable rows are skipped, and counted by reason. Columns that training does not use are stored as well.
"""

import csv
import gzip
import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fleetcast.fleet.errors import ConfigError, RecordError

# fmt: off
SWF_COLUMNS = (
    "job_id", "submit_s", "wait_s", "run_s", "procs_alloc", "cpu_time_avg", "mem_used_kb", "procs_req", "time_req_s",
    "mem_req_kb", "status", "user", "group", "exe", "queue", "partition", "prev_job", "think_s",
)
# fmt: on
_HELIOS_NEEDS = ("job_id", "gpu_num", "submit_time", "duration")
_UNKNOWN_TIMES = frozenset({"", "None", "NONE", "Unknown", "N/A"})
WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_HOLD", "CONFIGURING"})  # states of jobs that will start


@dataclass(slots=True)
class JobColumns:
    """The columns of a job table, all of equal length.

    `skipped`: the number of skipped lines by reason. `header`: the comment lines of the file.
    """

    columns: dict[str, list[Any]] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)
    header: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def add(self, row: dict[str, Any]) -> None:
        """Append a row. It must have the same keys as every other row."""
        for name, value in row.items():
            self.columns.setdefault(name, []).append(value)


def read_job_table(kind: str, path: Path) -> JobColumns:
    """Read the jobs of a `helios`, `swf` or `slurm` file. A `.gz` file is unpacked.

    Raises ConfigError if the file is missing or has another layout.
    """
    reader: dict[str, Callable[[Path], JobColumns]] = {"helios": read_helios, "swf": read_swf, "slurm": read_slurm}
    if kind not in reader:
        raise ConfigError(f"import kind {kind!r}: expected one of {', '.join(reader)}")
    if not path.exists():
        raise ConfigError(f"no such file: {path}")
    return reader[kind](path)


def read_helios(path: Path) -> JobColumns:
    """Read the `cluster_log.csv` of a Helios log. path: this file, or the folder that holds it.

    CPU jobs (gpu_num 0) are skipped as `no GPUs`.
    """
    history = JobColumns()
    lines = _read_lines(_find_table_file(path, "cluster_log.csv"), history.skipped)
    names = _parse_header(next(lines, ""), _HELIOS_NEEDS, ",", "cluster_log.csv")
    for line in lines:
        _add_line(history, line, names, ",", _parse_helios_row)
    return _add_arrival_times(history)


def read_gpu_numbers(path: Path) -> JobColumns:
    """Read the GPU counts of virtual clusters from the `cluster_gpu_number.csv` of a Helios log.

    Each row holds date, vc and gpus. Returns no rows if the file does not exist.
    """
    history = JobColumns()
    file = path / "cluster_gpu_number.csv" if path.is_dir() else path.with_name("cluster_gpu_number.csv")
    if not file.exists():
        return history
    lines = _read_lines(file, history.skipped)
    names = _parse_header(next(lines, ""), ("date",), ",", file.name)
    for line in lines:
        try:
            row = _parse_fields(line, names, ",")
            date = datetime.fromisoformat(row.pop("date").strip())
            counts = {name: _parse_number(name, value) for name, value in row.items()}
        except (RecordError, ValueError) as error:
            history.skipped[error.reason if isinstance(error, RecordError) else "date"] += 1
            continue
        for name, gpus in counts.items():
            history.add({"date": date, "vc": name, "gpus": int(gpus)})
    return history


def read_swf(path: Path) -> JobColumns:
    """Read a file in Standard Workload Format: header lines, and lines of 18 numbers.

    Header lines begin with a semicolon. Unknown values stay -1.
    """
    history = JobColumns()
    for line in _read_lines(path, history.skipped):
        text = line.strip()
        if not text or text.startswith(";"):
            history.header += [text] if text else []
            continue
        fields = text.split()
        try:
            if len(fields) != len(SWF_COLUMNS):
                raise RecordError("field count", f"{len(fields)} instead of {len(SWF_COLUMNS)}")
            history.add({name: _parse_number(name, value) for name, value in zip(SWF_COLUMNS, fields, strict=True)})
        except RecordError as error:
            history.skipped[error.reason] += 1
    for name, values in history.columns.items():
        if all(value.is_integer() for value in values):
            history.columns[name] = [int(value) for value in values]
    return history


def read_slurm(path: Path) -> JobColumns:
    """Read the output of `sacct -P` with a header line. Job steps and jobs without a GPU are skipped.

    Running jobs have no end. Jobs that wait, or were cancelled before they started, have no start. None of
    these jobs has a run time.
    """
    history, seen = JobColumns(), Counter[str]()
    lines = _read_lines(path, history.skipped)
    first = next(lines, "")
    delimiter = "|#" if "|#" in first else "|"  # `--delimiter='|#'` survives job names with a bar
    names = _parse_header(first, ("JobID", "State", "Start", "End"), delimiter, "sacct -P")
    starts: set[tuple[str, datetime | None]] = set()

    def make_unique_row(row: dict[str, str]) -> dict[str, Any]:
        made = _parse_slurm_row(row)
        identity = (made["job_id"], made["start_time"])
        if identity in starts:
            raise RecordError("duplicate")
        starts.add(identity)
        seen[made["job_id"]] += 1
        if seen[made["job_id"]] > 1:  # a requeued job: one row a run
            made["job_id"] = f"{made['job_id']}#{seen[made['job_id']] - 1}"
        return made

    for line in lines:
        _add_line(history, line, names, delimiter, make_unique_row)
    return _add_arrival_times(history)


def _add_line(
    history: JobColumns, line: str, names: list[str], delimiter: str, row_of: Callable[[dict[str, str]], dict[str, Any]]
) -> None:
    if not line.strip():
        return
    try:
        history.add(row_of(_parse_fields(line, names, delimiter)))
    except RecordError as error:
        history.skipped[error.reason] += 1


def _parse_helios_row(row: dict[str, str]) -> dict[str, Any]:
    gpus = int(_parse_number("gpu_num", row.pop("gpu_num")))
    if gpus <= 0:
        raise RecordError("no GPUs")
    submit = _parse_time("submit_time", row.pop("submit_time"))
    made: dict[str, Any] = {
        "job_id": row.pop("job_id"),
        "submit_time": submit,
        "service_sec": _parse_number("duration", row.pop("duration")),
        "gpu_count": gpus,
    }
    if made["service_sec"] < 0:
        raise RecordError("duration")
    for name, value in row.items():
        if name in ("start_time", "end_time"):
            made[name] = None if value.strip() in _UNKNOWN_TIMES else _parse_time(name, value)
        elif name in ("cpu_num", "node_num", "queue"):
            made["queue_s" if name == "queue" else name] = _parse_number(name, value)
        else:
            made[name] = value
    return made


def _parse_slurm_row(row: dict[str, str]) -> dict[str, Any]:
    job_id = row.get("JobIDRaw") or row["JobID"]
    if "." in job_id or "." in row["JobID"]:
        raise RecordError("job step")
    start, end = (None if row[name] in _UNKNOWN_TIMES else _parse_time(name, row[name]) for name in ("Start", "End"))
    if start and end and end < start:
        raise RecordError("ends before start")
    gpus = _count_slurm_gpus(row)
    if gpus <= 0:
        raise RecordError("no GPUs")
    asked = next((row[key] for key in ("Submit", "Eligible", "Start") if row.get(key, "") not in _UNKNOWN_TIMES), "")
    if start is None and not (end or (row["State"].split() or [""])[0] in WAITING):
        raise RecordError("neither start nor end")
    ours = {"JobID", "JobIDRaw", "Submit", "Start", "End", "State", "User", "NNodes"}
    return {
        "job_id": job_id,
        "submit_time": _parse_time("Submit", asked),
        "service_sec": (end - start).total_seconds() if start and end else None,
        "gpu_count": gpus,
        "user": row.get("User", ""),
        "state": (row["State"].split() or [""])[0],
        "start_time": start,
        "end_time": end,
        "nodes": row.get("NNodes", ""),
    } | {f"slurm_{name.lower()}": value for name, value in row.items() if name not in ours}


def _count_slurm_gpus(row: dict[str, str]) -> int:
    """Return the number of GPUs of a job, or 0 if the row states none.

    AllocTRES and ReqTRES (`gres/gpu=8`) state the GPUs of the whole job. Without them, AllocGRES (`gpu:8`) is used,
    which states the GPUs of each node.
    """
    for key in ("AllocTRES", "ReqTRES"):
        parts = dict(part.split("=", 1) for part in row.get(key, "").split(",") if "=" in part)
        if "gres/gpu" in parts:
            return int(_parse_number(key, parts["gres/gpu"]))
        typed = [value for name, value in parts.items() if name.startswith("gres/gpu:")]
        if typed:
            return sum(int(_parse_number(key, value)) for value in typed)
    for part in row.get("AllocGRES", "").split(","):
        words = part.removeprefix("PER_NODE:").split(":")
        if words[0] == "gpu":
            nodes = row.get("NNodes") or row.get("AllocNodes") or "1"
            return int(_parse_number("AllocGRES", words[-1]) * _parse_number("NNodes", nodes))
    return 0


def _add_arrival_times(history: JobColumns) -> JobColumns:
    """Add the column arrival_s: seconds since the first submission."""
    times = history.columns.get("submit_time", [])
    if times:
        first = min(times)
        history.columns["arrival_s"] = [(time - first).total_seconds() for time in times]
    return history


def _read_lines(path: Path, skipped: Counter[str]) -> Iterator[str]:
    """Yield the lines of a file, unpacked if it is a `.gz` file, without their line ends.

    Bytes that are not UTF-8 become replacement characters. A truncated gzip file ends early.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8", errors="replace", newline="\n") as file:
        try:
            for line in file:
                yield str(line).rstrip("\r\n")
        except (EOFError, gzip.BadGzipFile, zlib.error):
            skipped["broken gzip"] += 1


def _find_table_file(path: Path, name: str) -> Path:
    if not path.is_dir():
        return path
    for candidate in (path / name, path / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise ConfigError(f"{path} holds no {name}")


def _parse_header(line: str, needs: tuple[str, ...], delimiter: str, what: str) -> list[str]:
    try:
        names = _split_line(line, delimiter)
    except RecordError as error:
        raise ConfigError(f"not a {what} file: its header is {error.reason}") from None
    missing = [name for name in needs if name not in names]
    if missing:
        raise ConfigError(f"not a {what} file: its header has no column {', '.join(missing)}")
    return names


def _split_line(line: str, delimiter: str) -> list[str]:
    if delimiter != ",":
        return line.split(delimiter)
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        raise RecordError("unreadable") from None


def _parse_fields(line: str, names: list[str], delimiter: str) -> dict[str, str]:
    values = _split_line(line, delimiter)
    if len(values) != len(names):
        raise RecordError("field count", f"{len(values)} instead of {len(names)}")
    return dict(zip(names, values, strict=True))


def _parse_number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise RecordError(name, text) from None
    if not math.isfinite(value):
        raise RecordError(name, text)
    return value


def _parse_time(name: str, text: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip()).replace(tzinfo=None)
    except ValueError:
        raise RecordError(name, text) from None
