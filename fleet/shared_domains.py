"""What nodes of one domain share: a cooling loop, a breaker, a leaf switch. The same for forecasts and placements."""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FAULTS_PER_DAY = {"rack": 2e-4, "power": 1e-4, "rail": 2e-4}  # of what a whole domain shares
SPREADS = 0.1  # of a member's own hazard above the usual, what its domain has in common with it


def shared_hazard(level: str, excess: Array, duration_s: float) -> Array:
    """What domains of two or more members add to their gang's hazard. excess: of the worst member of each.

    >>> shared_hazard("rack", np.array([0.0, 0.5]), 86_400).tolist()
    [0.0002, 0.0502]
    """
    return np.asarray(FAULTS_PER_DAY[level] * duration_s / 86_400 + SPREADS * excess)
