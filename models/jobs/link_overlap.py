"""Prediction of whether the sending phases of jobs collide on one link (circular compatibility).

    one turn    period_s. For `busy_share` of it the job sends at `rate` of the link's capacity, else it computes
    circle      the turns of both jobs on a circle of their least common multiple (periods rounded to a small
                ratio). A shift turns one against the other, 5 degrees at a time
    overload    the share of a job's sending that coincides with the other's, times their joint demand
                beyond the capacity
    speed       period / (period + sending * overload)
    compatible  1 - the mean over the circle of the joint demand beyond the capacity, at the best shift

Jobs whose periods have no such ratio drift through all shifts, so they get the mean. If there are more
than two jobs, each gets the best shift given the shifts of those before it. The method is that of CASSINI
(Rajasekaran et al., NSDI'24). The formula of the slowdown is our own.
"""

import math
from collections.abc import Sequence
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
class SendingTurns:
    """The periodic use of a link by a job.

    In every period of `period_s`, the job sends for `busy_share` of the time, at `rate` of the link's capacity.
    """

    period_s: float
    busy_share: float
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Overlap:
    """The speeds of two jobs, a and b, on one link, relative to running alone.

    speed_a, speed_b: (shift,) for each shift of b against a. locked: whether the shift between them stays
    the same.
    """

    speed_a: Array
    speed_b: Array
    locked: bool


@dataclass(frozen=True, slots=True)
class LinkFit:
    """The best shifts of jobs that share a link, and how compatible the jobs are.

    compatibility: 0 to 1. shifts_s: the number of seconds after the first job at which each job should begin, None
    if the jobs drift, because then no shift lasts.
    """

    compatibility: float
    shifts_s: tuple[float, ...] | None


def find_turn_ratio(a_s: float, b_s: float) -> tuple[int, int] | None:
    """Return the smallest numbers of turns of a and of b that take about the same time.

    Returns None if there are no such small numbers, or if a period is not positive and finite.

    >>> find_turn_ratio(1.0, 2.01), find_turn_ratio(1.0, 1.0), find_turn_ratio(1.0, 1.387)
    ((2, 1), (1, 1), None)
    """
    if not (0 < a_s < math.inf and 0 < b_s < math.inf and math.isfinite(b_s / a_s)):
        return None
    found = Fraction(b_s / a_s).limit_denominator(MOST_TURNS)
    turns = found.numerator, found.denominator
    near = 0 < max(turns) <= MOST_TURNS and abs(turns[0] * a_s / (turns[1] * b_s) - 1) <= RATIO_ERROR
    return turns if near and min(turns) > 0 and math.lcm(*turns) <= MOST_TURNS else None


def compute_overlap(a: SendingTurns, b: SendingTurns) -> Overlap:
    """Return the speeds of two jobs on one link, at every shift of one against the other.

    >>> half = SendingTurns(1.0, 0.5)
    >>> both = compute_overlap(half, half)
    >>> round(float(both.speed_a[0]), 2), float(both.speed_a[180 // STEP_DEGREES])
    (0.67, 1.0)
    """
    turns = find_turn_ratio(a.period_s, b.period_s)
    beyond = max(0.0, a.rate + b.rate - 1.0)
    shifts = np.arange(0, 360, STEP_DEGREES)
    if turns is None:
        return Overlap(
            np.full(len(shifts), _compute_speed(a, beyond * b.busy_share)),
            np.full(len(shifts), _compute_speed(b, beyond * a.busy_share)),
            False,
        )
    sends_a, sends_b = _make_sending_mask(a.busy_share, turns[0]), _make_sending_mask(b.busy_share, turns[1])
    both = _compute_overlap_shares(sends_a, sends_b)[shifts * CELLS // 360]
    return Overlap(
        _compute_speed(a, beyond * both / max(sends_a.mean(), 1 / CELLS)),
        _compute_speed(b, beyond * both / max(sends_b.mean(), 1 / CELLS)),
        True,
    )


def fit_link(jobs: Sequence[SendingTurns]) -> LinkFit:
    """Return the shifts at which the jobs collide least on a link, and how compatible they are.

    Two jobs are fitted exactly, 5 degrees at a time. More jobs are fitted one after the other.

    >>> fit_link([SendingTurns(2.0, 0.5), SendingTurns(2.0, 0.5)])
    LinkFit(compatibility=1.0, shifts_s=(0.0, 1.0))
    """
    turns = _count_common_turns(jobs)
    if turns is None:
        return LinkFit(1.0 - _compute_independent_excess(jobs), None)
    circle_s = turns[0] * jobs[0].period_s
    steps = np.arange(0, CELLS, CELLS * STEP_DEGREES // 360)
    places = (np.arange(CELLS)[None, :] - steps[:, None]) % CELLS
    taken, shifts_s, excess = np.zeros(CELLS), [], 0.0
    for number, (job, of) in enumerate(zip(jobs, turns, strict=True)):
        wants = job.rate * _make_sending_mask(job.busy_share, of)[places[: 1 if number == 0 else None]]
        beyond = np.maximum(0.0, taken + wants - 1.0).mean(axis=1)
        best = int(np.argmin(beyond))
        taken, excess = taken + wants[best], float(beyond[best])
        shifts_s.append(float(steps[best]) / CELLS * circle_s % job.period_s)
    return LinkFit(max(0.0, 1.0 - excess), tuple(shifts_s))


def _count_common_turns(jobs: Sequence[SendingTurns]) -> list[int] | None:
    """Return the number of turns of each job on their common circle.

    Returns None if there is no such circle, or if a job would have more than MOST_TURNS.
    """
    ratios = [find_turn_ratio(jobs[0].period_s, job.period_s) for job in jobs]
    if None in ratios:
        return None
    known = [ratio for ratio in ratios if ratio is not None]
    first = math.lcm(*(own for own, _ in known))
    turns = [other * first // own for own, other in known]
    return turns if max(turns) <= MOST_TURNS else None


def _compute_independent_excess(jobs: Sequence[SendingTurns]) -> float:
    """Return the mean demand above the link's capacity if the jobs send independently of each other.

    The result is a share of the capacity. Rates are rounded to 1 % of the capacity.
    """
    cells = 100
    chance = np.ones(1)
    for job in jobs:
        rate, share = round(min(job.rate, 1.0) * cells), min(max(job.busy_share, 0.0), 1.0)
        both = np.zeros(len(chance) + rate)
        both[: len(chance)] += (1 - share) * chance
        both[rate:] += share * chance
        chance = both
    beyond = np.maximum(0, np.arange(len(chance)) - cells) / cells
    return min(1.0, float(chance @ beyond))


def _compute_speed(job: SendingTurns, overload: Array | float) -> Array:
    return np.asarray(1.0 / (1.0 + job.busy_share * np.asarray(overload)))


def _compute_overlap_shares(a: NDArray[np.bool_], b: NDArray[np.bool_]) -> Array:
    """Return (CELLS,) the share of the circle on which both send, at each shift of b.

    a, b: (CELLS,) whether the job sends. The shares are a circular correlation.
    """
    turned = np.fft.rfft(a.astype(np.float64)) * np.conj(np.fft.rfft(b.astype(np.float64)))
    return np.asarray(np.fft.irfft(turned, CELLS).clip(min=0.0) / CELLS)


def _make_sending_mask(busy_share: float, turns: int) -> NDArray[np.bool_]:
    """Return (CELLS,) whether the job sends in each cell of the circle."""
    return np.asarray((np.arange(CELLS) * turns / CELLS) % 1.0 < busy_share)
