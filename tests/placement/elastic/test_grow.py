"""Laws of gangs that grow back."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.elastic.grow import (
    DWELL_MS,
    GangGrowth,
    find_fitting,
    fits_on_gpus,
    propose_growth,
)
from fleetcast.placement.elastic.shrink import PAUSE_S
from fleetcast.placement.elastic.speed import SPEED_EXPONENT, learn_speed_exponent
from fleetcast.placement.engine import fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import RunningJobs, make_running_jobs
from fleetcast.placement.machines.view import Advice, ClusterView, Hearing
from tests.fuzz.bounds import examples
from tests.placement.reclaim.scenes import G, make_view

NOW_MS = 10 * DWELL_MS
OPTIONS = Options(now_ms=NOW_MS)
FREE = -1


def make_gangs(view: ClusterView, each: int, least: list[int], most: list[int], **more: Any) -> RunningJobs:
    gpus = [int((view.holders == at).sum()) for at in range(len(view.jobs))]
    return make_running_jobs(
        view.jobs,
        **{"gang_step": 1, **more},
        gpus=gpus,
        members=[have // each for have in gpus],
        gpus_per_member=each,
        gang_min=least,
        gang_desired=most,
    )


def grow(
    view: ClusterView, jobs: RunningJobs, left_s: float = 36_000.0, waiting: tuple[PlacementRequest, ...] = ()
) -> tuple[GangGrowth, ...]:
    return propose_growth(view, jobs, np.full(len(jobs), left_s), waiting, OPTIONS)


def test_a_gang_grows_to_its_full_size_and_says_what_that_saves() -> None:
    view = make_view(np.array([[0] * G] * 2 + [[FREE] * G] * 4))
    (one,) = grow(view, make_gangs(view, G, [1], [4]))
    assert (one.size, one.gpus) == (4, 2 * G)
    assert [rank.rank for rank in one.places] == [2, 3]
    assert one.cost_gpu_s == PAUSE_S * 2 * G
    assert one.gain_gpu_s == pytest.approx(36_000 * (1 - 0.5**SPEED_EXPONENT) * 2 * G)


def test_growth_that_saves_less_than_its_pause_does_not_happen() -> None:
    view = make_view(np.array([[0] * G] * 2 + [[FREE] * G]))
    saved = 1 - (2 / 3) ** SPEED_EXPONENT
    jobs = make_gangs(view, G, [1], [4])
    assert grow(view, jobs, PAUSE_S / saved - 1) == ()
    assert len(grow(view, jobs, PAUSE_S / saved + 1)) == 1
    slow = replace(jobs, resize_pause_s=np.array([600.0]))
    assert grow(view, slow, PAUSE_S / saved + 1) == ()


def test_a_gang_rests_between_two_changes() -> None:
    view = make_view(np.array([[0] * G, [FREE] * G]))
    jobs = make_gangs(view, G, [1], [2])
    assert grow(view, replace(jobs, resized_ms=np.array([NOW_MS - DWELL_MS + 1]))) == ()
    assert len(grow(view, replace(jobs, resized_ms=np.array([NOW_MS - DWELL_MS])))) == 1


def test_a_gang_stays_in_its_domain_and_off_advised_nodes() -> None:
    view = make_view(np.array([[0] * G] + [[FREE] * G] * 5), rack=3)
    advice = np.array([0, Advice.DRAIN, 0, 0, 0, 0], np.int8)
    jobs = make_gangs(view, G, [1], [6], required_level=["rack"])
    (one,) = grow(replace(view, advice=advice), jobs)
    assert [rank.node for rank in one.places] == ["n003"]


def test_a_gang_stays_in_the_pools_of_its_nodes() -> None:
    view = make_view(np.array([[FREE] * G, [0] * G, [FREE] * G]))
    inventory = replace(view.inventory, pool=np.array([0, 1, 1], np.int32), pools=("train", "research"))
    jobs = make_gangs(view, G, [1], [2])
    assert [rank.node for rank in grow(view, jobs)[0].places] == ["n001"]
    (one,) = grow(replace(view, inventory=inventory), jobs)
    assert [rank.node for rank in one.places] == ["n003"]


def test_a_gang_grows_only_on_nodes_on_which_a_request_of_its_queue_could_be_placed() -> None:
    view = make_view(np.array([[0] * G] + [[FREE] * G] * 3))
    hearing = np.array([Hearing.FRESH, Hearing.STALE, Hearing.FRESH, Hearing.FRESH], np.int8)
    p_fail = np.array([0.0, 0.0, 0.9, 0.0])
    jobs, left_s = make_gangs(view, G, [1], [4]), np.full(1, 36_000.0)
    view = replace(view, hearing=hearing, p_fail=p_fail)
    (one,) = propose_growth(view, jobs, left_s, (), Options(now_ms=NOW_MS, max_risk=0.5))
    assert [rank.node for rank in one.places] == ["n004"]
    assert propose_growth(view, jobs, left_s, (), OPTIONS, close_nodes=lambda request: "its queue is full") == ()


def test_the_gang_that_gains_most_grows_first() -> None:
    view = make_view(np.array([[0] * G, [1] * G, [FREE] * G]))
    jobs = make_gangs(view, G, [1, 1], [2, 2])
    found = propose_growth(view, jobs, np.array([4_000.0, 9_000.0]), (), OPTIONS)
    assert [one.job for one in found] == ["j1"]


def test_the_queue_may_forbid_growth() -> None:
    view = make_view(np.array([[0] * G, [FREE] * G]))
    jobs = make_gangs(view, G, [1], [2])
    assert propose_growth(view, jobs, np.array([9_000.0]), (), OPTIONS, lambda growths: growths[0].gpus < G) == ()


def test_a_gang_grows_on_the_next_nodes_if_a_request_waits_for_the_fullest() -> None:
    view = make_view(np.array([[0] * 4 + [1] * 4, [1] * 4 + [FREE] * 4, [FREE] * G, [FREE] * G]))
    jobs = make_gangs(view, 4, [1, 0], [2, 0])
    wanted = PlacementRequest(request_id="w", gang=1, gpus_per_node=4, avoid_nodes=("n003", "n004"))
    (one,) = grow(view, jobs, waiting=(wanted,))
    assert [rank.node for rank in one.places] == ["n003"]
    assert grow(view, jobs, waiting=(msgspec.structs.replace(wanted, avoid_nodes=()),)) == ()


def test_a_gang_leaves_out_only_the_nodes_with_which_a_request_would_fit() -> None:
    view = make_view(np.array([[0] * G, *[[FREE] * G] * 5]), rack=6)
    jobs = make_gangs(view, G, [1], [4], gang_step=3)
    pairs = (("n002", "n003"), ("n004", "n005"))
    waiting = tuple(
        PlacementRequest(
            request_id=f"w{at}", gang=2, gpus_per_node=G, avoid_nodes=tuple(set(view.topology.names) - set(pair))
        )
        for at, pair in enumerate(pairs)
    )
    (one,) = grow(view, jobs, waiting=waiting)
    assert [rank.node for rank in one.places] == ["n002", "n004", "n006"]


def test_any_number_of_wanted_nodes_hides_no_other_node() -> None:
    view = make_view(np.array([[0] * G, *[[FREE] * G] * 20]))
    wanted = PlacementRequest(request_id="w", gang=1, gpus_per_node=G, avoid_nodes=("n021",))
    (one,) = grow(view, make_gangs(view, G, [1], [2]), waiting=(wanted,))
    assert [rank.node for rank in one.places] == ["n021"]


@examples(300)
@given(st.integers(0, 2**32))
def test_a_gang_is_given_up_only_if_requests_wait_for_every_place(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, each = int(rng.integers(2, 9)), int(rng.choice([2, 4]))
    holders = np.where(rng.random((n, G // each)) < 0.5, FREE, 1)
    holders[0, 0] = 0
    holders = np.searchsorted(np.unique(holders), holders) - int((holders == FREE).any())
    view = make_view(np.repeat(holders, each, axis=1))
    least, most = np.zeros(len(view.jobs), np.int64), np.zeros(len(view.jobs), np.int64)
    least[0], most[0] = 1, 2
    names = np.array(view.topology.names)
    waiting = tuple(
        PlacementRequest(
            request_id=f"w{at}",
            gang=int(rng.integers(1, 3)),
            gpus_per_node=int(rng.choice([1, 2, 4])),
            avoid_nodes=tuple(names[rng.random(n) < 0.6].tolist()),
        )
        for at in range(rng.integers(1, 3))
    )
    found = propose_growth(
        view, make_gangs(view, each, least.tolist(), most.tolist()), np.full(len(view.jobs), 36_000.0), waiting, OPTIONS
    )
    places = []
    for row in range(n):
        idle = np.flatnonzero(view.free[row])
        for at in range(len(idle) // each):
            alone = np.zeros(view.milli.shape, bool)
            alone[row, idle[at * each : (at + 1) * each]] = True
            places.append(fits_on_gpus(find_fitting(view, waiting, OPTIONS), view, alone, OPTIONS))
    assert bool(found) == (not all(places))


def test_the_exponent_of_an_unseen_gang_is_the_prior_and_follows_its_step_times() -> None:
    assert learn_speed_exponent([8], [1.0]) == SPEED_EXPONENT
    assert learn_speed_exponent([2, 8], [1.0, 1.0]) == pytest.approx(SPEED_EXPONENT / 2)
    assert learn_speed_exponent([1, 2, 4, 8, 16], [16.0, 8.0, 4.0, 2.0, 1.0]) == pytest.approx(0.98)
    assert learn_speed_exponent([2, 4], [1.0, 9.0]) == 0.0


@examples(400)
@given(st.integers(0, 2**32))
def test_grown_gangs_stay_on_the_grid_and_take_nothing_that_a_request_waits_for(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, each = int(rng.integers(2, 9)), int(rng.choice([2, 4, 8]))
    holders = np.repeat(rng.integers(-1, 3, (n, G // each)), each, axis=1)
    used = np.unique(holders[holders >= 0])
    holders = np.where(holders >= 0, np.searchsorted(used, holders), FREE)
    view = make_view(holders)
    j = len(view.jobs)
    step = rng.integers(1, 4, j)
    size = np.array([(holders == at).sum() // each for at in range(j)], np.int64)
    least = np.maximum(1, size - step * rng.integers(0, 3, j))
    most = least + step * rng.integers(1, 5, j)
    most = np.maximum(most, size)
    levels = rng.choice(["", "rack"], j).tolist()
    jobs = make_gangs(view, each, least.tolist(), most.tolist(), gang_step=step, required_level=levels)
    waiting = tuple(
        PlacementRequest(request_id=f"w{at}", gang=int(rng.integers(1, 4)), gpus_per_node=int(rng.choice([1, 4, 8])))
        for at in range(rng.integers(0, 3))
    )
    found = propose_growth(view, jobs, rng.uniform(0, 9_000, j), waiting, OPTIONS)
    taken = np.zeros(view.milli.shape, bool)
    for one in found:
        at = jobs.row[one.job]
        assert size[at] < one.size <= most[at]
        assert (one.size - least[at]) % step[at] == 0
        assert one.gpus == (one.size - size[at]) * each == sum(len(rank.gpus) for rank in one.places)
        mine = np.zeros(view.milli.shape, bool)
        for rank in one.places:
            row = view.topology.names.index(rank.node)
            assert view.free[row, list(rank.gpus)].all()
            assert not taken[row, list(rank.gpus)].any()
            mine[row, list(rank.gpus)] = True
        racks = np.flatnonzero((view.holders == at).any(axis=1)) // 2
        if levels[at]:
            assert set(np.flatnonzero(mine.any(axis=1)) // 2) <= set(racks)
        taken |= mine
    alone = replace(view, milli=np.where(taken, view.milli, np.int16(0)))
    assert not any(fits_now(request, alone, OPTIONS) for request in waiting)
