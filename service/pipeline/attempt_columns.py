"""The facts of many attempts as columns, so that a tick does not read every attempt again for each of its results."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt


@dataclass(frozen=True, slots=True)
class AttemptColumns:
    """Facts of attempts, one row an attempt. None of them depends on the time of a tick.

    started_ms: (row,) int64, 0 before the start. waited_s: (row,) float64, from the time when the attempt became
    eligible to its start, NaN if either is unknown. group: (row,) index into `groups`. groups: queue and class.
    """

    started_ms: NDArray[np.int64]
    waited_s: NDArray[np.float64]
    group: NDArray[np.intp]
    groups: list[tuple[str, str]]

    @classmethod
    def from_attempts(cls, attempts: Sequence[JobAttempt]) -> "AttemptColumns":
        started_ms = np.array([row.started_ms or 0 for row in attempts], np.int64)
        eligible_ms = np.array([row.eligible_ms or 0 for row in attempts], np.int64)
        waited_s = np.maximum(0.0, (started_ms - eligible_ms) / 1000)
        waited_s[(started_ms == 0) | (eligible_ms == 0)] = np.nan
        numbers: dict[tuple[str, str], int] = {}
        group = [numbers.setdefault((row.queue, row.class_), len(numbers)) for row in attempts]
        return cls(started_ms, waited_s, np.array(group, np.intp), list(numbers))

    def group_waits_since(self, time_ms: int) -> dict[tuple[str, str], NDArray[np.float64]]:
        """Return queue and class → the waits in seconds of the attempts that started after `time_ms`."""
        rows = np.flatnonzero((self.started_ms > time_ms) & np.isfinite(self.waited_s))
        rows = rows[np.argsort(self.group[rows], kind="stable")]
        numbers, begins = np.unique(self.group[rows], return_index=True)
        waits = np.split(self.waited_s[rows], begins[1:])
        return {self.groups[number]: own for number, own in zip(numbers.tolist(), waits, strict=False)}
