import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.ahead.paths import MOST_CALENDARS, Timelines, sample_timelines
from fleetcast.placement.ahead.run_draws import PATHS, interpolate_remaining_s
from fleetcast.placement.ahead.start_time import StartEstimate, _describe_room, compute_start_times, estimate_start
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import NO_RUNNING_JOBS
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.plan.queue import WaitingEntry
from fleetcast.placement.plan.timeline import Release, RunTimeQuantiles, Timeline
from tests.placement.runs import Run, table_of

NOW_MS = 1_589_310_000_000  # 19:00 UTC
OPTIONS = Options(now_ms=NOW_MS)
HOUR_S = 3600.0
EXACT = (HOUR_S,) * 8  # of quantiles


def request(name: str = "x", gang: int = 1, each: int = 8, level: Any = None, **fields: Any) -> PlacementRequest:
    topology = TopologyConstraint(required=level)
    return PlacementRequest(request_id=name, gang=gang, gpus_per_node=each, topology=topology, **fields)


@pytest.fixture
def busy(make_view):
    """r01: n001 ends in 1 h, n002 in 2 h; r02: n003 in 3 h, n004 in 4 h. Every job holds a whole node."""
    holders = np.repeat(np.arange(4, dtype=np.int32), 8).reshape(4, 8)
    view = make_view({"r01": [0, 0], "r02": [0, 0]}, holders=holders, jobs=("a", "b", "c", "d"))
    hours = zip("abcd", (1, 2, 3, 4), strict=True)
    return view, table_of({job: Run(NOW_MS, 8, left_s=(HOUR_S * left,) * 8) for job, left in hours})


def paths(state: Any, *queue: PlacementRequest, run_s: Any = EXACT) -> Timelines:
    view, running = state
    entries = [WaitingEntry(entry, NOW_MS + number) for number, entry in enumerate(queue)]
    return sample_timelines(entries, view, running, RunTimeQuantiles({}), OPTIONS, lambda request: run_s)


def hours(estimate: StartEstimate) -> list[float]:
    assert estimate.start_ms is not None
    return [round((start - NOW_MS) / 3_600_000, 3) for start in estimate.start_ms.values()]


def test_a_job_starts_when_the_first_node_is_free(busy) -> None:
    estimate = estimate_start(request(), paths(busy))
    assert hours(estimate) == [1, 1, 1]
    assert [(row.job, row.node, row.ends_ms["p50"]) for row in estimate.blocked_by] == [
        ("a", "n001", NOW_MS + 3_600_000)
    ]
    assert estimate.constraint == "gpus"
    assert estimate.sentence == ("needs 8 GPUs; the earliest such block is in 60 min (p90 60 min), when job a ends")


def test_a_gang_waits_for_the_last_of_its_nodes(busy) -> None:
    estimate = estimate_start(request(gang=3), paths(busy))
    assert hours(estimate) == [3, 3, 3]
    assert [row.job for row in estimate.blocked_by] == ["c", "b", "a"]


def test_a_required_level_waits_for_one_domain_and_is_named(busy) -> None:
    estimate = estimate_start(request(gang=2, level="rack", avoid_nodes=("n001",)), paths(busy))
    assert hours(estimate) == [4, 4, 4]
    assert estimate.constraint == "topology"
    assert "inside one rack" in estimate.sentence


def test_members_of_one_node_need_it_whole(busy) -> None:
    estimate = estimate_start(request(gang=4, each=2, level="node"), paths(busy))
    assert hours(estimate) == [1, 1, 1]
    assert estimate.sentence.startswith("needs 8 GPUs (4 x 2 GPUs) with fast intra-node links; the earliest")


def test_a_job_that_waits_is_told_of_those_before_it_by_request_and_by_job(busy) -> None:
    timeline = paths(busy, request("q1"), request("q2", job="mine"), request("q3"))
    for asked in (request("q2"), request("another", job="mine")):
        estimate = estimate_start(asked, timeline)
        assert hours(estimate) == [2, 2, 2]
        assert [row.job for row in estimate.blocked_by] in (["b"], ["q1"])


def test_of_many_priorities_some_calendars_are_kept_and_nobody_is_told_too_early(busy) -> None:
    queue = [request(f"q{number}", priority=-number) for number in range(100)]
    timeline = paths(busy, *queue)
    assert MOST_CALENDARS // 2 < len(timeline.calendars) <= MOST_CALENDARS + 1
    starts = [hours(estimate_start(request(priority=-number), timeline))[0] for number in range(-1, 100)]
    alone = [hours(estimate_start(request(priority=-n), paths(busy, *queue[: n + 1])))[0] for n in (0, 5, 99)]
    assert starts == sorted(starts)
    assert starts[0] == 1
    assert [starts[1], starts[100]] == [alone[0], alone[2]]
    assert starts[6] >= alone[1]


def test_rooms_of_many_shapes_are_not_kept_for_good(busy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetcast.placement.ahead.calendars.MAX_CACHED_ROOMS", 3)
    timeline = paths(busy)
    for cpus in range(1, 10):
        assert hours(estimate_start(request(cpus=cpus), timeline)) == [1, 1, 1]
    assert len(timeline.rooms.known) <= 3


def test_who_waits_before_takes_his_place_first(busy) -> None:
    timeline = paths(busy, request("q1"), request("q2"))
    assert compute_start_times(timeline)["q2"] == (NOW_MS + 7_200_000,) * 3
    # q1 runs for an hour on n001 from 1 h on, q2 on n002 from 2 h on or on n001 again
    assert hours(estimate_start(request(), timeline)) == [2, 2, 2]
    assert hours(estimate_start(request(priority=5), timeline)) == [1, 1, 1]


def test_an_entry_of_the_queue_is_not_counted_twice(busy) -> None:
    timeline = paths(busy, request("q1"), request("q2"))
    assert hours(estimate_start(request("q1"), timeline)) == [1, 1, 1]


def test_a_short_job_may_use_what_is_kept_for_a_gang(busy) -> None:
    timeline = paths(busy, request("wide", gang=4))  # from 4 h on; n001 idles from 1 h to 4 h
    assert hours(estimate_start(request(limit_s=HOUR_S), timeline)) == [1, 1, 1]
    assert hours(estimate_start(request(limit_s=9 * HOUR_S), timeline)) == [5, 5, 5]


def test_what_never_fits_says_why(busy) -> None:
    estimate = estimate_start(request(gpu_model="B200"), paths(busy))
    assert (estimate.start_ms, estimate.blocked_by, estimate.constraint) == (None, (), "gpu_model")
    assert estimate.sentence.startswith("does not fit even when all jobs have ended: needs 8 GPUs of model B200")


def test_a_gang_of_a_million_never_fits_and_takes_no_memory(busy) -> None:
    huge = request("huge", gang=1_000_000, each=1024)
    sampled = paths(busy, huge)
    assert estimate_start(request(gang=1_000_000), sampled, NOW_MS).start_ms is None
    assert estimate_start(request(each=1), sampled, NOW_MS).start_ms is not None


def test_what_fits_now_starts_now(make_view) -> None:
    view = make_view({"r01": [8, 0]})
    timeline = paths((view, NO_RUNNING_JOBS))
    assert fits_now(request(), view, OPTIONS)
    estimate = estimate_start(request(), timeline)
    assert hours(estimate) == [0, 0, 0]
    assert estimate.sentence == "needs 8 GPUs; such a block is free now"


def test_quantiles_do_not_cross_and_never_lie_in_the_past(busy) -> None:
    view, _ = busy
    running = table_of({job: Run(NOW_MS - 3_600_000 * age, 8) for age, job in enumerate("abcd", 1)})
    timeline = sample_timelines([], view, running, RunTimeQuantiles({0: (1800.0, 86_400.0)}), OPTIONS)
    for gang in (1, 2, 4):
        start = estimate_start(request(gang=gang), timeline, NOW_MS + 60_000).start_ms
        assert start is not None
        assert NOW_MS + 60_000 <= start["p10"] <= start["p50"] <= start["p90"]


def test_a_job_that_outlived_its_like_is_not_about_to_end(busy) -> None:
    view, _ = busy
    running = table_of({job: Run(NOW_MS - 40 * 3_600_000, 8) for job in "abcd"})
    timeline = sample_timelines([], view, running, RunTimeQuantiles({0: (600.0, 1200.0)}), OPTIONS)
    start = estimate_start(request(gang=4), timeline).start_ms
    assert start is not None
    assert start["p90"] - NOW_MS > 40 * 3_600_000


def test_an_estimate_changes_nothing_and_repeats(busy) -> None:
    timeline = paths(busy, request("wide", gang=4), request("q"))
    before = copy.deepcopy(timeline.calendars)
    first = estimate_start(request(gang=2), timeline)
    assert estimate_start(request(gang=2), timeline) == first
    assert estimate_start(request(gang=2), paths(busy, request("wide", gang=4), request("q"))) == first
    for (_, then), (_, now) in zip(before, timeline.calendars, strict=True):
        assert all(np.array_equal(getattr(then, name), getattr(now, name)) for name in ("free_s", "gap_s", "holder"))


def test_gpus_that_do_not_answer_are_never_free(busy) -> None:
    view, running = busy
    usable = np.ones((4, 8), bool)
    usable[0] = False
    answering = replace(view, usable=usable, milli=convert_to_milli(view.free & usable))
    estimate = estimate_start(request(), paths((answering, running)))
    assert hours(estimate) == [2, 2, 2]


def test_every_path_books_as_many_gpus_as_it_needs(busy) -> None:
    timeline = paths(busy, *(request(f"q{number}", gang=2, each=3) for number in range(5)))
    last = timeline.calendars[-1][1]
    counts = [(last.holder == timeline.jobs.index(f"q{number}")).sum() for number in range(4, 5)]
    assert counts == [6 * PATHS]
    assert (np.diff(last.free_s, axis=-1) >= 0).all()


@pytest.mark.parametrize("seed", range(6))
def test_with_exact_run_times_it_starts_at_the_first_release_at_which_it_fits(make_view, seed: int) -> None:
    """The paths against the fit that decides placements, release by release."""
    rng = np.random.default_rng(seed)
    holders = rng.integers(-1, 6, (9, 8)).astype(np.int32)
    jobs = tuple("abcdef")
    view = make_view({"r01": [0] * 4, "r02": [0] * 2, "r03": [0] * 3}, holders=holders, jobs=jobs)
    view = replace(view, milli=convert_to_milli(holders < 0), state=(rng.random(9) < 0.1).astype(np.int8))
    left_s = rng.integers(100, 90_000, 6).tolist()
    running = table_of({job: Run(NOW_MS, 1, left_s=(float(left),) * 8) for job, left in zip(jobs, left_s, strict=True)})
    held = {job: np.flatnonzero(holders.ravel() == number) for number, job in enumerate(jobs)}
    ahead = [
        Release(job, NOW_MS + left * 1000, held[job], np.full(len(held[job]), 1000))
        for left, job in sorted(zip(left_s, jobs, strict=True))
    ]
    timeline = Timeline(view, ahead)
    for gang in (1, 2, 5, 7):
        for each, level in ((1, None), (3, "node"), (4, "rack"), (8, "rack"), (5, None), (2, "rail_group")):
            for spread in (False, True):
                wanted = request(gang=gang, each=each, level=level, spread=spread and level != "node")
                step = timeline.find_first_fit(wanted, OPTIONS)
                start = estimate_start(wanted, paths((view, running))).start_ms
                expected = None if step is None else ahead[step - 1].end_ms if step else NOW_MS
                assert (start and start["p50"]) == expected, wanted


def test_a_fleet_without_nodes_fits_nothing(make_view) -> None:
    estimate = estimate_start(request(level="rack"), paths((make_view({}), NO_RUNNING_JOBS)))
    assert estimate.start_ms is None
    assert "no node is known yet" in estimate.sentence


def test_few_of_many_jobs_end_at_the_lowest_level_that_is_known() -> None:
    """A twentieth of the futures lies below it; they do not all end at that moment."""
    levels = np.linspace(0.001, 0.999, 999)
    left_s = interpolate_remaining_s((60.0, 120.0, 600.0, 3600.0, 7200.0, 14_400.0, 20_000.0, 40_000.0), levels)
    assert (np.diff(left_s) > 0).all()
    assert left_s[0] < 60 < left_s[60]
    assert left_s[-1] > 40_000
    assert set(interpolate_remaining_s((HOUR_S,) * 8, levels).round(6)) == {HOUR_S}


def test_past_its_limit_a_job_does_not_end_now() -> None:
    run_s = RunTimeQuantiles({8: (100.0, 1000.0)}).compute_run_times(8, np.array([0.5]), 50_000.0, 40_000.0)
    assert run_s[0] > 60_000


@pytest.mark.parametrize(
    ("free", "p90_s", "sentence"),
    [
        (7, 0, "room now: 7 GPUs are free"),
        (1, 30, "room now: 1 GPU is free"),
        (0, 30, "room within a minute, when the next job ends"),
    ],
)
def test_room_names_free_gpus_only_where_there_are_some(free: int, p90_s: int, sentence: str) -> None:
    opens_ms = {"p10": NOW_MS, "p50": NOW_MS, "p90": NOW_MS + 1000 * p90_s}
    assert _describe_room(free, 0, opens_ms, NOW_MS) == sentence
