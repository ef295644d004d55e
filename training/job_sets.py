"""Job histories of a data folder, recognised by their columns, as one columnar table.

| layout | from | columns that tell it |
|---|---|---|
| SWF | Parallel Workloads Archive, `fleetcast data import swf` | submit_s, run_s, procs_alloc |
| Helios, sacct | `fleetcast data import helios` or `slurm` | submit_time, service_sec, gpu_count |
| Philly | msr-fiddle/philly-traces | timestamp, duration, num_gpus |
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from training.data_folders import is_table, read_table, set_names

Array = NDArray[np.float64]
Names = NDArray[np.object_]

SHORTEST_S = 1.0
ENDED_WELL = frozenset({"COMPLETED", "1"})  # Slurm's word, and SWF's status
UNKNOWN_STATES = frozenset({"", "-1", "None", "nan", "NaN"})
SWF, TIMED, PHILLY = ("submit_s", "run_s"), ("submit_time", "service_sec"), ("timestamp", "duration")


@dataclass(frozen=True, slots=True)
class JobTable:
    """One row a job, in order of submission. Strings are "" and numbers NaN where the source does not say.

    submit_s: seconds on the set's own clock (Unix time where it has dates). start_s: NaN where the source knows no
    waits; inf for a job that had not started yet (only in a table that was cut, see `until`).
    run_s: at least SHORTEST_S; NaN where the end is not known (only in a table that was cut, see `until`).
    gpus: GPUs, or processors of a CPU cluster. failed: 1 failed or cancelled, 0 ended well, NaN unknown.
    """

    job: Names
    submit_s: Array
    start_s: Array
    run_s: Array
    gpus: Array
    user: Names
    group: Names
    name: Names
    queue: Names
    cpus: Array
    limit_s: Array
    failed: Array

    def __len__(self) -> int:
        return len(self.submit_s)

    def take(self, rows: NDArray[Any]) -> "JobTable":
        """Some of the rows (indices or a mask), in that order."""
        return JobTable(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    @property
    def begin_s(self) -> Array:
        """Starts; where the source knows no waits the submission, as if the job had not waited."""
        return np.where(np.isnan(self.start_s), self.submit_s, self.start_s)

    @property
    def end_s(self) -> Array:
        """Ends; NaN where the run time is unknown."""
        return np.asarray(self.begin_s + self.run_s)

    def until(self, now_s: float) -> "JobTable":
        """What was known at `now_s`: jobs submitted by then; a start or end after it is not known (NaN)."""
        table = self.take(self.submit_s <= now_s)
        ends, begins = table.end_s, table.begin_s
        start_s = np.where(begins <= now_s, table.start_s, np.inf)
        run_s = np.where(ends <= now_s, table.run_s, np.nan)
        failed = np.where(np.isfinite(run_s), table.failed, np.nan)
        columns = {column.name: getattr(table, column.name) for column in fields(table)}
        return JobTable(**{**columns, "start_s": start_s, "run_s": run_s, "failed": failed})


@dataclass(frozen=True, slots=True)
class JobSet:
    """A history of both folders. Rows with `in_test` come from the test folder, which may hold the past of an unseen
    user or cluster. `train_end_s`: the last submission of the train folder; what is judged comes after it."""

    dataset: str
    table: JobTable
    in_test: NDArray[np.bool_]
    train_end_s: float
    skipped: Counter[str] = field(default_factory=Counter)

    @property
    def train(self) -> JobTable:
        """What the train folder told at its end: later starts and ends are not known."""
        return self.table.take(~self.in_test).until(self.train_end_s)

    @property
    def judged(self) -> NDArray[np.bool_]:
        """(job,) submitted in the test folder after the end of the train folder."""
        return self.in_test & (self.table.submit_s > self.train_end_s)


def read_job_sets(train: Path, test: Path, skipped: list[str] | None = None) -> list[JobSet]:
    """The job histories that are in both folders below jobs/; the reason for each that is not goes to `skipped`."""
    lines = skipped if skipped is not None else []
    there = {folder: [name for name in set_names(folder) if name.startswith("jobs/")] for folder in (train, test)}
    found = []
    for name in sorted({*there[train], *there[test]}):
        missing = [word for word, folder in (("train", train), ("test", test)) if name not in there[folder]]
        if missing:
            lines.append(f"{name}: not in the {missing[0]} folder")
            continue
        read = _read_both(name, train / name, test / name)
        if isinstance(read, str):
            lines.append(f"{name}: {read}")
        else:
            found.append(read)
    return found


def read_jobs(folder: Path) -> tuple[JobTable, Counter[str]]:
    """The jobs of one set's folder, and how many rows were left out by reason."""
    parts, skipped = [], Counter[str]()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and is_table(path):
            table = read_table(path)
            layout = layout_of(table.columns)
            if layout is not None:
                parts.append(_checked(layout(table), skipped))
    table = _joined(parts)
    return table.take(np.argsort(table.submit_s, kind="stable")), skipped


def layout_of(columns: Sequence[str]) -> Callable[[pd.DataFrame], JobTable] | None:
    """The reader of a layout; None where the columns are of no job history."""
    for needs, reader in ((SWF, _swf), (TIMED, _timed), (PHILLY, _philly)):
        if set(needs) <= set(columns):
            return reader
    return None


def _read_both(name: str, train: Path, test: Path) -> JobSet | str:
    (before, bad), (after, bad_too) = read_jobs(train), read_jobs(test)
    if not len(before):
        return "no usable job in the train folder"
    seen = set(zip(before.job.tolist(), before.submit_s.tolist(), strict=True))
    rows = zip(after.job.tolist(), after.submit_s.tolist(), strict=True)
    again = np.array([bool(job) and (job, at) in seen for job, at in rows], np.bool_)
    skipped = bad + bad_too
    if again.any():
        skipped["in both folders"] += int(again.sum())
    after = after.take(~again)
    table = _joined([before, after])
    in_test = np.arange(len(table)) >= len(before)
    order = np.argsort(table.submit_s, kind="stable")
    found = JobSet(name, table.take(order), in_test[order], float(before.submit_s.max()), skipped)
    return found if found.judged.any() else "no job of the test folder is later than the train folder"


def _joined(parts: Sequence[JobTable]) -> JobTable:
    columns = {}
    for column in fields(JobTable):
        empty = np.empty(0, np.float64 if column.name in NUMBERS else object)
        columns[column.name] = np.concatenate([getattr(part, column.name) for part in parts] or [empty])
    return JobTable(**columns)


NUMBERS = frozenset({"submit_s", "start_s", "run_s", "gpus", "cpus", "limit_s", "failed"})


def _checked(table: JobTable, skipped: Counter[str]) -> JobTable:
    """Rows with a submission, a run time and a size; run times below SHORTEST_S are raised to it."""
    good = np.ones(len(table), np.bool_)
    checks = (
        ("no submission time", np.isfinite(table.submit_s)),
        ("no run time", table.run_s >= 0),
        ("no GPUs", table.gpus > 0),
    )
    for reason, holds in checks:
        bad = good & ~holds
        if bad.any():
            skipped[reason] += int(bad.sum())
        good &= holds
    kept = table.take(good)
    kept.run_s[:] = np.maximum(kept.run_s, SHORTEST_S)
    kept.start_s[kept.start_s < kept.submit_s] = np.nan
    return kept


def _swf(table: pd.DataFrame) -> JobTable:
    rows = len(table)
    alloc, asked = (_numbers(table, name, rows) for name in ("procs_alloc", "procs_req"))
    submit, wait = _numbers(table, "submit_s", rows), _numbers(table, "wait_s", rows)
    return JobTable(
        job=_names(table, "job_id", rows),
        submit_s=submit,
        start_s=np.where(wait >= 0, submit + wait, np.nan),
        run_s=_numbers(table, "run_s", rows),
        gpus=np.where(alloc > 0, alloc, asked),
        user=_names(table, "user", rows),
        group=_names(table, "group", rows),
        name=_names(table, "exe", rows),
        queue=_names(table, "queue", rows),
        cpus=np.full(rows, np.nan),
        limit_s=_positive(_numbers(table, "time_req_s", rows)),
        failed=_failed(_names(table, "status", rows)),
    )


def _timed(table: pd.DataFrame) -> JobTable:
    rows = len(table)
    limits = table["slurm_timelimit"].map(slurm_limit_s) if "slurm_timelimit" in table.columns else None
    return JobTable(
        job=_names(table, "job_id", rows),
        submit_s=_times(table, "submit_time", rows),
        start_s=_times(table, "start_time", rows),
        run_s=_numbers(table, "service_sec", rows),
        gpus=_numbers(table, "gpu_count", rows),
        user=_names(table, "user", rows),
        group=_names(table, "slurm_account", rows),
        name=_names(table, "slurm_jobname", rows),
        queue=_names(table, "vc" if "vc" in table.columns else "slurm_partition", rows),
        cpus=_positive(_numbers(table, "cpu_num" if "cpu_num" in table.columns else "slurm_ncpus", rows)),
        limit_s=np.full(rows, np.nan) if limits is None else np.asarray(limits, np.float64),
        failed=_failed(_names(table, "state", rows)),
    )


def _philly(table: pd.DataFrame) -> JobTable:
    rows, none = len(table), np.full(len(table), np.nan)
    return JobTable(
        job=_names(table, "job_id", rows),
        submit_s=_times(table, "timestamp", rows),
        start_s=none.copy(),
        run_s=_numbers(table, "duration", rows),
        gpus=_numbers(table, "num_gpus", rows),
        user=_names(table, "user", rows),
        group=_names(table, "group", rows),
        name=_names(table, "name", rows),
        queue=_names(table, "cluster", rows),
        cpus=none.copy(),
        limit_s=none.copy(),
        failed=_failed(_names(table, "state", rows)),
    )


def slurm_limit_s(text: object) -> float:
    """Seconds of `[days-]hours:minutes:seconds`, `minutes:seconds` or `minutes`; NaN where there is no limit.

    >>> slurm_limit_s("1-02:00:00"), slurm_limit_s("30:00"), slurm_limit_s("UNLIMITED")
    (93600.0, 1800.0, nan)
    """
    days, dash, clock = str(text).rpartition("-")
    parts = clock.split(":")
    try:
        numbers = [float(part) for part in parts]
        whole = float(days or 0) * 86_400
    except ValueError:
        return float("nan")
    first = 0 if dash or len(numbers) > 2 else 1  # the first part is hours (after days always), else minutes
    return whole + sum(number * scale for number, scale in zip(numbers, (3600.0, 60.0, 1.0)[first:], strict=False))


def _numbers(table: pd.DataFrame, name: str, rows: int) -> Array:
    if name not in table.columns:
        return np.full(rows, np.nan)
    return np.array(pd.to_numeric(table[name], errors="coerce"), np.float64)


def _positive(values: Array) -> Array:
    return np.where(values > 0, values, np.nan)


def _names(table: pd.DataFrame, name: str, rows: int) -> Names:
    """Words; "" where unknown (-1 is SWF's unknown)."""
    if name not in table.columns:
        return np.full(rows, "", object)
    words = table[name].astype(str).to_numpy(object)
    words[np.asarray(table[name].isna()) | (words == "-1")] = ""
    return np.asarray(words, object)


def _times(table: pd.DataFrame, name: str, rows: int) -> Array:
    """Unix seconds; a time without a zone is read as UTC. NaN where unreadable."""
    if name not in table.columns:
        return np.full(rows, np.nan)
    times = pd.to_datetime(table[name], utc=True, errors="coerce")
    seconds = (times - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
    return np.array(seconds, np.float64)


def _failed(states: Names) -> Array:
    words = states.tolist()
    return np.array([np.nan if word in UNKNOWN_STATES else float(word not in ENDED_WELL) for word in words], np.float64)
