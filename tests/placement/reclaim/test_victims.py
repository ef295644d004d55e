"""Laws of the search for victims."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from fleetcast.fleet.requests import Gang, PlacementRequest, TopologyConstraint
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.slots import HeldParts
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.reclaim.room import HostAmounts
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims, find_victims
from tests.fuzz.bounds import examples
from tests.placement.reclaim.scenes import OPTIONS, Scene, make_view, scenes

FREE = -1


def find(
    request: PlacementRequest, view: ClusterView, cost: list[float], host: HostAmounts | None = None
) -> ChosenVictims:
    found = find_victims(request, view, np.array(cost, float), OPTIONS, host)
    assert isinstance(found, ChosenVictims), found
    return found


def ask(members: int, each: int, level: str | None = None, **more: object) -> PlacementRequest:
    return PlacementRequest(
        request_id="payer",
        gang=members,
        gpus_per_node=each,
        topology=TopologyConstraint(level),
        **more,  # type: ignore[arg-type]
    )


@examples(400)
@given(scenes())
def test_a_set_frees_the_right_shape_and_every_victim_is_needed(scene: Scene) -> None:
    found = find_victims(scene.request, scene.view, scene.cost, OPTIONS, scene.host)
    stoppable = frozenset(name for name, cost in zip(scene.view.jobs, scene.cost, strict=True) if np.isfinite(cost))
    if isinstance(found, NoVictims):
        assert found.code == "no_room"
        assert not scene.fits_without(stoppable), "all that may stop would have let it in"
        return
    jobs = frozenset(found.chosen.jobs)
    assert jobs <= stoppable
    assert found.decision.outcome == "placed"
    assert scene.fits_without(jobs)
    for job in jobs:
        assert not scene.fits_without(jobs - {job}), f"{job} is not needed"
    by_name = dict(zip(scene.view.jobs, scene.cost.tolist(), strict=True))
    assert [by_name[job] for job in found.chosen.jobs] == list(found.costs_gpu_s)
    assert found.chosen.cost_gpu_s == pytest.approx(sum(found.costs_gpu_s))
    assert found.chosen.cost_gpu_s >= found.bound_gpu_s - 1e-6
    assert all(lost.cost_gpu_s >= found.chosen.cost_gpu_s for lost in found.lost)


@examples(400)
@given(scenes(8))
def test_no_set_is_cheaper_than_the_bound_and_few_sets_are_cheaper_than_ours(scene: Scene) -> None:
    found = find_victims(scene.request, scene.view, scene.cost, OPTIONS, scene.host)
    optimum = scene.find_optimum()
    if isinstance(found, NoVictims):
        assert optimum == np.inf
        return
    assert found.bound_gpu_s <= optimum + 1e-6
    assert found.chosen.cost_gpu_s <= optimum * 1.5 + 1e-6


@examples(150)
@given(scenes())
def test_neither_repetition_nor_the_order_of_jobs_changes_the_answer(scene: Scene) -> None:
    first = find_victims(scene.request, scene.view, scene.cost, OPTIONS, scene.host)
    j = len(scene.view.jobs)
    order = np.random.default_rng(j).permutation(j)  # new number → old number
    number = np.empty(j, np.int32)
    number[order] = np.arange(j)
    holders = np.where(scene.view.holders >= 0, number[scene.view.holders], np.int32(-1))
    parts = replace(scene.view.parts, job=number[scene.view.parts.job].astype(np.int64))
    view = replace(scene.view, holders=holders, jobs=tuple(scene.view.jobs[at] for at in order), parts=parts)
    host = None if scene.host is None else HostAmounts(scene.host.cpus[order], scene.host.memory_gib[order])
    repeated = find_victims(scene.request, scene.view, scene.cost, OPTIONS, scene.host)
    permuted = find_victims(scene.request, view, scene.cost[order], OPTIONS, host)
    for other in (repeated, permuted):
        if isinstance(first, NoVictims) or isinstance(other, NoVictims):
            assert first == other
        else:
            assert (other.chosen, other.lost, other.decision) == (first.chosen, first.lost, first.decision)


def test_a_request_that_fits_stops_nobody() -> None:
    found = find(ask(1, 4), make_view(np.array([[0] * 4 + [FREE] * 4])), [5.0])
    assert (found.chosen.jobs, found.chosen.cost_gpu_s, found.bound_gpu_s) == ((), 0.0, 0.0)
    assert found.decision.outcome == "placed"


def test_the_cheapest_node_of_the_required_rack_is_freed() -> None:
    holders = np.repeat(np.arange(4), 8).reshape(4, 8)
    found = find(ask(2, 8, "rack"), make_view(holders), [1.0, 90.0, 40.0, 40.0])
    assert found.chosen.jobs == ("j2", "j3")
    assert found.chosen.domain == "r2"
    assert found.bound_gpu_s == 80.0
    assert [lost.jobs for lost in found.lost] == [] or all(lost.cost_gpu_s > 80 for lost in found.lost)


def test_a_gang_that_is_paid_for_once_is_free_on_its_other_nodes() -> None:
    holders = np.repeat([0, 0, 1, 2], 8).reshape(4, 8)
    assert find(ask(2, 8), make_view(holders), [60.0, 40.0, 40.0]).chosen.jobs == ("j0",)


def test_a_job_that_may_not_be_stopped_protects_its_nodes() -> None:
    holders = np.array([[0] * 7 + [1], [2] * 8])
    found = find(ask(1, 8), make_view(holders), [1.0, np.inf, 500.0])
    assert found.chosen.jobs == ("j2",)
    assert find(ask(1, 8), make_view(holders), [1.0, np.nan, 500.0]).chosen.jobs == ("j2",), "unknown is protected"


def test_without_enough_room_the_numbers_say_so() -> None:
    holders = np.array([[0] * 8, [1] * 8])
    found = find_victims(ask(2, 8), make_view(holders), np.array([1.0, np.inf]), OPTIONS)
    assert found == NoVictims("no_room", 1, 2)


def test_a_request_without_gpus_stops_nobody() -> None:
    request = PlacementRequest(request_id="cpu", gpus_per_node=0, cpus=8)
    assert find_victims(request, make_view(np.array([[0] * 8])), np.array([1.0]), OPTIONS) == NoVictims("no_gpus")


def test_an_elastic_gang_stops_jobs_for_its_minimum_alone() -> None:
    holders = np.repeat(np.arange(4), 8).reshape(4, 8)
    request = PlacementRequest(request_id="e", gang=Gang(1, 4), gpus_per_node=8)
    assert len(find(request, make_view(holders), [4.0, 3.0, 2.0, 1.0]).chosen.jobs) == 1


def test_parts_of_gpus_are_freed_one_by_one() -> None:
    holders = np.full((1, 8), 0)
    holders[0, :2] = [1, 2]
    parts = HeldParts(np.array([1, 3, 2]), np.array([0, 0, 1]), np.array([500, 500, 1000]))
    view = make_view(holders, 1, parts)
    view = replace(view, jobs=("j0", "j1", "j2", "j3"))
    found = find(ask(1, 1, gpu_share=500), view, [100.0, 10.0, 30.0, 20.0])
    assert found.chosen.jobs == ("j1",)


def test_cpus_and_memory_are_given_back_where_they_are_known() -> None:
    holders = np.array([[0] * 8, [1] * 8])
    view = make_view(holders, 2, free_cpus=np.zeros(2), free_host_memory_gib=np.zeros(2))
    unknown = np.full(2, np.nan)
    known = HostAmounts(np.array([np.nan, 64.0]), np.array([np.nan, 100.0]))
    request = ask(1, 8, cpus=64, host_memory_gib=100)
    assert find(request, view, [1.0, 9.0], known).chosen.jobs == ("j1",), "what j0 gives back is unknown"
    found = find_victims(request, view, np.array([1.0, 9.0]), OPTIONS, HostAmounts(unknown, unknown))
    assert found == NoVictims("no_room", 0, 1)
    left = find(request, view, [1.0, 9.0], known).view
    assert left.free_cpus.tolist() == [0.0, 64.0]


@pytest.mark.parametrize("asked", [None, 8])
def test_filters_of_the_operator_see_the_cpus_that_jobs_give_back(asked: int | None) -> None:
    holders = np.array([[0] * 8, [1] * 8])
    view = make_view(holders, 2, free_cpus=np.zeros(2))
    host = HostAmounts(np.array([64.0, 16.0]), np.full(2, np.nan))
    options = Options(filters=(("few_cpus", lambda request, view, options: view.free_cpus < 32),))
    found = find_victims(ask(1, 8, cpus=asked), view, np.array([9.0, 1.0]), options, host)
    assert isinstance(found, ChosenVictims)
    assert found.chosen.jobs == ("j0",)


def test_where_cpus_are_missing_a_cheap_job_beside_the_nodes_of_the_best_price_is_found() -> None:
    """GPUs are free everywhere. Job 0 has 28 CPUs in each rack, and the cheap job 2 has 80 on the last node."""
    holders = np.full((4, 8), FREE)
    holders[[0, 2], 0], holders[1, 0], holders[3, :4] = 0, 1, 2
    view = make_view(holders, rack=2, free_cpus=np.array([61.0, 35.0, 63.0, 22.0]))
    host = HostAmounts(np.array([56.0, 8.0, 80.0]), np.full(3, np.nan))
    assert find(ask(2, 2, "rack", cpus=40), view, [28.0, 34.0, 6.0], host).chosen.jobs == ("j2",)
