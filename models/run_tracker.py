"""RunTracker: keeps quantiles of run times honest by what has ended since (conformal quantile tracking).

Each level has an offset. Once an hour in which jobs ended it moves by

    step * mean over those jobs of (level - 1[run <= what was issued])

so that in the long run the share below a level is the level, whatever the jobs do (Gibbs and Candès 2021; Angelopoulos
et al. 2023). Feedback comes late, with the end of the job, and a sweep of a thousand jobs ends within minutes: a step
for each of them would run away before the first corrected forecast is checked. So an hour is one step, and a busy one
counts for a few. An offset for each group as well made it worse on every history tried.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.run_past import LEVELS

Array = NDArray[np.float64]

STEP = 0.12  # of a logarithm
PERIOD_S = 3600.0
USUAL, POWER, MOST = 20, 0.7, 8.0  # an hour of n jobs counts (n / USUAL) ** POWER, at most MOST
FARTHEST = 3.0
_LEVELS = np.array(LEVELS)


class RunTracker:
    """Offsets to the logarithms of the quantiles at LEVELS."""

    def __init__(self) -> None:
        self.offset = np.zeros(len(LEVELS))
        self._push = np.zeros(len(LEVELS))
        self._jobs = 0
        self._since_s: float | None = None

    def served(self, log_run: Array) -> Array:
        """(…, level) quantiles moved by what was learnt, in order."""
        return np.sort(log_run + self.offset, axis=-1)

    def learn(self, issued: Array, log_run: float, now_s: float) -> None:
        """The outcome, at now_s, of a job whose quantiles (level,) were issued; each is to be told once."""
        if self._since_s is None:
            self._since_s = now_s
        self._push += _LEVELS - (log_run <= issued)
        self._jobs += 1
        if now_s - self._since_s >= PERIOD_S:
            weight = min(MOST, (self._jobs / USUAL) ** POWER)
            self.offset = (self.offset + STEP * weight * self._push / self._jobs).clip(-FARTHEST, FARTHEST)
            self._push, self._jobs, self._since_s = np.zeros(len(LEVELS)), 0, now_s

    def dump(self) -> dict[str, Any]:
        """JSON-able and copied."""
        return {
            "offset": self.offset.tolist(),
            "push": self._push.tolist(),
            "jobs": self._jobs,
            "since_s": self._since_s,
        }

    def load(self, kept: dict[str, Any]) -> None:
        """The inverse of `dump`."""
        self.offset, self._push = (np.array(kept[name], np.float64) for name in ("offset", "push"))
        self._jobs, self._since_s = kept["jobs"], kept["since_s"]
