"""Moves of running jobs for a waiting gang, compared with all sets of jobs in small fleets."""

from itertools import combinations, permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from fleetcast.fleet.requests import PlacementRequest, TopologyConstraint
from fleetcast.placement.engine import decide, fits_now
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.vacate import remove_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.moves import FoundMoves, NoMoves, find_moves
from fleetcast.placement.plan.timeline import add_request_placement
from tests.placement.reclaim.scenes import draw_holders, make_view

OPTIONS = Options()
G = 8


def make_shapes(view: ClusterView) -> dict[str, PlacementRequest]:
    """Return the request of each job: members of as many GPUs as it holds on its first node."""
    found = {}
    for number, name in enumerate(view.jobs):
        held = (view.holders == number).sum(axis=1)
        each = int(held[held > 0][0])
        found[name] = PlacementRequest(
            request_id=f"move {name}", job=name, gang=int(held.sum()) // each, gpus_per_node=each
        )
    return found


def check_moves(
    found: FoundMoves, request: PlacementRequest, view: ClusterView, shapes: dict[str, PlacementRequest]
) -> None:
    """Check that the gang and all moved jobs fit together, each in its own shape and on GPUs that are its own."""
    left = remove_jobs(view, found.places.keys())
    for wanted, ranks in (
        (request, found.decision.ranks),
        *((shapes[job], ranks) for job, ranks in found.places.items()),
    ):
        assert len(ranks) == wanted.members.min
        for rank in ranks:
            assert len(set(rank.gpus)) == wanted.gpus_per_node
            assert left.free[left.inventory.row[rank.node], list(rank.gpus)].all()
        left = add_request_placement(left, wanted, ranks)


def fits_together(requests: tuple[PlacementRequest, ...], view: ClusterView) -> bool:
    for request in requests:
        decision = decide(request, view, OPTIONS)
        if decision.outcome != "placed":
            return False
        view = add_request_placement(view, request, decision.ranks)
    return True


def find_optimum(
    request: PlacementRequest, view: ClusterView, cost: NDArray[np.float64], shapes: dict[str, PlacementRequest]
) -> float:
    """Return the least cost of all sets whose jobs fit together with the gang in some order, inf if there is none."""
    may = [at for at, amount in enumerate(cost) if np.isfinite(amount)]
    sets = (chosen for size in range(1, len(may) + 1) for chosen in combinations(may, size))
    for amount, chosen in sorted((float(cost[list(chosen)].sum()), chosen) for chosen in sets):
        left = remove_jobs(view, {view.jobs[at] for at in chosen})
        if not fits_now(request, left, OPTIONS):
            continue
        moved = [request, *(shapes[view.jobs[at]] for at in chosen)]
        if any(fits_together(order, left) for order in permutations(moved)):
            return amount
    return float("inf")


def test_two_small_jobs_move_together_so_that_a_whole_node_is_free() -> None:
    holders = np.full((3, G), -1)
    holders[0, :4], holders[1, :2], holders[2, :7] = 0, 1, 2
    view = make_view(holders, rack=3)
    request = PlacementRequest(request_id="payer", gpus_per_node=8)
    shapes, cost = make_shapes(view), np.array([400.0, 100.0, 10.0])
    found = find_moves(request, view, cost, shapes, OPTIONS)
    assert isinstance(found, FoundMoves)
    check_moves(found, request, view, shapes)
    assert (found.places.keys(), found.cost_gpu_s) == ({"j1"}, 100.0)
    assert {rank.node for rank in found.places["j1"]} == {"n001"}


def test_a_job_without_another_place_does_not_move() -> None:
    holders = np.full((2, G), -1)
    holders[0], holders[1, :4] = 0, 1
    view = make_view(holders)
    request = PlacementRequest(request_id="payer", gpus_per_node=8)
    assert find_moves(request, view, np.array([5.0, 5.0]), make_shapes(view), OPTIONS) == NoMoves("no_place")


def test_a_gang_that_no_move_can_help_gets_the_numbers() -> None:
    holders = np.full((2, G), -1)
    holders[0], holders[1, :4] = 0, 1
    view = make_view(holders)
    request = PlacementRequest(request_id="payer", gang=3, gpus_per_node=8)
    assert find_moves(request, view, np.array([5.0, 5.0]), make_shapes(view), OPTIONS) == NoMoves("no_room", 2, 3)


def draw_scene(seed: int) -> tuple[PlacementRequest, ClusterView, NDArray[np.float64], dict[str, PlacementRequest]]:
    rng = np.random.default_rng(seed)
    holders = draw_holders(rng, int(rng.integers(2, 6)), 5)
    view = make_view(holders)
    cost = np.where(rng.random(len(view.jobs)) < 0.15, np.inf, rng.integers(1, 50, len(view.jobs)).astype(float))
    request = PlacementRequest(
        request_id="payer",
        gang=int(rng.integers(1, 4)),
        gpus_per_node=int(rng.choice([4, 8])),
        topology=TopologyConstraint(rng.choice([None, "rack"])),
    )
    return request, view, cost, make_shapes(view)


@pytest.mark.parametrize("part", range(4))
def test_moves_fit_together_and_are_the_cheapest_in_nearly_all_small_scenes(part: int) -> None:
    solvable = solved = best = 0
    for seed in range(100 * part, 100 * (part + 1)):
        request, view, cost, shapes = draw_scene(seed)
        if fits_now(request, view, OPTIONS) or view.free.sum() < request.members.min * request.gpus_per_node:
            continue
        found, optimum = find_moves(request, view, cost, shapes, OPTIONS), find_optimum(request, view, cost, shapes)
        if isinstance(found, FoundMoves):
            check_moves(found, request, view, shapes)
            assert found.bound_gpu_s <= found.cost_gpu_s + 1e-6
            assert found.cost_gpu_s >= optimum - 1e-6
        solvable += np.isfinite(optimum)
        solved += isinstance(found, FoundMoves)
        best += isinstance(found, FoundMoves) and found.cost_gpu_s <= optimum + 1e-6
    assert solvable >= 8
    assert solved == best == solvable
