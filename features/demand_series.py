"""DemandSeries: what the pools were asked for and gave, as regular series, from job attempts in event time.

What an attempt adds to the series is a pure function of its state: when it changes, the old contribution is taken
off and the new one added. So any order and any repetition of the same events end in the same series.

    submitted ──────────── started ───────────── ended         first attempts only: arriving + gpus, arriving_jobs + 1
    queued  + gpus         queued - gpus                       an attempt that ends unstarted leaves the queue
                           running + gpus        running - gpus

An attempt that nobody submitted arrives as it starts. Attempts without GPUs are no demand. A resized attempt counts
as if it had always had its present size.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from features.delta_bins import ARRIVING, ARRIVING_JOBS, QUEUED, RUNNING, DeltaBins
from features.finished_runs import FinishedRuns
from fleet.jobs import JobAttempt

Target = Literal["arriving", "arriving_jobs", "running", "queued", "wanted"]
TARGETS: tuple[Target, ...] = ("arriving", "arriving_jobs", "running", "queued", "wanted")
EVERYTHING = "all"
BINS = {60: 24 * 60, 600: 35 * 24 * 6}  # seconds of a bin -> full bins kept: a day, and 35 days
MOST_POOLS = 200


@dataclass(frozen=True, slots=True)
class Contribution:
    """What an attempt adds. Times are None where the attempt has not come so far."""

    pool: str
    gpus: int
    arrives: bool
    submitted_ms: int | None
    started_ms: int | None
    ended_ms: int | None

    def row(self) -> tuple[str, int, bool, int | None, int | None, int | None]:
        """Its fields, in order."""
        return self.pool, self.gpus, self.arrives, self.submitted_ms, self.started_ms, self.ended_ms

    def edges(self) -> list[tuple[int, int, int, int, int]]:
        """Changes as (time_ms, arriving, arriving_jobs, running, queued)."""
        gpus, submitted, started, ended = self.gpus, self.submitted_ms, self.started_ms, self.ended_ms
        arrival = submitted if submitted is not None else started
        assert arrival is not None, "no contribution without an arrival"
        waits = gpus if submitted is not None else 0
        edges = [(arrival, gpus * self.arrives, int(self.arrives), 0, waits)]
        if started is not None:
            edges.append((max(started, arrival), 0, 0, gpus, -waits))
            if ended is not None:
                edges.append((max(ended, started, arrival), 0, 0, -gpus, 0))
        elif ended is not None:
            edges.append((max(ended, arrival), 0, 0, 0, -waits))
        return edges


def contribution(attempt: JobAttempt) -> Contribution | None:
    """What an attempt adds to the series; None when it is no demand for GPUs, or nobody told yet that it arrived."""
    gpus = attempt.gpus
    if gpus <= 0 or (attempt.submitted_ms is None and attempt.started_ms is None):
        return None
    arrives = attempt.attempt <= 1
    return Contribution(attempt.queue, gpus, arrives, attempt.submitted_ms, attempt.started_ms, attempt.over_ms)


class DemandSeries:
    """Series per pool and for all together, at 1 minute for a day and at 10 minutes for 35 days.

    Pools are the names of queues. Beyond MOST_POOLS names a further queue counts in "all" only, so that names made
    up by a client do not eat the memory.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], Contribution] = {}
        self._bins: dict[tuple[str, int], DeltaBins] = {
            (EVERYTHING, seconds): DeltaBins(seconds * 1000, bins + 1) for seconds, bins in BINS.items()
        }
        self._attempts: dict[str, int] = {}  # pool -> attempts that count in it
        self._runs = FinishedRuns()

    def update(self, attempt: JobAttempt) -> None:
        """Take in the present state of an attempt; costs nothing where it adds what it added before."""
        self._runs.update(attempt)
        key = (attempt.job, attempt.attempt)
        new, old = contribution(attempt), self._known.get(key)
        if new == old:
            return
        if old is not None:
            self._add(old, -1)
            del self._known[key]
        if new is not None:
            self._add(new, 1)
            self._known[key] = new

    def _add(self, change: Contribution, sign: int) -> None:
        pools = (EVERYTHING,) if change.pool == EVERYTHING else (change.pool, EVERYTHING)
        holders = [bins for pool in pools for bins in self._of(pool)]
        for time_ms, arriving, jobs, running, queued in change.edges():
            amounts = (sign * arriving, sign * jobs, sign * running, sign * queued, sign)
            for bins in holders:
                bins.add(time_ms, amounts)
        if change.pool in self._attempts:
            self._attempts[change.pool] += sign

    def _of(self, pool: str) -> list[DeltaBins]:
        """The bins of a pool, made when it is new; none when there are too many pools."""
        if (pool, 60) not in self._bins:
            if len(self._attempts) >= MOST_POOLS:
                return []
            self._attempts[pool] = 0
            for seconds, bins in BINS.items():
                self._bins[pool, seconds] = DeltaBins(seconds * 1000, bins + 1)
        return [self._bins[pool, seconds] for seconds in BINS]

    def pools(self) -> tuple[str, ...]:
        """Names of queues that attempts named, sorted, and "all" at the end."""
        return (*sorted(pool for pool, attempts in self._attempts.items() if attempts > 0), EVERYTHING)

    def series(self, pool: str, target: Target, now_ms: int, bin_s: int, bins: int) -> NDArray[np.float64]:
        """(bin,) oldest first; NaN before the first event of any pool, and everywhere for a pool never seen.

        `bin_s` is 60 or 600. Levels (running, queued, wanted) are as of the end of a bin, the last one being the bin
        that holds `now_ms`; arrivals are sums, the last one of the last full bin.
        """
        everything = self._bins[EVERYTHING, bin_s]
        chosen = self._bins.get((pool, bin_s))
        last = now_ms // (bin_s * 1000)
        if chosen is None:
            return np.full(bins, np.nan)
        everything.advance(last)
        chosen.advance(last)
        values = _READ[target](chosen, last, bins)
        first = last - bins + 1 if target not in ("arriving", "arriving_jobs") else last - bins
        values[np.arange(first, first + bins) < max(everything.first_bin(), chosen.oldest_bin())] = np.nan
        return values

    def durations(self) -> dict[str, Any]:
        """How long finished jobs ran: {"by_gpus": {"8": {"p50", "p90", "n"}}, "all": {…} | None}, in seconds."""
        return self._runs.quantiles()

    def finished_run_s(self, gpus: int) -> float | None:
        """The running p90 of the run times of finished jobs of this GPU count, in seconds; None before the first."""
        row = self._runs.quantiles()["by_gpus"].get(str(gpus))
        return None if row is None else float(row["p90"])

    def forget(self, attempt: JobAttempt) -> None:
        """Drop the memory of an attempt that changes no more; its part of the series stays."""
        self._known.pop((attempt.job, attempt.attempt), None)

    def recall(self, attempt: JobAttempt) -> None:
        """The inverse of `forget`, before an attempt changes after all: what it added is known again."""
        added = contribution(attempt)
        if added is not None:
            self._known[attempt.job, attempt.attempt] = added

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
        """What a snapshot keeps, all of it copied: JSON-able parts, and arrays by name."""
        about: dict[str, Any] = {
            "known": [(*key, *added.row()) for key, added in self._known.items()],
            "attempts": dict(self._attempts),
            "runs": self._runs.dump(),
            "bins": [],
        }
        arrays = {}
        for number, ((pool, seconds), bins) in enumerate(self._bins.items()):
            row, arrays[f"bins {number}"] = bins.dump()
            about["bins"].append({"pool": pool, "seconds": seconds, **row})
        return about, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[np.float64]]) -> None:
        """The inverse of `dump`, into an empty one; queues that nobody has used for all of its bins are left out."""
        for number, row in enumerate(about["bins"]):
            pool, seconds = row["pool"], row["seconds"]
            bins = DeltaBins(seconds * 1000, BINS[seconds] + 1)
            bins.load(row, arrays[f"bins {number}"])
            self._bins[pool, seconds] = bins
        longest = max(BINS)
        idle = {pool for pool in about["attempts"] if self._bins[pool, longest].is_idle()}
        self._attempts = {pool: count for pool, count in about["attempts"].items() if pool not in idle}
        self._bins = {key: bins for key, bins in self._bins.items() if key[0] not in idle}
        self._known = {(job, attempt): Contribution(*added) for job, attempt, *added in about["known"]}
        self._runs.load(about["runs"])


_READ: dict[str, Callable[[DeltaBins, int, int], NDArray[np.float64]]] = {
    "arriving": lambda rows, last, bins: rows.sums(ARRIVING, last - 1, bins),
    "arriving_jobs": lambda rows, last, bins: rows.sums(ARRIVING_JOBS, last - 1, bins),
    "running": lambda rows, last, bins: rows.levels(RUNNING, last, bins),
    "queued": lambda rows, last, bins: rows.levels(QUEUED, last, bins),
    "wanted": lambda rows, last, bins: rows.levels(RUNNING, last, bins) + rows.levels(QUEUED, last, bins),
}
