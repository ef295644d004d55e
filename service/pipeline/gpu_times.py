"""The GPU time of running attempts: GPU-seconds that telemetry observed, and how many of them were busy."""

from collections.abc import Mapping, Sequence, Set
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.service.answers.jobs import GpuTimeRow
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.tick import Tick

SECTION = "jobs.gpu_time"
LONGEST_GAP_MS = 300_000  # between two ticks; of more nobody knows
USED, SEEN = 0, 1
NEAR_HALF, MOST_HUNDREDTHS = (
    1e-3,
    1e11,
)  # of `round_to_two_digits`: below the latter, products are exact to a ten-thousandth
Key = tuple[str, int]


class GpuTimes(Capability, Stateful):
    """The GPU time of attempts that run or ended recently, summed over the ticks.

    `make_sections`, `dump` and `shift_times` must not run at the same time.
    """

    def __init__(self) -> None:
        self._rows: dict[Key, int] = {}  # attempt → row of the next two
        self._placed_ms: list[int | None] = []  # (row,) since when it is on its GPUs
        self._gpu_s = np.zeros((0, 2))  # (row, USED or SEEN) GPU-seconds on these GPUs
        self._running: Sequence[JobAttempt] | None = None  # of the last call, with the next two
        self._rows_of_running = np.zeros(0, np.intp)
        self._began_ms = np.zeros(0, np.int64)  # (running,) since when it is on its GPUs
        self._last_ms: int | None = None
        self._shown: Set[Key] = frozenset()

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        seen = tick.occupancy.holder.copy()
        parts = tick.occupancy.parts
        seen[parts[:, 1], parts[:, 2]] = -1  # of a GPU that several share nobody can tell whose work it is
        ended, places = tick.events.ended, tick.events.placements
        self.add_gpu_time(tick.now_ms, tick.events.running, seen, tick.read_gpu_feature("gpu_util"))
        of = places, *ended
        self._drop_unlisted_attempts(
            tick.memory.get_or_make("shown", of, lambda: {*places.keys, *((row.job, row.attempt) for row in ended)})
        )
        return (Section(SECTION, msgspec.json.encode(self.make_rows()), tick.now_ms),)

    def add_gpu_time(
        self,
        now_ms: int,
        running: Sequence[JobAttempt],
        holder: NDArray[np.int32],
        busy: NDArray[np.float64],
    ) -> None:
        """Add the GPU time since the last tick to each running attempt.

        A GPU that is 30 % busy for one second adds 0.3 GPU-seconds to USED and 1 to SEEN.
        holder: (n, g) index into `running`, -1 if none. busy: (n, g) 0 to 1, NaN if unknown. `running` may stay
        the same object only while none of its attempts changes.
        """
        before, self._last_ms = self._last_ms, now_ms
        if before is None or not 0 < now_ms - before <= LONGEST_GAP_MS:
            return
        if running is not self._running:
            self._rows_of_running, self._running = self._find_rows(running), running
            times_ms = [max(attempt.started_ms or 0, attempt.placed_ms or 0) for attempt in running]
            self._began_ms = np.array(times_ms, np.int64)
        known = (holder >= 0) & ~np.isnan(busy)
        gpus = np.bincount(holder[known], minlength=len(running))
        work = np.bincount(holder[known], np.clip(busy[known], 0.0, 1.0), len(running))
        began_ms = self._began_ms
        passed_s = np.where(began_ms > before, np.maximum(now_ms - began_ms, 0), now_ms - before) / 1000
        self._gpu_s[self._rows_of_running] += np.stack([work * passed_s, gpus * passed_s], axis=1)

    def _find_rows(self, running: Sequence[JobAttempt]) -> NDArray[np.intp]:
        """Return the row of each running attempt: (running,).

        A new attempt, or one that has moved to other GPUs, starts with no GPU time.
        """
        rows = [self._rows.setdefault((attempt.job, attempt.attempt), len(self._rows)) for attempt in running]
        fresh = len(self._rows) - len(self._placed_ms)
        self._placed_ms += [None] * fresh
        self._gpu_s = np.pad(self._gpu_s, ((0, fresh), (0, 0)))
        for row, attempt in zip(rows, running, strict=True):
            if self._placed_ms[row] != attempt.placed_ms:
                self._placed_ms[row], self._gpu_s[row] = attempt.placed_ms, 0.0
        return np.array(rows, np.intp)

    def _drop_unlisted_attempts(self, shown: Set[Key]) -> None:
        """Drop all attempts that are not in `shown`.

        If `shown` is the same object as at the last call, do nothing.
        """
        if shown is self._shown:
            return
        left = {key: row for key, row in self._rows.items() if key in shown}
        if len(left) < len(self._rows):
            rows = list(left.values())
            self._rows = {key: row for row, key in enumerate(left)}
            self._placed_ms, self._gpu_s = [self._placed_ms[row] for row in rows], self._gpu_s[rows]
            self._running = None
        self._shown = shown

    def make_rows(self) -> list[GpuTimeRow]:
        used, seen = (round_to_two_digits(self._gpu_s[:, column]) for column in (USED, SEEN))
        jobs, numbers = [job for job, _ in self._rows], [number for _, number in self._rows]
        return list(map(GpuTimeRow, jobs, numbers, used, seen))

    def dump(self) -> Dump:
        rows = zip(self._rows, self._placed_ms, self._gpu_s.tolist(), strict=True)
        return [(*key, placed_ms, *gpu_s) for key, placed_ms, gpu_s in rows], {}

    def load(self, about: Sequence[Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object.

        Raises msgspec.ValidationError if it is invalid.
        """
        rows = msgspec.convert(about, list[tuple[str, int, int | None, float, float]])
        self._rows = {(job, attempt): row for row, (job, attempt, *_) in enumerate(rows)}
        self._placed_ms = [placed_ms for _, _, placed_ms, *_ in rows]
        self._gpu_s = np.array([gpu_s for *_, used, seen in rows for gpu_s in (used, seen)]).reshape(-1, 2)

    def shift_times(self, by_ms: int) -> None:
        """Forget when the last tick was. The clock was set, so the time since then is unknown."""
        self._last_ms = None


def round_to_two_digits(values: NDArray[np.float64]) -> list[float]:
    """Round each value to two decimal places, as `round` does but three times as fast.

    >>> round_to_two_digits(np.array([2.675, 0.125, 1e17]))
    [2.67, 0.12, 1e+17]
    """
    hundredths = values * 100
    found: list[float] = (np.rint(hundredths) / 100).tolist()
    from_half = np.abs(hundredths - np.floor(hundredths) - 0.5)  # so near, the product may lie on the other side
    for at in np.flatnonzero((from_half < NEAR_HALF) | (np.abs(hundredths) > MOST_HUNDREDTHS)).tolist():
        found[at] = round(float(values[at]), 2)
    return found
