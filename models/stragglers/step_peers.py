"""Detection of slow ranks and stages, by comparing their step times with data-parallel peers.

Peers are the ranks of one pipeline stage in one step. A rank's own work (compute, data loading) is
divided by its peers' median. This ratio needs no history, has no waiting in it, and does not depend
on the names of the ranks.

    a worker    its compute or its data loading is 10 % above its peers' in 3 of 4 steps in a row, or 50 % in
                the last step if no other rank was slow. With 8 peers and more it must also be above them by 3
                of their robust sigmas. If ranks report the length of their sequences, it must also be above
                the time for its own length
    a stage     its ranks compute longer than other stages' in every step, by 10 % of the mean of all. A
                full pipeline runs at the pace of its slowest stage, an even one at the mean (the what-if of
                Lin et al., OSDI 2025, all ideal but this stage). Most jobs are uneven by design (the last
                stage has the head of the model), so it must also be 10 % above its own least share so far
    pauses      in most steps some rank is above its peers, but not always the same one. Usually that is
                garbage collection
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.features.sums import divide
from fleetcast.fleet.events import Step
from fleetcast.fleet.job_steps import GangStep, RankSteps
from fleetcast.models.peers import compute_median
from fleetcast.models.stragglers.change_point import MAD_TO_SIGMA

Array = NDArray[np.float64]

SLOW_RATIO = 1.10
CLEAR_RATIO = 1.50  # so much in one step is enough
WINDOW = 4
VOTES = 3
FEWEST_PEERS = 3  # with two, nobody knows which of them is slow
MANY_PEERS = 8  # from here on the peers' own spread is known, too
SIGMAS = 3.0  # of it that a slow rank is over them
FEWEST_STEPS = 8  # to say that a stage is slow in every step, or a different rank in each
WHOLE = 0.75  # of the ranks that tell of a step: with fewer it is not looked at yet
SAME = 0.9  # share of the steps in which the same stage is the slowest
COLUMNS = ("compute", "data", "sequence_length")


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank that is slower than its peers.

    ratio: its time divided by the peers' median, in its usual slow step. excess_s: seconds above the peers'
    median. part: compute or data.
    """

    rank: int
    ratio: float
    excess_s: float
    part: str


@dataclass(frozen=True, slots=True)
class SlowStage:
    """A stage that takes longer than the other stages.

    ratio: its time divided by the mean of all stages. excess_s: the seconds above that mean. grown_s: the
    seconds above the time that its least share so far would take, 0 if it has not grown.
    """

    stage: int
    ratio: float
    excess_s: float
    grown_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Blame:
    """The ranks or the stage that hold a gang back: slow ranks (worst first), or the slow stage.

    firm: the worst rank was slow in 3 of 4 steps. pauses: whether ranks pause in turns. begun_ms: start
    of the first slow step. stages: each stage's time divided by the mean of all.
    """

    ranks: tuple[SlowRank, ...] = ()
    firm: bool = False
    stage: SlowStage | None = None
    pauses: bool = False
    begun_ms: int = 0
    stages: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _PeerGroup:
    """The ranks of one stage in one step. own: (rank, part) seconds of their own work."""

    stage: int | None
    ranks: tuple[int, ...]
    own: Array
    length: Array  # (rank,) of its sequences, 0 untold


def find_blame(rank_steps: RankSteps, since_ms: int = 0, least: Mapping[int, float] | None = None) -> Blame:
    """Find the ranks or the stage that hold the gang back, in its newest steps since `since_ms`.

    least: stage -> its least share so far.
    """
    whole_steps = _list_whole_steps({number: gang for number, gang in rank_steps.items() if gang.ended_ms >= since_ms})
    if not whole_steps:
        return Blame()
    whole_steps = whole_steps[-FEWEST_STEPS:]
    peers = [_group_peers(gang.ranks.values()) for gang in whole_steps]
    slow = [_find_slow_ranks(groups) for groups in peers]
    found = _find_persistent_ranks(slow[-WINDOW:])
    if found:
        firm = sum(found[0].rank in step for step in slow[-WINDOW:]) >= VOTES
        return Blame(tuple(found), firm, begun_ms=_find_begin_ms(whole_steps, slow, found[0].rank))
    stages, table = _tabulate_by_stage(peers)
    if not stages:
        return Blame(pauses=_are_slow_in_turns(slow), begun_ms=_compute_start_ms(whole_steps[0]))
    shares = divide(table, table.mean(axis=1, keepdims=True), 1.0)
    usual = dict(zip(stages, _compute_column_medians(shares).tolist(), strict=True))
    stage = _find_slow_stage(stages, table, usual, least or {})
    grown = np.zeros(len(whole_steps), bool)
    if stage is not None and stage.grown_s:
        grown = shares[:, stages.index(stage.stage)] >= SLOW_RATIO * (least or {})[stage.stage]
    return Blame(
        stage=stage,
        pauses=stage is None and _are_slow_in_turns(slow),
        begun_ms=_compute_start_ms(whole_steps[int(grown.argmax())]),
        stages=usual,
    )


def _list_whole_steps(rank_steps: RankSteps) -> list[GangStep]:
    """Return the steps that most of the ranks reported, in the order of their ends.

    Returns no steps if there are too few ranks.
    """
    most = max((len(gang.ranks) for gang in rank_steps.values()), default=0)
    rows = [(gang.ended_ms, number) for number, gang in rank_steps.items() if len(gang.ranks) >= WHOLE * most]
    return [rank_steps[number] for _, number in sorted(rows)] if most >= FEWEST_PEERS else []


def _group_peers(steps: Iterable[Step]) -> list[_PeerGroup]:
    stages: dict[int | None, list[Step]] = {}
    for step in steps:
        if step.parts is not None and step.parts.compute > 0:
            stages.setdefault(step.stage, []).append(step)
    found = []
    for stage, members in stages.items():
        own = np.array([(row.parts.compute, row.parts.data) for row in members if row.parts], np.float64)
        length = np.array([row.sequence_length or 0.0 for row in members])
        found.append(_PeerGroup(stage, tuple(row.rank or 0 for row in members), own, length))
    return found


def _find_slow_ranks(groups: list[_PeerGroup]) -> dict[int, SlowRank]:
    """Return rank -> how slow it is, for the ranks that are slower than their peers in one step."""
    found: dict[int, SlowRank] = {}
    for group in groups:
        if len(group.ranks) < FEWEST_PEERS:
            continue
        median = _compute_column_medians(group.own)
        excess = group.own - median
        # A part is held to itself and to the whole work: data loading of milliseconds is never a slow worker.
        ratio = 1 + excess / np.array([median[0], max(median.sum(), 1e-9)])
        over = ratio >= SLOW_RATIO
        if len(group.ranks) >= MANY_PEERS and over.any():
            over &= excess >= SIGMAS * MAD_TO_SIGMA * _compute_column_medians(np.abs(excess))
        if not over.any():
            continue
        if (group.length > 0).all():
            rate = group.own[:, 0] / group.length
            over[:, 0] &= rate >= SLOW_RATIO * compute_median(rate)
        for row, part in np.argwhere(over).tolist():
            rank = group.ranks[row]
            if rank not in found or excess[row, part] > found[rank].excess_s:
                found[rank] = SlowRank(rank, float(ratio[row, part]), float(excess[row, part]), COLUMNS[part])
    return found


def _compute_column_medians(values: Array) -> Array:
    """Return (column,) the median of each column. values: (row, column)."""
    ordered, half = np.sort(values, axis=0), len(values) // 2
    return np.asarray(ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2)


def _find_persistent_ranks(slow: list[dict[int, SlowRank]]) -> list[SlowRank]:
    """Return the ranks that are slow in 3 of the last 4 steps, the worst first.

    If there are no such ranks, return the rank that is clearly slow in the last step, unless other ranks were slow
    too.
    """
    votes: dict[int, list[SlowRank]] = {}
    for step in slow:
        for rank, row in step.items():
            votes.setdefault(rank, []).append(row)
    found = [rows for rows in votes.values() if len(rows) >= VOTES]
    if not found and len(votes) == 1:
        found = [rows for rank, rows in votes.items() if rank in slow[-1] and slow[-1][rank].ratio >= CLEAR_RATIO]
    usual = [sorted(rows, key=lambda row: row.excess_s)[len(rows) // 2] for rows in found]
    return sorted(usual, key=lambda row: (-row.excess_s, row.rank))


def _find_begin_ms(whole_steps: list[GangStep], slow: list[dict[int, SlowRank]], rank: int) -> int:
    """Return the start of the first step in which the rank is slow, in Unix ms."""
    first = next(at for at, step in enumerate(slow) if rank in step)
    return _compute_start_ms(whole_steps[first])


def _compute_start_ms(gang: GangStep) -> int:
    return min(step.time_ms - round(step.duration_s * 1000) for step in gang.ranks.values())


def _are_slow_in_turns(slow: list[dict[int, SlowRank]]) -> bool:
    """Return whether ranks are slow in turns.

    In most steps some rank must be slow. No rank may be slow in more than half of these steps.
    """
    count = Counter(rank for step in slow for rank, row in step.items() if row.part == COLUMNS[0])
    struck = sum(1 for step in slow if step)
    return len(slow) >= FEWEST_STEPS and 2 * struck > len(slow) and 2 * max(count.values(), default=0) <= struck


def _tabulate_by_stage(peers: list[list[_PeerGroup]]) -> tuple[list[int], Array]:
    """Return the stages, and (step, stage) the median seconds of their ranks' own work.

    Returns no stages if a step does not state its stages.
    """
    stages = sorted({group.stage for groups in peers for group in groups if group.stage is not None})
    tables = [{group.stage: compute_median(group.own.sum(axis=1)) for group in groups} for groups in peers]
    table = np.array([[row.get(stage, np.nan) for stage in stages] for row in tables])
    if len(stages) < 2 or len(peers) < FEWEST_STEPS or not np.isfinite(table).all():
        return [], table
    return stages, table


def _find_slow_stage(
    stages: list[int], table: Array, usual: Mapping[int, float], least: Mapping[int, float]
) -> SlowStage | None:
    """Return the stage that is the slowest in nearly every step and 10 % above the mean, or None.

    The result also states by how many seconds the stage has grown since its ratio to the mean was least. At a ratio r
    to the mean of n stages, a stage takes r / (n - r) of the time that the other stages take together.
    """
    worst = np.bincount(table.argmax(axis=1), minlength=len(stages))
    at = int(worst.argmax())
    stage = stages[at]
    ratio, least_ratio = usual[stage], least.get(stage, usual[stage])
    if worst[at] < SAME * len(table) or ratio < SLOW_RATIO:
        return None
    others = table.sum(axis=1) - table[:, at]
    before_s = others * least_ratio / (len(stages) - least_ratio)
    grown_s = compute_median(table[:, at] - before_s) if ratio >= SLOW_RATIO * least_ratio else 0.0
    return SlowStage(stage, ratio, compute_median(table[:, at] - table.mean(axis=1)), grown_s)
