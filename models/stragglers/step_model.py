"""StepModel: the expected time of a step from its work: T = a N + b sum l^2 + c.

N is the number of tokens, in sequences of length l. The linear layers need time per token, and attention
needs time by the square of the length. Jobs that do not report N have no model. Neither have jobs whose times
do not follow N.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import Step
from fleetcast.models.peers import compute_median

Array = NDArray[np.float64]

FEWEST = 16
EXPLAINED = 0.5  # the least share of the spread of step times that the model must explain
VARIED = 0.02  # less variation of the work than this teaches nothing


@dataclass(frozen=True, slots=True)
class StepModel:
    """The costs of a step in seconds: per token, per token and length, and fixed. No cost is below 0."""

    token_s: float
    attention_s: float
    fixed_s: float

    def predict_s(self, work: Array) -> Array:
        """Return (step,) the predicted seconds. work: (step, 2), the result of `compute_step_work`."""
        return np.asarray(work @ np.array([self.token_s, self.attention_s]) + self.fixed_s)


def compute_step_work(steps: list[Step]) -> Array | None:
    """Return (step, 2) the work of each step: its tokens N, and the sum of squared sequence lengths.

    Returns None if a step lacks its tokens, or only some steps state their length. If no step states a
    length, all lengths count as equal, and times depend on the tokens alone.
    """
    if not steps or not steps[-1].tokens:
        return None
    tokens = np.array([step.tokens or 0 for step in steps], np.float64)
    length = np.array([step.sequence_length or 0.0 for step in steps])
    if not length.any():
        length = np.ones(len(steps))
    return np.column_stack((tokens, tokens * length)) if tokens.all() and length.all() else None


def fit_steps(work: Array, duration: Array) -> StepModel | None:
    """Fit the costs by least squares, with no cost below 0.

    Returns None if the work explains too little of the times. work: (step, 2). duration: (step,)
    seconds.

    >>> tokens = np.tile([1000.0, 2000.0, 3000.0, 4000.0], 6)
    >>> model = fit_steps(np.column_stack((tokens, tokens * 512)), 1.0 + tokens / 1000)
    >>> [round(float(seconds), 2) for seconds in model.predict_s(np.array([[5000.0, 5000.0 * 512]]))]
    [6.0]
    """
    if len(duration) < FEWEST or float((work.std(axis=0) / work.mean(axis=0)).max()) < VARIED:
        return None
    off = np.abs(duration - compute_median(duration))
    usual = off <= 10 * (compute_median(off) + 1e-9)
    scale = work.mean(axis=0)
    table = np.column_stack((work / scale, np.ones(len(work))))
    cost = _fit_nonnegative_costs(table[usual], duration[usual])
    left = duration[usual] - table[usual] @ cost
    if left.var() > (1 - EXPLAINED) * duration[usual].var():
        return None
    return StepModel(float(cost[0] / scale[0]), float(cost[1] / scale[1]), float(cost[2]))


def _fit_nonnegative_costs(table: Array, seconds: Array) -> Array:
    """Return (column,) the least-squares costs, with no cost below 0.

    The function tries all subsets of the few columns, and uses the best subset.
    """
    columns = table.shape[1]
    # A few rows with the same sums of squares.
    rotated = np.asarray(np.linalg.qr(np.column_stack((table, seconds)), mode="r"))
    table, seconds = rotated[:, :columns], rotated[:, columns]
    cost = np.linalg.lstsq(table, seconds, rcond=None)[0]
    if (cost >= 0).all():
        return np.asarray(cost)
    best, least = np.zeros(columns), float((seconds**2).sum())
    for count in range(1, columns):
        for chosen in combinations(range(columns), count):
            cost = np.linalg.lstsq(table[:, chosen], seconds, rcond=None)[0]
            left = float(((seconds - table[:, chosen] @ cost) ** 2).sum())
            if (cost >= 0).all() and left < least:
                best, least = np.zeros(columns), left
                best[list(chosen)] = cost
    return best


@dataclass(frozen=True, slots=True)
class ExplainedTimes:
    """The predicted seconds of each step, and the measured seconds without the part that unusual work explains."""

    predicted_s: Array
    duration: Array


def explain_times(steps: list[Step], duration: Array, last: int) -> ExplainedTimes | None:
    """Explain the times of steps by their work. Returns None if the work does not explain them.

    The model is fitted on all steps except the `last` ones.
    """
    work = compute_step_work(steps)
    model = fit_steps(work[:-last], duration[:-last]) if work is not None and len(work) > last else None
    if work is None or model is None:
        return None
    predicted = model.predict_s(work)
    usual_s = compute_median(predicted[:-last])
    return ExplainedTimes(predicted, duration * usual_s / np.maximum(predicted, 1e-9))
