"""GPU time of running attempts, measured by telemetry: how long their GPUs were watched and busy."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from fleet.jobs import JobAttempt
from fleet.stateful import Dump, Stateful
from service.answers.jobs import GpuTimeRow
from service.board.board import Section
from service.pipeline.capability import Capability
from service.pipeline.tick import Tick

SECTION = "jobs.gpu_time"
LONGEST_GAP_MS = 300_000  # between two ticks; of more nobody knows
Key = tuple[str, int]


@dataclass(slots=True)
class GpuTime:
    """The GPU-seconds of an attempt on the GPUs that it has held since `placed_ms`.

    A GPU at 30 % for one second adds 1 to `seen` and 0.3 to `used`.
    """

    placed_ms: int | None
    used: float = 0.0
    seen: float = 0.0


class GpuTimes(Capability, Stateful):
    """The GPU time of attempts that run or ended lately, summed over the ticks.

    `sections`, `dump` and `move` are never called at the same time.
    """

    def __init__(self) -> None:
        self._known: dict[Key, GpuTime] = {}
        self._last_ms: int | None = None
        self._shown: Set[Key] = frozenset()

    def sections(self, tick: Tick) -> Sequence[Section]:
        seen = tick.occupancy.holder.copy()
        parts = tick.occupancy.parts
        seen[parts[:, 1], parts[:, 2]] = -1  # of a GPU that several share nobody can tell whose work it is
        self.fold(tick.now_ms, tick.events.running, seen, tick.gpu_column("gpu_util"))
        ended = tick.events.ended
        places = tick.events.placements
        of = places, *ended
        self._forget(
            tick.memory.recall("shown", of, lambda: {*places.keys, *((row.job, row.attempt) for row in ended)})
        )
        return (Section(SECTION, msgspec.json.encode(self.rows()), tick.now_ms),)

    def fold(
        self, now_ms: int, running: Sequence[JobAttempt], holder: NDArray[np.int32], busy: NDArray[np.float64]
    ) -> None:
        """Add the time since the last tick.

        holder: (n, g) index into `running`, -1 if none. busy: (n, g) 0 to 1, NaN if unknown.
        """
        before, self._last_ms = self._last_ms, now_ms
        if before is None or not 0 < now_ms - before <= LONGEST_GAP_MS:
            return
        told = (holder >= 0) & ~np.isnan(busy)
        gpus = np.bincount(holder[told], minlength=len(running)).tolist()
        work = np.bincount(holder[told], np.clip(busy[told], 0.0, 1.0), len(running)).tolist()
        whole_s = (now_ms - before) / 1000
        for attempt, watched, worked in zip(running, gpus, work, strict=True):
            known, passed_s = self._of(attempt), whole_s
            began_ms = max(attempt.started_ms or before, attempt.placed_ms or before)
            if began_ms > before:
                passed_s = max(0, now_ms - began_ms) / 1000
            known.seen += watched * passed_s
            known.used += worked * passed_s

    def _of(self, attempt: JobAttempt) -> GpuTime:
        """Return the GPU time of an attempt. It starts at zero again if the attempt has moved to other GPUs."""
        key = attempt.job, attempt.attempt
        known = self._known.get(key)
        if known is None or known.placed_ms != attempt.placed_ms:
            known = self._known[key] = GpuTime(attempt.placed_ms)
        return known

    def _forget(self, shown: Set[Key]) -> None:
        """Forget all attempts that are not in `shown`.

        shown: the caller passes the same object as long as these attempts stay the same.
        """
        if shown is not self._shown:
            for key in self._known.keys() - shown:
                del self._known[key]
            self._shown = shown

    def rows(self) -> list[GpuTimeRow]:
        return [GpuTimeRow(*key, round(row.used, 2), round(row.seen, 2)) for key, row in self._known.items()]

    def dump(self) -> Dump:
        return [(*key, row.placed_ms, row.used, row.seen) for key, row in self._known.items()], {}

    def load(self, about: Sequence[Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the result of `dump` into an empty object. Raises msgspec.ValidationError."""
        rows = msgspec.convert(about, list[tuple[str, int, int | None, float, float]])
        self._known = {(job, attempt): GpuTime(*row) for job, attempt, *row in rows}  # type: ignore[arg-type]

    def move(self, by_ms: int) -> None:
        """Forget the time of the last tick: after the clock was set, the time until the next is unknown."""
        self._last_ms = None
