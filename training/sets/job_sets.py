"""Job histories of a data folder, as one columnar table.

The columns of a table decide its layout:

| layout | from | columns that identify it |
|---|---|---|
| SWF | Parallel Workloads Archive, `fleetcast data import swf` | submit_s, run_s, procs_alloc |
| Helios, sacct | `fleetcast data import helios` or `slurm` | submit_time, service_sec, gpu_count |
| Philly | msr-fiddle/philly-traces | timestamp, duration, num_gpus |
| plain | any CSV; user, queue and limit_s may be empty | job, submit_s, run_s, gpus |
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.training.sets.data_folders import (
    convert_to_seconds,
    convert_to_text,
    is_table,
    list_set_names,
    read_table,
)

Array = NDArray[np.float64]
Names = NDArray[np.object_]

SHORTEST_S = 1.0
DAY_S = 86_400
ALONE_DAYS = 7  # of its own history (half of a short one) before a set without a train part is judged
ALONE_ROWS = 50_000  # newest jobs of each other set that it stands on
ENDED_WELL = frozenset({"COMPLETED", "1"})  # Slurm's word, and SWF's status
UNKNOWN_STATES = frozenset({"", "-1", "None", "nan", "NaN"})
SWF, TIMED, PHILLY = ("submit_s", "run_s"), ("submit_time", "service_sec"), ("timestamp", "duration")
PLAIN = ("job", "submit_s", "run_s", "gpus")


@dataclass(frozen=True, slots=True)
class HistoryJobs:
    """A table of jobs with one row for each job, in order of submission.

    An unknown string is "" and an unknown number is NaN. submit_s: on the set's own clock (Unix time if
    it has dates). start_s: NaN if the source has no waits, inf if the job had not started yet. run_s:
    at least SHORTEST_S, NaN if the job had not ended yet. gpus: processors on a CPU cluster. failed: 1
    failed or cancelled, 0 ended well, NaN unknown.
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

    def select_rows(self, rows: NDArray[Any]) -> "HistoryJobs":
        """Return the rows that `rows` selects (indices or a mask), in that order."""
        return HistoryJobs(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})

    @property
    def begin_s(self) -> Array:
        """(job,) start times in seconds, or the submission times if the source has no waits."""
        return np.where(np.isnan(self.start_s), self.submit_s, self.start_s)

    @property
    def end_s(self) -> Array:
        """(job,) end times in seconds. NaN if the run time is unknown."""
        return np.asarray(self.begin_s + self.run_s)

    def select_known_at(self, now_s: float) -> "HistoryJobs":
        """Return the jobs submitted by `now_s`, with the facts that were known at that time.

        If a job started later, its start is inf. If it ended later, its run time is NaN.
        """
        table = self.select_rows(self.submit_s <= now_s)
        ends, begins = table.end_s, table.begin_s
        start_s = np.where(begins <= now_s, table.start_s, np.inf)
        run_s = np.where(ends <= now_s, table.run_s, np.nan)
        failed = np.where(np.isfinite(run_s), table.failed, np.nan)
        return replace(table, start_s=start_s, run_s=run_s, failed=failed)


@dataclass(frozen=True, slots=True)
class JobHistory:
    """The history of one job set from the train and test folders.

    The jobs that the test folder submits after `train_end_s` are judged. in_test: (job,) whether the
    job is in the test folder, which may also hold earlier jobs of an unseen user or cluster. alone:
    whether the train folder has no jobs of this set. In that case, the other sets are the training data, and
    the set's own first jobs are the history.
    """

    dataset: str
    table: HistoryJobs
    in_test: NDArray[np.bool_]
    train_end_s: float
    skipped: Counter[str] = field(default_factory=Counter)
    alone: bool = False

    @property
    def train_jobs(self) -> HistoryJobs:
        """The jobs of the train folder as known at `train_end_s`: later starts and ends are left out."""
        return self.table.select_rows(~self.in_test).select_known_at(self.train_end_s)

    @property
    def is_judged(self) -> NDArray[np.bool_]:
        """(job,) whether the job was submitted in the test folder after the end of the train folder."""
        return self.in_test & (self.table.submit_s > self.train_end_s)

    @property
    def own_history(self) -> "JobHistory":
        """The history with only the jobs of this set.

        If the set is `alone`, its own jobs before the judged ones become the train part.
        """
        if not self.alone:
            return self
        table = self.table.select_rows(self.in_test)
        return JobHistory(self.dataset, table, table.submit_s > self.train_end_s, self.train_end_s, self.skipped)


def read_job_sets(train: Path, test: Path, skipped: list[str] | None = None) -> list[JobHistory]:
    """Read the job histories below jobs/ of the test folder.

    For each set that cannot be judged, the reason is added to `skipped`.
    """
    lines = skipped if skipped is not None else []
    there = {folder: [name for name in list_set_names(folder) if name.startswith("jobs/")] for folder in (train, test)}
    known = {name: read_jobs(train / name) for name in there[train]}
    found = []
    for name in sorted({*there[train], *there[test]}):
        if name not in there[test]:
            lines.append(f"{name}: not in the test folder")
            continue
        after = read_jobs(test / name)
        if name in known:
            read = _make_joined_history(name, known[name], after)
        else:
            read = _make_test_history(name, after, {other: table for other, (table, _) in known.items() if len(table)})
        if isinstance(read, str):
            lines.append(f"{name}: {read}")
        else:
            found.append(read)
    return found


def read_jobs(folder: Path) -> tuple[HistoryJobs, Counter[str]]:
    """Read the jobs of one set's folder, or of one file.

    Returns the jobs, and the number of left-out rows by reason.
    """
    parts, skipped = [], Counter[str]()
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
        if path.is_file() and is_table(path):
            try:
                table = read_table(path)
            except RecordError as error:
                skipped[str(error)] += 1
                continue
            layout = find_layout(table.columns)
            if layout is not None:
                parts.append(_select_good_rows(layout(table), skipped))
    table = _concat_tables(parts)
    rows = pd.DataFrame({name: getattr(table, name) for name in ("job", "submit_s", "start_s", "run_s", "gpus")})
    twice = rows.duplicated().to_numpy() & (table.job != "")
    if twice.any():
        skipped["reported twice"] += int(twice.sum())
    table = table.select_rows(~twice)
    return table.select_rows(np.argsort(table.submit_s, kind="stable")), skipped


def find_layout(columns: Sequence[str]) -> Callable[[pd.DataFrame], HistoryJobs] | None:
    """Return the reader of a layout, or None if no job history has such columns."""
    for needs, reader in (
        (PLAIN, _read_plain_jobs),
        (SWF, _read_swf_jobs),
        (TIMED, _read_jobs_with_start_times),
        (PHILLY, _read_philly_jobs),
    ):
        if set(needs) <= set(columns):
            return reader
    return None


def _make_test_history(
    name: str, read: tuple[HistoryJobs, Counter[str]], others: Mapping[str, HistoryJobs]
) -> JobHistory | str:
    """Return the history of a set that only the test folder has, on its own clock.

    Its train part is the newest jobs of those train sets that began before it ended. Returns the reason
    if the set cannot be judged.
    """
    own, skipped = read
    if not len(own):
        return _explain_no_jobs("test", skipped)
    first_s, last_s = float(own.submit_s[0]), float(own.submit_s[-1])
    older = [_prefix_newest_jobs(other, table) for other, table in others.items() if table.submit_s[0] < last_s]
    if not older:
        return "not in the train folder, and no set there is older than it"
    table = _concat_tables([*older, own])
    in_test = np.arange(len(table)) >= len(table) - len(own)
    order = np.argsort(table.submit_s, kind="stable")
    own_s = first_s + min(ALONE_DAYS * DAY_S, (last_s - first_s) / 2)
    begin_s = max([own_s, *(float(other.submit_s[-1]) for other in older)])
    found = JobHistory(name, table.select_rows(order), in_test[order], begin_s, skipped, alone=True)
    return found if found.is_judged.any() else "not in the train folder, and no job of it is later than that folder"


def _prefix_newest_jobs(name: str, table: HistoryJobs) -> HistoryJobs:
    """Return the newest jobs of a set, with the set's name as a prefix of all names.

    The prefix keeps users or groups of two sets with the same name apart.
    """
    newest = table.select_rows(np.arange(len(table))[-ALONE_ROWS:])
    for column in (newest.job, newest.user, newest.group, newest.name, newest.queue):
        known = column != ""
        column[known] = f"{name}/" + column[known]
    return newest


def _explain_no_jobs(folder: str, skipped: Counter[str]) -> str:
    reasons = ", ".join(f"{count:,} rows: {reason}" for reason, count in sorted(skipped.items()))
    return f"no usable job in the {folder} folder" + (f" ({reasons})" if reasons else "")


def _make_joined_history(
    name: str, train: tuple[HistoryJobs, Counter[str]], test: tuple[HistoryJobs, Counter[str]]
) -> JobHistory | str:
    (before, bad), (after, bad_too) = train, test
    if not len(before):
        return _explain_no_jobs("train", bad)
    seen = set(zip(before.job.tolist(), before.submit_s.tolist(), strict=True))
    rows = zip(after.job.tolist(), after.submit_s.tolist(), strict=True)
    again = np.array([bool(job) and (job, at) in seen for job, at in rows], np.bool_)
    skipped = bad + bad_too
    if again.any():
        skipped["in both folders"] += int(again.sum())
    after = after.select_rows(~again)
    table = _concat_tables([before, after])
    in_test = np.arange(len(table)) >= len(before)
    order = np.argsort(table.submit_s, kind="stable")
    found = JobHistory(name, table.select_rows(order), in_test[order], float(before.submit_s.max()), skipped)
    return found if found.is_judged.any() else "no job of the test folder is later than the train folder"


def _concat_tables(parts: Sequence[HistoryJobs]) -> HistoryJobs:
    columns = {}
    for column in fields(HistoryJobs):
        empty = np.empty(0, np.float64 if column.name in NUMBERS else object)
        columns[column.name] = np.concatenate([getattr(part, column.name) for part in parts] or [empty])
    return HistoryJobs(**columns)


NUMBERS = frozenset({"submit_s", "start_s", "run_s", "gpus", "cpus", "limit_s", "failed"})


def _select_good_rows(table: HistoryJobs, skipped: Counter[str]) -> HistoryJobs:
    """Return the rows with a submission, a run time and a size. The others are counted in `skipped`.

    Run times below SHORTEST_S are raised to it.
    """
    good = np.ones(len(table), np.bool_)
    checks = (
        ("no submission time", np.isfinite(table.submit_s)),
        ("no run time", np.isfinite(table.run_s) & (table.run_s >= 0)),
        ("no GPUs", np.isfinite(table.gpus) & (table.gpus > 0)),
    )
    for reason, holds in checks:
        bad = good & ~holds
        if bad.any():
            skipped[reason] += int(bad.sum())
        good &= holds
    good_rows = table.select_rows(good)
    good_rows.run_s[:] = np.maximum(good_rows.run_s, SHORTEST_S)
    good_rows.start_s[good_rows.start_s < good_rows.submit_s] = np.nan
    return good_rows


def _read_columns(table: pd.DataFrame, names: Mapping[str, str], **columns: Array) -> HistoryJobs:
    """Return a job table from the columns of a file.

    names: field → name of its column. columns: field → values. A field in neither of them is unknown.
    """
    rows = len(table)
    words_of = {
        name: _read_names(table, names.get(name, ""), rows) for name in ("job", "user", "group", "name", "queue")
    }
    numbers = {name: _read_numbers(table, names.get(name, ""), rows) for name in NUMBERS - {"failed"}}
    failed = _parse_failures(_read_names(table, names["failed"], rows))
    known: dict[str, Any] = {**words_of, **numbers, "failed": failed, **columns}
    return HistoryJobs(**known)


def _read_swf_jobs(table: pd.DataFrame) -> HistoryJobs:
    names = {"job": "job_id", "submit_s": "submit_s", "run_s": "run_s", "user": "user", "group": "group", "name": "exe"}
    names |= {"queue": "queue", "failed": "status"}
    wait, alloc, limit_s = (_read_numbers(table, name, len(table)) for name in ("wait_s", "procs_alloc", "time_req_s"))
    found = _read_columns(table, {**names, "gpus": "procs_req"}, limit_s=_mask_non_positive(limit_s))
    start_s = np.where(wait >= 0, found.submit_s + wait, np.nan)
    return replace(found, start_s=start_s, gpus=np.where(alloc > 0, alloc, found.gpus))


def _read_jobs_with_start_times(table: pd.DataFrame) -> HistoryJobs:
    rows = len(table)
    names = {"job": "job_id", "run_s": "service_sec", "gpus": "gpu_count", "user": "user", "group": "slurm_account"}
    names |= {"name": "slurm_jobname", "queue": "vc" if "vc" in table.columns else "slurm_partition", "failed": "state"}
    found = _read_columns(
        table,
        names,
        submit_s=_read_times(table, "submit_time", rows),
        start_s=_read_times(table, "start_time", rows),
        cpus=_mask_non_positive(_read_numbers(table, "cpu_num" if "cpu_num" in table.columns else "slurm_ncpus", rows)),
    )
    if "slurm_timelimit" not in table.columns:
        return found
    return replace(found, limit_s=np.asarray(table["slurm_timelimit"].map(parse_slurm_limit_s), np.float64))


def _read_philly_jobs(table: pd.DataFrame) -> HistoryJobs:
    names = {"job": "job_id", "run_s": "duration", "gpus": "num_gpus", "queue": "cluster", "failed": "state"}
    names |= {name: name for name in ("user", "group", "name")}
    return _read_columns(table, names, submit_s=_read_times(table, "timestamp", len(table)))


def _read_plain_jobs(table: pd.DataFrame) -> HistoryJobs:
    same = ("job", "submit_s", "run_s", "gpus", "user", "group", "name", "queue", "cpus")
    limit_s = _mask_non_positive(_read_numbers(table, "limit_s", len(table)))
    return _read_columns(table, {name: name for name in (*same, "failed")}, limit_s=limit_s)


def parse_slurm_limit_s(text: object) -> float:
    """Return the seconds of a Slurm time limit, NaN if there is no limit.

    The forms are `[days-]hours:minutes:seconds`, `minutes:seconds` and `minutes`.

    >>> parse_slurm_limit_s("1-02:00:00"), parse_slurm_limit_s("30:00"), parse_slurm_limit_s("UNLIMITED")
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


def _read_numbers(table: pd.DataFrame, name: str, rows: int) -> Array:
    if name not in table.columns:
        return np.full(rows, np.nan)
    return np.array(pd.to_numeric(table[name], errors="coerce"), np.float64)


def _mask_non_positive(values: Array) -> Array:
    return np.where(values > 0, values, np.nan)


def _read_names(table: pd.DataFrame, name: str, rows: int) -> Names:
    """Return a column as text, "" where it is unknown. SWF writes -1 for unknown."""
    if name not in table.columns:
        return np.full(rows, "", object)
    named = convert_to_text(table[name])
    named[named == "-1"] = ""
    return named


def _read_times(table: pd.DataFrame, name: str, rows: int) -> Array:
    return convert_to_seconds(table[name]) if name in table.columns else np.full(rows, np.nan)


def _parse_failures(states: Names) -> Array:
    ended = states.tolist()
    return np.array([np.nan if word in UNKNOWN_STATES else float(word not in ENDED_WELL) for word in ended], np.float64)
