"""ClusterView: one consistent set of arrays for one decision."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleet.topology import Topology


@dataclass(frozen=True, slots=True)
class ClusterView:
    """All arrays are over the n nodes of `topology`; nobody changes them.

    free: (n, g) bool, GPU index is usable and unoccupied; usable: (n, g) bool, the GPU exists and answers.
    p_fail, p_slow: (n,) probability within `risk_horizon_s`, NaN = unknown (never treated as worst or best).
    state: (n,) 0 in service, 1 drained, 2 lost; reason: first reason sentence of risky nodes by row.
    holders: (n, g) int32 index into `jobs` of who holds a GPU, -1 none; free_cpus, free_host_memory_gib: NaN = unknown.
    """

    topology: Topology
    free: NDArray[np.bool_]
    usable: NDArray[np.bool_]
    state: NDArray[np.int8]
    p_fail: NDArray[np.float64]
    p_slow: NDArray[np.float64]
    reason: dict[int, str]
    holders: NDArray[np.int32]
    jobs: tuple[str, ...]
    free_cpus: NDArray[np.float64]
    free_host_memory_gib: NDArray[np.float64]
    risk_horizon_s: int = 3600
    as_of_ms: int = 0
    generation: int = 0
    models: tuple[tuple[str, str], ...] = ()
