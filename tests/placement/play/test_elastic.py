"""Laws of plays in which gangs shrink and grow."""

import math

import numpy as np
import pytest

from fleetcast.placement.play.replay import Trace
from fleetcast.placement.play.served import ServedPlan
from fleetcast.training.judges.played import PlayScene, make_served_plan
from fleetcast.training.judges.played_elastic import PARTS, draw_elastic_jobs, make_elastic_replay

NODES, EACH = 4, 8


def make_scene(seed: int) -> PlayScene:
    rng = np.random.default_rng(seed)
    jobs = 60
    submit_s = np.sort(rng.uniform(0, 20_000, jobs)).tolist()
    gpus = rng.choice([1, 4, 8, 16, 32], jobs, p=[0.3, 0.2, 0.2, 0.2, 0.1]).tolist()
    run_s = np.exp(rng.uniform(math.log(300), math.log(9_000), jobs)).tolist()
    blank = [""] * jobs
    return PlayScene(Trace(blank, submit_s, run_s, gpus, [None] * jobs, blank, blank), NODES, EACH)


def sum_held_gpus(plan: ServedPlan) -> int:
    return sum(hold.gpus for hold in plan.holds.values())


@pytest.mark.parametrize("seed", range(6))
def test_sizes_holders_charges_and_work_agree_through_every_change(seed: int) -> None:
    scene = make_scene(seed)
    gangs = draw_elastic_jobs(scene, 0.8, seed)
    plan = make_served_plan(scene, "ours")
    replay, progress = make_elastic_replay(scene, plan, gangs, 0.9)
    held_gpu_s, before_s, gpus = 0.0, 0.0, 0
    for now_s in replay.play_steps():
        held_gpu_s += gpus * (now_s - before_s)
        before_s, gpus = now_s, sum_held_gpus(plan)
        assert gpus == int((plan.view.holders >= 0).sum()) == NODES * EACH - int(plan.view.free.sum())
        for job, hold in plan.holds.items():
            if job in gangs:
                size = len(hold.ranks)
                assert size == progress.size[job]
                assert -(-gangs[job] // PARTS) <= size <= gangs[job]
    assert progress.shrinks > 0
    assert progress.grows > 0
    assert np.isfinite(replay.end_s).all()
    assert plan.played is not None
    charged = sum(charge.compute_held_gpu_s(0, 10**12) for charge in plan.played.closed)
    assert not plan.played.opened
    assert charged == pytest.approx(held_gpu_s, rel=1e-6, abs=100.0)  # charges have whole milliseconds
    work = sum(run_s * size for run_s, size in zip(scene.trace.run_s, scene.trace.gpus, strict=True))
    assert progress.sum_work_gpu_s(math.inf) == pytest.approx(work)


def test_without_a_gang_nothing_differs_from_the_plan_that_serves() -> None:
    scene = make_scene(1)
    replay, _ = make_elastic_replay(scene, make_served_plan(scene, "ours"), {}, 0.9)
    fixed, _ = make_elastic_replay(scene, make_served_plan(scene, "ours"), {}, None)
    assert replay.play().tolist() == fixed.play().tolist()


@pytest.mark.parametrize(
    ("run_s", "limit_s", "waits"), [(300.0, 300.0, False), (50_000.0, 50_000.0, True), (50_000.0, None, False)]
)
def test_a_gang_that_ends_soon_shrinks_unless_the_request_has_a_long_limit(
    run_s: float, limit_s: float | None, waits: bool
) -> None:
    trace = Trace([""] * 2, [0.0, 9_000.0], [10_000.0, run_s], [32, 8], [10_000.0, limit_s], [""] * 2, [""] * 2)
    scene = PlayScene(trace, NODES, EACH)
    replay, progress = make_elastic_replay(scene, make_served_plan(scene, "ours"), {0: 4}, 0.9)
    assert replay.play().tolist() == [0.0, 10_000.0 if waits else 9_000.0]
    assert progress.shrinks == (not waits)
