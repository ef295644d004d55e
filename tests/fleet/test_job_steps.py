"""Steps folded by step: a reference for every gang, in bounded room."""

from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.events import Step, StepParts
from fleetcast.fleet.job_steps import MAX_RANK_STEPS, MAX_RANKS, MAX_STEPS
from fleetcast.fleet.jobs import JobAttempt
from tests.fuzz.bounds import examples


def of_rank(rank: int | None, number: int, own_s: float = 1.0, at_ms: int | None = None) -> Step:
    """As the client library counts: each rank in a range of its own."""
    return Step(
        job="j", sequence=((0 if rank is None else rank + 1) << 32) + number, step=number, rank=rank,
        time_ms=1000 * number if at_ms is None else at_ms, duration_s=2.0, parts=StepParts(compute=own_s),
    )  # fmt: skip


def fold(*events: Step) -> JobAttempt:
    attempt = JobAttempt("j", 1)
    for event in events:
        attempt.fold(event)
    return attempt


def test_a_large_gang_keeps_as_many_steps_as_a_small_one_and_ranks_of_the_newest():
    ranks, numbers = 40, range(MAX_STEPS + 10)
    attempt = fold(*(of_rank(rank, number, 1.0 + (rank == 7)) for number in numbers for rank in range(ranks)))
    assert [(step.step, step.rank) for step in attempt.steps] == [(number, 7) for number in numbers[10:]]
    assert sorted(attempt.rank_steps) == list(numbers[-MAX_RANK_STEPS:])
    assert all(len(row.ranks) == ranks for row in attempt.rank_steps.values())


@given(st.permutations([(rank, number) for rank in (None, 0, 1, 2) for number in range(5)]), st.booleans())
@examples(125)
def test_the_order_of_arrival_changes_nothing(order, with_whole):
    told = [row for row in order if with_whole or row[0] is not None]
    events = [of_rank(rank, number, 1.0 + (rank or 0) * number) for rank, number in told]
    attempt = fold(*events, *events)
    ordered = fold(*sorted(events, key=lambda row: (row.time_ms, row.sequence)))
    assert (attempt.steps, attempt.rank_steps) == (ordered.steps, ordered.rank_steps)
    assert {step.rank is None for step in attempt.steps} == {with_whole}


def test_steps_done_again_after_a_rollback_are_new_ones():
    first = [of_rank(0, number) for number in range(100)]
    again = [
        Step(job="j", sequence=(1 << 32) + 1000 + number, step=number, rank=0, time_ms=200_000 + number, duration_s=3.0)
        for number in range(50, 60)
    ]
    attempt = fold(*first, *again)
    assert [step.step for step in attempt.steps][-11:] == [99, *range(50, 60)]
    assert list(attempt.rank_steps)[-1] == 59


def test_a_rank_beyond_all_measure_is_timed_and_not_kept_apart():
    attempt = fold(of_rank(MAX_RANKS, 1))
    assert (len(attempt.steps), attempt.rank_steps) == (1, {})
