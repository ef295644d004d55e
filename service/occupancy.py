"""What runs where, as arrays: observed from job events, never assumed from decisions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.jobs import JobAttempt
from fleet.topology import Topology


@dataclass(frozen=True, slots=True)
class Occupancy:
    """holder: (n, g) int32 index into `jobs` of the attempt that holds a GPU, -1 free."""

    holder: NDArray[np.int32]
    jobs: tuple[str, ...]
    node_jobs: dict[int, list[str]]
    used_cpus: NDArray[np.float64]  # (n,)
    used_host_memory_gib: NDArray[np.float64]  # (n,)


def observe(running: Sequence[JobAttempt], topology: Topology, index: dict[str, int]) -> Occupancy:
    """Fold the running attempts onto the GPUs. `index`: node name -> row.

    An attempt that names nodes but no GPUs takes `gpus_per_node` free ones there (all, when that is unknown), of those
    that nobody names. GPUs beyond what the topology knows of a node are ignored.
    """
    width = max(1, int(topology.gpus.max(initial=1)))
    holder = np.full((len(topology), width), -1, np.int32)
    node_jobs: dict[int, list[str]] = {}
    used_cpus, used_memory = np.zeros(len(topology)), np.zeros(len(topology))
    unnamed: list[tuple[int, int]] = []  # (number, row) of those whose GPUs are to be guessed, after all named ones
    for number, attempt in enumerate(running):
        places = [(rank.node, rank.gpus) for rank in attempt.ranks] or [(node, ()) for node in attempt.nodes]
        for node, gpus in places:
            row = index.get(node, -1)
            if row < 0:
                continue
            if gpus:
                holder[row, [gpu for gpu in gpus if 0 <= gpu < topology.gpus[row]]] = number
            else:
                unnamed.append((number, row))
        for node in attempt.hosts:
            if (row := index.get(node, -1)) >= 0:
                node_jobs.setdefault(row, []).append(attempt.job)
                if attempt.submission:
                    used_cpus[row] += attempt.submission.cpus or 0
                    used_memory[row] += attempt.submission.host_memory_gib or 0
    for number, row in unnamed:
        holder[row, _first_free(holder[row], running[number], topology.gpus[row])] = number
    return Occupancy(holder, tuple(attempt.job for attempt in running), node_jobs, used_cpus, used_memory)


def _first_free(row: NDArray[np.int32], attempt: JobAttempt, gpus: int) -> NDArray[np.intp]:
    free = np.flatnonzero(row[:gpus] < 0)
    wanted = attempt.submission.gpus_per_node if attempt.submission else len(free)
    return free[:wanted]
