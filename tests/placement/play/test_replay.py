"""Laws of the order within a leaf, played on a count of GPUs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.placement.play.capacity import Capacity, CountAsk
from fleetcast.placement.play.replay import REFUSED_S, Floats, Replay, RowScheduler, Trace
from fleetcast.placement.play.rows import NEVER, RowEntry, WaitingRow
from fleetcast.placement.queues.order import compute_area

GPUS = 8
BOUND_S = 100.0

Job = tuple[float, float, int]  # submit_s, run_s, gpus
jobs = st.lists(
    st.tuples(st.integers(0, 400).map(float), st.integers(1, 90).map(float), st.integers(1, GPUS)),
    min_size=1,
    max_size=40,
).map(sorted)


def exactly(ask: CountAsk, age_s: float) -> float:
    """A plan that knows each limit to be the run time."""
    assert ask.limit_s is not None
    return ask.limit_s


@dataclass(frozen=True)
class Keyed:
    keys: Sequence[float]

    def compute_key(self, job: int, now_s: float) -> float:
        return self.keys[job]

    def record_start(self, job: int, now_s: float) -> None:
        """Learns nothing."""

    def record_end(self, job: int, now_s: float) -> None:
        """Learns nothing."""


def play(rows: list[Job], bound_s: float | None = BOUND_S, **more: Any) -> Floats:
    """The least area first, and who has waited as long as the bound; None: first come, first served."""
    submit_s, run_s, gpus = (list(column) for column in zip(*rows, strict=True))
    trace = Trace([], submit_s, run_s, gpus, run_s)
    policy = Keyed([0.0 if bound_s is None else compute_area(each, run) for each, run in zip(gpus, run_s, strict=True)])
    asks = [CountAsk(each, run) if each <= GPUS else None for each, run in zip(gpus, run_s, strict=True)]
    scheduler = RowScheduler(submit_s, Capacity(GPUS, exactly), policy, asks.__getitem__, bound_s or NEVER)
    return Replay(trace, scheduler, **more).play()


@given(jobs, st.sampled_from([None, BOUND_S]))
def test_all_start_after_their_arrival_and_never_over_capacity(rows: list[Job], bound_s: float | None) -> None:
    start_s = play(rows, bound_s)
    assert all(start >= submit for start, (submit, _, _) in zip(start_s, rows, strict=True))
    for moment in start_s:
        held = sum(g for start, (_, run, g) in zip(start_s, rows, strict=True) if start <= moment < start + run)
        assert held <= GPUS


@given(jobs)
def test_the_same_input_gives_the_same_starts(rows: list[Job]) -> None:
    assert play(rows).tobytes() == play(rows).tobytes()


@given(jobs)
def test_nobody_waits_beyond_the_bound_plus_what_ran_before_its_claim(rows: list[Job]) -> None:
    """As the head it waits for what runs; before, for those that came earlier and wait, too, one after the other."""
    start_s = play(rows)
    longest_s = max(run for _, run, _ in rows)
    for at, (submit, _, _) in enumerate(rows):
        due_s = submit + BOUND_S
        if start_s[at] > due_s:
            earlier = sum(start > due_s and row[0] <= submit for start, row in zip(start_s, rows, strict=True))
            assert start_s[at] <= due_s + earlier * longest_s


@given(jobs, st.integers(0, 5))
def test_backfill_never_delays_the_head(rows: list[Job], which: int) -> None:
    """First come, first served: the first that waits starts no later than it would without anybody behind it."""
    at = which % len(rows)
    submits = [row[0] for row in rows]
    alone = play(rows[: at + 1], None)
    if all(alone[before] <= submits[at] for before in range(at)):
        assert play(rows, None)[at] <= alone[at]


def test_the_least_area_is_next_and_not_the_least_time() -> None:
    blocker, wide, narrow = (0.0, 50.0, 8), (1.0, 10.0, 8), (2.0, 40.0, 1)
    assert play([blocker, wide, narrow], NEVER).tolist() == [0.0, 90.0, 50.0]
    assert play([blocker, wide, narrow], None).tolist() == [0.0, 50.0, 60.0]


def test_who_waited_as_long_as_the_bound_goes_before_smaller_ones() -> None:
    rows = [(0.0, 50.0, 8), (1.0, 60.0, 8), *((2.0 + at, 49.0, 8) for at in range(6))]
    never, bounded = play(rows, NEVER), play(rows)
    assert never[1] == max(never)
    assert bounded[1] == 148.0  # the first pass after 101 s: two of 49 s were before it


def test_beside_the_head_the_least_area_goes_first_whoever_has_waited() -> None:
    """Both have waited too long when the first is the head; two GPUs are free beside it until 170 s."""
    runs = [(0.0, 170.0, 6), (0.0, 120.0, 2)]
    head, longer, shorter = (1.0, 60.0, 8), (2.0, 50.0, 2), (3.0, 40.0, 2)
    assert play([*runs, head, longer, shorter]).tolist() == [0.0, 0.0, 170.0, 230.0, 120.0]


def test_a_refused_start_gives_back_its_gpus_and_waits_on() -> None:
    start_s = play([(0.0, 10.0, 8), (1.0, 10.0, 8)], refuses=lambda job, tried: (job, tried) == (0, 0))
    assert start_s.tolist() == [REFUSED_S, REFUSED_S + 10]


def test_a_job_that_outruns_its_plan_is_planned_anew() -> None:
    trace = Trace([], [0.0, 1.0, 2.0], [100.0, 10.0, 30.0], [4, 8, 4], [None] * 3)
    asks = [CountAsk(each, None) for each in trace.gpus]

    def short(ask: CountAsk, age_s: float) -> float:
        return max(5.0, age_s * 1.05)

    scheduler = RowScheduler(trace.submit_s, Capacity(GPUS, short), Keyed([0.0] * 3), asks.__getitem__)
    start_s = Replay(trace, scheduler).play()
    assert start_s.tolist() == [0.0, 100.0, 110.0]


def test_a_job_that_is_cancelled_and_sent_again_gains_nothing() -> None:
    rows = [(0.0, 50.0, 8), *((1.0 + at, 20.0, 8) for at in range(10))]
    once = play(rows)
    again = play(sorted([*rows[:1], *rows[2:], (30.0, 20.0, 8)]))
    assert max(again) >= once[1]
    assert sorted(again) == sorted(once)


def test_a_row_tells_who_is_next_by_key_then_by_arrival_once_somebody_is_starved() -> None:
    row = WaitingRow("ask", bound_s=10.0)
    late, early = RowEntry("late", 1.0, 5.0), RowEntry("early", 2.0, 0.0)
    row.add(late)
    row.add(early)
    assert row.find_next_entry(9.0)[1] is late
    assert row.find_next_entry(10.0)[1] is early
    row.remove(early)
    assert row.find_next_entry(20.0)[1] is late
    assert np.isfinite(row.find_next_entry(20.0)[0][2])
