"""JobChanges: how long past starts and resizes of jobs took, and the step times of elastic jobs at each size.

The cost of a stop and the gain of a resize depend on them. A value comes from the events of one attempt as they are
known when it is recorded, so it contains no later event. A missing, duplicated or impossible event gives no value.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any

import msgspec
from numpy.typing import NDArray

from fleetcast.fleet.events import Phase, Step
from fleetcast.fleet.job_steps import MAX_STEPS
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.fleet.requests import Gang
from fleetcast.fleet.stateful import Dump, Stateful

FEWEST = 3  # a group with fewer observations has no median
NEWEST = 31  # how many observations of a group its median uses
MAX_OBSERVATIONS = 10_000
MAX_ELASTIC_JOBS = 10_000
LONGEST_S = 7200.0  # of a start or a pause; a longer one is a wrong clock, or a job that waits for something else
FEWEST_STEPS = 8  # at one size
FIRST_STEPS = 2  # steps after a change of size that are left out, because they are slower
SAME_SPEED = 1.1  # a smaller ratio of step times counts as no difference
WORKING = frozenset({"warmup", "steady"})  # phases in which a job does its work

Identity = tuple[str, int, int]  # job, attempt, time of the change
Groups = tuple[str, str, str]  # the job, its owner's jobs of its class, all jobs


class GroupMedians:
    """The newest observed durations in seconds, and their medians by group.

    version: grows with every change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._known: dict[Identity, tuple[Groups, float]] = {}
        self._by_group: dict[str, dict[Identity, float]] = {}
        self._medians: dict[str, float] = {}

    def get(self, identity: Identity) -> float | None:
        """Return an observed duration in seconds, or None if this change was not observed."""
        row = self._known.get(identity)
        return None if row is None else row[1]

    def record(self, identity: Identity, groups: Groups, seconds: float) -> None:
        """Record a duration. A later value of the same change replaces it. Impossible durations are dropped."""
        if not 0.0 <= seconds <= LONGEST_S:
            return
        if identity in self._known:
            groups = self._known[identity][0]
        self._known[identity] = groups, seconds
        self.version += 1
        for group in groups:
            self._by_group.setdefault(group, {})[identity] = seconds
            self._medians.pop(group, None)
        if len(self._known) > MAX_OBSERVATIONS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        oldest = next(iter(self._known))
        for group in self._known.pop(oldest)[0]:
            rows = self._by_group[group]
            del rows[oldest]
            self._medians.pop(group, None)
            if not rows:
                del self._by_group[group]

    def find_median(self, groups: Groups) -> float | None:
        """Return the median of the newest durations of the first group with enough of them, None without one."""
        for group in groups:
            if len(rows := self._by_group.get(group, ())) >= FEWEST:
                if group not in self._medians:
                    self._medians[group] = float(median(islice(reversed(rows.values()), NEWEST)))  # type: ignore[union-attr]
                return self._medians[group]
        return None

    def dump(self) -> list[list[Any]]:
        return [[*identity, list(groups), seconds] for identity, (groups, seconds) in self._known.items()]

    def load(self, rows: Iterable[Sequence[Any]]) -> None:
        for job, attempt, time_ms, groups, seconds in msgspec.convert(rows, list[tuple[str, int, int, Groups, float]]):
            self.record((job, attempt, time_ms), groups, seconds)


class JobChanges(Stateful):
    """Past starts and resizes of jobs, and the step times of elastic jobs by size.

    version: grows whenever the times of an attempt that cannot resize may change.
    """

    def __init__(self) -> None:
        self._sized_jobs = 0  # how often a job became one of known sizes
        self.starts = GroupMedians()
        self.pauses = GroupMedians()
        self._sizes: OrderedDict[str, dict[int, StepTime]] = OrderedDict()  # elastic job → members → step time

    def record(self, attempt: JobAttempt, *, saw_start: bool = True) -> None:
        """Record a running attempt in its present state. Repeating it changes nothing.

        saw_start: whether its events were received from its start on. Otherwise the first step received may be one
        of many, and says nothing of the start.
        """
        if attempt.started_ms is None:
            return
        start = attempt.job, attempt.attempt, 0
        start_s = measure_start_s(attempt) if saw_start else None
        known_s = self.starts.get(start)
        if start_s is not None and (known_s is None or start_s < known_s):
            self.starts.record(start, make_groups(attempt), start_s)
        if not is_elastic(attempt):
            return
        pause_s = measure_pause_s(attempt)
        if pause_s is not None:
            self.pauses.record((attempt.job, attempt.attempt, attempt.placed_ms or 0), make_groups(attempt), pause_s)
        self._record_step_time(attempt)

    def _record_step_time(self, attempt: JobAttempt) -> None:
        members, found = len(attempt.ranks) or len(attempt.nodes), measure_step_time(attempt)
        if not members or found is None:
            return
        self._sized_jobs += attempt.job not in self._sizes
        self._sizes.setdefault(attempt.job, {})[members] = found
        self._sizes.move_to_end(attempt.job)
        if len(self._sizes) > MAX_ELASTIC_JOBS:
            self._sizes.popitem(last=False)

    def find_restart_s(self, attempt: JobAttempt) -> float | None:
        """Return the seconds from a start of this job to its first work, None if too few starts were observed."""
        return self.starts.find_median(make_groups(attempt))

    def find_pause_s(self, attempt: JobAttempt) -> float | None:
        """Return the seconds that this job pauses while its size changes, or None if it is unknown."""
        return self.pauses.find_median(make_groups(attempt)) if is_elastic(attempt) else None

    @property
    def version(self) -> int:
        return self.starts.version + self._sized_jobs

    def may_resize(self, attempt: JobAttempt) -> bool:
        """Return whether more than the restart time may be known of an attempt."""
        return attempt.job in self._sizes or is_elastic(attempt)

    def find_size_times(self, job: str) -> dict[int, float]:
        """Return members → seconds for the same amount of work, of an elastic job that ran at several sizes.

        Returns {} if they cannot be compared. Without tokens, equal step times at all sizes may mean that each member
        has a share of the batch that stays the same, so they say nothing.
        """
        rows = self._sizes.get(job, {})
        if len(rows) < 2:
            return {}
        if all(row.token_s is not None for row in rows.values()):
            return {members: row.token_s for members, row in sorted(rows.items()) if row.token_s is not None}
        found = {members: row.step_s for members, row in sorted(rows.items())}
        return found if max(found.values()) >= SAME_SPEED * min(found.values()) else {}

    def dump(self) -> Dump:
        sizes = [[job, {str(size): row for size, row in rows.items()}] for job, rows in self._sizes.items()]
        return {"starts": self.starts.dump(), "pauses": self.pauses.dump(), "sizes": msgspec.to_builtins(sizes)}, {}

    def load(self, about: Any, arrays: Mapping[str, NDArray[Any]]) -> None:
        sizes = msgspec.convert(about["sizes"], list[tuple[str, dict[int, StepTime]]], strict=False)
        self.starts.load(about["starts"])
        self.pauses.load(about["pauses"])
        self._sizes = OrderedDict(sizes)


class StepTime(msgspec.Struct, frozen=True):
    """The median seconds of a step, and of a token of the whole gang. token_s: None if its steps state no tokens."""

    step_s: float
    token_s: float | None = None


def make_groups(attempt: JobAttempt) -> Groups:
    """Return the groups of an attempt, from the narrowest."""
    user = attempt.submission.user if attempt.submission else ""
    return f"job {attempt.job}", f"owner {attempt.queue}\n{user}\n{attempt.class_}", "all"


def is_elastic(attempt: JobAttempt) -> bool:
    """Return whether the attempt states that its number of members may change."""
    gang = attempt.submission.gang if attempt.submission else 1
    return isinstance(gang, Gang) and gang.min < gang.desired


def measure_start_s(attempt: JobAttempt) -> float | None:
    """Return the seconds from the start of an attempt to its first step, or else to its first working phase.

    Returns None if no event states the start, if the first step may have been dropped, or if a clock was wrong.
    """
    if attempt.started_ms is None or attempt.written.get("started", -1) < 0 or attempt.has_unseen_start:
        return None
    begun = [event.time_ms for event in attempt.events if isinstance(event, Phase) and event.name in WORKING]
    if attempt.phase in WORKING and attempt.phase_since_ms is not None:
        begun.append(attempt.phase_since_ms)
    begun = [time_ms for time_ms in begun if not attempt.checkpoints or time_ms <= attempt.checkpoints[0].time_ms]
    if attempt.steps and len(attempt.steps) < MAX_STEPS:
        begun.append(round(find_beginning_ms(attempt.steps[0])))
    if not begun:
        return None
    start_s = (min(begun) - attempt.started_ms) / 1000
    return start_s if start_s >= 0 else None


def find_beginning_ms(step: Step) -> float:
    """Return the time at which a step began."""
    return step.time_ms - 1000 * max(0.0, step.duration_s)


def measure_pause_s(attempt: JobAttempt) -> float | None:
    """Return the seconds without a step around the last change of an attempt's size.

    The steps between the two that were reported count as work. Returns None without a step before and after.
    """
    changed_ms, started_ms = attempt.placed_ms, attempt.started_ms
    if changed_ms is None or started_ms is None or changed_ms <= started_ms:
        return None
    before = max((step for step in attempt.steps if step.time_ms <= changed_ms), key=_get_end, default=None)
    after = min((step for step in attempt.steps if step.time_ms > changed_ms), key=_get_end, default=None)
    if before is None or after is None:
        return None
    work_s = max(1, after.step - before.step) * after.duration_s
    return max(0.0, (after.time_ms - before.time_ms) / 1000 - work_s)


def _get_end(step: Step) -> tuple[int, int]:
    return step.time_ms, step.sequence


def measure_step_time(attempt: JobAttempt) -> StepTime | None:
    """Return the step time of an attempt at its present size, None before enough of its steps are known."""
    since_ms = max(attempt.started_ms or 0, attempt.placed_ms or 0)
    steps = [step for step in attempt.steps if find_beginning_ms(step) >= since_ms and step.duration_s > 0]
    steps = steps[FIRST_STEPS:]
    if len(steps) < FEWEST_STEPS:
        return None
    members = max(1, len(attempt.ranks) or len(attempt.nodes))
    tokens = [(step.tokens or 0) * (1 if step.rank is None else members) for step in steps]
    known = all(tokens)
    token_s = median(step.duration_s / number for step, number in zip(steps, tokens, strict=True)) if known else None
    step_s = median(step.duration_s for step in steps)
    return StepTime(step_s, token_s) if math.isfinite(step_s) else None
