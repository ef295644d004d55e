"""RunPast: the newest runs of similar jobs, from which features are computed quickly."""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Hashable, Sequence
from typing import Any

SHORT, LONG = 20, 200
LEVELS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
PAST_NAMES = (
    "last",
    "mean_two",
    "p10_short",
    "p50_short",
    "p90_short",
    "p50_long",
    "p90_long",
    "count",
    "failed",
    "since_submit",
    "running",
    "running_mean_age",
    "running_oldest_age",
    "previous_run",
    "previous_age",
)
_NO_RUNS = (math.nan,) * 7


class RunProgress:
    """The run of one job so far. begin_ms: None while it waits. log_run: None until the run has ended."""

    __slots__ = ("begin_ms", "log_run")

    def __init__(self) -> None:
        self.begin_ms: int | None = None
        self.log_run: float | None = None


class RunPast:
    """The newest runs under one key, as logarithms of seconds, in order of their ends."""

    __slots__ = (
        "_ended",
        "_levels",
        "_now",
        "_now_ms",
        "_short",
        "_sorted",
        "began_ms",
        "count",
        "failed",
        "newest",
        "running",
        "runs",
        "submitted_ms",
    )

    def __init__(self) -> None:
        self.runs: deque[float] = deque()
        self._short: list[float] = []
        self._sorted: list[float] = []
        self._ended: tuple[float, ...] | None = _NO_RUNS  # None: to be made again
        self._levels: tuple[float, ...] | None = None
        self._now: tuple[float, ...] = ()  # the features as of _now_ms, which all jobs of a key share
        self._now_ms: int | None = None  # None: to be made again
        self.count = 0
        self.failed = 0.0  # share, fading over SHORT runs
        self.submitted_ms = -1
        self.newest: RunProgress | None = None  # the job submitted last
        self.running: dict[Hashable, int] = {}  # identity -> start, in order of the starts
        self.began_ms = 0  # sum of those starts

    def record_submission(self, at_ms: int, run: RunProgress) -> None:
        """Record that a job was submitted."""
        self._now_ms = None
        if at_ms >= self.submitted_ms:
            self.submitted_ms, self.newest = at_ms, run

    def record_start(self, identity: Hashable, at_ms: int) -> None:
        """Record that a job began to run."""
        self._now_ms = None
        self.running[identity] = at_ms
        self.began_ms += at_ms

    def remove_running(self, identity: Hashable) -> None:
        """Remove a job from the running jobs."""
        self._now_ms = None
        self.began_ms -= self.running.pop(identity, 0)

    def add_ended_run(self, log_run: float, failed: bool) -> None:
        """Add the run time of a job that ended. log_run: natural logarithm of seconds."""
        self._ended = self._levels = self._now_ms = None
        self.count += 1
        self.failed += (failed - self.failed) / min(self.count, SHORT)
        runs = self.runs
        runs.append(log_run)
        insort(self._sorted, log_run)
        insort(self._short, log_run)
        if len(runs) > SHORT:
            del self._short[bisect_left(self._short, runs[-1 - SHORT])]
            if len(runs) > LONG:
                del self._sorted[bisect_left(self._sorted, runs.popleft())]

    def compute_quantiles(self) -> tuple[float, ...]:
        """Return the quantiles of the last LONG runs at LEVELS, interpolated linearly. There must be a run."""
        if self._levels is None:
            self._levels = tuple([compute_quantile(self._sorted, level) for level in LEVELS])
        return self._levels

    def compute_short_median(self) -> float:
        """Return the median of the last SHORT runs. There must be a run."""
        return compute_quantile(self._short, 0.5)

    def read_features(self, now_ms: int) -> tuple[float, ...]:
        """Return the features at `now_ms`, in the order of PAST_NAMES. They are cached."""
        if now_ms != self._now_ms:
            self._now, self._now_ms = self._compute_features(now_ms), now_ms
        return self._now

    def _compute_features(self, now_ms: int) -> tuple[float, ...]:
        running = self.running
        ended = self._ended
        if ended is None:
            ended = self._ended = self._compute_ended_features()
        alive = len(running)
        if alive:
            mean_age = math.log1p(max(0.0, now_ms - self.began_ms / alive) / 1000)
            oldest = math.log1p(max(0.0, now_ms - next(iter(running.values()))) / 1000)
        else:
            mean_age = oldest = math.nan
        since = math.log1p(max(0, now_ms - self.submitted_ms) / 1000) if self.submitted_ms >= 0 else math.nan
        previous, previous_age = self._measure_previous_run(now_ms)
        among = (math.log1p(alive), mean_age, oldest, previous, previous_age)
        return (*ended, math.log1p(self.count), self.failed, since, *among)

    def _compute_ended_features(self) -> tuple[float, ...]:
        """Return the first features of PAST_NAMES, which change only when a run ends. There must be a run."""
        runs, short, long = self.runs, self._short, self._sorted
        s, n = len(short) - 1, len(long) - 1
        last = runs[-1]
        two = math.log((math.exp(last) + math.exp(runs[-2])) / 2) if n else last
        shorts = (short[(s + 5) // 10], short[(s + 1) // 2], short[(9 * s + 5) // 10])
        return (last, two, *shorts, long[(n + 1) // 2], long[(9 * n + 5) // 10])

    def _measure_previous_run(self, now_ms: int) -> tuple[float, float]:
        """Return two logarithms of seconds for the job submitted last: its run time, and its age.

        The run time is NaN until the job has ended. The age is NaN unless the job runs.
        """
        newest = self.newest
        if newest is None or newest.begin_ms is None:
            return math.nan, math.nan
        if newest.log_run is not None:
            return newest.log_run, math.nan
        return math.nan, math.log1p(max(0, now_ms - newest.begin_ms) / 1000)

    def adopt_newest(self, at_ms: int, run: RunProgress) -> None:
        """Set `newest` to a restored job that has not ended, if no later job was submitted.

        Call it after `from_dump`.
        """
        if at_ms == self.submitted_ms and self.newest is not None and self.newest.log_run is None:
            self.newest = run

    def dump(self) -> list[Any]:
        """Return a JSON-able copy, without running jobs."""
        newest = None if self.newest is None else [self.newest.begin_ms, self.newest.log_run]
        return [list(self.runs), self.count, self.failed, self.submitted_ms, newest]

    @classmethod
    def from_dump(cls, row: Sequence[Any]) -> "RunPast":
        """Build the object from the result of `dump`."""
        past = cls()
        runs, past.count, past.failed, past.submitted_ms, newest = row
        past.runs = deque(runs)
        past._sorted, past._short = sorted(runs), sorted(runs[-SHORT:])
        past._ended = None if runs else _NO_RUNS
        if newest is not None:
            past.newest = RunProgress()
            past.newest.begin_ms, past.newest.log_run = newest
        return past


def compute_quantile(ordered: Sequence[float], level: float) -> float:
    """Return a quantile, interpolated linearly between neighbours. `ordered` must not be empty.

    >>> compute_quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    at = level * (len(ordered) - 1)
    low = int(at)
    value = ordered[low]
    return value if low == at else value + (at - low) * (ordered[low + 1] - value)
