"""The running jobs of a view as columns: what each holds, its queue and owner, and the cost of stopping it.

Row k describes job k of `ClusterView.jobs`. So an index in `ClusterView.holders` is also a row of this table.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

RUN_LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # of quantiles that models give
DEFAULT_RESTART_S = 300.0  # until restarts of the job have been observed
NOT_SAID, PROTECTED, PREEMPTIBLE = -1, 0, 1  # values of `RunningJobs.preemptible`

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class JobRun(NamedTuple):
    """The size and times of a job, for estimates of its end. left_s: quantiles of its remaining time, if known."""

    started_ms: int
    gpus: int
    limit_s: float | None
    left_s: tuple[float, ...] | None

    def compute_age_s(self, now_ms: int) -> float:
        """Return the seconds that the job has run, at least 0."""
        return max(0.0, (now_ms - self.started_ms) / 1000)


@dataclass(frozen=True)
class RunningJobs:
    """Columns over the j running jobs of a view, in the order of `ClusterView.jobs`.

    NaN is an unknown amount or cost, and -1 an unknown time. The arrays never change.
    """

    names: tuple[str, ...]  # (j,) job names
    attempt: Integers  # (j,)
    leaf: tuple[str, ...]  # (j,) leaf queue that the job is charged to; without a tree, the queue that it names
    user: tuple[str, ...]  # (j,) "" unknown
    job_class: tuple[str, ...]  # (j,) training, fine_tuning, inference, batch or interactive
    required_level: tuple[str, ...]  # (j,) level of the domain in which all its members must be, "" none
    slow_node: tuple[str, ...]  # (j,) node that slows it, if it has a whole checkpoint since then; "" none
    priority: Integers  # (j,) as its events or its request state it, without the priority of its class
    preemptible: NDArray[np.int8]  # (j,) -1 not said, 0 its owner forbids a stop, 1 its owner allows it
    gpus: Integers  # (j,) GPUs that it holds; a shared GPU counts as one
    members: Integers  # (j,) members that run now, 0 unknown
    gang_min: Integers  # (j,) least members of an elastic gang, 0 if the gang is not elastic
    gang_desired: Integers  # (j,) most members of an elastic gang, 0 if the gang is not elastic
    gang_step: Integers  # (j,) members by which an elastic gang grows and shrinks, 0 if it is not elastic
    gpus_per_member: Integers  # (j,) 0 unknown
    started_ms: Integers  # (j,) start of the attempt
    checkpoint_ms: Integers  # (j,) when its last whole checkpoint was complete, -1 none
    checkpoint_cost_s: Floats  # (j,) seconds that a checkpoint takes, NaN unknown
    restart_s: Floats  # (j,) seconds from a new start to useful work, learnt, else `DEFAULT_RESTART_S`
    resized_ms: Integers  # (j,) when its size last changed, -1 never
    resize_pause_s: Floats  # (j,) seconds that it stands still while its size changes, NaN unknown
    speed_exponent: Floats  # (j,) its speed is members ** exponent, NaN unknown
    stops: Integers  # (j,) number of preemptions of the job in the last 24 hours
    cpus_per_member: Floats  # (j,) CPUs, NaN unknown
    cpus: Floats  # (j,) CPUs of all members, NaN unknown
    host_memory_gib_per_member: Floats  # (j,) NaN unknown
    host_memory_gib: Floats  # (j,) of all members, NaN unknown
    limit_s: Floats  # (j,) time limit from its start, NaN without one
    remaining_s: Floats  # (j, level) quantiles of the remaining time at `RUN_LEVELS`, NaN where no model knows them

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def row(self) -> dict[str, int]:
        """Job name → row. If two attempts of a job run, this is the row of the later attempt."""
        return {name: row for row, name in enumerate(self.names)}

    def find_rows(self, names: Iterable[str]) -> NDArray[np.int64]:
        """Return (k,) the row of each of these jobs, -1 for a job that is not in the table."""
        return np.fromiter(map(self.row.get, names, repeat(-1)), np.int64)

    @cached_property
    def runs(self) -> dict[str, JobRun]:
        """Job name → its run. Jobs of unknown start are left out."""
        columns = (self.started_ms.tolist(), self.gpus.tolist(), self.limit_s.tolist(), self.remaining_s.tolist())
        is_forecast = np.asarray(~np.isnan(self.remaining_s).any(axis=1))
        return {
            name: JobRun(
                started_ms,
                gpus,
                None if math.isnan(limit_s) else limit_s,
                tuple(left_s) if forecast else None,
            )
            for name, started_ms, gpus, limit_s, left_s, forecast in zip(
                self.names, *columns, is_forecast.tolist(), strict=True
            )
            if started_ms >= 0
        }

    def find_run(self, name: str, now_ms: int, gpus: int = 1) -> JobRun:
        """Return the run of a job. An unknown job counts as begun now, on `gpus` GPUs."""
        return self.runs.get(name) or JobRun(now_ms, gpus, None, None)

    def select_rows(self, rows: NDArray[Any]) -> "RunningJobs":
        """Return a table with only these rows. rows: (k,) indices, or (j,) bool."""
        chosen = np.arange(len(self))[rows].tolist()
        return self._map_columns(lambda name, values: values[rows], lambda name, values: [values[at] for at in chosen])

    def append_rows(self, other: "RunningJobs") -> "RunningJobs":
        """Return this table followed by the rows of another one."""
        if not len(other):
            return self
        both = self._map_columns(
            lambda name, values: np.concatenate([values, getattr(other, name)]),
            lambda name, values: [*values, *getattr(other, name)],
        )
        both.__dict__["runs"] = self.runs | other.runs  # a pass appends few rows to thousands
        return both

    def _map_columns(
        self,
        array: Callable[[str, NDArray[Any]], NDArray[Any]],
        words: Callable[[str, tuple[str, ...]], Iterable[str]],
    ) -> "RunningJobs":
        """Return the table with each column changed.

        `array` changes columns of numbers, and `words` changes columns of text.
        """
        changed: dict[str, Any] = {}
        for name, values in ((column.name, getattr(self, column.name)) for column in fields(self)):
            changed[name] = tuple(words(name, values)) if isinstance(values, tuple) else array(name, values)
        return RunningJobs(**changed)


_UNKNOWN: dict[str, tuple[Any, float]] = {  # column → its type, and its value if nothing is known
    "attempt": (np.int64, 1),
    "priority": (np.int64, 0),
    "preemptible": (np.int8, NOT_SAID),
    "gpus": (np.int64, 0),
    "members": (np.int64, 0),
    "gang_min": (np.int64, 0),
    "gang_desired": (np.int64, 0),
    "gang_step": (np.int64, 0),
    "gpus_per_member": (np.int64, 0),
    "started_ms": (np.int64, -1),
    "checkpoint_ms": (np.int64, -1),
    "checkpoint_cost_s": (np.float64, np.nan),
    "restart_s": (np.float64, DEFAULT_RESTART_S),
    "resized_ms": (np.int64, -1),
    "resize_pause_s": (np.float64, np.nan),
    "speed_exponent": (np.float64, np.nan),
    "stops": (np.int64, 0),
    "cpus_per_member": (np.float64, np.nan),
    "cpus": (np.float64, np.nan),
    "host_memory_gib_per_member": (np.float64, np.nan),
    "host_memory_gib": (np.float64, np.nan),
    "limit_s": (np.float64, np.nan),
}


def make_running_jobs(
    names: Iterable[str],
    *,
    leaf: Iterable[str] = (),
    user: Iterable[str] = (),
    job_class: Iterable[str] = (),
    required_level: Iterable[str] = (),
    slow_node: Iterable[str] = (),
    remaining_s: ArrayLike = np.nan,
    **columns: ArrayLike,
) -> RunningJobs:
    """Make a table of running jobs. A column that is left out has the value for unknown in all rows.

    A column of numbers has one value for each job, or one value for all of them. Raises TypeError if the table
    has no column of that name.

    >>> jobs = make_running_jobs(["a", "b"], gpus=[8, 4], limit_s=3600.0)
    >>> jobs.gpus.tolist(), jobs.limit_s.tolist(), jobs.preemptible.tolist()
    ([8, 4], [3600.0, 3600.0], [-1, -1])
    """
    if wrong := columns.keys() - _UNKNOWN.keys():
        raise TypeError(f"the table of running jobs has no column {', '.join(sorted(wrong))}")
    rows = tuple(names)
    j = len(rows)
    filled: dict[str, Any] = {
        name: _fill_column(columns.get(name, unknown), (j,), kind) for name, (kind, unknown) in _UNKNOWN.items()
    }
    return RunningJobs(
        names=rows,
        leaf=tuple(leaf) or ("",) * j,
        user=tuple(user) or ("",) * j,
        job_class=tuple(job_class) or ("training",) * j,
        required_level=tuple(required_level) or ("",) * j,
        slow_node=tuple(slow_node) or ("",) * j,
        remaining_s=_fill_column(remaining_s, (j, len(RUN_LEVELS)), np.float64),
        **filled,
    )


def _fill_column(values: ArrayLike, shape: tuple[int, ...], kind: Any) -> NDArray[Any]:
    """Return a new column. values: one value for each row, or one for all rows."""
    if np.isscalar(values):
        return np.full(shape, values, kind)
    column = np.array(values, kind)
    return column if column.shape == shape else np.broadcast_to(column, shape).copy()


NO_RUNNING_JOBS = make_running_jobs(())
