"""Estimation of a job's pace from its step times: how slow it is, since when, and why.

    observed   median of the last 3 steps
    expected   predicted from tokens and sequence lengths if these explain the job's step times (see
               step_model), else the median of its earlier steps. It stays the same while the job is slow
    ratio      observed divided by the job's own usual time
    slow       a window of its last steps is above the limit (see change_point), or they became gradually slower
               than the job's best times. A job is also slow, whatever its past, if a rank or a grown stage holds
               it back (see step_peers)

Steps with a checkpoint do not count: all ranks wait for the checkpoint, and it ends by itself. Steps that are
long because of their content count as slow, but no member is to blame.
"""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.events import Step
from fleetcast.fleet.job_steps import MAX_RANK_STEPS, compute_own_work_s
from fleetcast.fleet.jobs import JobAttempt
from fleetcast.models.peers import compute_median
from fleetcast.models.stragglers.change_point import (
    SCALES,
    StepReference,
    find_best_pace,
    find_slow_creep,
    find_slowdown,
    is_other_work,
    is_still_slow,
    make_step_reference,
)
from fleetcast.models.stragglers.step_model import explain_times
from fleetcast.models.stragglers.step_peers import FEWEST_STEPS, SLOW_RATIO, Blame, find_blame

Array = NDArray[np.float64]

LAST = 3
WINDOW = 4
BLOCK = 8
SHORTEST_S = 1e-6  # steps that take less are not timed
FEWEST = 16
MOST_EXCESS = 0.9  # of a step that a rank can cost, whatever its parts add up to
LONG_RATIO = 1.5  # of a single step, beside the job's median
EXPLAINS = 0.5  # of what a step takes longer than usual
FEWEST_PAUSES = 3
PAUSES_LOOKED = 64  # steps
LONGEST_CHECKPOINT_MS = 600_000  # one whose end is not told until then never ends
PAUSES = frozenset({"init", "loading", "evaluation", "checkpoint", "cooldown"})
PARTS = ("compute", "communication", "data", "other")


@dataclass(frozen=True, slots=True)
class StepPace:
    """The pace of a job by its step times, and the ranks or the stage that hold it back.

    `ratio` is None until there is a reference. ranks: the ranks whose own work is slow, worst first.
    """

    steps: int
    observed_s: float | None = None
    expected_s: float | None = None
    usual_s: float | None = None  # the job's own past
    limit_s: float | None = None  # above it a step is slow
    ratio: float | None = None
    slow: bool = False
    since_ms: int | None = None
    cause: str = "unknown"
    ranks: tuple[int, ...] = ()
    stage: int | None = None
    excess_s: float = 0.0  # that the worst of them, or the stage, costs a step
    peers_ms: int = 0  # since when these are slow
    by_peers: bool = False  # slow beside its peers, whatever its past
    lately: bool = False  # the last two steps were: enough where a member has a reason to be slow
    first_ms: int = 0  # end of the oldest step that counts
    window: int = 0  # how many steps it took to see that it is slow; 0: it is not
    best_s: float | None = None  # median of its best 64 steps so far
    stages: tuple[tuple[int, float], ...] = ()  # of each its least share so far (see step_peers)
    uneven: tuple[tuple[int, float], ...] = ()  # ranks over their peers since the first steps, least ratio so far
    longest: int | None = None  # the stage that computes longest, of a job that is not slow
    even_s: float | None = None  # that a step would take if what is longest were as the others


def measure_pace(attempt: JobAttempt, before: StepPace | None = None) -> StepPace:
    """Return the pace of an attempt from its stored steps since its last resize.

    before: the attempt's last pace at this size. Its reference stays while the job is slow. Steps that all take 0 s
    were not measured, so they have no pace.
    """
    steps = _list_steps_since_resize(attempt)
    if not steps:
        return StepPace(0)
    if not any(step.duration_s for step in steps):
        return StepPace(len(steps))
    duration = np.array([step.duration_s for step in steps])
    end_ms = np.array([step.time_ms for step in steps], np.int64)
    disturbed = _is_in_checkpoint(attempt, duration, end_ms)
    usual = [step for step, out in zip(steps, disturbed.tolist(), strict=True) if not out]
    pace = _judge_pace_by_past(attempt, usual, duration[~disturbed], end_ms[~disturbed], before)
    if disturbed[-1] and pace.limit_s is not None and duration[-1] > pace.limit_s and not pace.slow:
        pace = replace(pace, observed_s=float(duration[-1]), cause="checkpoint")
    since_ms = max(steps[-MAX_RANK_STEPS:][0].time_ms, attempt.placed_ms or 0)
    found = find_blame(attempt.rank_steps, since_ms, dict(before.stages) if before else None)
    pace, found = _drop_old_offenders(pace, attempt, found, before)
    return _judge_pace_by_peers(pace, attempt, found, usual, before)


def _list_steps_since_resize(attempt: JobAttempt) -> list[Step]:
    """Return the steps that began after the last resize. The step in which a gang resizes contains its pause.

    With a fixed batch the steps of a smaller gang take longer. That is no slowdown.
    """
    placed_ms, started_ms = attempt.placed_ms, attempt.started_ms
    if placed_ms is None or started_ms is None or placed_ms <= started_ms:
        return attempt.steps
    return [step for step in attempt.steps if step.time_ms - 1000 * step.duration_s >= placed_ms]


def _judge_pace_by_past(
    attempt: JobAttempt, steps: list[Step], duration: Array, end_ms: NDArray[np.int64], before: StepPace | None
) -> StepPace:
    """Return the pace of a job compared with its own past steps only."""
    if not len(duration):
        return StepPace(0)
    observed_s = compute_median(duration[-LAST:])
    best_s = find_best_pace(duration, before.best_s if before else None)
    plain = explain_times(steps, duration, WINDOW)
    shown = _choose_reference(duration if plain is None else plain.duration, before, best_s if plain is None else None)
    by_work = False
    if shown is None and plain is not None:
        shown = find_slowdown(duration)
        by_work = shown is not None
    measure = shown or make_step_reference(duration, SCALES[0])
    if measure is None or measure.usual_s <= SHORTEST_S:
        return StepPace(len(duration), observed_s, first_ms=int(end_ms[0]), best_s=best_s)
    over = duration >= measure.limit_s
    runs = attempt.phase not in PAUSES
    slow = runs and shown is not None
    expected_s = measure.usual_s if plain is None else compute_median(plain.predicted_s[-LAST:])
    return StepPace(
        steps=len(duration),
        observed_s=observed_s,
        expected_s=expected_s,
        usual_s=measure.usual_s,
        limit_s=measure.limit_s,
        ratio=observed_s / (min(expected_s, measure.usual_s) if slow and expected_s > 0 else measure.usual_s),
        slow=slow,
        lately=bool(runs and over[-2:].all()),
        since_ms=_find_slow_begin_ms(over, duration, end_ms, measure, before) if over[-1] or shown else None,
        cause=("sequence_length" if by_work else _find_grown_part(steps)) if slow else "unknown",
        first_ms=int(end_ms[0]),
        window=measure.steps if shown and not by_work else 0,
        best_s=best_s,
    )


def _choose_reference(duration: Array, before: StepPace | None, best_s: float | None) -> StepReference | None:
    """Return the reference by which the job is slow, or None if it is not slow.

    While a slowdown lasts, the result is the previous reference. Otherwise it is the reference of a new slowdown.
    """
    if before is not None and before.window and before.usual_s and before.limit_s:
        held = StepReference(before.usual_s, before.limit_s, before.window)
        alone = not before.ranks and before.stage is None
        if is_still_slow(duration, held) and not (alone and is_other_work(duration, held.usual_s)):
            return held
    return find_slowdown(duration) or find_slow_creep(duration, best_s)


def _drop_old_offenders(
    pace: StepPace, attempt: JobAttempt, found: Blame, before: StepPace | None
) -> tuple[StepPace, Blame]:
    """Remove from the blame the ranks that have always been as slow, and record them in the pace.

    Such ranks may be a stage: if a job states no stages, a long stage looks like many slow ranks on several
    nodes.
    """
    if attempt.phase in PAUSES:
        return replace(pace, stages=before.stages, uneven=before.uneven) if before else pace, found
    stages = dict(before.stages) if before else {}
    stages |= {stage: min(ratio, stages.get(stage, ratio)) for stage, ratio in found.stages.items()}
    uneven = dict(before.uneven) if before else {}
    young = before is None or before.steps < FEWEST_STEPS
    over = {row.rank: row.ratio for row in found.ranks}
    if young and not pace.slow and _is_stage_like(attempt, over):
        uneven |= {rank: ratio for rank, ratio in over.items() if rank not in uneven}
    uneven = {rank: min(ratio, over.get(rank, ratio)) for rank, ratio in uneven.items()}
    pace = replace(pace, stages=tuple(sorted(stages.items())), uneven=tuple(sorted(uneven.items())))
    ranks = tuple(row for row in found.ranks if row.ratio >= SLOW_RATIO * uneven.get(row.rank, 0.0))
    if len(ranks) < len(found.ranks) and not ranks and pace.observed_s is not None:
        pace = replace(pace, even_s=pace.observed_s - min(found.ranks[0].excess_s, MOST_EXCESS * pace.observed_s))
    return pace, replace(found, ranks=ranks)


def _is_stage_like(attempt: JobAttempt, over: Mapping[int, float]) -> bool:
    """Return whether the slow ranks look like a stage that the job does not report.

    Slow ranks look like a stage if they are more than an eighth of the ranks, on more than one node. over: slow
    rank -> its ratio.
    """
    if not over:
        return False
    newest = max(attempt.rank_steps.values(), key=lambda gang: len(gang.ranks)).ranks
    if any(step.stage is not None for step in newest.values()):
        return False
    node = {row.rank: row.node for row in attempt.ranks}
    return 8 * len(over) > len(newest) and len({node.get(rank, rank) for rank in over}) > 1


def _judge_pace_by_peers(
    pace: StepPace, attempt: JobAttempt, found: Blame, steps: list[Step], before: StepPace | None
) -> StepPace:
    """Return the pace, with the ranks or the stage that hold the job back according to their own step times.

    Such ranks or a stage may show a slowdown that the job's past does not show.
    """
    if pace.cause in ("sequence_length", "checkpoint") or attempt.phase in PAUSES:
        return pace
    ranks = tuple(row.rank for row in found.ranks if row.excess_s >= found.ranks[0].excess_s / 2)
    observed_s = pace.observed_s or 0.0
    excess_s = found.ranks[0].excess_s if ranks else found.stage.grown_s if found.stage else 0.0
    excess_s = min(excess_s, MOST_EXCESS * observed_s)
    costly = observed_s > 0 and excess_s >= (SLOW_RATIO - 1) * (observed_s - excess_s)
    costly = costly and (found.firm or found.stage is not None)
    if pace.slow and pace.usual_s is not None:  # slow by its past: who costs less than half of that is not why
        ranks = ranks if costly or excess_s >= EXPLAINS * (observed_s - pace.usual_s) else ()
    if not pace.slow and not costly:
        if found.stage is not None:
            pace = replace(pace, longest=found.stage.stage, even_s=max(0.0, observed_s - found.stage.excess_s))
        return pace if not found.pauses and not _has_lone_pauses(steps) else replace(pace, cause="garbage_collection")
    stage = found.stage.stage if found.stage and costly else None
    if not ranks and stage is None:
        paused = found.pauses and pace.cause in ("unknown", "compute")
        return replace(pace, cause="garbage_collection") if paused else pace
    same = before is not None and (before.ranks[:1], before.stage) == (ranks[:1], stage)
    begun_ms = before.peers_ms if before is not None and same else found.begun_ms
    pace = replace(
        pace,
        ranks=ranks,
        stage=stage,
        excess_s=excess_s,
        peers_ms=begun_ms,
        cause=found.ranks[0].part if ranks else "compute",
    )
    if pace.slow:
        return pace
    expected_s = observed_s - excess_s
    ratio = observed_s / max(expected_s, 1e-9)
    return replace(pace, slow=True, by_peers=True, since_ms=begun_ms, expected_s=expected_s, ratio=ratio)


def _has_lone_pauses(steps: list[Step]) -> bool:
    """Return whether the job has single long steps, in each of which another rank computed longer.

    Such a job is not slow, but loses time.
    """
    looked = [step for step in steps[-PAUSES_LOOKED:] if step.rank is not None and step.parts is not None]
    if len(looked) < FEWEST:
        return False
    duration = np.array([step.duration_s for step in looked])
    usual_s = compute_median(duration)
    long = duration >= LONG_RATIO * usual_s
    if np.count_nonzero(long) < FEWEST_PAUSES:
        return False
    own = np.array([compute_own_work_s(step) for step in looked])
    own_usual_s = compute_median(own)
    lone = long & ~np.roll(long, 1) & ~np.roll(long, -1) & (own - own_usual_s >= (duration - usual_s) / 2)
    struck = [looked[at].rank for at in np.flatnonzero(lone).tolist()]
    return len(struck) >= FEWEST_PAUSES and 2 * max(map(struck.count, struck)) <= len(struck) + 1


def find_reference_pace(duration: Array) -> tuple[float, float] | None:
    """Return (seconds, relative noise) of the fastest block of consecutive steps, or None without steps.

    >>> find_reference_pace(np.array([2.0] * 16 + [3.0] * 16))
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


def _is_in_checkpoint(attempt: JobAttempt, duration: Array, end_ms: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return (step,) whether a checkpoint began, ran or ended during the step.

    If a job writes checkpoints in more than half of its steps, the result is False everywhere.
    """
    start_ms = end_ms - (duration * 1000).astype(np.int64)
    first = bisect_left(attempt.checkpoints, int(start_ms.min()), key=lambda edge: edge.time_ms)
    edges = attempt.checkpoints[max(first - 1, 0) :]
    if not edges:
        return np.zeros(len(duration), bool)
    at_ms = np.array([edge.time_ms for edge in edges], np.int64)
    begins = np.array([edge.edge == "begin" for edge in edges])
    until_ms = np.where(np.append(begins[1:], True), at_ms, np.append(at_ms[1:], 0))  # of a begin: its end, if told
    if begins[-1] and _is_checkpoint_running(attempt, int(at_ms[-1])):
        until_ms[-1] += LONGEST_CHECKPOINT_MS
    from_ms, until_ms = at_ms[begins, None], until_ms[begins, None]
    inside = ((start_ms <= from_ms) & (end_ms >= from_ms)) | ((start_ms < until_ms) & (end_ms > from_ms))
    inside = np.asarray(inside.any(axis=0))
    return inside if 2 * inside.sum() <= len(inside) else np.zeros(len(inside), bool)  # it writes all the time


def _is_checkpoint_running(attempt: JobAttempt, began_ms: int) -> bool:
    """Return whether the last checkpoint, which has no end yet, still runs.

    Returns False for a job that began other checkpoints long ago and ended none, because it reports no ends.
    """
    edges = attempt.checkpoints
    return edges[0].time_ms > began_ms - LONGEST_CHECKPOINT_MS or any(edge.edge == "end" for edge in edges)


def _find_slow_begin_ms(
    over: NDArray[np.bool_], duration: Array, end_ms: NDArray[np.int64], measure: StepReference, before: StepPace | None
) -> int:
    """Return when the first of the slow steps began, in Unix ms.

    That step is the first one after the last two ordinary steps in a row. The result stays the same while the
    slowdown lasts. over: (step,) whether the step is above the limit.
    """
    if (
        before is not None
        and before.window
        and before.since_ms
        and before.limit_s == measure.limit_s
        and not before.by_peers
    ):
        return before.since_ms
    ordinary = ~over
    pairs = np.flatnonzero(ordinary[:-1] & ordinary[1:])
    first = int(pairs[-1]) + 2 if len(pairs) else 0
    slow = np.flatnonzero(over[first:])
    at = first + int(slow[0]) if len(slow) else len(duration) - min(measure.steps, len(duration))
    return int(end_ms[at] - duration[at] * 1000)


def _find_grown_part(steps: list[Step]) -> str:
    """Return the part of the step that grew most since the reference.

    Returns "unknown" if the parts are not reported, if no part grew, or if "other" grew most.
    """
    timed = [step for step in steps if step.parts is not None]
    if len(timed) < FEWEST:
        return "unknown"
    growth = {}
    for part in PARTS:
        seconds = np.array([getattr(step.parts, part) for step in timed])
        reference = find_reference_pace(seconds[:-WINDOW])
        growth[part] = compute_median(seconds[-LAST:]) - (reference[0] if reference else 0.0)
    part = max(growth, key=lambda name: growth[name])
    return part if growth[part] > 0 and part != "other" else "unknown"
