"""Computation of the best checkpoint interval (Young) from a gang's failure rate and checkpoint cost.

    interval  D = sqrt(2 w / r)                                        Young, 1974; Daly, 2006, to first order
    ETTR      (1 - w / D) (1 - r (u + D / 2))                          first order of Meta's, HPCA 2025

w: seconds that a checkpoint stops the work. r: failures of the gang per second. u: seconds from a
failure until work continues. ETTR is the effective training time ratio: the share of a running job's time
that is neither repeated work nor waiting.
"""

import math
from dataclasses import dataclass

DAY_S = 86_400.0
RESTART_S = 300.0  # where nobody told what a restart takes


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """A checkpoint interval, and the effective training time ratio (ETTR) expected at that interval."""

    interval_s: float
    failure_rate_per_day: float
    expected_ettr: float


def compute_ettr(interval_s: float, cost_s: float, rate_per_day: float, restart_s: float = RESTART_S) -> float:
    """Return the effective training time ratio at an interval between checkpoints, from 0 to 1.

    >>> round(compute_ettr(1200.0, 30.0, 512 * 0.0065), 3)
    0.941
    """
    working = max(0.0, 1 - cost_s / interval_s)
    return working * max(0.0, 1 - rate_per_day / DAY_S * (restart_s + interval_s / 2))


def make_checkpoint_plan(cost_s: float, rate_per_day: float) -> CheckpointPlan:
    """Return the best checkpoint interval and its ETTR. Both arguments must be above 0.

    Checkpoints never cost more than half of the time: the interval is at least twice the cost of a checkpoint.

    >>> plan = make_checkpoint_plan(30.0, 512 * 0.0065)
    >>> round(plan.interval_s), round(plan.expected_ettr, 2)
    (1248, 0.94)
    """
    interval_s = max(math.sqrt(2 * cost_s * DAY_S / rate_per_day), 2 * cost_s)
    return CheckpointPlan(interval_s, rate_per_day, compute_ettr(interval_s, cost_s, rate_per_day))
