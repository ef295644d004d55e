"""RunTracker: keeps quantiles of run times honest by what has ended since (conformal quantile tracking).

Each level has an offset for all jobs and one for each group. When a job ends, both move by their step:
offset += step * (level - 1[run <= what was issued]), so that in the long run the share below a level is the level
whatever the jobs do (Gibbs and Candès 2021; Angelopoulos et al. 2023). Feedback comes late, with the end of the job.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from features.run_past import LEVELS

Array = NDArray[np.float64]

STEP_ALL, STEP_GROUP = 0.01, 0.02  # of a logarithm, an outcome
FARTHEST = 3.0
GROUPS_KEPT = 5_000
_LEVELS = np.array(LEVELS)


class RunTracker:
    """Offsets to the logarithms of the quantiles at LEVELS."""

    def __init__(self, step_all: float = STEP_ALL, step_group: float = STEP_GROUP) -> None:
        self._steps = step_all, step_group
        self._all = np.zeros(len(LEVELS))
        self._groups: dict[str, Array] = {}

    def served(self, log_run: Array, group: str) -> Array:
        """(level,) quantiles moved by what was learnt, in order."""
        own = self._groups.get(group)
        return np.sort(log_run + (self._all if own is None else self._all + own))

    def learn(self, issued: Array, log_run: float, group: str) -> None:
        """The outcome of a job whose quantiles were issued; each is to be told once."""
        push = _LEVELS - (log_run <= issued)
        own = self._groups.pop(group, None)
        self._groups[group] = ((0.0 if own is None else own) + self._steps[1] * push).clip(-FARTHEST, FARTHEST)
        self._all = (self._all + self._steps[0] * push).clip(-FARTHEST, FARTHEST)
        if len(self._groups) > GROUPS_KEPT:
            del self._groups[next(iter(self._groups))]

    def dump(self) -> dict[str, Any]:
        """JSON-able and copied."""
        return {"all": self._all.tolist(), "groups": [[name, row.tolist()] for name, row in self._groups.items()]}

    def load(self, kept: dict[str, Any]) -> None:
        """The inverse of `dump`."""
        self._all = np.array(kept["all"], np.float64)
        self._groups = {name: np.array(row, np.float64) for name, row in kept["groups"]}
