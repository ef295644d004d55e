"""The decision to replace nodes before they fail, by cost.

A warning is followed only if the expected saving exceeds the expected cost of a false alarm.
"""

from collections.abc import Iterable

import numpy as np

from fleetcast.placement.recovery.steps import RecoveryTimes


def compute_set_probability(p_fail: Iterable[float]) -> float:
    """Return the probability that at least one node of a set fails. Nodes fail independently of each other.

    >>> round(compute_set_probability([0.1, 0.2]), 3)
    0.28
    """
    p = np.asarray(list(p_fail), np.float64)
    return float(-np.expm1(np.log1p(-np.minimum(p, 1 - 1e-15)).sum()))


def compute_least_probability(redo_s: float, times: RecoveryTimes) -> float:
    """Return the probability of a failure above which it pays to act before the failure.

    redo_s: expected work that the failure would destroy.

    >>> round(compute_least_probability(1600, RecoveryTimes()), 3)
    0.159
    """
    saved_s, spent_s = redo_s + times.detection_s, times.checkpoint_s + times.swap_s
    return spent_s / (saved_s + spent_s) if saved_s + spent_s > 0 else 1.0


def should_act_early(p: float, redo_s: float, times: RecoveryTimes) -> bool:
    """Return whether to checkpoint now and replace the nodes before they fail.

    It pays if p × (redo + detection) > (1 − p) × (checkpoint + swap). p: the probability that the set of nodes
    fails before the next checkpoint is due or within the warning's horizon, whichever the caller knows.
    """
    return p > compute_least_probability(redo_s, times)
