"""RunTracker: corrections of run-time quantiles by the outcomes of ended jobs.

    served = model + weight * (similar jobs - model) + offset          logarithms, at each level

The offset, one for all jobs, follows coverage (conformal quantile tracking: Gibbs and Candès 2021;
Angelopoulos et al. 2023). Once for every hour in which jobs ended it moves by

    step * mean over those jobs of (level - 1[run <= the issued quantile])

A sweep of a thousand jobs ends within minutes. With a step for each job, the offset would run away
before the first corrected forecast is checked. So an hour is one step, and an hour with many jobs counts
as a few steps.

The weight, one for each kind of jobs, follows the gradient of the pinball loss, with a small step
for each job (online gradient descent: Zinkevich 2003). If a kind of job now runs differently than at the
fit, its newest jobs get more weight. They change the answer by at most MOST_APART, so that no sweep
can spoil it. Before the first outcome, the model's answer is not changed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.run_past import LEVELS

Array = NDArray[np.float64]
Kind = tuple[str, float]  # group or queue, GPUs

STEP = 0.12  # of a logarithm
PERIOD_S = 3600.0
USUAL, POWER, MOST = 20, 0.7, 8.0  # an hour of n jobs counts (n / USUAL) ** POWER, at most MOST
FARTHEST = 3.0
WEIGHT_STEP, MOST_WEIGHT = 0.02, 0.9
MOST_APART = 1.0  # of a logarithm
MAX_KINDS = 4096
_LEVELS = np.array(LEVELS)
_NO_WEIGHT = np.zeros(len(LEVELS))


class RunTracker:
    """The corrections of run-time quantiles: an offset at each level, and weights of similar jobs by kind.

    All corrections apply to logarithms.
    """

    def __init__(self) -> None:
        self.offset = np.zeros(len(LEVELS))
        self._weight: dict[Kind, Array] = {}  # by kind, the one that ended a job longest ago first
        self._push = np.zeros(len(LEVELS))
        self._jobs = 0
        self._since_s: float | None = None

    def correct_quantiles(self, log_run: Array, similar: Array, kinds: Sequence[Kind]) -> Array:
        """Return (job, level) the corrected log quantiles, in ascending order.

        log_run: (job, level) the log quantiles of the model. similar: (job, level) those of similar jobs, NaN if
        unknown.
        """
        weight = np.array([self._weight.get(kind, _NO_WEIGHT) for kind in kinds]).reshape(log_run.shape)
        apart = np.nan_to_num(similar - log_run).clip(-MOST_APART, MOST_APART)
        return np.sort(log_run + weight * apart + self.offset, axis=-1)

    def learn_outcome(self, issued: Array, similar: Array, kind: Kind, log_run: float, now_s: float) -> None:
        """Update the corrections with the outcome of a job, known at `now_s`. Call this once for each job.

        issued: (level,) the log quantiles that were issued for the job. log_run: the job's log run time.
        """
        if self._since_s is None:
            self._since_s = now_s
        miss = _LEVELS - (log_run <= issued)
        weight = self._weight.pop(kind, _NO_WEIGHT)
        apart = np.nan_to_num((similar + self.offset - issued) / (1 - weight)).clip(-MOST_APART, MOST_APART)
        self._weight[kind] = (weight + WEIGHT_STEP * miss * apart).clip(0.0, MOST_WEIGHT)
        if len(self._weight) > MAX_KINDS:
            del self._weight[next(iter(self._weight))]
        self._push += miss
        self._jobs += 1
        if now_s - self._since_s >= PERIOD_S:
            busy = min(MOST, (self._jobs / USUAL) ** POWER)
            self.offset = (self.offset + STEP * busy * self._push / self._jobs).clip(-FARTHEST, FARTHEST)
            self._push, self._jobs, self._since_s = np.zeros(len(LEVELS)), 0, now_s

    def dump(self) -> dict[str, Any]:
        """Return a copy of the state that can be written as JSON."""
        return {
            "offset": self.offset.tolist(),
            "push": self._push.tolist(),
            "jobs": self._jobs,
            "since_s": self._since_s,
            "weight": [[kind, row.tolist()] for kind, row in self._weight.items()],
        }

    def load(self, saved: dict[str, Any]) -> None:
        """Restore the state that `dump` returned."""
        self.offset, self._push = (np.array(saved[name], np.float64) for name in ("offset", "push"))
        self._jobs, self._since_s = saved["jobs"], saved["since_s"]
        self._weight = {tuple(kind): np.array(row, np.float64) for kind, row in saved["weight"]}
