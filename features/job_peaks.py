"""JobPeaks: the highest observed GPU memory and power of finished jobs, by kind of job.

    each tick   readings of the GPUs that a running attempt holds ─ max ─> its peaks so far
    finished    its peaks ─> the newest MAX_RUNS of its user and name, of its user and size, of its queue and size

A failed job may not have reached its peak, so it does not count. Peaks between two scrapes are not
observed.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.similarity import Kind, make_job_shape, make_kind_keys
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.placements import RunningPlaces
from fleetcast.fleet.stateful import Dump, Stateful

MAX_RUNS = 32
MOST_KINDS = 4096
SETTLED_S = 30.0  # a younger attempt's newest reading may be of who held the GPU before
GIB = 2.0**30
KINDS: tuple[Kind, ...] = ("user and name", "user and GPUs", "queue and GPUs")
QUANTILE = 0.9  # of the peaks of a kind: what a further job of it is likely to stay below

MEMORY, POWER = 0, 1
Attempt = tuple[str, int]
Array = NDArray[np.float32]


class JobPeaks(Stateful):
    """The peaks of running attempts and of kinds of jobs. Only one task may change them.

    Peaks are (memory of the fullest GPU in GiB, mean power of the GPUs in W), NaN if not observed.
    """

    def __init__(self) -> None:
        self._running: dict[Attempt, int] = {}  # -> row of `_peaks`
        self._peaks = np.zeros((0, 2), np.float32)
        self._places: RunningPlaces | None = None  # of the attempts in `_running`
        self._rows: dict[int, int] = {}  # key -> row, the one that was used longest ago first
        self._runs = np.zeros((0, MAX_RUNS, 2), np.float32)
        self._count = np.zeros(0, np.int64)
        self._likely = np.zeros((0, 2), np.float32)

    def store_finished(self, ended: Iterable[JobAttempt]) -> None:
        """Store the peaks of attempts that have finished. Ignores all other attempts and repeats."""
        for attempt in ended:
            row = self._running.pop((attempt.job, attempt.attempt), None)
            if row is not None:
                self._places = None
            if row is not None and attempt.outcome == "finished" and np.isfinite(self._peaks[row]).any():
                of_kind = make_kind_keys(make_job_shape(attempt))
                for kind in KINDS:
                    if kind in of_kind:
                        self._store_peaks(of_kind[kind], self._peaks[row])

    def observe(
        self,
        running: Sequence[JobAttempt],
        now_ms: int,
        holder: NDArray[np.int32],
        rows: NDArray[np.int32],
        memory_bytes: NDArray[np.floating],
        power_w: NDArray[np.floating],
        places: RunningPlaces | None = None,
    ) -> None:
        """Record the readings of one moment. Drop attempts that no longer run.

        Call `store_finished` first. holder: (n, g) index into `running`, -1 if the GPU is free. rows: (n, g) row
        of each GPU in the readings, -1 if it has none. places: the places of `running`, the same object until an
        attempt starts, ends or moves.
        """
        if places is None or places is not self._places:
            self._update_running_rows(running)
            self._places = places
        index, peaks = self._running, self._peaks
        started_ms = np.array([row.started_ms or now_ms for row in running], np.int64)
        settled = now_ms - started_ms >= SETTLED_S * 1000
        seen = (holder >= 0) & (rows >= 0) & (rows < len(power_w))
        number, entity = holder[seen], rows[seen]
        own = settled[number]
        number, entity = number[own], entity[own]
        peaks[:, MEMORY] = np.fmax(
            peaks[:, MEMORY], _compute_group_maxima(number, memory_bytes[entity], len(index)) / GIB
        )
        peaks[:, POWER] = np.fmax(peaks[:, POWER], _compute_group_means(number, power_w[entity], len(index)))

    def _update_running_rows(self, running: Sequence[JobAttempt]) -> None:
        """Give each of these attempts a row with its peaks so far, and drop all others."""
        index = {(attempt.job, attempt.attempt): row for row, attempt in enumerate(running)}
        before = np.array([self._running.get(key, -1) for key in index], np.intp)
        peaks = np.full((len(index), 2), np.nan, np.float32)
        peaks[before >= 0] = self._peaks[before[before >= 0]]
        self._running, self._peaks = index, peaks

    def make_table(self) -> tuple[NDArray[np.uint64], Array]:
        """Return (k,) the sorted keys of the kinds of jobs, and (k, 3) float32 their likely peaks.

        The columns are the likely peak memory (GiB of a GPU), the likely peak power (W of a GPU), and the
        number of runs.
        """
        keys = np.fromiter(self._rows, np.uint64, len(self._rows))
        rows = np.fromiter(self._rows.values(), np.intp, len(self._rows))
        order = np.argsort(keys)
        seen = np.minimum(self._count[rows], MAX_RUNS).astype(np.float32)
        return keys[order], np.column_stack([self._likely[rows], seen])[order].astype(np.float32)

    def _store_peaks(self, key: int, peaks: Array) -> None:
        row = self._rows.pop(key, None)
        if row is None:
            row = self._allocate_row()
        self._rows[key] = row
        self._runs[row, self._count[row] % MAX_RUNS] = peaks
        self._count[row] += 1
        for what in (MEMORY, POWER):
            known = self._runs[row, :, what]
            known = known[np.isfinite(known)]
            self._likely[row, what] = np.quantile(known, QUANTILE) if len(known) else np.nan

    def _allocate_row(self) -> int:
        """Return an empty row. If there are MOST_KINDS kinds, it is the row of the least recently used one."""
        if len(self._rows) >= MOST_KINDS:
            row = self._rows.pop(next(iter(self._rows)))
        else:
            row = len(self._rows)
            self._grow_arrays(row + 1)
        self._runs[row], self._count[row], self._likely[row] = np.nan, 0, np.nan
        return row

    def _grow_arrays(self, rows: int) -> None:
        more = max(0, rows - len(self._count)) and max(64, len(self._count))
        if more:
            self._runs = np.pad(self._runs, ((0, more), (0, 0), (0, 0)))
            self._count = np.pad(self._count, (0, more))
            self._likely = np.pad(self._likely, ((0, more), (0, 0)))

    def dump(self) -> Dump:
        """Return a copy for a snapshot: JSON-able parts, and arrays by name."""
        rows = np.fromiter(self._rows.values(), np.intp, len(self._rows))
        arrays: dict[str, NDArray[Any]] = {
            "peaks": self._peaks[list(self._running.values())],
            "keys": np.fromiter(self._rows, np.uint64, len(self._rows)),
            "runs": self._runs[rows],
            "count": self._count[rows],
            "likely": self._likely[rows],
        }
        return {"running": [list(key) for key in self._running]}, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object."""
        self._running = {(job, attempt): row for row, (job, attempt) in enumerate(about["running"])}
        self._peaks = arrays["peaks"].copy()
        self._rows = {key: row for row, key in enumerate(arrays["keys"].tolist())}
        self._runs, self._count = arrays["runs"].copy(), arrays["count"].copy()
        self._likely = arrays["likely"].copy()


def _compute_group_maxima(number: NDArray[np.int32], values: NDArray[np.floating], length: int) -> NDArray[np.float64]:
    """Return (length,) the largest value of each number, NaN for a number without values. number: (values,)."""
    most = np.full(length, np.nan)
    np.fmax.at(most, number, values)
    return most


def _compute_group_means(number: NDArray[np.int32], values: NDArray[np.floating], length: int) -> NDArray[np.float64]:
    """Return (length,) the mean value of each number, NaN for a number without values. number: (values,)."""
    known = np.isfinite(values)
    count = np.bincount(number[known], minlength=length).astype(np.float64)
    total = np.bincount(number[known], weights=values[known], minlength=length)
    means: NDArray[np.float64] = np.divide(total, count, out=np.full(length, np.nan), where=count > 0)
    return means
