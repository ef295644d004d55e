"""Whom a request may stop: by what all queues hold once everything has settled."""

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from fleetcast.benchmarks.kit.queue_scenes import TeamJob, Teams, draw_teams, run_until_stable
from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.queues.queues_file import read_queues
from fleetcast.placement.reclaim.fairness import find_fair_victims
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims, find_victims
from tests.fuzz.bounds import EFFORT
from tests.placement.reclaim.scenes import OPTIONS, make_view

ALIKE = "[queue.a]\n[queue.b]\n"
OWED = "[queue.a]\nguaranteed = {gpu = 60}\n[queue.b]\nguaranteed = {gpu = 40}\n"
COHORTS = """[queue.x]\nguaranteed = {gpu = 60}\n[queue."x/a"]\nguaranteed = {gpu = 60}
[queue.y]\nguaranteed = {gpu = 40}\n[queue."y/b"]\nguaranteed = {gpu = 40}\n"""
HERO = TeamJob("hero", "a", 60, priority=1)


def chosen(found: ChosenVictims | NoVictims) -> tuple[str, ...]:
    assert isinstance(found, ChosenVictims), found
    return found.chosen.jobs


def pieces(queue: str, sizes: list[int]) -> tuple[TeamJob, ...]:
    return tuple(TeamJob(f"{queue[-1]}{at}", queue, gpus, float(gpus)) for at, gpus in enumerate(sizes))


@pytest.mark.parametrize(("text", "a", "b"), [(OWED, "a", "b"), (COHORTS, "x/a", "y/b")])
def test_a_hero_beside_its_own_30_takes_what_it_is_owed_and_nobody_takes_it_back(text: str, a: str, b: str) -> None:
    """Kueue's published case: 60 of 100 beside 30 of the own queue and 70 of another's, in one cohort and in two."""
    teams = Teams(read_queues(text), 100, (*pieces(a, [30]), *pieces(b, [10] * 7)))
    hero = replace(HERO, queue=a)
    victims = chosen(teams.find(hero))
    assert victims.count("a0") == 1
    assert len(victims) == 4, "its own 30, and 30 of the other queue, which keeps the 40 that it is owed"
    assert run_until_stable(teams, hero) == 4


@pytest.mark.parametrize(("text", "a", "b"), [(OWED, "a", "b"), (COHORTS, "x/a", "y/b"), (ALIKE, "a", "b")])
def test_a_job_of_70_is_not_stopped_for_a_hero_that_would_give_it_back(text: str, a: str, b: str) -> None:
    teams = Teams(read_queues(text), 100, (*pieces(a, [30]), *pieces(b, [70])))
    hero = replace(HERO, queue=a)
    assert isinstance(teams.find(hero), NoVictims)
    assert run_until_stable(teams, hero) == 0


def test_queues_without_guarantees_end_with_equal_shares_at_most() -> None:
    teams = Teams(read_queues(ALIKE), 100, pieces("b", [10] * 10))
    assert len(chosen(teams.find(TeamJob("p", "a", 50)))) == 5
    assert teams.find(TeamJob("p", "a", 60)) == NoVictims("unfair", 40, 60)


def test_a_share_that_own_stops_have_lowered_proves_nothing() -> None:
    """The own job of 2 starts again on another node. So the queue would hold 10 at weight 2 beside 4 at weight 1."""
    tree = read_queues("[queue.a]\nweight = 2\n[queue.b]\n")
    jobs = (TeamJob("own", "a", 2), TeamJob("b0", "b", 6), TeamJob("b1", "b", 4, math.inf))
    payer = TeamJob("p", "a", 8, priority=1)
    queues = Teams(tree, 16, jobs).make_queues(payer)
    request = PlacementRequest(request_id="p", queue="a", gpus_per_node=8)
    view = make_view(np.array([[0] * 2 + [1] * 6, [2] * 4 + [-1] * 4]))
    cost = np.array([job.cost for job in jobs])
    view = replace(view, jobs=tuple(job.name for job in jobs))
    assert find_fair_victims(request, view, cost, OPTIONS, queues) == NoVictims("unfair", 0, 1)
    no_room = replace(view, milli=np.where(view.holders < 0, 0, view.milli).astype(np.int16))
    queues.standing.capacity = {"gpu": 12.0}
    assert chosen(find_fair_victims(request, no_room, cost, OPTIONS, queues)) == ("b0", "own")


def test_a_queue_gives_only_what_is_above_its_guarantee() -> None:
    text = "[queue.a]\nguaranteed = {gpu = 8}\n[queue.b]\nguaranteed = {gpu = 4}\n[queue.c]\n"
    teams = Teams(read_queues(text), 12, (*pieces("b", [2] * 4), *pieces("c", [2, 2])))
    cheap_b = tuple(replace(job, cost=0.5 if job.queue == "b" else 9.0) for job in teams.jobs)
    victims = chosen(replace(teams, jobs=cheap_b).find(TeamJob("p", "a", 6)))
    assert sum(name.startswith("b") for name in victims) == 2
    assert len(victims) == 3


def test_a_sub_queue_keeps_its_guarantee_though_its_parent_has_more() -> None:
    text = """[queue.a]\nguaranteed = {gpu = 8}\n[queue.g]\nguaranteed = {gpu = 8}
    [queue."g/one"]\nguaranteed = {gpu = 4}\n[queue."g/two"]\nguaranteed = {gpu = 4}\n"""
    teams = Teams(read_queues(text), 16, (*pieces("g/one", [4]), *pieces("g/two", [4, 4, 4])))
    free = tuple(replace(job, cost=0.1 if job.queue == "g/one" else 9.0) for job in teams.jobs)
    victims = chosen(replace(teams, jobs=free).find(TeamJob("p", "a", 4)))
    assert [name[0] for name in victims] == ["o"]


def test_a_higher_class_stops_jobs_of_its_own_queue_and_of_others() -> None:
    teams = Teams(read_queues(ALIKE), 8, pieces("a", [8]))
    assert isinstance(teams.find(TeamJob("p", "a", 8)), NoVictims)
    assert chosen(teams.find(TeamJob("p", "a", 8, priority=1))) == ("a0",)
    assert isinstance(teams.find(TeamJob("p", "b", 8, priority=1)), NoVictims)
    assert chosen(teams.find(TeamJob("p", "b", 8, priority=2))) == ("a0",)


def test_a_job_of_no_queue_is_never_stopped() -> None:
    teams = Teams(read_queues(ALIKE), 8, pieces("b", [8]))
    payer = TeamJob("p", "a", 4, priority=1)
    queues = teams.make_queues(payer)
    assert queues.holds.keys() == {"b0"}
    assert isinstance(Teams(teams.tree, 4, ()).find(payer), ChosenVictims)
    assert Teams(teams.tree, 3, ()).find(payer) == NoVictims("no_room", 3, 4)


def test_a_limit_holds_even_if_the_victims_would_make_room() -> None:
    teams = Teams(read_queues("[queue.a]\nlimit = {gpu = 4}\n[queue.b]\n"), 16, pieces("b", [8, 8]))
    assert teams.find(TeamJob("p", "a", 8)) == NoVictims("quota")


def test_a_refusal_beyond_so_many_gpus_holds_whichever_jobs_give_back_so_many() -> None:
    proven = 0
    for seed in range(round(200 * EFFORT)):
        rng = np.random.default_rng(seed)
        teams, payer = draw_teams(rng)
        text = "".join(
            f"[queue.{top}]\nguaranteed = {{gpu = {rng.integers(0, 8)}}}\nlimit = {{gpu = {rng.integers(8, 30)}}}\n"
            f'[queue."{top}/one"]\nlend = {{gpu = 0}}\n[queue."{top}/two"]\n'
            for top in "xy"
        )
        leaves = ("x/one", "x/two", "y/one", "y/two")
        jobs = tuple(replace(job, queue=str(rng.choice(leaves))) for job in teams.jobs)
        standing = Teams(read_queues(text), teams.gpus, jobs).make_standing()
        standing.add_waiting(str(rng.choice(leaves)), {"gpu": float(rng.integers(0, 9))})
        leaf, amounts, most = str(rng.choice(leaves)), {"gpu": float(payer.gpus)}, float(rng.integers(0, 9))
        refuses = standing.find_refusing_queue(leaf, amounts) is not None
        assert standing.is_refused_beyond(leaf, amounts, 0.0) == refuses
        if not standing.is_refused_beyond(leaf, amounts, most):
            continue
        proven += 1
        for chosen in (chosen for size in range(len(jobs) + 1) for chosen in combinations(jobs, size)):
            if sum(job.gpus for job in chosen) <= most:
                left = standing.copy()
                for job in chosen:
                    left.add_held(job.queue, {"gpu": float(job.gpus)}, -1.0)
                assert left.find_refusing_queue(leaf, amounts) is not None, (seed, chosen)
    assert proven > 20 * EFFORT


def test_no_search_runs_if_no_set_of_victims_could_meet_the_quota() -> None:
    """Queue a waits for its 64 GPUs. Eight jobs of 4 GPUs, the most on one node, give too few of them back to c."""
    tree = read_queues("[queue.a]\nguaranteed = {gpu = 64}\n[queue.b]\n[queue.c]\n")
    jobs = tuple(TeamJob(f"b{at}", "b", 4) for at in range(32))
    view = make_view(np.arange(32).repeat(4).reshape(16, 8))
    view, cost = replace(view, jobs=tuple(job.name for job in jobs)), np.ones(32)
    searched = []

    def find(*arguments: Any) -> ChosenVictims | NoVictims:
        searched.append(arguments)
        return find_victims(*arguments)

    for waits, searches in ((0.0, 1), (24.0, 1), (64.0, 0)):
        payer = TeamJob("p", "c", 1)
        queues = Teams(tree, 128, jobs).make_queues(payer)
        queues.standing.add_waiting("a", {"gpu": waits})
        searched.clear()
        request = PlacementRequest(request_id="p", queue="c", gpus_per_node=8)
        found = find_fair_victims(request, view, cost, OPTIONS, queues, find=find)
        assert len(searched) == searches, waits
        assert isinstance(found, ChosenVictims) == (waits == 0.0), found
        if waits:
            assert found == NoVictims("quota")


def test_nearly_all_solvable_scenes_are_solved_fairly_and_without_loops() -> None:
    solvable = solved = 0
    for seed in range(round(500 * EFFORT)):
        teams, payer = draw_teams(np.random.default_rng(seed))
        found = teams.find(payer)
        fair = dict.fromkeys(names for _, names in teams.list_fair_sets(payer))
        solvable += bool(fair)
        if isinstance(found, ChosenVictims):
            solved += 1
            assert {frozenset(names) for names in fair} >= {frozenset(found.chosen.jobs)}, seed
        run_until_stable(teams, payer)
    assert solvable > 30 * EFFORT
    assert solved >= 0.995 * solvable - 1
