"""JobOutcomes: nodes on which jobs fail more often than elsewhere (lemon nodes) for unknown reasons.

Each of the m nodes of an ended attempt is charged 1/m of a job, and 1/m of a failure if the attempt
failed. If the failure names a node, that node is charged the whole failure. A job that fails repeatedly
counts once against a node, until it has not failed there for REMEMBERED_MS. Failures caused by the user do
not count. Sums fade with a half-life of HALF_MS. A node's share of failures is drawn towards the fleet's,
which has the weight of PRIOR_JOBS. A signal needs FEWEST failures, and a share that is DEVIATIONS standard
deviations above the fleet's.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.risk.detectors import register_reporter
from fleetcast.models.risk.signals import Signal

DAY_MS = 86_400_000
HALF_MS = 14 * DAY_MS
PRIOR_JOBS = 20.0
FEWEST, DEVIATIONS = 3.0, 3.0
MOST_TIMES = 5.0  # a fault of its own is taken to be as much likelier as jobs fail oftener, at most so: an assumption
NOT_THE_NODE = frozenset({"user", "out_of_memory", "timeout", "cancelled"})
REMEMBERED_MS = DAY_MS  # which attempts were counted
FAILED_AT_MOST = 50_000  # jobs on nodes


class JobOutcomes:
    """The numbers of ended jobs and of failures of each node. Older ones count less."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}
        self._at_ms = 0
        self._counted: dict[tuple[str, int], int] = {}  # attempt → when it ended
        self._failed: dict[tuple[str, str], int] = {}  # job, node → when it last failed there, the oldest first

    def count_ended(self, ended: Iterable[JobAttempt], now_ms: int) -> None:
        """Count the ended attempts that have not been counted before. Attempts that ended long ago are ignored."""
        self._decay_sums(now_ms)
        for attempt in ended:
            key, end_ms = (attempt.job, attempt.attempt), attempt.ended_ms
            if end_ms is None or key in self._counted or end_ms < now_ms - REMEMBERED_MS:
                continue
            self._counted[key] = end_ms
            self._count_attempt(attempt, end_ms)
        if len(self._counted) and min(self._counted.values()) < now_ms - REMEMBERED_MS:
            self._counted = {key: at_ms for key, at_ms in self._counted.items() if at_ms >= now_ms - REMEMBERED_MS}
        if len(self._failed) and min(self._failed.values()) < now_ms - REMEMBERED_MS:
            self._failed = {key: at_ms for key, at_ms in self._failed.items() if at_ms >= now_ms - REMEMBERED_MS}
        for oldest in list(self._failed)[: max(len(self._failed) - FAILED_AT_MOST, 0)]:
            del self._failed[oldest]

    def _count_attempt(self, attempt: JobAttempt, end_ms: int) -> None:
        failure = attempt.failure if attempt.outcome == "failed" else None
        if attempt.outcome not in ("finished", "failed") or (failure and failure.category in NOT_THE_NODE):
            return
        hosts = attempt.hosts
        for name in hosts:
            jobs = 1 / len(hosts)
            failed = jobs if attempt.outcome == "failed" else 0.0
            if failure and failure.node in hosts:
                jobs, failed = (1.0, 1.0) if name == failure.node else (jobs, 0.0)
            if failed and self._record_failure(attempt.job, name, end_ms):
                continue
            own = self._sums.setdefault(name, [0.0, 0.0])
            own[0] += jobs
            own[1] += failed

    def _record_failure(self, job: str, name: str, end_ms: int) -> bool:
        """Record that a job failed on a node. Returns whether the job had failed there before."""
        before_ms = self._failed.pop((job, name), None)
        self._failed[job, name] = max(end_ms, before_ms or 0)
        return before_ms is not None

    def _decay_sums(self, now_ms: int) -> None:
        """Decay all sums to the current time, at most once an hour."""
        if now_ms - self._at_ms < DAY_MS // 24:
            return
        left = 0.5 ** ((now_ms - self._at_ms) / HALF_MS) if self._at_ms else 1.0
        self._sums = {
            name: [jobs * left, failed * left] for name, (jobs, failed) in self._sums.items() if jobs * left > 0.01
        }
        self._at_ms = now_ms

    @register_reporter("failed_jobs")
    def make_signals(self, rows: Mapping[str, int]) -> list[Signal]:
        """Return a signal for each node on which jobs fail too often.

        The strength is 1 if the node's share of failures is MOST_TIMES the usual share. rows: node name → row.
        """
        names = [name for name in self._sums if name in rows]
        if not names:
            return []
        jobs, failed = np.array([self._sums[name] for name in names]).T
        usual = float(failed.sum() / jobs.sum())
        expected = jobs * usual
        found = (failed >= FEWEST) & (failed - expected >= DEVIATIONS * np.sqrt(np.maximum(expected, 0.25)))
        times = (failed + PRIOR_JOBS * usual) / (jobs + PRIOR_JOBS) / max(usual, 1e-9)
        strength = np.clip((times - 1) / (MOST_TIMES - 1), 0.0, 1.0)
        return [
            Signal("failed_jobs", rows[names[at]], names[at], float(failed[at] / jobs[at]), usual, float(strength[at]))
            for at in np.flatnonzero(found & (strength > 0)).tolist()
        ]

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return a copy of the state for a snapshot."""
        counted: Sequence[Any] = [[job, attempt, at_ms] for (job, attempt), at_ms in self._counted.items()]
        failed: Sequence[Any] = [[job, node, at_ms] for (job, node), at_ms in self._failed.items()]
        sums = {name: list(own) for name, own in self._sums.items()}
        return {"sums": sums, "at_ms": self._at_ms, "counted": counted, "failed": failed}, {}

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Fill an empty object with the state that `dump` returned."""
        self._sums = {name: list(own) for name, own in about["sums"].items()}
        self._at_ms = about["at_ms"]
        self._counted = {(job, attempt): at_ms for job, attempt, at_ms in about["counted"]}
        self._failed = {(job, node): at_ms for job, node, at_ms in about["failed"]}

    def shift_times(self, by_ms: int) -> None:
        """Shift all stored times by `by_ms`, because the clock was set."""
        self._at_ms += by_ms if self._at_ms else 0
        self._counted = {key: at_ms + by_ms for key, at_ms in self._counted.items()}
        self._failed = {key: at_ms + by_ms for key, at_ms in self._failed.items()}
