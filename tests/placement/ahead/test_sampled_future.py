"""Futures of a queue, played by its rules."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.ahead.futures import BIN_S, ArrivalForecast
from fleetcast.placement.ahead.paths import sample_timelines
from fleetcast.placement.ahead.start_time import compute_start_times
from fleetcast.placement.machines.gang_room import Fleet, GangAsk, Slot
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.plan.queue import WaitingEntry, plan
from fleetcast.placement.plan.timeline import RunTimeQuantiles
from tests.fuzz.bounds import examples
from tests.placement.conftest import build
from tests.placement.runs import Run, table_of

NOW_MS = 1_589_310_000_000
HOUR_S = 3600.0
OPTIONS = Options(now_ms=NOW_MS)
SURE = RunTimeQuantiles({0: (HOUR_S, HOUR_S)}, {0: (HOUR_S,) * 8}, {8: 1})


def request(name: str, gang: int = 1, each: int = 8, level: Any = None, **fields: Any) -> PlacementRequest:
    topology = TopologyConstraint(required=level)
    return PlacementRequest(request_id=name, gang=gang, gpus_per_node=each, topology=topology, **fields)


@pytest.fixture
def busy(make_view):
    """Four nodes; job a ends in 1 h, b in 2 h, c in 3 h, d in 4 h, each with a whole node."""
    holders = np.repeat(np.arange(4, dtype=np.int32), 8).reshape(4, 8)
    view = make_view({"r01": [0, 0], "r02": [0, 0]}, holders=holders, jobs=("a", "b", "c", "d"))
    hours = zip("abcd", (1, 2, 3, 4), strict=True)
    return view, table_of({job: Run(NOW_MS, 8, left_s=(HOUR_S * left,) * 8) for job, left in hours})


def starts(
    state: Any, *queue: PlacementRequest, arrivals: ArrivalForecast | None = None, run_s: float = HOUR_S
) -> dict[str, list[float]]:
    """request → hours until its p10, p50 and p90."""
    view, running = state
    entries = [WaitingEntry(entry, NOW_MS - 1000 + number) for number, entry in enumerate(queue)]
    sampled = sample_timelines(entries, view, running, SURE, OPTIONS, lambda asked: (run_s,) * 8, arrivals)
    return {
        name: [round((ms - NOW_MS) / 3_600_000, 2) for ms in told]
        for name, told in compute_start_times(sampled).items()
    }


def arriving(gpus: float, size: int = 8) -> ArrivalForecast:
    flat = np.full((2, 1), gpus)
    return ArrivalForecast(np.array([BIN_S]), np.array([0.1, 0.9]), flat, np.array([size]), np.array([1.0]))


def test_who_waits_passes_a_gang_that_is_not_first_but_not_the_one_that_is(busy) -> None:
    """Only the head keeps nodes, here the last; small jobs should run for an hour, and end after ten minutes."""
    last = request("head", avoid_nodes=("n001", "n002", "n003"))
    found = starts(busy, last, request("gang", gang=3), request("small"), run_s=600.0)
    assert found == {"head": [4.0] * 3, "gang": [3.0] * 3, "small": [1.0] * 3}
    found = starts(busy, request("head", gang=2), request("gang", gang=3), request("small"), run_s=600.0)
    assert found == {"head": [2.0] * 3, "gang": [3.0] * 3, "small": [3.17] * 3}


def test_a_job_that_ends_before_the_head_starts_goes_first(busy) -> None:
    view, running = busy
    ended = view.holders == 0
    free = (replace(view, milli=convert_to_milli(ended), holders=np.where(ended, -1, view.holders)), running)
    short = replace(SURE, by_gpus={8: (60.0, 60.0), 0: (HOUR_S, HOUR_S)})
    queue = [WaitingEntry(request("head", gang=2), NOW_MS - 2), WaitingEntry(request("short"), NOW_MS - 1)]
    found = compute_start_times(sample_timelines(queue, *free, short, OPTIONS, lambda asked: (60.0,) * 8))
    assert found["short"] == (NOW_MS,) * 3
    assert found["head"] == (NOW_MS + 7_200_000,) * 3


def test_jobs_of_higher_priority_that_may_come_take_their_turn_first(busy) -> None:
    alone = starts(busy, request("low"))
    crowd = starts(busy, request("low", priority=-1), request("high", priority=5), arrivals=arriving(64.0))
    assert alone["low"] == [1.0] * 3
    assert crowd["high"] == [1.0] * 3
    assert crowd["low"][1] > 2.0


def test_jobs_of_the_same_priority_that_may_come_do_not_pass_who_waits_for_as_much(busy) -> None:
    assert starts(busy, request("first"), arrivals=arriving(64.0))["first"] == [1.0] * 3


def test_small_jobs_that_may_come_pass_a_gang_that_is_not_first(busy) -> None:
    calm = starts(busy, request("head", gang=3), request("gang", gang=2))
    crowd = starts(busy, request("head", gang=3), request("gang", gang=2), arrivals=arriving(16.0, size=1))
    assert crowd["head"] == calm["head"] == [3.0] * 3
    assert crowd["gang"][2] >= calm["gang"][2]


def test_a_job_that_can_never_start_holds_nobody_up(busy) -> None:
    assert starts(busy, request("never", gang=9), request("first"), arrivals=arriving(800.0, size=400)) == {
        "first": [1.0] * 3
    }


def test_a_required_level_is_kept(busy) -> None:
    assert starts(busy, request("rack", gang=2, level="rack"))["rack"] == [2.0] * 3
    far = request("rack", gang=2, level="rack", avoid_nodes=("n001",))
    assert starts(busy, far)["rack"] == [4.0] * 3


def test_arrivals_are_as_many_as_forecast() -> None:
    drawn = arriving(40.0).draw_jobs(np.random.default_rng(1))
    coming = list(islice(drawn, 500))
    assert [at for at, _ in coming] == sorted(at for at, _ in coming)
    gpus = sum(size for _, size in coming)
    assert gpus / coming[-1][0] * BIN_S == pytest.approx(40.0, rel=0.05)


def test_arrivals_lie_between_the_forecast_s_levels() -> None:
    forecast = replace(arriving(0.0), gpus=np.array([[8.0], [24.0]]))
    gpus = dict.fromkeys(range(200), 0)
    for at_s, size in forecast.draw_jobs(np.random.default_rng(2)):
        if at_s >= BIN_S * len(gpus):
            break
        gpus[int(at_s // BIN_S)] += size
    assert np.mean(list(gpus.values())) == pytest.approx(16.0, rel=0.1)
    assert set(gpus.values()) <= {0, 8, 16, 24, 32}


@examples(75)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=12))
def test_room_is_kept_as_if_it_were_counted_anew(changes: list[tuple[int, int]]) -> None:
    domain = np.array([0, 0, 1, 1, -1, -1])
    slots = [Slot(1, np.full(6, 8)), Slot(4, np.array([2, 2, 2, 0, 2, 2])), Slot(2, np.full(6, 4), domain)]
    first = Fleet(np.full(6, 4), np.zeros(6), slots)
    fleet = first.copy()
    for node, free in changes:
        fleet.change_free_gpus(np.array([node]), np.array([free - fleet.free[node]]))
    again = Fleet(fleet.free.copy(), np.zeros(6), slots)
    for slot, members in [(slot, members) for slot in range(3) for members in range(1, 50)]:
        ask = GangAsk(slot, members, 60.0)
        assert fleet.fits(ask) == again.fits(ask) == (again.choose_gang_nodes(ask, None) is not None)
    assert first.free.tolist() == [4] * 6
    assert first.fits(GangAsk(0, 24, 60.0))
    assert not first.fits(GangAsk(0, 25, 60.0))


@examples(20)
@given(st.data())
def test_laws_of_start_times(data: Any) -> None:
    """Quantiles are in order, no start lies in the past, and what the queue would place now starts now."""
    nodes = data.draw(st.integers(1, 4))
    held = data.draw(st.lists(st.integers(0, 8), min_size=nodes, max_size=nodes))
    view = build({"r01": held})
    running = table_of({"running": Run(NOW_MS - 60_000 * data.draw(st.integers(0, 5000)), 1)})
    asks = data.draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from((1, 2, 8)), st.integers(0, 1)), max_size=6))
    queue = [
        WaitingEntry(request(f"q{at}", gang=gang, each=each, priority=priority), NOW_MS - 100 + at)
        for at, (gang, each, priority) in enumerate(asks)
    ]
    run_times = RunTimeQuantiles({0: (600.0, 7200.0)}, {}, {1: 3, 8: 1})
    found = compute_start_times(sample_timelines(queue, view, running, run_times, OPTIONS, arrivals=arriving(4.0)))
    for low, middle, high in found.values():
        assert NOW_MS <= low <= middle <= high
    placed = plan(queue, view, running, run_times, OPTIONS).placed
    if placed:
        assert found[placed[0][0].request.request_id] == (NOW_MS,) * 3
