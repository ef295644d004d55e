"""The steps of one attempt. They take bounded memory, whatever the size of the gang.

    steps       the newest MAX_STEPS by time: the job's own record of a step, or else that of its slowest rank
    rank_steps  step -> rank -> event, for the newest MAX_RANK_STEPS steps that ranks reported

The order of arrival does not matter if the records of one step arrive within NEAR records and
MAX_RANK_STEPS steps of each other. A step that is repeated after a rollback is a new step.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from fleetcast.fleet.events import Step

MAX_STEPS = 256
MAX_RANK_STEPS = 16
MAX_RANKS = 16_384  # ranks from here on are timed and not compared
NEAR = 16  # records of one step lie as near as this; one farther away is of an earlier run through it


@dataclass(slots=True)
class GangStep:
    """One step as reported by its ranks. ended_ms: when the last rank ended it."""

    ended_ms: int
    ranks: dict[int, Step] = field(default_factory=dict)

    def copy(self) -> "GangStep":
        return GangStep(self.ended_ms, dict(self.ranks))


RankSteps = dict[int, GangStep]


def compute_own_work_s(step: Step) -> float:
    """Return the seconds of a step without communication. If the step states no parts, return its whole duration."""
    parts = step.parts
    return step.duration_s if parts is None else parts.compute + parts.data + parts.other


def fold_step(steps: list[Step], rank_steps: RankSteps, event: Step) -> None:
    """Fold one step event into `steps` and `rank_steps`."""
    if event.rank is not None and event.rank < MAX_RANKS:
        _record_rank_step(rank_steps, event, event.rank)
    when = _make_time_key(event)
    at = len(steps) if not steps or when > _make_time_key(steps[-1]) else bisect_right(steps, when, key=_make_time_key)
    known = _find_nearby_step(steps, at, event) if rank_steps or event.rank is not None else None
    if known is not None and (event.rank is not None or steps[known].rank is not None):
        if _make_record_key(event) <= _make_record_key(steps[known]):
            return
        del steps[known]
        at -= known < at
    steps.insert(at, event)
    if len(steps) > MAX_STEPS:
        del steps[0]


def _record_rank_step(rank_steps: RankSteps, event: Step, rank: int) -> None:
    gang = rank_steps.get(event.step)
    if gang is None:
        gang = rank_steps[event.step] = GangStep(event.time_ms)
    elif event.time_ms > gang.ended_ms:
        gang.ended_ms = event.time_ms
    known = gang.ranks.get(rank)
    if known is None or known.sequence < event.sequence:
        gang.ranks[rank] = event
    if len(rank_steps) > MAX_RANK_STEPS:
        del rank_steps[min(rank_steps, key=lambda number: (rank_steps[number].ended_ms, number))]


def _find_nearby_step(steps: list[Step], at: int, event: Step) -> int | None:
    """Return the index of the record of the event's step, or None if there is none near `at`.

    at: the index at which the event would be inserted.
    """
    if at and steps[at - 1].step == event.step:
        return at - 1
    for place in range(min(at + NEAR, len(steps)) - 1, max(at - NEAR, 0) - 1, -1):
        if steps[place].step == event.step:
            return place
    return None


def _make_time_key(step: Step) -> tuple[int, int]:
    return step.time_ms, step.sequence


def _make_record_key(step: Step) -> tuple[bool, float, int]:
    return step.rank is None, compute_own_work_s(step), step.sequence
