"""The capability that learns, from running jobs, how long a restart and a resize take and how size changes speed."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from numpy.typing import NDArray

from fleetcast.features.job_changes import JobChanges
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.stateful import Dump, Stateful
from fleetcast.placement.elastic.speed import learn_speed_exponent
from fleetcast.service.answers.jobs import LearntTimes
from fleetcast.service.board.board import Section
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.tick import Tick

SECTION = "jobs.learnt"
NOTHING_LEARNT = LearntTimes()
SOON_MS = 180_000  # an attempt first seen this soon after its start counts as seen from its start


class LearntJobTimes(Capability, Stateful):
    """The times that were learnt for each running job. Jobs for which nothing was learnt are left out.

    `make_sections` and `dump` must not run at the same time.
    """

    def __init__(self) -> None:
        self._changes = JobChanges()
        self._running: Sequence[JobAttempt] | None = None  # of the last tick
        self._learnt: dict[str, LearntTimes] = {}  # what was learnt for them
        self._recorded: dict[tuple[str, int], JobAttempt] = {}  # the same attempts by name
        self._from_start: set[tuple[str, int]] = set()  # those of them that were seen from their start on
        self._times: dict[tuple[str, int], LearntTimes] = {}  # of attempts that cannot resize, at `_version`
        self._version = 0

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        return (Section(SECTION, msgspec.json.encode(self.learn(tick.events.running, tick.now_ms)), tick.now_ms),)

    def learn(self, running: Sequence[JobAttempt], now_ms: int) -> dict[str, LearntTimes]:
        """Record the attempts that have changed since the last call. Return job → its learnt times.

        Jobs that already ran when the service began, or that ran while it was away, say nothing of restarts.
        `running` may stay the same object only while none of its attempts changes.
        """
        if running is self._running:
            return self._learnt
        before = self._recorded
        self._recorded = {(attempt.job, attempt.attempt): attempt for attempt in running}
        self._from_start &= self._recorded.keys()
        for key, attempt in self._recorded.items():
            known = before.get(key)
            if known is attempt:
                continue
            if known is None and now_ms - (attempt.started_ms or 0) <= SOON_MS:
                self._from_start.add(key)
            self._times.pop(key, None)
            self._changes.record(attempt, saw_start=key in self._from_start)
        if self._version != self._changes.version:
            self._version, self._times = self._changes.version, {}
        times_before, self._times = self._times, {}
        found: dict[str, LearntTimes] = {}
        for key, attempt in self._recorded.items():
            times = times_before.get(key)
            if times is None:
                times = self._make_times(attempt)
                if self._changes.may_resize(attempt):  # its times change with each step
                    found[attempt.job] = times
                    continue
            found[key[0]] = self._times[key] = times
        self._learnt = {job: times for job, times in found.items() if times != NOTHING_LEARNT}
        self._running = running
        return self._learnt

    def _make_times(self, attempt: JobAttempt) -> LearntTimes:
        restart_s, pause_s = self._changes.find_restart_s(attempt), self._changes.find_pause_s(attempt)
        times_s = self._changes.find_size_times(attempt.job)
        exponent = learn_speed_exponent(list(times_s), list(times_s.values())) if times_s else None
        return LearntTimes(
            None if restart_s is None else round(restart_s, 1),
            None if pause_s is None else round(pause_s, 1),
            None if exponent is None else round(exponent, 3),
        )

    def dump(self) -> Dump:
        return self._changes.dump()

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._running = None
        self._changes.load(about, arrays)

    def shift_times(self, by_ms: int) -> None:
        """Change nothing: durations do not move with a clock."""
