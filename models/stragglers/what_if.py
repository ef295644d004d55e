"""Simulation of a training step in which one worker, stage or operation type is as fast as its peers.

A pipeline step is replayed as a graph. An operation starts when its worker's previous one has ended
and, after a transfer, its input has arrived. The input of a forward pass comes from the previous stage. The
input of a backward pass comes from the next stage. The replicas meet at the end. Waiting is not an operation,
so it shows only in the result.

    slowdown of X   T(all ideal, X as it was) / T(all ideal)                         1.0: X costs nothing
    share of X      (T(as it was) - T(X ideal)) / (T(as it was) - T(all ideal))      1.0: X explains all of it

ideal: the mean of all operations of a type (What-if Analysis of Stragglers, Lin et al., OSDI 2025).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

FORWARD, BACKWARD = range(2)
OP_TYPES = ("forward-compute", "backward-compute")
Order = Sequence[Sequence[tuple[int, int]]]  # by stage: (type, micro-batch) in the order of the worker's schedule


@dataclass(frozen=True, slots=True)
class Attribution:
    """The slowdown of a job, divided by replica, stage, type of operation (OP_TYPES) and worker.

    A worker is a pair (replica, stage). share: (replica, stage) the share of the lost time that each worker
    explains.
    """

    slowdown: float
    by_replica: Array
    by_stage: Array
    by_type: Array
    by_worker: Array
    share: Array


def simulate_step_time(seconds: Array, order: Order, transfer_s: float = 0.0) -> Array:
    """Return (step,) seconds from the first operation of each step to its last.

    seconds: (step, replica, stage, type, micro-batch). order: each stage's operations (type,
    micro-batch) in order. Raises ValueError if operations of the order wait for each other.

    >>> two = np.ones((1, 1, 2, 2, 1))  # one micro-batch through two stages, there and back
    >>> simulate_step_time(two, [[(0, 0), (1, 0)], [(0, 0), (1, 0)]])
    array([4.])
    """
    stages = len(order)
    seconds = np.nan_to_num(seconds)  # a micro-batch that a step did not have
    ends = np.full(seconds.shape, np.nan)
    free = np.zeros(seconds.shape[:3])
    at = [0] * stages
    while any(at[stage] < len(order[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(order[stage]):
                kind, micro = order[stage][at[stage]]
                source = stage - 1 if kind == FORWARD else stage + 1
                start = free[:, :, stage]
                if 0 <= source < stages:
                    if (kind, micro) not in order[source][: at[source]]:
                        break
                    start = np.maximum(start, ends[:, :, source, kind, micro] + transfer_s)
                free[:, :, stage] = ends[:, :, stage, kind, micro] = start + seconds[:, :, stage, kind, micro]
                at[stage] += 1
                moved = True
        if not moved:
            raise ValueError(f"the schedule waits for itself after {at} operations of its stages")
    return np.asarray(free.max(axis=(1, 2)))


def attribute_slowdown(seconds: Array, order: Order, transfer_s: float = 0.0) -> Attribution:
    """Divide the slowdown over all steps among replicas, stages, operation types and workers.

    seconds: (step, replica, stage, type, micro-batch). Raises ValueError if operations of the order
    wait for each other, or if nothing takes any time.
    """
    _, replicas, stages, types, _ = seconds.shape
    typical = np.nanmean(seconds, axis=(0, 1, 2, 4))
    ideal = np.broadcast_to(typical[:, None], seconds.shape)

    def sum_step_times(mixed: Array) -> float:
        return float(simulate_step_time(mixed, order, transfer_s).sum())

    def compute_slowdown_of(where: tuple[int | slice, ...]) -> float:
        mixed = ideal.copy()
        mixed[where] = seconds[where]
        return sum_step_times(mixed) / least

    least, most = sum_step_times(ideal), sum_step_times(seconds)
    if least <= 0:
        raise ValueError("no operation takes any time")
    every = slice(None)
    by_worker, share = np.ones((replicas, stages)), np.zeros((replicas, stages))
    for replica in range(replicas):
        for stage in range(stages):
            where = (every, replica, stage)
            by_worker[replica, stage] = compute_slowdown_of(where)
            mixed = seconds.copy()
            mixed[where] = ideal[where]
            share[replica, stage] = (most - sum_step_times(mixed)) / (most - least) if most > least else 0.0
    return Attribution(
        slowdown=most / least,
        by_replica=np.array([compute_slowdown_of((every, row)) for row in range(replicas)]),
        by_stage=np.array([compute_slowdown_of((every, every, row)) for row in range(stages)]),
        by_type=np.array([compute_slowdown_of((every, every, every, row)) for row in range(types)]),
        by_worker=by_worker,
        share=share,
    )
