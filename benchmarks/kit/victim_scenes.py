"""Scenes for the search for victims: full fleets, with jobs whose stop costs differently much."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.requests import LevelName, PlacementRequest, TopologyConstraint
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.view import ClusterView

EACH = 8  # GPUs of a node
ZONE = 512  # nodes of a rail group
PROTECTED = 0.15  # of the jobs may not be stopped


@dataclass(frozen=True, slots=True)
class VictimScene:
    """A full fleet. cost_gpu_s: (j,) inf for protected jobs. started: (j,) start times, for orders by age."""

    view: ClusterView
    cost_gpu_s: NDArray[np.float64]
    started: NDArray[np.float64]


def make_view(holders: NDArray[np.int64], rack: int) -> ClusterView:
    """Return a fleet of racks of `rack` nodes. holders: (n, g) the job of each GPU, -1 for none."""
    n = len(holders)
    specs = []
    for row in range(n):
        domains = {Level.RACK: f"r{row // rack:04d}", Level.RAIL_GROUP: f"z{row // ZONE}", Level.CLUSTER: "c"}
        specs.append(NodeSpec(f"n{row:05d}", EACH, "H100", 80, 128, 2048, domains=domains))
    return ClusterView(
        topology=Topology.build(specs),
        milli=convert_to_milli(holders < 0),
        usable=np.ones(holders.shape, bool),
        state=np.zeros(n, np.int8),
        p_fail=np.full(n, 0.001),
        p_slow=np.full(n, 0.001),
        reason={},
        holders=holders.astype(np.int32),
        jobs=tuple(f"job{index:05d}" for index in range(int(holders.max()) + 1)),
        free_cpus=np.full(n, 128.0),
        free_host_memory_gib=np.full(n, 2048.0),
    )


def make_scene(view: ClusterView, rng: np.random.Generator, protected: float = PROTECTED) -> VictimScene:
    """Return the scene of a view, with a random start and age of the last checkpoint for each job.

    Jobs write checkpoints at intervals from minutes to hours, or never. protected: share of the jobs that may
    not be stopped.
    """
    j = len(view.jobs)
    gpus = np.bincount(view.holders[view.holders >= 0], minlength=j).astype(np.float64)
    age_s = rng.exponential(12 * 3600.0, j)
    saved_s = np.where(rng.random(j) < 0.2, age_s, np.minimum(age_s, rng.random(j) * rng.lognormal(8.0, 1.0, j)))
    cost = gpus * (saved_s + 300.0)
    return VictimScene(view, np.where(rng.random(j) < protected, np.inf, cost), -age_s)


def fill_with_whole_nodes(
    nodes: int, rng: np.random.Generator, sizes: Sequence[int] = (1, 1, 2, 4, 8)
) -> NDArray[np.int64]:
    """Return (n, g) holders: gangs of whole nodes side by side."""
    holders = np.full((nodes, EACH), -1)
    row = job = 0
    while row < nodes:
        size = int(rng.choice(sizes))
        holders[row : row + size] = job
        row, job = row + size, job + 1
    return holders


def fill_with_pieces(nodes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return (n, g) holders: gangs of members of 1 to 4 GPUs, each on any node with room."""
    holders = np.full((nodes, EACH), -1)
    free, job = np.full(nodes, EACH), 0
    while free.sum() > 0.01 * nodes * EACH:
        each, members = int(rng.choice([1, 2, 4])), int(rng.choice([1, 1, 2, 4, 8]))
        fits = np.flatnonzero(free >= each)
        for row in rng.choice(fits, min(members, len(fits)), replace=False).tolist() if len(fits) else []:
            holders[row, EACH - free[row] : EACH - free[row] + each] = job
            free[row] -= each
        job += bool(len(fits))
    return holders


def make_request(members: int, each: int, level: LevelName | None = None, **more: object) -> PlacementRequest:
    return PlacementRequest(
        request_id="payer",
        gang=members,
        gpus_per_node=each,
        topology=TopologyConstraint(level),
        **more,  # type: ignore[arg-type]
    )
