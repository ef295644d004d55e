"""Random run times for playing a queue forward, drawn from the newest runs of similar jobs."""

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

MAX_RUNS = 30  # newest runs of a key: recent ones tell more than many
FEWEST = 3
SHARED = 0.6  # of the variance is common to jobs of one kind: a sweep is long or short as a whole
NORMAL = NormalDist()

Key = tuple[int, ...]
Levels = NDArray[np.float64]


class RunPools:
    """The newest run times of each kind of job, recorded in order of the jobs' ends.

    A job belongs to several kinds, the most specific first. A kind is a tuple of keys.
    """

    def __init__(self) -> None:
        self._runs: dict[Key, deque[float]] = defaultdict(lambda: deque(maxlen=MAX_RUNS))

    def record_end(self, kinds: Sequence[Key], run_s: float) -> None:
        """Record that a job of these kinds ran for `run_s`."""
        for kind in kinds:
            self._runs[kind].append(math.log(max(run_s, 1.0)))

    def find_known_runs(self, kinds: Sequence[Key]) -> Levels:
        """Return (k,) logarithms of run times in seconds, ascending, of the first kind with enough runs.

        Returns an empty array if no kind has enough.
        """
        for kind in kinds:
            runs = self._runs.get(kind)
            if runs is not None and len(runs) >= FEWEST:
                return np.sort(np.array(runs))
        return np.zeros(0)

    def draw_run_times(
        self, kinds: Sequence[Key], limit_s: float, ages_s: Levels, own: Levels, common: Levels
    ) -> Levels:
        """Draw (path, job) run times in seconds of jobs of the same kinds that have run for `ages_s` (job,).

        A run time is at most `limit_s`. own: (path, job) a standard normal value for each job. common: (path,) a
        standard normal value that all jobs of a path share. A job older than all known runs doubles its age in half of
        the draws.
        """
        mixed = math.sqrt(SHARED) * common[:, None] + math.sqrt(1 - SHARED) * own
        levels = 0.5 * (1 + _compute_error_function(mixed / math.sqrt(2)))
        known = self.find_known_runs(kinds)
        if not len(known):
            known = np.log(np.array([60.0, max(limit_s, 61.0)]))
        at = (np.arange(len(known)) + 0.5) / len(known)
        passed = np.interp(np.log(np.maximum(ages_s, 1.0)), known, at, left=0.0, right=1.0)
        run_s = np.exp(np.interp(passed + levels * (1 - passed), at, known))
        pareto_s = ages_s / (1 - np.minimum(levels, 0.98))
        run_s = np.where(passed >= at[-1], pareto_s, run_s)
        return np.asarray(np.clip(run_s, ages_s + 1, np.maximum(limit_s, ages_s + 1)))


def _compute_error_function(x: Levels) -> Levels:
    """Return the error function of each value (Abramowitz and Stegun 7.1.26), accurate to 1.5e-7."""
    t = 1 / (1 + 0.3275911 * np.abs(x))
    tail = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    return np.asarray(np.sign(x) * (1 - tail * np.exp(-x * x)))


def compute_normal_quantiles(paths: int) -> Levels:
    """Return (path,) standard normal values at evenly spaced probabilities."""
    return np.array([NORMAL.inv_cdf((path + 0.5) / paths) for path in range(paths)])
