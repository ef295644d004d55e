"""What a stop costs by the table of running jobs and the risk of their nodes."""

import math
from typing import Any

import numpy as np

from fleetcast.placement.machines.running_jobs import make_running_jobs
from fleetcast.placement.machines.slots import HeldParts
from fleetcast.placement.plan.reclaiming import compute_job_costs
from tests.placement.reclaim.scenes import G, make_view

NOW_MS = 10_000_000
RISK = np.array([0.1, 0.2, np.nan, 0.0])  # within an hour


def lost_s(p_fail: np.ndarray = RISK, **columns: Any) -> list[float]:
    """The seconds of work that each job would lose: j0 on nodes 0 and 1, j1 on 1 and 2, j2 on 3, each with 4 GPUs."""
    holders = np.full((4, G), -1)
    for job, nodes in enumerate([(0, 1), (1, 2), (3,)]):
        for node in nodes:
            holders[node, 4 * (job == 1) : 4 * (job == 1) + 4] = job
    view = make_view(holders, p_fail=p_fail, risk_horizon_s=3600)
    names = ["j2", "gone", "j0", "j1"]  # in another order than the view's, with a job that it lacks
    jobs = make_running_jobs(names, gpus=4, started_ms=NOW_MS - 9_000_000, **columns)
    lost = compute_job_costs(jobs, view, NOW_MS).lost / 4
    return [float(lost[names.index(name)]) for name in ("j0", "j1", "j2", "gone")]


def test_work_without_a_known_checkpoint_reaches_back_one_interval_by_the_risk_of_all_nodes() -> None:
    rate = -(math.log(0.9) + math.log(0.8)) / 3600
    j0, j1, j2, gone = lost_s(checkpoint_cost_s=30.0)
    assert np.isclose(j0, math.sqrt(2 * 30.0 / rate))
    assert (j1, gone) == (9000.0, 9000.0), "nobody knows how often these fail"
    assert j2 == 9000.0, "it never fails, so it need write no checkpoint"


def test_a_job_that_shares_a_gpu_has_the_risk_of_its_node() -> None:
    parts = HeldParts(np.array([0, 1]), np.array([0, 0]), np.array([500, 500]))
    view = make_view(np.where(np.arange(G) == 0, 1, -1)[None, :], parts=parts, p_fail=RISK[:1], risk_horizon_s=3600)
    jobs = make_running_jobs(["j0", "j1"], gpus=1, started_ms=NOW_MS - 9_000_000, checkpoint_cost_s=30.0)
    assert np.allclose(compute_job_costs(jobs, view, NOW_MS).lost, math.sqrt(2 * 30.0 * 3600 / -math.log(0.9)))


def test_risk_does_not_count_where_a_checkpoint_is_known_or_its_cost_unknown() -> None:
    assert lost_s(checkpoint_cost_s=30.0, checkpoint_ms=NOW_MS - 5_000_000) == [5000.0] * 4
    assert lost_s() == [9000.0] * 4


def test_a_checkpoint_that_costs_nothing_or_nodes_that_are_sure_to_fail_do_not_mean_that_no_work_is_lost() -> None:
    assert lost_s(checkpoint_cost_s=0.0) == [9000.0] * 4
    assert lost_s(np.array([1.0, 0.2, np.nan, 1.0]), checkpoint_cost_s=30.0) == [30.0, 9000.0, 30.0, 9000.0]


def test_a_fleet_without_jobs_costs_nothing() -> None:
    view = make_view(np.full((1, G), -1), p_fail=RISK[:1], risk_horizon_s=3600)
    gone = make_running_jobs(["gone"], gpus=4, started_ms=NOW_MS - 9_000_000, checkpoint_cost_s=30.0)
    assert compute_job_costs(make_running_jobs([]), view, NOW_MS).lost.tolist() == []
    assert (compute_job_costs(gone, view, NOW_MS).lost / 4).tolist() == [9000.0]
