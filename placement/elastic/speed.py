"""The speed of an elastic gang at each size: members ** exponent, relative to one member."""

from collections.abc import Sequence

import numpy as np

SPEED_EXPONENT = 0.9  # until the speed of a gang was observed at several sizes
PRIOR_SIZES = 1.0  # the weight of this exponent, in further observed sizes


def compute_speed(members: float, exponent: float) -> float:
    """Return the speed of a gang, relative to one member."""
    return float(members**exponent)


def learn_speed_exponent(sizes: Sequence[int], step_s: Sequence[float]) -> float:
    """Return the exponent of a job's speed from its median step times at several sizes.

    sizes: different numbers of members. step_s: seconds of a step at each size. The estimate moves from
    `SPEED_EXPONENT` to the slope of the step times as sizes are added. It is between 0 and 1.

    >>> learn_speed_exponent([4], [1.0])
    0.9
    >>> round(learn_speed_exponent([2, 4, 8], [4.0, 2.0, 1.0]), 3)
    0.967
    """
    if len(set(sizes)) < 2:
        return SPEED_EXPONENT
    slope = -float(np.polyfit(np.log(sizes), np.log(step_s), 1)[0])
    further = len(set(sizes)) - 1
    found = (further * slope + PRIOR_SIZES * SPEED_EXPONENT) / (further + PRIOR_SIZES)
    return min(1.0, max(0.0, found))
