"""`fleetcast evaluate placement`: the share of GPUs allocated once 130 % of them have been requested.

    ours       least growth of the potential (`PotentialGrowth`) over the pods that have arrived so far; at first,
               the demand is that of the train folder's other lists
    fgd        fragmentation alone, over the judged list itself, known beforehand (Weng et al., ATC 2023)
    best_fit   the node with the least left;  dot_prod: the least dot product of requested and free resources
    packing    GPUs in use first, idle nodes last;  random: any node with room

Pods arrive one by one in an order drawn by `seed`, and no pod leaves. A pod that finds no room is
refused.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fleetcast.placement.machines.potential import compute_potential, count_fragmented_milli
from fleetcast.placement.machines.shapes import RecentShapes
from fleetcast.training.judges.packing import (
    GrowthPolicy,
    PackedFleet,
    Policy,
    RandomPolicy,
    ScorePolicy,
    draw_arrivals,
    pack_pods,
    score_best_fit,
    score_dot_product,
    score_packing,
)
from fleetcast.training.reports.results import ResultRow, Results
from fleetcast.training.sets.packing_sets import PackingSet, PodList, read_packing_sets

Say = Callable[[str], None]

LOAD = 1.3
WINDOW = 2000  # arrivals that ours remembers
POPULAR = 0.95  # of the list: its commonest shapes, which published FGD looks at
BEFORE = 200  # of them, at first, of other lists


def evaluate(train: Path, test: Path, seed: int, say: Say) -> Results:
    """Evaluate every list of arrivals in the test folder."""
    results = Results("placement")
    for one in read_packing_sets(train, test, results.skipped):
        evaluate_set(results, one, seed, say)
    return results


def evaluate_set(results: Results, one: PackingSet, seed: int, say: Say) -> None:
    """Add the rows of one list of pods. Every policy packs the same arrivals."""
    order = draw_arrivals(one.pods, one.machines, LOAD, seed)
    say(f"{one.dataset}: {len(order):,} arrivals for {one.machines.gpus:,} GPUs of {len(one.machines.cpus):,} nodes")
    for method, make in make_policies(one, seed).items():
        began = time.process_time()
        share = pack_pods(one.machines, one.pods.kinds, order, make)
        took_s = time.process_time() - began
        for metric, value in (("allocated_at_130", 100 * share), ("seconds", took_s)):
            row = ResultRow(one.dataset, "packing", "all", None, method, "", metric, value, None, None, len(order))
            results.rows.append(row)
        say(f"{one.dataset}: {method} {100 * share:.2f} % in {took_s:.1f} s")


def make_policies(one: PackingSet, seed: int) -> dict[str, Callable[[PackedFleet], Policy]]:
    """Return method → a function that creates the policy for a fleet."""
    return {
        "ours": lambda fleet: GrowthPolicy(fleet, compute_potential, _sample_past_shapes(one.before, seed), True),
        "fgd": lambda fleet: GrowthPolicy(fleet, count_fragmented_milli, _collect_all_shapes(one.pods), False, POPULAR),
        "best_fit": lambda fleet: ScorePolicy(fleet, score_best_fit),
        "dot_prod": lambda fleet: ScorePolicy(fleet, score_dot_product),
        "packing": lambda fleet: ScorePolicy(fleet, score_packing),
        "random": lambda fleet: RandomPolicy(fleet, seed),
    }


def _sample_past_shapes(lists: Sequence[PodList], seed: int) -> RecentShapes:
    recent, rng = RecentShapes(WINDOW), np.random.default_rng(seed)
    for pods in lists:
        for number in rng.choice(pods.kind, BEFORE // len(lists)).tolist():
            recent.add(pods.kinds[number].shape)
    return recent


def _collect_all_shapes(pods: PodList) -> RecentShapes:
    recent = RecentShapes(len(pods.kind))
    for number in pods.kind.tolist():
        recent.add(pods.kinds[number].shape)
    return recent
