"""The topology of a fleet: each node's hardware, NVLink domain, rack, rail group, block and cluster.

A topology is immutable, with columns by node row. A change makes a new one with the next
`generation`. A node that no source names has domain -1 at every level ("unplaced"). It is scored
and shown, but only requests without constraints above the node level can be placed on it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray


class Level(StrEnum):
    """The levels of the topology, from the tightest domain to the widest."""

    NODE = "node"
    NVLINK_DOMAIN = "nvlink_domain"
    RACK = "rack"
    RAIL_GROUP = "rail_group"
    BLOCK = "block"
    CLUSTER = "cluster"


DOMAIN_LEVELS = tuple(level for level in Level if level is not Level.NODE)


@dataclass(frozen=True, slots=True)
class Device:
    """A network adapter of a node."""

    name: str
    gpus: tuple[int, ...] = ()  # the nearest ones; (): unknown
    rail: int = -1  # adapters of one rail meet at a leaf switch; -1: unknown
    bytes_per_s: float = 0.0  # 0: unknown


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node, as a topology source states it. An empty domain name means that the source states none.

    counts_resources: whether `gpus` is a scheduler's count of a resource, which may count shares of a
    board.
    stated_gpus: the number that the source stated, if an exporter has counted fewer boards since.
    Otherwise 0.
    other_names: host names and addresses under which other sources report the machine.
    lent_gpus: number of GPUs that another scheduler uses for jobs that no source reports.
    source: the name of the scheduler's source that stated this node.
    """

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
    counts_resources: bool = False
    stated_gpus: int = 0
    other_names: tuple[str, ...] = ()
    lent_gpus: int = 0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Topology:
    """The topology of n nodes as columns over node rows.

    `domain[level][row]` is an index into `domain_names[level]`, -1 if unknown.
    """

    nodes: tuple[NodeSpec, ...]
    placed: NDArray[np.bool_]  # (n,) named by a topology source
    gpus: NDArray[np.int16]  # (n,) usable as indices 0 to gpus - 1
    domain: dict[Level, NDArray[np.int32]]  # level -> (n,)
    domain_names: dict[Level, tuple[str, ...]]
    generation: int
    hosts: dict[str, tuple[Device, ...]] = field(default_factory=dict)  # by node, pool or GPU model; "": all others
    names: tuple[str, ...] = field(init=False, repr=False)  # made once: readers ask for them node by node
    lent_gpus: NDArray[np.int16] = field(init=False, repr=False)  # (n,)
    stated_gpus: NDArray[np.int16] = field(init=False, repr=False)  # (n,) boards that must be there

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(node.name for node in self.nodes))
        object.__setattr__(self, "lent_gpus", np.array([node.lent_gpus for node in self.nodes], np.int16))
        stated = [max(node.gpus, node.stated_gpus) for node in self.nodes]
        object.__setattr__(self, "stated_gpus", np.array(stated, np.int16))

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
        """Make a topology from node specs. Raises ValueError on a repeated node.

        Domains are numbered in order of their first mention.
        """
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

    def find_devices(self, row: int) -> tuple[Device, ...]:
        """Return the network adapters of a node that its own wiring or the fabric states.

        If both state an adapter, the facts about it are merged.
        """
        node = self.nodes[row]
        keys = (node.name, node.pool, node.gpu_model, "")
        inside = next((self.hosts[key] for key in keys if key in self.hosts), ())
        declared = {device.name: device for device in node.devices}
        return tuple(
            [_merge_device(device, declared.pop(device.name, device)) for device in inside] + list(declared.values()),
        )

    def add_unplaced_nodes(self, names: Sequence[str]) -> "Topology":
        """Return the next generation of this topology, with more nodes that no source has placed."""
        nodes = (*self.nodes, *(NodeSpec(name) for name in names))
        placed = [*self.placed.tolist(), *(False for _ in names)]
        return Topology.build(nodes, placed=placed, generation=self.generation + 1, hosts=self.hosts)

    def update_gpu_counts(self, counts: Mapping[str, int], model: Mapping[str, str] | None = None) -> "Topology":
        """Return the next generation of this topology, with the number of boards that exporters count on each node.

        model: node → GPU model, for nodes whose model is unknown. A count below the stated number replaces it,
        because missing boards cannot be given out. A count above the stated number is ignored. A count of 0 means
        that all boards of a node are elsewhere now.
        """
        nodes = [
            _apply_board_count(node, counts.get(node.name), (model or {}).get(node.name, "")) for node in self.nodes
        ]
        placed = self.placed.tolist()
        return Topology.build(nodes, placed=placed, generation=self.generation + 1, hosts=self.hosts)


def _apply_board_count(node: NodeSpec, boards: int | None, model: str) -> NodeSpec:
    """Return a node's spec with the number of boards that an exporter counted.

    boards: None if no exporter counted. model: the GPU model in telemetry, used if the spec has none.
    """
    gpus = node.gpus if boards is None else min(node.gpus or boards, boards)
    missing = gpus < node.gpus and not node.counts_resources
    return replace(
        node,
        gpus=gpus,
        gpu_model=node.gpu_model or (model if gpus else ""),
        stated_gpus=node.gpus if missing else node.stated_gpus,
    )


def _merge_device(inside: Device, declared: Device) -> Device:
    """Merge the facts about one adapter from the node's wiring and from the fabric."""
    rail = inside.rail if inside.rail >= 0 else declared.rail
    return Device(inside.name, inside.gpus or declared.gpus, rail, declared.bytes_per_s or inside.bytes_per_s)
