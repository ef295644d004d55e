"""Kueue's order of victims: what joins first, and what leaves again."""

import numpy as np

from fleetcast.fleet.requests import PlacementRequest, RankPlacement
from fleetcast.placement.machines.options import Options
from fleetcast.placement.machines.running_jobs import make_running_jobs
from fleetcast.placement.machines.view import ClusterView
from fleetcast.placement.plan.timeline import Hold, add_placements
from fleetcast.placement.play.served import make_empty_view
from fleetcast.placement.play.youngest import YoungestFirst
from fleetcast.placement.reclaim.victims import ChosenVictims, NoVictims

JOBS = {
    "old": ("n0001", 0, 2, 100),
    "young": ("n0001", 2, 4, 300),
    "small": ("n0002", 0, 1, 200),
    "big": ("n0002", 1, 4, 400),
}
OPTIONS = Options(now_ms=1_000_000)


def make_scene(priority: dict[str, int]) -> tuple[ClusterView, YoungestFirst]:
    holds = [Hold(name, [RankPlacement(0, node, tuple(range(a, b)))]) for name, (node, a, b, _) in JOBS.items()]
    table = make_running_jobs(
        JOBS, priority=[priority.get(name, 0) for name in JOBS], started_ms=[row[3] for row in JOBS.values()]
    )
    return add_placements(make_empty_view([4, 4]), holds), YoungestFirst.of(table)


def search(gpus: int, cost: dict[str, float] | None = None, priority: dict[str, int] | None = None) -> object:
    view, find = make_scene(priority or {})
    costs = np.array([(cost or {}).get(name, 1.0) for name in view.jobs])
    found = find(PlacementRequest(request_id="r", gpus_per_node=gpus), view, costs, OPTIONS)
    if isinstance(found, NoVictims):
        return found.code
    assert isinstance(found, ChosenVictims)
    assert found.decision.outcome == "placed"
    assert set(found.view.jobs) == set(JOBS) - set(found.chosen.jobs)
    return found.chosen.jobs


def test_the_youngest_join_until_the_request_fits_and_those_not_needed_run_on() -> None:
    assert search(1) == ("big",)
    assert search(4) == ("big", "small")  # young joined between them, and is not needed
    assert search(2, cost={"big": np.inf}) == ("young",)


def test_the_lower_priority_joins_before_the_younger_and_the_cost_counts_for_nothing() -> None:
    assert search(1, priority={"big": 1}) == ("young",)
    assert search(1, cost={"big": 1e9, "old": 0.5}) == ("big",)


def test_nothing_stops_where_the_request_would_not_fit() -> None:
    assert search(4, cost={"big": np.inf, "old": np.nan}) == "no_room"
    assert search(0) == "no_gpus"
