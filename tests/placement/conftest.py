"""A small fleet in one line: racks by name, each a list of free GPUs a node (nodes have 8)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.placement.machines.slots import convert_to_milli
from fleetcast.placement.machines.view import ClusterView

MakeView = Callable[..., ClusterView]


def build(racks: Mapping[str, Sequence[int]], *, unplaced: Sequence[int] = (), **changed: Any) -> ClusterView:
    """Nodes n001, n002, ... in rack order; two racks a rail group; the lowest GPU indices are the busy ones."""
    specs = []
    free: list[int] = []
    for number, (rack, counts) in enumerate(racks.items()):
        domains = {Level.RACK: rack, Level.RAIL_GROUP: f"rg{number // 2 + 1}", Level.BLOCK: "b1", Level.CLUSTER: "c"}
        for count in counts:
            name = f"n{len(specs) + 1:03d}"
            domain = domains | {Level.NVLINK_DOMAIN: name}
            specs.append(NodeSpec(name, 8, "H100", 80, 128, 2048, domains=domain))
            free.append(count)
    topology = Topology.build(specs, generation=3)
    if unplaced:
        topology = topology.add_unplaced_nodes([f"x{i}" for i in range(len(unplaced))])
        topology = topology.update_gpu_counts({f"x{i}": 8 for i in range(len(unplaced))})
    counts = np.array([*free, *unplaced])
    n = len(counts)
    is_free = np.arange(8)[None, :] >= 8 - counts[:, None]
    columns: dict[str, Any] = {
        "topology": topology,
        "milli": convert_to_milli(is_free),
        "usable": np.ones((n, 8), bool),
        "state": np.zeros(n, np.int8),
        "p_fail": np.full(n, 0.001),
        "p_slow": np.full(n, 0.001),
        "reason": {},
        "holders": np.where(is_free, -1, 0).astype(np.int32),
        "jobs": ("running",),
        "free_cpus": np.full(n, 128.0),
        "free_host_memory_gib": np.full(n, 2048.0),
        "as_of_ms": 1_000_000,
        "generation": topology.generation,
        "models": (("risk", "rules"),),
    }
    return ClusterView(**(columns | changed))


@pytest.fixture
def make_view() -> MakeView:
    return build
