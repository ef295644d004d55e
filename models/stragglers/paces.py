"""Paces: the pace of every running job, computed again only when a new step has arrived."""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.stragglers.steps import StepPace, measure_pace

_Stamp = tuple[int | None, ...]  # what a pace was computed from


class Paces:
    """The pace of each running job. While a job is slow, its pace is compared with the same reference."""

    def __init__(self) -> None:
        self._paces: dict[str, tuple[_Stamp, StepPace]] = {}

    def __len__(self) -> int:
        return len(self._paces)

    def find_pace(self, attempt: JobAttempt) -> StepPace:
        """Return the attempt's pace from its steps so far. Without a new step, the pace comes from the cache."""
        if not attempt.steps:
            return StepPace(0)
        stamp = (attempt.attempt, attempt.reported_steps, attempt.written.get("placement"))
        known = self._paces.get(attempt.job)
        if known is not None and known[0] == stamp:
            return known[1]
        same = known is not None and known[0][0] == stamp[0] and known[0][2] == stamp[2]
        pace = measure_pace(attempt, known[1] if known is not None and same else None)
        self._paces[attempt.job] = (stamp, pace)
        return pace

    def drop_ended(self, running: Collection[str]) -> None:
        """Drop the paces of all jobs that are not in `running`."""
        self._paces = {job: known for job, known in self._paces.items() if job in running}

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        return {job: [stamp, msgspec.to_builtins(pace)] for job, (stamp, pace) in self._paces.items()}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state that `dump` returned."""
        self._paces = {job: (tuple(stamp), msgspec.convert(pace, StepPace)) for job, (stamp, pace) in about.items()}

    def shift_times(self, by_ms: int) -> None:
        """Do nothing, because the times of steps come from their events."""
