"""Circular compatibility: whether two jobs that use a link in turns of their steps get in each other's way.

    one turn    period_s, of which `busy_share` sends at `rate` of the link's capacity, the rest computes
    circle      both turns go round a circle of their least common multiple (periods rounded to a ratio of small whole
                numbers); a shift turns one against the other, 5 degrees at a time
    overload    the share of a job's sending that falls on the other's, times what the two want beyond the capacity
    speed       period / (period + sending * overload)

Two jobs whose periods have no such ratio drift through all shifts: the mean is theirs. After the idea of CASSINI
(Rajasekaran et al., NSDI'24); the formula of the slowdown is ours.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEP_DEGREES = 5
MOST_TURNS = 12
RATIO_ERROR = 0.02  # a ratio of periods that is nearer than this to small whole numbers is that
CELLS = 720  # of the circle


@dataclass(frozen=True, slots=True)
class Turns:
    """How a job uses a link: every `period_s` it sends for `busy_share` of the time at `rate` of the capacity."""

    period_s: float
    busy_share: float
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """(shift,) speeds of a and b relative to alone at each shift of b; `locked`: the shift stays as it is."""

    speed_a: Array
    speed_b: Array
    locked: bool

    @property
    def compatibility(self) -> float:
        """The best that a shift can give: the speed of the slower one."""
        return float(np.minimum(self.speed_a, self.speed_b).max())

    @property
    def best_shift_degrees(self) -> int:
        return int(np.minimum(self.speed_a, self.speed_b).argmax()) * STEP_DEGREES


def ratio_of(a_s: float, b_s: float) -> tuple[int, int] | None:
    """Turns of a and of b that take about as long; None where no small numbers do, or a period is none.

    >>> ratio_of(1.0, 2.01), ratio_of(1.0, 1.0), ratio_of(1.0, 1.387)
    ((2, 1), (1, 1), None)
    """
    if not (0 < a_s < math.inf and 0 < b_s < math.inf and math.isfinite(b_s / a_s)):
        return None
    found = Fraction(b_s / a_s).limit_denominator(MOST_TURNS)
    turns = found.numerator, found.denominator
    near = 0 < max(turns) <= MOST_TURNS and abs(turns[0] * a_s / (turns[1] * b_s) - 1) <= RATIO_ERROR
    return turns if near and min(turns) > 0 and math.lcm(*turns) <= MOST_TURNS else None


def overlap(a: Turns, b: Turns) -> Overlap:
    """Speeds at every shift of one circle.

    >>> half = Turns(1.0, 0.5)
    >>> both = overlap(half, half)
    >>> round(both.speed_a[0], 2), round(both.compatibility, 2), both.best_shift_degrees
    (np.float64(0.67), 1.0, 180)
    """
    turns = ratio_of(a.period_s, b.period_s)
    beyond = max(0.0, a.rate + b.rate - 1.0)
    shifts = np.arange(0, 360, STEP_DEGREES)
    if turns is None:
        return Overlap(
            np.full(len(shifts), _speed(a, beyond * b.busy_share)),
            np.full(len(shifts), _speed(b, beyond * a.busy_share)),
            False,
        )
    sends_a, sends_b = _circle(a.busy_share, turns[0]), _circle(b.busy_share, turns[1])
    both = _meetings(sends_a, sends_b)[shifts * CELLS // 360]
    return Overlap(
        _speed(a, beyond * both / max(sends_a.mean(), 1 / CELLS)),
        _speed(b, beyond * both / max(sends_b.mean(), 1 / CELLS)),
        True,
    )


def _speed(job: Turns, overload: Array | float) -> Array:
    return np.asarray(1.0 / (1.0 + job.busy_share * np.asarray(overload)))


def _meetings(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> Array:
    """(CELLS,) share of the circle on which both send, at each shift of b: a circular correlation."""
    turned = np.fft.rfft(a.astype(np.float64)) * np.conj(np.fft.rfft(b.astype(np.float64)))
    return np.asarray(np.fft.irfft(turned, CELLS).clip(min=0.0) / CELLS)


def _circle(busy_share: float, turns: int) -> NDArray[np.bool_]:
    """(CELLS,) whether the job sends there."""
    return np.asarray((np.arange(CELLS) * turns / CELLS) % 1.0 < busy_share)
