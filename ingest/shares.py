"""The division of nodes among several pipelines.

Blocks are sorted by name and assigned in turn, and a node follows its block. A node without a block is
assigned by a checksum of its short name. So all pipelines agree.
"""

import ipaddress
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.entities import Entities
from fleetcast.fleet.samples import EntityKind, SampleBatch
from fleetcast.fleet.topology import Level, Topology
from fleetcast.ingest.pages.target_spec import TargetSpec


@dataclass(frozen=True, slots=True)
class Share:
    """The nodes that belong to pipeline `instance` of `instances`. blocks: node → number of its block."""

    instance: int = 0
    instances: int = 1
    blocks: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_topology(cls, instance: int, instances: int, topology: Topology) -> "Share":
        """Build the share of a pipeline.

        Blocks are numbered by name, so their order in the topology does not matter.
        """
        names = topology.domain_names[Level.BLOCK]
        place = {name: number for number, name in enumerate(sorted(names))}
        rows = topology.domain[Level.BLOCK].tolist()
        blocks = {node: place[names[row]] for node, row in zip(topology.names, rows, strict=True) if row >= 0}
        return cls(instance, instances, blocks)

    @property
    def is_first(self) -> bool:
        """True if this is the pipeline that applies events and scores the fleet."""
        return self.instance == 0

    def owns(self, node: str) -> bool:
        """Return whether a node belongs to this pipeline.

        >>> [Share(k, 3).owns("n1.cluster.example") for k in range(3)]
        [False, True, False]
        """
        return self.instances == 1 or self._find_number(node) % self.instances == self.instance

    def scrapes(self, target: TargetSpec) -> bool:
        """Return whether this pipeline scrapes a target.

        A target belongs to the pipeline of its node or, if it names no node, to the pipeline of its host. Targets on
        this machine are assigned one by one.
        """
        if self.instances == 1:
            return True
        if target.node:
            return self.owns(target.node)
        if _is_local_host(target.host):
            return zlib.crc32(target.url.encode()) % self.instances == self.instance
        return self.owns(target.host)

    def _find_number(self, node: str) -> int:
        block = self.blocks.get(node)
        if block is not None:
            return block
        short = node if _is_address(node) else node.partition(".")[0]
        return self.blocks.get(short, zlib.crc32(short.encode()))


WHOLE = Share()


class OwnNodeFilter:
    """A filter of samples for the nodes of a share. Samples without a node belong to the first pipeline."""

    def __init__(self, share: Share, entities: Entities) -> None:
        self._share = share
        self._entities = entities
        self._own = np.zeros(0, bool)  # (node,)

    def find_own_nodes(self) -> NDArray[np.bool_]:
        """Return (node,) bool, true for nodes of the share."""
        names = self._entities[EntityKind.NODE].names
        more = [self._share.owns(name) for name in names[len(self._own) :]]
        if more:
            self._own = np.concatenate([self._own, np.array(more, bool)])
        return self._own

    def filter_samples(self, samples: SampleBatch) -> SampleBatch:
        node = self._entities[samples.kind].node[samples.entity]
        keep = np.append(self.find_own_nodes(), self._share.is_first)[node]  # -1, no node, is the last
        if keep.all():
            return samples
        return SampleBatch(
            samples.kind,
            samples.metric[keep],
            samples.entity[keep],
            samples.time_ms[keep],
            samples.value[keep],
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local_host(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)
