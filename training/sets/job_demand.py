"""Job histories as demand: the GPUs that arrived, waited and ran in each bin.

    submit ──── queued ──── start ──── running ──── end          the level of a bin is that at its end

A demand series begins with the first end of a job. The file lacks jobs that had ended before that time
(`sacct -S` prints only jobs that waited or ran since then). A series ends with the last
submission. A job that never started counts as waiting until it was cancelled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fleetcast.fleet.errors import RecordError
from fleetcast.ingest.job_tables import WAITING
from fleetcast.training.sets.data_folders import convert_to_seconds, convert_to_text, is_table, read_table
from fleetcast.training.sets.job_sets import HistoryJobs, find_layout

Array = NDArray[np.float64]
Say = Callable[[str], None]

MOST_PARTS = 12  # partitions that are series of their own: the largest
LEAST_PART = 0.01  # of the GPUs that were asked for
MOST_KNOWN = 0.5  # of the starts, at the least
ALL = "all"
COLUMNS = ("arriving_jobs", "arriving", "started_jobs", "started", "ended_jobs", "ended", "running", "queued")


@dataclass(frozen=True, slots=True)
class JobTimes:
    """The times of jobs in seconds, (job,) each.

    start_s: inf if the job has not started. leave_s: when the job left the queue, because it started or was
    cancelled. end_s: inf while it still runs.
    """

    job: NDArray[np.object_]
    submit_s: Array
    start_s: Array
    leave_s: Array
    end_s: Array
    gpus: Array
    part: NDArray[np.object_]

    def select_rows(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "JobTimes":
        return JobTimes(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    def __len__(self) -> int:
        return len(self.submit_s)


@dataclass(frozen=True, slots=True)
class JobDemand:
    """The jobs of one set from both folders, from which demand series are made.

    train_end_s: the last submission in the train folder, None if the folder does not have the set.
    """

    dataset: str
    jobs: JobTimes
    train_end_s: float | None

    @property
    def first_s(self) -> float:
        ends = np.minimum(self.jobs.end_s, np.where(np.isfinite(self.jobs.start_s), np.inf, self.jobs.leave_s))
        return float(min(ends.min(), self.last_s))

    @property
    def last_s(self) -> float:
        return float(self.jobs.submit_s.max())

    def list_series_names(self) -> tuple[str, ...]:
        """Return the names of the largest partitions, and `all`.

        With fewer than two partitions, the only name is `all`.
        """
        parts, at = np.unique(self.jobs.part.astype(str), return_inverse=True)
        size = np.bincount(at, self.jobs.gpus)
        largest = [row for row in np.argsort(-size, kind="stable")[:MOST_PARTS] if size[row] >= LEAST_PART * size.sum()]
        if len(largest) < 2:
            return (ALL,)
        return (*sorted(name for name in parts[largest].tolist() if name != ALL), ALL)

    def make_columns(self, names: Sequence[str], first: int, bins: int, bin_s: int) -> dict[str, Array]:
        """Return name → (series, bin) for all of COLUMNS. first: the number of the first bin."""
        found = [_bin_jobs(self._select_jobs(name), first, bins, bin_s) for name in names]
        return {column: np.stack([one[column] for one in found]) for column in COLUMNS}

    def _select_jobs(self, name: str) -> JobTimes:
        return self.jobs if name == ALL else self.jobs.select_rows(np.flatnonzero(self.jobs.part == name))


def _bin_jobs(jobs: JobTimes, first: int, bins: int, bin_s: int) -> dict[str, Array]:
    one = np.ones(len(jobs))
    ran = np.isfinite(jobs.start_s)
    end_s = np.where(ran, jobs.end_s, np.inf)
    sums = {
        "arriving": (jobs.submit_s, jobs.gpus),
        "started": (jobs.start_s, jobs.gpus),
        "ended": (end_s, jobs.gpus),
        "left": (jobs.leave_s, jobs.gpus),
    }
    at = {name: np.floor(np.minimum(times, 2.0**52) / bin_s) - first for name, (times, _) in sums.items()}
    found = {name: _sum_per_bin(at[name], weights, bins) for name, (_, weights) in sums.items()}
    level = {name: _sum_before_first_bin(at[name], jobs.gpus) + found[name].cumsum() for name in sums}
    jobs_of = {f"{name}_jobs": _sum_per_bin(at[name], one, bins) for name in ("arriving", "started", "ended")}
    running, queued = level["started"] - level["ended"], level["arriving"] - level["left"]
    return {**jobs_of, **found, "running": running, "queued": queued}


def _sum_per_bin(at: Array, weights: Array, bins: int) -> Array:
    """Return (bin,) the sum of the weights in each bin. at: (job,) bin numbers."""
    inside = (at >= 0) & (at < bins)
    return np.bincount(at[inside].astype(np.intp), weights[inside], bins).astype(np.float64)


def _sum_before_first_bin(at: Array, weights: Array) -> float:
    return float(weights[at < 0].sum())


def read_job_demand(name: str, train: Path, test: Path | None, say: Say) -> JobDemand | None:
    """Read the jobs of a set in both folders. A repeated job counts once.

    Returns None, and passes the reason to `say`, if the set has no usable jobs.
    """
    before = _read_jobs(train / name, say)
    after = _read_jobs(test / name, say) if test is not None else None
    found = [part for part in (before, after) if part is not None and len(part)]
    if not found:
        return None
    jobs = _join_jobs(found)
    if np.isfinite(jobs.start_s).mean() < MOST_KNOWN:
        say(f"skipped {name}: most of its starts are unknown, so it shows run times alone")
        return None
    good = _find_usable_jobs(jobs)
    if bad := int((~good).sum()):
        say(f"{name}: {bad:,} of {len(good):,} jobs lack a time or GPUs, or end before they begin: skipped")
    if not good.any():
        return None
    known_s = np.zeros(0) if before is None else before.submit_s[_find_usable_jobs(before)]
    return JobDemand(name, jobs.select_rows(good), float(known_s.max()) if len(known_s) else None)


def _find_usable_jobs(jobs: JobTimes) -> NDArray[np.bool_]:
    known = np.isfinite(jobs.submit_s) & (jobs.gpus > 0) & (jobs.leave_s >= jobs.submit_s)
    return np.asarray(known & ~(np.isfinite(jobs.start_s) & (jobs.end_s < jobs.start_s)))


def _join_jobs(parts: Sequence[JobTimes]) -> JobTimes:
    whole = JobTimes(
        *(np.concatenate([getattr(part, name) for part in parts]) for name in JobTimes.__dataclass_fields__)
    )
    rows = pd.DataFrame({"job": whole.job, "submit_s": whole.submit_s, "start_s": whole.start_s})
    twice = rows.duplicated().to_numpy() & (whole.job != "")
    whole = whole.select_rows(~twice)
    return whole.select_rows(np.argsort(whole.submit_s, kind="stable"))


def _read_jobs(folder: Path, say: Say) -> JobTimes | None:
    """Read the jobs of all tables of a folder. Returns None if it has no table of jobs."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and is_table(path)):
        try:
            table = read_table(path)
        except RecordError as error:
            say(f"skipped {error.detail}")
            continue
        if (layout := find_layout(table.columns)) is not None and not table.empty:
            found.append(_make_job_times(table, layout(table)))
    return _join_jobs(found) if found else None


def _make_job_times(table: pd.DataFrame, history: HistoryJobs) -> JobTimes:
    ended = convert_to_seconds(table["end_time"]) if "end_time" in table else np.full(len(table), np.nan)
    state = convert_to_text(table["state"]) if "state" in table else np.full(len(table), "", object)
    started = np.isfinite(history.start_s)
    run_s = np.where(history.run_s >= 0, history.run_s, np.nan)
    end_s = np.where(np.isfinite(run_s), history.start_s + run_s, ended)
    waits = np.isin(state.astype(str), list(WAITING))
    gone_s = np.where(np.isfinite(ended), ended, np.where(waits, np.inf, np.nan))  # of those that never started
    return JobTimes(
        job=history.job,
        submit_s=history.submit_s,
        start_s=np.where(started, history.start_s, np.inf),
        leave_s=np.where(started, history.start_s, gone_s),
        end_s=np.where(started & np.isfinite(end_s), end_s, np.inf),
        gpus=history.gpus,
        part=history.queue,
    )
