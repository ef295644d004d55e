"""Demand in minutes after T0 (a full hour); 10-minute bins unless said otherwise."""

import json
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.features.demand_series import TARGETS, DemandSeries
from fleetcast.features.job_fold import JobFold
from fleetcast.features.run_past import LEVELS
from fleetcast.fleet.events import Failed, Finished, JobEvent, Preempted, Queued, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.requests import RankPlacement
from tests.fuzz.bounds import examples

T0 = 1_700_002_800_000
MINUTE = 60_000


def at(minute: float) -> int:
    return T0 + round(minute * MINUTE)


def submitted(job: str, minute: float, gpus: int = 8, queue: str = "train", attempt: int = 1) -> Submitted:
    return Submitted(job=job, attempt=attempt, sequence=1, time_ms=at(minute), gang=1, gpus_per_node=gpus, queue=queue)


def started(job: str, minute: float, attempt: int = 1) -> Started:
    return Started(job=job, attempt=attempt, sequence=2, time_ms=at(minute), nodes=("n1",))


def finished(job: str, minute: float) -> Finished:
    return Finished(job=job, sequence=3, time_ms=at(minute))


def demand_of(*events: JobEvent) -> DemandSeries:
    jobs, demand = JobTable(), DemandSeries()
    for event in events:
        attempt = jobs.apply(event)
        if attempt:
            demand.update(attempt)
    return demand


def folded(events: Iterable[JobEvent]) -> JobFold:
    fold = JobFold()
    for event in events:
        fold.apply(event)
    return fold


def read(demand: DemandSeries, target, minute: float, bins: int, pool: str = "all", bin_s: int = 600) -> list[float]:
    return demand.read_series(pool, target, at(minute), bin_s, bins).tolist()


def waits(job: str, minute: float, sequence: int, blocked: bool) -> Queued:
    return Queued(job=job, sequence=sequence, time_ms=at(minute), reason="JobHeldUser", blocked=blocked)


def test_a_blocked_job_is_demand_from_its_release_on() -> None:
    held = [submitted("a", 5), waits("a", 5, 4, True)]
    assert read(demand_of(submitted("b", 1, 1), *held), "queued", 25, 3) == [1, 1, 1]
    released = demand_of(submitted("b", 1, 1), *held, waits("a", 22, 5, False))
    assert read(released, "queued", 25, 3) == [1, 1, 9]
    assert read(released, "arriving", 30, 3) == [1, 0, 8]


def test_a_job_that_ends_while_it_is_blocked_was_no_demand() -> None:
    cancelled = Failed(job="a", sequence=9, time_ms=at(8), category="cancelled")
    demand = demand_of(submitted("b", 1, 1), submitted("a", 5), waits("a", 5, 4, True), cancelled)
    assert read(demand, "arriving", 20, 2) == [1, 0]


def test_a_job_waits_runs_and_leaves() -> None:
    # bins      0-10 submitted   10-20 started   20-30   30-40 finished   40-50
    demand = demand_of(submitted("a", 5), started("a", 12), finished("a", 33))
    assert read(demand, "queued", 45, 5) == [8, 0, 0, 0, 0]
    assert read(demand, "running", 45, 5) == [0, 8, 8, 0, 0]
    assert read(demand, "wanted", 45, 5) == [8, 8, 8, 0, 0]


def test_arrivals_end_with_the_last_full_bin() -> None:
    demand = demand_of(submitted("a", 5), submitted("b", 8, gpus=2), submitted("c", 15), submitted("d", 25))
    assert read(demand, "arriving", 29, 2) == [10, 8]
    assert read(demand, "arriving_jobs", 29, 2) == [2, 1]


def test_nothing_is_known_before_the_first_event() -> None:
    demand = demand_of(submitted("a", 15), submitted("b", 35, queue="other"))
    assert np.isnan(read(demand, "queued", 45, 5)).tolist() == [True, False, False, False, False]
    assert read(demand, "queued", 45, 3, pool="other") == [0, 8, 8]


def test_pools_are_the_queues_and_all() -> None:
    demand = demand_of(submitted("a", 5), submitted("b", 5, gpus=4, queue="batch"), submitted("c", 6, queue="all"))
    assert demand.list_queues() == ("batch", "train", "all")
    assert [read(demand, "queued", 9, 1, pool) for pool in demand.list_queues()] == [[4], [8], [20]]


def test_a_pool_never_seen_is_unknown() -> None:
    assert np.isnan(read(demand_of(submitted("a", 5)), "queued", 9, 3, "nobody")).all()


def test_a_minute_series_covers_the_same_jobs() -> None:
    demand = demand_of(submitted("a", 1), started("a", 3), finished("a", 5))
    assert read(demand, "wanted", 6, 6, bin_s=60) == [8, 8, 8, 8, 0, 0]


def test_a_cancelled_job_leaves_the_queue() -> None:
    demand = demand_of(submitted("a", 5), Failed(job="a", sequence=2, time_ms=at(15), category="cancelled"))
    assert read(demand, "queued", 25, 3) == [8, 0, 0]


def test_a_later_attempt_runs_but_does_not_arrive_again() -> None:
    preempted = Preempted(job="a", sequence=3, time_ms=at(12))
    again = (submitted("a", 13, attempt=2), started("a", 14, attempt=2))
    demand = demand_of(submitted("a", 1), started("a", 2), preempted, *again)
    assert read(demand, "arriving_jobs", 25, 2) == [1, 0]
    assert read(demand, "running", 25, 3) == [8, 8, 8]


def test_a_job_that_nobody_submitted_arrives_as_it_starts() -> None:
    demand = demand_of(Started(job="a", sequence=1, time_ms=at(5), nodes=("n1", "n2")))
    assert read(demand, "arriving", 15, 1) == [2]
    assert read(demand, "queued", 15, 2) == [0, 0]


def test_an_attempt_keeps_the_gpus_that_it_held_after_its_end_and_its_rest() -> None:
    fold = folded([submitted("j", 0, gpus=1), started("j", 0)])
    fold.demand.set_sizes({("j", 1): 8000}, fold.jobs.get)
    fold.apply(finished("j", 40))
    assert read(fold.demand, "running", 59, 6) == [8, 8, 8, 8, 0, 0]
    fold.demand.set_sizes({}, fold.jobs.get)
    fold.pack_old_attempts(at(60), 0)
    fold.apply(Finished(job="j", sequence=4, time_ms=at(20)))
    assert read(fold.demand, "running", 59, 6) == [8, 8, 0, 0, 0, 0]


def test_the_bound_on_sizes_drops_none_of_an_attempt_that_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.features.shown_sizes.MOST_SIZES", 1)
    both = ("j", "k")
    fold = folded([event for job in both for event in (submitted(job, 0, gpus=1), started(job, 0))])
    fold.demand.set_sizes({(job, 1): 8000 for job in both}, fold.jobs.get)
    fold.apply(finished("k", 20))
    fold.pack_old_attempts(at(60), 0)
    fold.apply(finished("j", 40))
    assert read(fold.demand, "running", 59, 6) == [16, 16, 8, 8, 0, 0]


def test_an_attempt_whose_end_is_reported_late_keeps_what_its_events_state() -> None:
    ranks = (RankPlacement(0, "n1", tuple(range(8))),)
    fold = folded([submitted("j", 0), Started(job="j", sequence=2, time_ms=at(0), ranks=ranks)])
    displaced = {("j", 1)}
    fold.demand.set_sizes({("j", 1): 3000}, fold.jobs.get, displaced)
    assert read(fold.demand, "running", 59, 1) == [3]
    again = DemandSeries()
    again.load(*fold.demand.dump())
    fold.apply(finished("j", 40))
    fold.demand.set_sizes({("j", 1): 3000}, fold.jobs.get, displaced)  # of a tick from before the end
    assert read(fold.demand, "running", 59, 6) == [8, 8, 8, 8, 0, 0]
    assert read(fold.demand, "arriving", 19, 1) == [8]
    again.update(fold.jobs.get("j", 1))
    assert read(again, "running", 59, 6) == [8, 8, 8, 8, 0, 0]


def test_an_attempt_that_still_runs_and_names_its_gpus_counts_by_these() -> None:
    fold = folded([submitted("j", 0, gpus=1), started("j", 0)])
    fold.demand.set_sizes({("j", 1): 8000}, fold.jobs.get)
    ranks = (RankPlacement(0, "n1", (0, 1)),)
    fold.apply(Started(job="j", attempt=1, sequence=3, time_ms=at(0), ranks=ranks))
    fold.demand.set_sizes({}, fold.jobs.get)
    assert read(fold.demand, "running", 19, 2) == [2, 2]


def test_attempts_without_gpus_are_no_demand() -> None:
    assert read(demand_of(submitted("a", 5, gpus=8), submitted("cpu", 5, gpus=0)), "arriving_jobs", 15, 1) == [1]


def test_history_older_than_the_ring_still_runs() -> None:
    demand = demand_of(submitted("a", 0), started("a", 1))
    later = 50 * 24 * 60
    assert read(demand, "running", later, 3) == [8, 8, 8]
    assert read(demand, "running", later + 36 * 24 * 60, 3) == [8, 8, 8]


def test_a_time_far_ahead_wipes_nothing() -> None:
    demand = demand_of(submitted("a", 5), submitted("wrong clock", 10**7))
    assert read(demand, "queued", 15, 2) == [8, 8]


def test_a_very_long_history_keeps_its_newest_part() -> None:
    demand = DemandSeries()
    jobs = JobTable()
    for minute in range(10_000):  # more minutes than may wait for the first reader
        attempt = jobs.apply(submitted(f"job{minute}", minute, gpus=1))
        assert attempt is not None
        demand.update(attempt)
    assert read(demand, "queued", 9_999, 3, bin_s=60) == [9_998, 9_999, 10_000]
    assert read(demand, "arriving", 10_000, 1440, bin_s=60) == [1.0] * 1440


def test_durations_are_of_finished_jobs_only() -> None:
    events: list[JobEvent] = []
    for i, minutes in enumerate((10, 20, 30)):
        events += [submitted(f"f{i}", 0), started(f"f{i}", 0), finished(f"f{i}", minutes)]
    events += [submitted("bad", 0), started("bad", 0), Failed(job="bad", sequence=3, time_ms=at(900), category="user")]
    events += [submitted("open", 0), started("open", 0)]
    demand = demand_of(*events)
    (known,) = demand.compute_duration_quantiles()["by_gpus"].items()
    assert known[0] == "8"
    assert (known[1]["p50"], known[1]["p90"], known[1]["n"]) == (1200.0, pytest.approx(1680.0), 3)
    assert known[1]["levels"] == sorted(known[1]["levels"])
    assert len(known[1]["levels"]) == len(LEVELS)
    assert demand.compute_duration_quantiles()["all"]["n"] == 3


def test_no_finished_job_no_durations() -> None:
    assert DemandSeries().compute_duration_quantiles() == {"by_gpus": {}, "all": None}


def test_durations_are_of_the_newest_jobs() -> None:
    events: list[JobEvent] = []
    for i in range(2010):
        run = 1000 if i < 10 else 5
        events += [submitted(f"f{i}", i), started(f"f{i}", i), finished(f"f{i}", i + run)]
    durations = demand_of(*sorted(events, key=lambda event: event.time_ms)).compute_duration_quantiles()
    assert durations["all"]["n"] == 2000


@st.composite
def histories(draw) -> list[JobEvent]:
    events: list[JobEvent] = []
    for job in range(draw(st.integers(1, 6))):
        times = sorted(draw(st.lists(st.integers(0, 120), min_size=3, max_size=3)))
        gpus, queue = draw(st.sampled_from((0, 1, 8))), draw(st.sampled_from(("a", "b", "all")))
        name = f"job{job}"
        events += [submitted(name, times[0], gpus, queue), started(name, times[1]), finished(name, times[2])][
            : draw(st.integers(1, 3))
        ]
    return events


def everything(demand: DemandSeries) -> dict[str, list[float]]:
    rows = {
        f"{pool} {target} {bin_s}": read(demand, target, 130, 140, pool, bin_s)
        for pool in demand.list_queues()
        for target in TARGETS
        for bin_s in (60, 600)
    }
    return rows | {"durations": str(demand.compute_duration_quantiles())}


@examples(100)
@given(histories(), st.randoms(use_true_random=False), st.booleans())
def test_any_order_and_any_repetition_give_the_same_series(events, random, read_early: bool) -> None:
    straight = everything(demand_of(*events))
    shuffled = events * 2
    random.shuffle(shuffled)
    jobs, demand = JobTable(), DemandSeries()
    for event in shuffled:
        jobs.apply(event)
        attempt = jobs.get(event.job, event.attempt)
        assert attempt is not None
        demand.update(attempt)
        if read_early:
            demand.read_series("all", "wanted", at(60), 600, 3)
    np.testing.assert_equal(everything(demand), straight)


@examples(100)
@given(histories(), st.data())
def test_a_snapshot_with_rest_and_an_overlapping_replay_equal_a_straight_run(events, data) -> None:
    cut = data.draw(st.integers(0, len(events)))
    overlap = data.draw(st.integers(0, cut))
    fold = folded(events[:cut])
    fold.pack_old_attempts(at(data.draw(st.integers(0, 120))), forget_before_ms=0)
    about, arrays = fold.demand.dump()
    fold.demand = DemandSeries()
    fold.demand.load(json.loads(json.dumps(about)), arrays)
    for event in events[overlap:]:
        fold.apply(event)
    np.testing.assert_equal(everything(fold.demand), everything(demand_of(*events)))


def test_a_dump_holds_still_while_the_series_go_on() -> None:
    """It is written in a thread: what is told meanwhile is replayed, and must not be in it already."""
    fold = folded([submitted("a", 5), started("a", 12), submitted("b", 6), started("b", 7), finished("b", 9)])
    about, arrays = fold.demand.dump()
    at_once = json.dumps(about)
    for event in (finished("a", 33), submitted("c", 34, queue="other")):
        fold.apply(event)
    assert json.dumps(about) == at_once
    restored = DemandSeries()
    restored.load(about, arrays)
    assert read(restored, "running", 45, 5) == [0, 8, 8, 8, 8]


def test_a_queue_that_nobody_has_used_for_all_of_its_bins_is_not_restored() -> None:
    demand = demand_of(submitted("a", 0, queue="old"), started("a", 1), finished("a", 2))
    days_ms = 36 * 86_400_000
    for pool in demand.list_queues():
        for bin_s in (60, 600):
            demand.read_series(pool, "wanted", at(0) + days_ms, bin_s, 3)
    restored = DemandSeries()
    restored.load(*demand.dump())
    assert restored.list_queues() == ("all",)


def test_sixty_thousand_attempts_take_a_moment() -> None:
    jobs, demand = JobTable(), DemandSeries()
    for i in range(3000):
        for event in (submitted(f"j{i}", i, queue=f"q{i % 15}"), started(f"j{i}", i + 1), finished(f"j{i}", i + 60)):
            jobs.apply(event)
    for attempt in jobs:
        demand.update(attempt)
    assert demand.compute_duration_quantiles()["all"]["n"] == 2000
