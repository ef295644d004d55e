"""Run times by GPU count, learnt from jobs as they end. A plan uses them to estimate running jobs."""

from collections import deque
from collections.abc import Sequence

import numpy as np

from fleetcast.placement.machines.running_jobs import RUN_LEVELS
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from fleetcast.placement.play.capacity import CountAsk

MAX_RUNS = 200  # of a GPU count
RELEARN = 0.05  # of its runs are new: learn its quantiles again


class SeenRuns:
    """The run times of jobs that have ended in a play so far.

    times: their quantiles, in the form that the placer reads from a board.
    """

    def __init__(self) -> None:
        self._runs: dict[int, deque[float]] = {}
        self._new: dict[int, int] = {}
        self._rows: dict[int, dict[str, object]] = {}
        self.times = RunTimeQuantiles({})

    def record_end(self, gpus: int, run_s: float) -> None:
        learnt = False
        for count in (gpus, 0):
            runs = self._runs.setdefault(count, deque(maxlen=MAX_RUNS))
            runs.append(run_s)
            self._new[count] = self._new.get(count, 0) + 1
            if self._new[count] > RELEARN * len(runs):
                self._rows[count], self._new[count], learnt = _make_row(runs), 0, True
        if learnt:
            self.times = RunTimeQuantiles.from_durations({"by_gpus": self._rows, "all": self._rows[0]})

    def plan_run_s(self, ask: CountAsk, age_s: float) -> float:
        """Return the total run time in seconds that is planned for a job.

        This is its time limit. Without a limit, it is the p90 of similar jobs that ran longer than `age_s`.
        """
        if ask.limit_s is not None:
            return ask.limit_s
        return self.times.estimate_run_s(ask.gpus, 0.9, age_s=age_s)


def _make_row(runs: Sequence[float]) -> dict[str, object]:
    levels = np.quantile(runs, RUN_LEVELS)
    return {"n": len(runs), "p50": levels[RUN_LEVELS.index(0.5)], "p90": levels[RUN_LEVELS.index(0.9)]}
