"""Laws of the order within a leaf, played on a count of GPUs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.capacity import Capacity, CountAsk
from placement.contest import PERIOD_S, Issued, Keyed, TermContest
from placement.order import ORDERS, Order
from placement.replay import REFUSED_S, Floats, Replay, RowScheduler, Trace
from placement.rows import NEVER, Item, WaitingRow

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


def play(rows: list[Job], order: Order | None = None, **more: Any) -> Floats:
    order = order or Order("shortest", BOUND_S, "limit")
    submit_s, run_s, gpus = (list(column) for column in zip(*rows, strict=True))
    trace = Trace([], submit_s, run_s, gpus, run_s)
    policy = Keyed([order.key(each, None, run) for each, run in zip(gpus, run_s, strict=True)])
    asks = [CountAsk(each, run) if each <= GPUS else None for each, run in zip(gpus, run_s, strict=True)]
    scheduler = RowScheduler(submit_s, Capacity(GPUS, exactly), policy, asks.__getitem__, order.bound_s())
    return Replay(trace, scheduler, **more).play()


@given(jobs, st.sampled_from(ORDERS))
def test_all_start_after_their_arrival_and_never_over_capacity(rows: list[Job], name: Any) -> None:
    start_s = play(rows, Order(name, BOUND_S))
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
    order = Order("fifo")
    submits = [row[0] for row in rows]
    alone = play(rows[: at + 1], order)
    if all(alone[before] <= submits[at] for before in range(at)):
        assert play(rows, order)[at] <= alone[at]


def test_the_least_area_is_next_and_not_the_least_time() -> None:
    blocker, wide, narrow = (0.0, 50.0, 8), (1.0, 10.0, 8), (2.0, 40.0, 1)
    assert play([blocker, wide, narrow], Order("shortest", 1e9, "limit")).tolist() == [0.0, 90.0, 50.0]
    assert play([blocker, wide, narrow], Order("fifo")).tolist() == [0.0, 50.0, 60.0]


def test_who_waited_as_long_as_the_bound_goes_before_smaller_ones() -> None:
    rows = [(0.0, 50.0, 8), (1.0, 60.0, 8), *((2.0 + at, 49.0, 8) for at in range(6))]
    never, bounded = play(rows, Order("shortest", 1e9, "limit")), play(rows)
    assert never[1] == max(never)
    assert bounded[1] == 148.0  # the first pass after 101 s: two of 49 s were before it


def test_first_come_first_served_is_the_default_and_knows_no_bound() -> None:
    order = Order()
    assert (order.name, order.key(8, 10.0, 20.0), order.bound_s(5.0)) == ("fifo", 0.0, NEVER)


def test_a_request_that_tolerates_less_is_bound_by_that() -> None:
    order = Order("shortest", 100.0)
    assert (order.bound_s(), order.bound_s(7.0), order.bound_s(1e6)) == (100.0, 7.0, 100.0)


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


def contest_of(forecast_is_right: bool) -> TermContest:
    """Two weeks of a queue that never empties: every second job is short, by its forecast or else by its limit."""
    contest = TermContest(GPUS, 1e9, lambda ask, age_s: ask.limit_s or 1e5)
    now_s = 0.0
    for job in range(400):
        run_s = 4000.0 if job % 2 else 400.0
        told_s = run_s if forecast_is_right else 4400.0 - run_s
        limit_s = 5000.0 if forecast_is_right else run_s
        contest.issued(job, Issued(job * 1500.0, GPUS, limit_s, told_s))
        now_s = max(now_s, job * 1500.0)
        contest.started(job, now_s)
        contest.ended(job, now_s := now_s + run_s)
    contest.settle(0.0)
    contest.settle(PERIOD_S + now_s)
    assert contest.term == "limit"  # to win once is not enough
    contest._jobs = {job: replace(one, submit_s=one.submit_s + PERIOD_S) for job, one in contest._jobs.items()}
    contest.settle(2 * PERIOD_S + now_s)
    return contest


@pytest.mark.parametrize(("right", "term"), [(True, "forecast"), (False, "limit")])
def test_a_forecast_orders_only_where_it_won_on_the_queue_itself(right: bool, term: str) -> None:
    assert contest_of(right).term == term


def test_a_contest_without_enough_jobs_changes_nothing() -> None:
    contest = TermContest(GPUS, 1e9, exactly)
    contest.settle(0.0)
    assert not contest.settle(PERIOD_S)
    assert (contest.log, contest.term) == ([], "limit")


def test_a_row_tells_who_is_next_by_key_then_by_arrival_once_somebody_is_starved() -> None:
    row = WaitingRow("ask", bound_s=10.0)
    late, early = Item("late", 1.0, 5.0), Item("early", 2.0, 0.0)
    row.add(late)
    row.add(early)
    assert row.first(9.0)[1] is late
    assert row.first(10.0)[1] is early
    row.remove(early)
    assert row.first(20.0)[1] is late
    assert np.isfinite(row.first(20.0)[0][2])
