"""The demonstration's teams: who asks for how much, and a file of queues for a fleet of any size."""

from collections import Counter

import pytest

from fleetcast.fleet.requests import PlacementRequest
from fleetcast.placement.queues.queues_file import check_capacity, read_queues
from fleetcast.simulator.days.traces import POOL, generate_trace
from fleetcast.simulator.teams import TEAMS, assign_teams, format_queues_toml

START_MS = 1_795_202_400_000


def test_each_job_is_dealt_to_a_team_and_a_user_the_same_in_every_run() -> None:
    trace = generate_trace(1064, start_ms=START_MS, seed=1, days_before=3, days_after=1)
    assert trace.get_job(0).queue == POOL
    dealt = assign_teams(trace)
    assert assign_teams(trace).queue == dealt.queue
    counts = Counter(queue.partition("/")[0] for queue in dealt.queue)
    for team in TEAMS:
        assert counts[team.name] / len(dealt) == pytest.approx(team.demand / 100, abs=0.03)
    large = [row for row in dealt if row.queue == "language/pretraining"]
    assert large
    assert min(row.gpus for row in large) == 16
    assert {row.user for row in dealt if row.queue == "teaching"} == set(TEAMS[2].people)


def test_the_placer_takes_the_file_and_every_request_of_a_dealt_trace() -> None:
    tree = read_queues(format_queues_toml(1064))
    check_capacity(tree, {"gpu": 1064.0})
    guaranteed = {node.name: node.guaranteed.get("gpu") for node in tree.nodes if node.parent == 0}
    assert guaranteed == {"urgent": 64, "language": 400, "vision": 400, "teaching": 200}
    for row in assign_teams(generate_trace(1064, start_ms=START_MS, seed=2, days_before=1, days_after=1)):
        leaf = tree.find_request_leaf(PlacementRequest(request_id=row.job, queue=row.queue, user=row.user))
        assert leaf.startswith(row.queue)
    assert tree.find_request_leaf(PlacementRequest(request_id="visitor")) == "vision"


def test_urgent_jobs_may_use_the_nodes_of_research() -> None:
    tree = read_queues(format_queues_toml(1064, 2, 32))
    check_capacity(tree, {"gpu": 1064.0})
    research = tree.find_node("research")
    assert (research.guaranteed, research.preemptible) == ({"gpu": 32}, "all")
    assert tree.classes["urgent"].preempts == ("research",)
    trace = generate_trace(1064, start_ms=START_MS, seed=2, days_before=1, days_after=1)
    assert {job.pool for job in assign_teams(trace, "train")} == {"train"}


@pytest.mark.parametrize("gpus", [8, 64, 320, 10_000])
def test_guarantees_fit_into_a_fleet_of_any_size(gpus: int) -> None:
    check_capacity(read_queues(format_queues_toml(gpus)), {"gpu": float(gpus)})
    spares = read_queues(format_queues_toml(gpus, 2)).spares
    assert spares is not None
    assert spares.count == 2
