"""Step times of one job: how fast it goes, how fast it should, and since when it does not.

    observed   median of the last 3 steps
    expected   median of the steps before the window that is looked at; while the job is slow it stays
    slow       a window of its last steps is above the limit: 3 steps by 12 %, 8 by 8 %, 16 by 7 %, 32 by 6 %, and by
               more than the job's own noise (see change_point); where a member has a reason, 2 steps will do

Steps that a checkpoint falls into do not count: everybody waits for it, and it ends by itself. Steps that are long
because of what is in them (see step_model) are slow, and nobody is to blame.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.events import Step
from fleet.jobs import JobAttempt
from models.change_point import SCALES, Measure, measure_of, slowed, still_slow
from models.step_model import explained

Array = NDArray[np.float64]

LAST = 3
WINDOW = 4
VOTES = 3
BLOCK = 8
FEWEST = 16
FEWEST_PEERS = 3
SLOW_RATIO = 1.10
PAUSES = frozenset({"init", "loading", "evaluation", "checkpoint", "cooldown"})
PARTS = ("compute", "communication", "data")


@dataclass(frozen=True, slots=True)
class Pace:
    """A job's step times. `ratio` is None until there is a reference; `worker` a rank whose own compute is slow."""

    steps: int
    observed_s: float | None = None
    expected_s: float | None = None
    limit_s: float | None = None  # above it a step is slow
    ratio: float | None = None
    slow: bool = False
    since_ms: int | None = None
    cause: str = "unknown"
    worker: int | None = None
    worker_excess_s: float = 0.0
    lately: bool = False  # the last two steps were: enough where a member has a reason to be slow
    first_ms: int = 0  # end of the oldest step that counts
    window: int = 0  # how many steps it took to see that it is slow; 0: it is not


def pace_of(attempt: JobAttempt, before: Pace | None = None) -> Pace:
    """The pace of an attempt from the steps it kept. `before`: its last pace, whose measure stays while slow."""
    steps = whole_steps(list(attempt.steps))
    if not steps:
        return Pace(0)
    duration = np.array([step.duration_s for step in steps])
    end_ms = np.array([step.time_ms for step in steps], np.int64)
    undisturbed = ~_in_checkpoint(attempt, duration, end_ms)
    steps = [step for step, keep in zip(steps, undisturbed.tolist(), strict=True) if keep]
    return _judge(attempt, steps, duration[undisturbed], end_ms[undisturbed], before)


def _judge(
    attempt: JobAttempt, steps: list[Step], duration: Array, end_ms: NDArray[np.int64], before: Pace | None
) -> Pace:
    if not len(duration):
        return Pace(0)
    observed_s = float(np.median(duration[-LAST:]))
    shown = _shown(duration, before)
    measure = shown or measure_of(duration, SCALES[0])
    if measure is None or measure.usual_s <= 0:
        return Pace(len(duration), observed_s, first_ms=int(end_ms[0]))
    over = duration >= measure.limit_s
    runs = attempt.phase not in PAUSES
    slow = runs and shown is not None
    worker, excess_s = slow_worker(attempt) if slow else (None, 0.0)
    return Pace(
        steps=len(duration),
        observed_s=observed_s,
        expected_s=measure.usual_s,
        limit_s=measure.limit_s,
        ratio=observed_s / measure.usual_s,
        slow=slow,
        lately=bool(runs and over[-2:].all()),
        since_ms=_began(over, duration, end_ms, measure, before) if over[-1] or shown else None,
        cause=_cause(steps, duration, measure) if slow else "unknown",
        worker=worker,
        worker_excess_s=excess_s,
        first_ms=int(end_ms[0]),
        window=measure.steps if shown else 0,
    )


def _shown(duration: Array, before: Pace | None) -> Measure | None:
    """The measure by which the job is slow: the one it was slow by, while it is, else that of a new change."""
    if before is not None and before.window and before.expected_s and before.limit_s:
        held = Measure(before.expected_s, before.limit_s, before.window)
        if still_slow(duration, held):
            return held
    return slowed(duration)


def whole_steps(steps: list[Step]) -> list[Step]:
    """One record a step: the job's own where it reports them, else the slowest rank of each step."""
    whole = [step for step in steps if step.rank is None]
    if whole or not steps:
        return whole
    slowest: dict[int, Step] = {}
    for step in steps:
        other = slowest.get(step.step)
        if other is None or step.duration_s > other.duration_s:
            slowest[step.step] = step
    return [slowest[number] for number in sorted(slowest)]


def reference_pace(duration: Array) -> tuple[float, float] | None:
    """(seconds, relative noise) of the fastest block of consecutive steps; None when there are none.

    >>> reference_pace(np.array([2.0] * 16 + [3.0] * 16))
    (2.0, 0.0)
    """
    if not len(duration):
        return None
    blocks = len(duration) // BLOCK
    whole = duration[: blocks * BLOCK].reshape(blocks, BLOCK)
    medians = np.median(whole, axis=1)
    best, rest = int(medians.argmin()) if blocks else -1, duration[blocks * BLOCK :]
    median, block = (float(medians[best]), whole[best]) if blocks else (np.inf, rest)
    if not blocks or (len(rest) >= BLOCK // 2 and float(np.median(rest)) < median):
        median, block = float(np.median(rest)), rest
    noise = 1.4826 * float(np.median(np.abs(block - median)))
    return median, noise / median if median > 0 else 0.0


def _in_checkpoint(attempt: JobAttempt, duration: Array, end_ms: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(step,) a checkpoint began, ran or ended while the step did."""
    start_ms = end_ms - (duration * 1000).astype(np.int64)
    inside = np.zeros(len(duration), bool)
    began: int | None = None
    for edge in attempt.checkpoints:
        if edge.edge == "begin":
            began = edge.time_ms
            inside |= (start_ms <= began) & (end_ms >= began)
        elif began is not None:
            inside |= (start_ms < edge.time_ms) & (end_ms > began)
            began = None
    return inside


def _began(
    over: NDArray[np.bool_], duration: Array, end_ms: NDArray[np.int64], measure: Measure, before: Pace | None
) -> int:
    """When the first of the slow steps began: after the last two ordinary ones in a row; it stays while it lasts."""
    if before is not None and before.window and before.since_ms and before.limit_s == measure.limit_s:
        return before.since_ms
    ordinary = ~over
    pairs = np.flatnonzero(ordinary[:-1] & ordinary[1:])
    first = int(pairs[-1]) + 2 if len(pairs) else 0
    slow = np.flatnonzero(over[first:])
    at = first + int(slow[0]) if len(slow) else len(duration) - min(measure.steps, len(duration))
    return int(end_ms[at] - duration[at] * 1000)


def _cause(steps: list[Step], duration: Array, measure: Measure) -> str:
    """Unusual work, or which part of the step grew most since the reference; unknown where neither is reported."""
    without = explained(steps, duration, measure.steps)
    if without is not None and not still_slow(without, measure):
        return "sequence_length"
    timed = [step for step in steps if step.parts is not None]
    if len(timed) < FEWEST:
        return "unknown"
    growth = {}
    for part in PARTS:
        seconds = np.array([getattr(step.parts, part) for step in timed])
        reference = reference_pace(seconds[:-WINDOW])
        growth[part] = float(np.median(seconds[-LAST:])) - (reference[0] if reference else 0.0)
    part = max(growth, key=lambda name: growth[name])
    return part if growth[part] > 0 else "unknown"


def slow_worker(attempt: JobAttempt) -> tuple[int | None, float]:
    """The rank whose own compute exceeds its peers' in 3 of the last 4 steps, and by how many seconds.

    Peers are the ranks of the same pipeline stage. Waiting for others is communication, so it names nobody. Where
    ranks tell how long their sequences were, a rank must be slow for the length of its own, too.
    """
    by_step: dict[int, dict[int | None, dict[int, tuple[float, float]]]] = {}
    for step in attempt.steps:
        if step.rank is not None and step.parts is not None and step.parts.compute > 0:
            row = by_step.setdefault(step.step, {}).setdefault(step.stage, {})
            row[step.rank] = (step.parts.compute, step.sequence_length or 0.0)
    votes: dict[int, list[float]] = {}
    for _, stages in sorted(by_step.items())[-WINDOW:]:
        for members in stages.values():
            for rank, excess_s in _over_peers(members):
                votes.setdefault(rank, []).append(excess_s)
    known = {rank: excess for rank, excess in votes.items() if len(excess) >= VOTES}
    if not known:
        return None, 0.0
    rank = max(known, key=lambda name: float(np.median(known[name])))
    return rank, float(np.median(known[rank]))


def _over_peers(members: dict[int, tuple[float, float]]) -> list[tuple[int, float]]:
    """(rank, seconds above the median) of who is slow among rank -> (compute seconds, sequence length, 0 untold)."""
    if len(members) < FEWEST_PEERS:
        return []
    seconds, length = np.array(list(members.values())).T
    median = float(np.median(seconds))
    over = seconds >= SLOW_RATIO * median
    if (length > 0).all():
        rate = seconds / length
        over &= rate >= SLOW_RATIO * np.median(rate)
    return [(rank, float(excess)) for rank, excess, slow in zip(members, seconds - median, over, strict=True) if slow]
