"""FinishedRuns: run times of the newest finished jobs, by their number of GPUs."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fleetcast.features.run_past import LEVELS
from fleetcast.fleet.jobs import JobAttempt

MAX_RUNS = 2000
Run = tuple[int, str, int, float]  # ended_ms, job, attempt, run_s


class FinishedRuns:
    """The newest MAX_RUNS finished runs of each GPU count, and of all counts together, in order of their ends.

    Failed runs are left out, because they ended early.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[int, Run]] = {}
        self._runs: dict[int | None, list[Run]] = {None: []}
        self._quantiles: dict[int | None, dict[str, Any]] = {}

    def update(self, attempt: JobAttempt) -> None:
        """Record the current state of an attempt."""
        key = (attempt.job, attempt.attempt)
        new = _make_run(attempt)
        old = self._known.get(key)
        if new == old:
            return
        if old is not None:
            del self._known[key]
            for group in (old[0], None):
                self._remove_run(group, old[1])
        if new is not None:
            self._known[key] = new
            for group in (new[0], None):
                self._insert_run(group, new[1])

    def _insert_run(self, group: int | None, run: Run) -> None:
        runs = self._runs.setdefault(group, [])
        insort(runs, run)
        if len(runs) > MAX_RUNS:
            oldest = runs.pop(0)
            if group is not None:
                self._known.pop((oldest[1], oldest[2]), None)
        self._quantiles.pop(group, None)

    def _remove_run(self, group: int | None, run: Run) -> None:
        runs = self._runs.get(group, [])
        at = bisect_left(runs, run)
        if at < len(runs) and runs[at] == run:
            del runs[at]
        self._quantiles.pop(group, None)

    def compute_quantiles(self) -> dict[str, Any]:
        """Return quantiles of the run times in seconds, and their number `n`, by GPU count and for all.

            {"by_gpus": {"8": {"p50", "p90", "n", "levels"}}, "all": {…} | None}

        levels: the quantiles at `LEVELS`.
        """
        for group, runs in self._runs.items():
            if runs and group not in self._quantiles:
                levels = np.quantile([run[3] for run in runs], LEVELS).tolist()
                p50, p90 = levels[LEVELS.index(0.5)], levels[LEVELS.index(0.9)]
                self._quantiles[group] = {"p50": p50, "p90": p90, "n": len(runs), "levels": levels}
        by_gpus = {str(group): self._quantiles[group] for group in sorted(g for g in self._quantiles if g is not None)}
        return {"by_gpus": by_gpus, "all": self._quantiles.get(None)}

    def dump(self) -> list[list[Any]]:
        """Return a JSON-able copy: for each group its GPU count (None for all) and its runs."""
        return [[group, [*runs]] for group, runs in self._runs.items()]

    def load(self, rows: Iterable[Sequence[Any]]) -> None:
        """Restore the result of `dump`."""
        for group, saved_runs in rows:
            runs = self._runs[group] = [(ended_ms, job, attempt, run_s) for ended_ms, job, attempt, run_s in saved_runs]
            if group is not None:
                self._known |= {(run[1], run[2]): (group, run) for run in runs}


def _make_run(attempt: JobAttempt) -> tuple[int, Run] | None:
    if attempt.outcome != "finished" or attempt.run_s is None or attempt.ended_ms is None or attempt.gpus <= 0:
        return None
    if attempt.has_unseen_start:
        return None
    return attempt.gpus, (attempt.ended_ms, attempt.job, attempt.attempt, attempt.run_s)
