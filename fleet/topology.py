"""Topology: each node's NVLink domain, rack, rail group, block and cluster, and its hardware.

Immutable, by dense node row; a change makes a new one with the next `generation`. A node that no file names has domain
-1 at every level ("unplaced"): it is scored and shown, and hosts only what asks for no level above the node.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Level(StrEnum):
    """From the tightest domain to the widest."""

    NODE = "node"
    NVLINK_DOMAIN = "nvlink_domain"
    RACK = "rack"
    RAIL_GROUP = "rail_group"
    BLOCK = "block"
    CLUSTER = "cluster"


DOMAIN_LEVELS = tuple(level for level in Level if level is not Level.NODE)


@dataclass(frozen=True, slots=True)
class Device:
    """A network adapter."""

    name: str
    gpus: tuple[int, ...] = ()  # the nearest ones; (): unknown
    rail: int = -1  # adapters of one rail meet at a leaf switch; -1: unknown
    bytes_per_s: float = 0.0  # 0: unknown


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a topology source says of one node. An empty domain name means the source does not say."""

    name: str
    gpus: int = 0
    gpu_model: str = ""
    gpu_memory_gib: float = 0.0
    cpus: int = 0
    host_memory_gib: float = 0.0
    pool: str = "default"
    domains: dict[Level, str] = field(default_factory=dict)
    power_domain: str = ""
    devices: tuple[Device, ...] = ()  # as the fabric shows them


@dataclass(frozen=True, slots=True)
class Topology:
    """Columns over n node rows. `domain[level][row]` indexes `domain_names[level]`, -1 is unknown."""

    nodes: tuple[NodeSpec, ...]
    placed: NDArray[np.bool_]  # (n,) named by a topology source
    gpus: NDArray[np.int16]  # (n,)
    domain: dict[Level, NDArray[np.int32]]  # level -> (n,)
    domain_names: dict[Level, tuple[str, ...]]
    generation: int
    hosts: dict[str, tuple[Device, ...]] = field(default_factory=dict)  # by node, pool or GPU model; "": all others
    names: tuple[str, ...] = field(init=False, repr=False)  # made once: readers ask for them node by node

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(node.name for node in self.nodes))

    def __len__(self) -> int:
        return len(self.nodes)

    @classmethod
    def build(
        cls,
        nodes: Sequence[NodeSpec],
        *,
        placed: Sequence[bool] | None = None,
        generation: int = 1,
        hosts: Mapping[str, tuple[Device, ...]] | None = None,
    ) -> "Topology":
        """Index the specs; domains are numbered in order of first mention. Raises ValueError on a repeated node."""
        names = [node.name for node in nodes]
        if len(set(names)) != len(names):
            twice, _ = Counter(names).most_common(1)[0]
            raise ValueError(f"node {twice!r} is named twice")
        domain: dict[Level, NDArray[np.int32]] = {}
        domain_names: dict[Level, tuple[str, ...]] = {}
        for level in DOMAIN_LEVELS:
            index: dict[str, int] = {}
            rows = [
                index.setdefault(label, len(index)) if (label := node.domains.get(level, "")) else -1 for node in nodes
            ]
            domain[level] = np.array(rows, np.int32)
            domain_names[level] = tuple(index)
        return cls(
            nodes=tuple(nodes),
            placed=np.ones(len(nodes), bool) if placed is None else np.array(placed, bool),
            gpus=np.array([node.gpus for node in nodes], np.int16),
            domain=domain,
            domain_names=domain_names,
            generation=generation,
            hosts=dict(hosts or {}),
        )

    def devices(self, row: int) -> tuple[Device, ...]:
        """The adapters of a node: as it is wired inside, with what the fabric adds."""
        node = self.nodes[row]
        keys = (node.name, node.pool, node.gpu_model, "")
        inside = next((self.hosts[key] for key in keys if key in self.hosts), ())
        told = {device.name: device for device in node.devices}
        return tuple(
            [_joined(device, told.pop(device.name, device)) for device in inside] + list(told.values()),
        )

    def with_unplaced(self, names: Sequence[str]) -> "Topology":
        """This topology with further nodes that no source has placed; the next generation."""
        nodes = (*self.nodes, *(NodeSpec(name) for name in names))
        placed = [*self.placed.tolist(), *(False for _ in names)]
        return Topology.build(nodes, placed=placed, generation=self.generation + 1, hosts=self.hosts)

    def with_gpus(
        self, counts: dict[str, int], model: dict[str, str] | None = None, emptied: Collection[str] = ()
    ) -> "Topology":
        """This topology with larger GPU counts, and models where unknown. The caller decides which nodes may grow.
        emptied: nodes that have exactly as many as counted, since boards of theirs are elsewhere now."""
        nodes = []
        for node in self.nodes:
            gpus = max(0 if node.name in emptied else node.gpus, counts.get(node.name, 0))
            known = node.gpu_model or (model or {}).get(node.name, "") if gpus else node.gpu_model
            nodes.append(replace(node, gpus=gpus, gpu_model=known))
        placed = self.placed.tolist()
        return Topology.build(nodes, placed=placed, generation=self.generation + 1, hosts=self.hosts)


def _joined(inside: Device, told: Device) -> Device:
    """Merge what the node's wiring and the fabric say of one adapter."""
    rail = inside.rail if inside.rail >= 0 else told.rail
    return Device(inside.name, inside.gpus or told.gpus, rail, told.bytes_per_s or inside.bytes_per_s)
