"""The mean wait of the service's plan, relative to a clairvoyant plan, on small scenes.

The benchmark needs the extra `optimum`. A scene has 12 jobs of one to eight whole nodes on 8 nodes. They
arrive within 40 minutes, and their limits are 1.2 to 5 times their run times. The solver CP-SAT makes the
clairvoyant plan on the same nodes. It knows every arrival and run time, stops no running job, and starts
from the best of our plans. `proven` counts the scenes whose plan is proven optimal. In the other scenes,
CP-SAT's best plan replaces the optimum.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from fleetcast.benchmarks.kit.case import make_record
from fleetcast.placement.play.replay import Floats, Trace
from fleetcast.training.judges.played import PlayScene, play_method

SIZES = (50,)  # scenes
JOBS, NODES, EACH = 12, 8, 8
COMES_S = 2400.0
SOLVE_S = 4.0  # deterministic seconds, the same on every machine
METHODS = ("ours", "easy_limits", "limit_x_cores", "area_oracle", "sjf_oracle")


def run(sizes: Sequence[int] = SIZES) -> Iterator[dict[str, Any]]:
    """Yield two records for each number of scenes: our mean wait divided by the clairvoyant plan's.

    The first covers all scenes, the second those whose plan is proven optimal.
    """
    for scenes in sizes:
        began_s = time.process_time()
        found = np.array([compare_mean_waits(make_scene(seed)) for seed in range(scenes)])
        cpu_s, proven = time.process_time() - began_s, found[:, 3] == 1
        for case, rows in (("mean wait over clairvoyant", found), ("the same, proven optimal", found[proven])):
            ours, easy, best, _ = rows.sum(axis=0).tolist()
            assert best > 0, "no request had to wait"
            beside = ("EASY on limits", easy / best)
            yield make_record("optimum", case, {"scenes": len(rows)}, [ours / best], "times", cpu_s=cpu_s, peer=beside)


def make_scene(seed: int) -> PlayScene:
    """Make a scene from a seed, with times in whole seconds."""
    rng = np.random.default_rng(seed)
    submit_s = np.sort(rng.integers(0, int(COMES_S), JOBS)).astype(float)
    run_s = np.clip(rng.lognormal(6.5, 1.0, JOBS), 30, 7200).round()
    gpus = EACH * rng.choice([1, 1, 1, 2, 2, 4, 8], JOBS)
    limit_s = (run_s * rng.uniform(1.2, 5.0, JOBS)).round()
    no_names = [""] * JOBS
    trace = Trace([], submit_s.tolist(), run_s.tolist(), gpus.tolist(), limit_s.tolist(), no_names, no_names)
    return PlayScene(trace, NODES, EACH)


def compare_mean_waits(scene: PlayScene) -> tuple[float, float, float, bool]:
    """Return the mean waits in seconds of our plan, of EASY on time limits, and of the clairvoyant plan.

    The fourth value is whether the clairvoyant plan is proven to be optimal.
    """
    starts = {method: play_method(scene, method).start_s for method in METHODS}
    submit_s = np.array(scene.trace.submit_s)
    mean = {method: float((start_s - submit_s).mean()) for method, start_s in starts.items()}
    total_s, proven = solve_optimum(scene, starts[min(mean, key=lambda method: mean[method])])
    return mean["ours"], mean["easy_limits"], total_s / len(submit_s), proven


def solve_optimum(scene: PlayScene, hint_s: Floats) -> tuple[float, bool]:
    """Return the sum of waits in seconds of the best plan that CP-SAT finds, and whether it is optimal.

    hint_s: (job,) the start times from which CP-SAT begins. Raises AssertionError without ortools.
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise AssertionError("it needs ortools: pip install 'fleetcast[optimum]'") from None
    trace, model = scene.trace, cp_model.CpModel()
    horizon_s = int(max(trace.submit_s) + sum(trace.run_s))
    intervals, starts = [], []
    for submit_s, run_s, hinted in zip(trace.submit_s, trace.run_s, hint_s.tolist(), strict=True):
        start = model.new_int_var(int(submit_s), horizon_s, "")
        intervals.append(model.new_fixed_size_interval_var(start, int(run_s), ""))
        model.add_hint(start, int(hinted))
        starts.append(start)
    model.add_cumulative(intervals, [-(-gpus // scene.each) for gpus in trace.gpus], scene.nodes)
    model.minimize(sum(starts) - int(sum(trace.submit_s)))
    solver = cp_model.CpSolver()
    solver.parameters.max_deterministic_time, solver.parameters.num_workers = SOLVE_S, 1
    solver.parameters.random_seed = 1
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), "CP-SAT found no plan"
    return solver.objective_value, bool(status == cp_model.OPTIMAL)
