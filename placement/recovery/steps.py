"""The ways to let an interrupted gang run again, each with its delay and its cost.

The steps form a ladder. The first ones keep the healthy members in place ("pinned").
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class RecoveryStep(StrEnum):
    """A way to let an interrupted gang run again. The order is that of the ladder."""

    IN_PLACE = "in_place"  # all its nodes are healthy: the processes restart where they were
    SPARE = "spare"  # lost nodes are replaced by spare nodes
    FREE = "free"  # lost nodes are replaced by free nodes
    BORROW = "borrow"  # other jobs stop and leave the nodes that are missing
    SHRINK = "shrink"  # an elastic gang runs on with fewer members
    ELSEWHERE = "elsewhere"  # the whole gang moves to another domain
    WAIT = "wait"  # the healthy members hold their places until nodes become free


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """The durations of recovery at a site, in seconds.

    checkpoint_s: the gang stands still for one checkpoint. detection_s: from a failure to the decision. restart_s:
    from the decision to the first new step if the whole gang starts again. swap_s: the same if the healthy members
    stay. free_after_s: until enough nodes become free if none is. grace_s: between the announced and the actual
    stop of a job.
    """

    checkpoint_s: float = 60.0
    detection_s: float = 300.0
    restart_s: float = 900.0
    swap_s: float = 300.0
    free_after_s: float = 1800.0
    grace_s: float = 120.0

    def compute_delay_s(self, step: RecoveryStep) -> float:
        """Return the seconds from the decision to the first new step of the gang."""
        if step is RecoveryStep.BORROW:
            return self.grace_s + self.swap_s
        if step is RecoveryStep.ELSEWHERE:
            return self.restart_s
        if step is RecoveryStep.WAIT:
            return self.free_after_s + self.swap_s
        return self.swap_s


@dataclass(frozen=True, slots=True)
class PricedStep:
    """A step that is possible. cost_gpu_s: idle GPU-seconds of the gang, and the losses of others."""

    step: RecoveryStep
    delay_s: float
    cost_gpu_s: float


def price_step(
    step: RecoveryStep, times: RecoveryTimes, gpus: float, others_gpu_s: float = 0.0, after_s: float = 0.0
) -> PricedStep:
    """Return a step with its delay and cost for a gang of `gpus` GPUs.

    others_gpu_s: GPU-seconds that the step costs besides the delay, such as the lost work of stopped jobs. after_s:
    seconds until the step may begin.

    >>> price_step(RecoveryStep.BORROW, RecoveryTimes(), gpus=16, others_gpu_s=7200)
    PricedStep(step=<RecoveryStep.BORROW: 'borrow'>, delay_s=420.0, cost_gpu_s=13920.0)
    """
    delay_s = after_s + times.compute_delay_s(step)
    return PricedStep(step, delay_s, gpus * delay_s + others_gpu_s)


def choose_step(possible: Iterable[PricedStep]) -> PricedStep:
    """Return the step that costs least. Among equal costs the first on the ladder wins.

    Raises ValueError if no step is possible.
    """
    ladder = list(RecoveryStep)
    return min(possible, key=lambda priced: (priced.cost_gpu_s, ladder.index(priced.step)))
