"""The jobs to stop for a request: their cost beside an exact solver and youngest first, and the search's time.

1. Cost: 12 racks of 16 full nodes, eight shapes of requests, seeds. CP-SAT solves the same scenes within
   `SOLVE_S` deterministic seconds, from our set as a hint. It needs the extra `optimum`, and is left out with
   a message without it. *Youngest first* is Kueue's order: the youngest jobs stop until the request fits, and
   then run on again if they are not needed.
2. CPU time: 10,000 nodes with 99.5 % of the GPUs in use, and KAI's scene `ReclaimLargeJobs`. Nothing is
   remembered from one run to the next.
3. Fairness: small scenes of two or three queues, beside a trial of every set of jobs. The stopped jobs then
   ask for GPUs in turn, until nothing changes.
"""

import importlib.util
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.benchmarks.kit.queue_scenes import draw_teams, run_until_stable
from fleetcast.benchmarks.kit.victim_scenes import (
    VictimScene,
    fill_with_pieces,
    fill_with_whole_nodes,
    make_request,
    make_scene,
    make_view,
)
from fleetcast.fleet.requests import LevelName, PlacementRequest
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.view import ViewMemo
from fleetcast.placement.reclaim.victims import ChosenVictims, VictimSearch, find_victims

SIZES = (10,)  # seeds of each shape, and five hundred times as many scenes of queues
SHAPES: tuple[tuple[int, int, LevelName | None], ...] = (
    *((4, 8, "rack"), (8, 8, "rack"), (12, 8, "rack"), (16, 4, "rack"), (8, 2, "rack")),
    *((24, 8, None), (64, 1, None), (32, 4, None)),
)  # members, GPUs of each, required level
NODES, RACK = 192, 16
LARGE, LARGE_RACK = 10_000, 64
SOLVE_S = 8.0  # deterministic seconds, the same on every machine
REPEATS = 7
ORDER = "youngest first"


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield the records of all three parts for each number of seeds."""
    for seeds in sizes:
        yield from _compare_costs(seeds)
        yield from _measure_large_fleets()
        yield from _measure_full_queues()
        yield from _check_fairness(500 * seeds)


def _compare_costs(seeds: int) -> Iterator[dict[str, Any]]:
    solver = importlib.util.find_spec("ortools") is not None
    if not solver:
        print("victims: no exact solver, pip install 'fleetcast[optimum]'", file=sys.stderr)
    for kind, fill in (("whole-node jobs", fill_with_whole_nodes), ("jobs in pieces", fill_with_pieces)):
        began_s, rows = time.process_time(), []
        for members, each, level in SHAPES:
            request = make_request(members, each, level)
            for seed in range(seeds):
                rng = np.random.default_rng([seed, len(kind)])
                scene = make_scene(make_view(fill(NODES, rng), RACK), rng)
                rows += _compare_searches(scene, request, solver)
        found = np.array(rows)
        size = {"scenes": len(found)}
        youngest, cpu_s = found[:, 1], time.process_time() - began_s
        yield make_record("victims", f"{ORDER} over ours, {kind}, median", size, [float(np.median(youngest))], "times",
                          cpu_s=cpu_s)  # fmt: skip
        proven = found[found[:, 3] == 1]
        if len(proven):
            peer = (ORDER, float((proven[:, 1] * proven[:, 2]).mean()))
            for name, value in (("mean", proven[:, 2].mean()), ("worst", proven[:, 2].max())):
                case = f"cost over the optimum, {kind}, {name}"
                size = {"scenes": len(proven)}
                yield make_record("victims", case, size, [float(value)], "times", cpu_s=cpu_s, peer=peer)
                peer = (ORDER, float((proven[:, 1] * proven[:, 2]).max()))


def _compare_searches(
    scene: VictimScene, request: PlacementRequest, solver: bool
) -> list[tuple[float, float, float, bool]]:
    """Return the seconds of our search, youngest first over ours, ours over the solver's, and whether it is optimal.

    Empty if nobody can help the request, and then the solver agrees.
    """
    began_s = time.process_time()
    found = find_victims(request, scene.view, scene.cost_gpu_s, Options())
    cpu_s = time.process_time() - began_s
    if not isinstance(found, ChosenVictims):
        assert not solver or solve_victims(scene, request, ())[0] is None, "the solver found a set, and we none"
        return []
    cost = found.chosen.cost_gpu_s
    assert cost > 0, "the request fits without a stop"
    best, proven = solve_victims(scene, request, found.chosen.jobs) if solver else (cost, False)
    assert best is not None
    return [(cpu_s, stop_youngest_first(scene, request) / cost, cost / best, proven)]


def stop_youngest_first(scene: VictimScene, request: PlacementRequest) -> float:
    """Return the cost in GPU-seconds of the jobs that Kueue's order stops for a request."""
    search = VictimSearch(request, scene.view, scene.cost_gpu_s, Options())
    youngest = np.argsort(-scene.started[search.parts.order], kind="stable")
    youngest = youngest[np.isfinite(search.cost[youngest])]
    low, high = 0, len(youngest)
    while low < high:
        middle = (low + high) // 2
        search.room.stop_only(_mask(youngest[:middle], len(search.cost)))
        low, high = (low, middle) if search.room.domain_room.max() >= search.needed else (middle + 1, high)
    search.room.stop_only(_mask(youngest[:low], len(search.cost)))
    search.room.restore_spare_jobs(youngest[:low][::-1], search.needed)
    return float(search.cost[search.room.stopped].sum())


def _mask(jobs: np.ndarray[Any, np.dtype[np.int64]], count: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    found = np.zeros(count, bool)
    found[jobs] = True
    return found


def solve_victims(scene: VictimScene, request: PlacementRequest, hint: Sequence[str]) -> tuple[float | None, bool]:
    """Return the cost of the cheapest set that CP-SAT finds, and whether it is optimal.

    hint: the jobs of a known set. Returns None if no set lets the request in. Raises
    AssertionError without ortools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise AssertionError("it needs ortools: pip install 'fleetcast[optimum]'") from None
    view, model = scene.view, cp_model.CpModel()
    each, level = request.gpus_per_node, request.required
    stops = {job: model.new_bool_var("") for job in np.flatnonzero(np.isfinite(scene.cost_gpu_s)).tolist()}
    domain = np.zeros(len(view), np.int64) if level is None else view.topology.domain[level]
    chosen = [model.new_bool_var("") for _ in range(int(domain.max()) + 1)]
    model.add_exactly_one(chosen)
    members: list[list[Any]] = [[] for _ in chosen]
    for row, holders in enumerate(view.holders):
        jobs, counts = np.unique(holders[holders >= 0], return_counts=True)
        held = [(stops[job], count) for job, count in zip(jobs.tolist(), counts.tolist(), strict=True) if job in stops]
        free = int(view.free_gpus[row])
        most = (free + sum(count for _, count in held)) // each
        if most:
            members[domain[row]].append(here := model.new_int_var(0, most, ""))
            model.add(each * here <= free + sum(count * stop for stop, count in held))
    for number, here in enumerate(members):
        model.add(sum(here) >= request.members.min).only_enforce_if(chosen[number])
    for job, stop in stops.items():
        model.add_hint(stop, view.jobs[job] in hint)
    model.minimize(sum(round(float(scene.cost_gpu_s[job])) * stop for job, stop in stops.items()))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.num_workers = SOLVE_S, 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, True
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), "CP-SAT found no set"
    return solver.objective_value, bool(status == cp_model.OPTIMAL)


def _measure_large_fleets() -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(1)
    holders = fill_with_whole_nodes(LARGE, rng, (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 4))
    holders[rng.random(LARGE) < 0.005] = -1
    scene = make_scene(
        make_view(np.unique(holders, return_inverse=True)[1].reshape(holders.shape) - 1, LARGE_RACK), rng
    )
    for case, request in (
        ("a rack of 32 whole nodes", make_request(32, 8, "rack")),
        ("2,000 GPUs anywhere", make_request(2000, 1)),
        ("4,000 GPUs anywhere", make_request(4000, 1)),
    ):
        yield _measure_search(case, scene, request)


def _measure_full_queues() -> Iterator[dict[str, Any]]:
    for nodes in (500, 1000):
        view = make_view(np.arange(nodes * 8).reshape(nodes, 8), LARGE_RACK)
        scene = make_scene(view, np.random.default_rng(2), protected=0.0)
        yield _measure_search("ReclaimLargeJobs", scene, make_request(nodes // 2, 8))
        if nodes == 1000:
            yield _measure_search("a hero of 128 nodes in a zone of 512", scene, make_request(128, 8, "rail_group"))


def _measure_search(case: str, scene: VictimScene, request: PlacementRequest) -> dict[str, Any]:
    """Return the record of the CPU time of one search, in ms, without anything remembered."""
    values, found = [], None
    for _ in range(REPEATS):
        view = replace(scene.view, memo=ViewMemo())
        began_s = time.process_time()
        found = find_victims(request, view, scene.cost_gpu_s, Options())
        values.append(1000 * (time.process_time() - began_s))
    assert isinstance(found, ChosenVictims), case
    case = f"{case}: {len(found.chosen.jobs):,} jobs, {found.chosen.cost_gpu_s / found.bound_gpu_s:.3f} times the bound"
    size = {"nodes": len(scene.view), "jobs": len(scene.view.jobs)}
    return make_record("victims", case, size, values, "ms", cpu_s=min(values) / 1000)


def _check_fairness(scenes: int) -> Iterator[dict[str, Any]]:
    began_s = time.process_time()
    solvable = solved = stops = 0
    for seed in range(scenes):
        teams, payer = draw_teams(np.random.default_rng(seed))
        found = teams.find(payer)
        fair = {frozenset(jobs) for _, jobs in teams.list_fair_sets(payer)}
        solvable += bool(fair)
        if isinstance(found, ChosenVictims):
            assert frozenset(found.chosen.jobs) in fair, f"seed {seed}: unfair in the final state"
            solved += 1
        stops += run_until_stable(teams, payer)
    size = {"scenes": scenes, "solvable": solvable}
    case = f"solved fairly, without loops in {stops:,} stops"
    yield make_record("victims", case, size, [100 * solved / solvable], "%", cpu_s=time.process_time() - began_s)
