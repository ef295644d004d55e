"""Steps of one attempt, folded by step: what a job keeps of millions of step events, whatever the size of its gang.

    steps       one record a step: the job's own where it reports one, else that of the rank that took longest for its
                own work; by time, the newest STEPS_KEPT
    rank_steps  step -> rank -> event, of the newest RANK_STEPS_KEPT steps that ranks told of: who is slow beside whom

Nothing goes by the order of arrival, nor by sequences (each rank counts in a range of its own): the newest are those
that ended last. A step that is done again after a rollback is a new one.
"""

from bisect import bisect_right, insort

from fleet.events import Step

STEPS_KEPT = 256
RANK_STEPS_KEPT = 16
RANKS_KEPT = 16_384  # ranks from here on are timed and not compared
NEAR = 16  # records of one step lie as near as this; one farther away is of an earlier run through it

RankSteps = dict[int, dict[int, Step]]


def own_s(step: Step) -> float:
    """Seconds that a rank spent on its own work, without waiting for others where it tells that apart."""
    parts = step.parts
    return step.duration_s if parts is None else parts.compute + parts.data + parts.other


def keep_step(steps: list[Step], rank_steps: RankSteps, event: Step) -> None:
    """Fold one event into both."""
    if event.rank is not None and event.rank < RANKS_KEPT:
        _keep_rank(rank_steps, event, event.rank)
    at = len(steps) if not steps or event.time_ms >= steps[-1].time_ms else bisect_right(steps, _when(event), key=_when)
    known = _record_near(steps, at, event)
    if known is not None:
        if event.rank is None and steps[known].rank is None:
            insort(steps, event, key=_when)  # the job's own: each is a step
        elif _rank_of_record(event) > _rank_of_record(steps[known]):
            del steps[known]
            insort(steps, event, key=_when)
    else:
        insort(steps, event, key=_when)
    if len(steps) > STEPS_KEPT:
        del steps[0]


def _keep_rank(rank_steps: RankSteps, event: Step, rank: int) -> None:
    ranks = rank_steps.get(event.step)
    if ranks is None:
        ranks = rank_steps[event.step] = {}
    known = ranks.get(rank)
    if known is None or known.sequence < event.sequence:
        ranks[rank] = event
    if len(rank_steps) > RANK_STEPS_KEPT:
        del rank_steps[min(rank_steps, key=lambda number: (ended_ms(rank_steps[number]), number))]


def ended_ms(ranks: dict[int, Step]) -> int:
    """When the last rank of a step was through with it."""
    return max(step.time_ms for step in ranks.values())


def _record_near(steps: list[Step], at: int, event: Step) -> int | None:
    """Where the record of the event's step is, near to where the event belongs."""
    for place in range(min(at + NEAR, len(steps)) - 1, max(at - NEAR, 0) - 1, -1):
        if steps[place].step == event.step:
            return place
    return None


def _when(step: Step) -> tuple[int, int]:
    return step.time_ms, step.sequence


def _rank_of_record(step: Step) -> tuple[bool, float, int]:
    return step.rank is None, own_s(step), step.sequence
