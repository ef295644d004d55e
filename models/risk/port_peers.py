"""Estimation of a port's expected speed, from its peers in the fleet and from the topology.

Peers have the same device, port number and link layer on nodes of one GPU model, because a site
buys one kind of adapter for these. The other ports of a node are no peers: storage, bonds and
management have adapters of their own. The expected speed is one that four of five peers reach. So slow ports
are found even if a fifth of the peers is slow. Older adapters of the same name are reported too, unless more
than a fifth of the peers are such adapters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fleetcast.fleet.topology import Device, Topology

LEAST_PEERS = 5
SLOW_SHARE = 0.2

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PortPeers:
    """The group of peers of each port, and its stated speed: (port,) bytes/s, NaN if unknown.

    `from_ports` returns the previous object unless ports or the topology have changed.
    """

    made_of: tuple[int, int, int]  # ports, topology generation, known link layers
    group: NDArray[np.int32]
    stated: Array

    @classmethod
    def from_ports(
        cls,
        names: Sequence[str],
        node: NDArray[np.int32],
        topology: Topology,
        before: "PortPeers | None" = None,
        layers: Mapping[str, str] | None = None,
    ) -> "PortPeers":
        """Build the groups of peers. names: "node/device/port" of each port.

        node: (port,) rows of the topology, which may lack some nodes. before: the previous object. layers:
        port → its link layer, where known.
        """
        layers = layers or {}
        key = (len(names), topology.generation, len(layers))
        if before is not None and before.made_of == key:
            return before
        groups: dict[tuple[str, str, str], int] = {}
        group = np.full(len(names), -1, np.int32)
        stated = np.full(len(names), np.nan)
        devices: dict[int, dict[str, Device]] = {}
        for port, (name, row) in enumerate(zip(names, node.tolist(), strict=True)):
            if 0 <= row < len(topology):
                place = name.partition("/")[2]
                group[port] = groups.setdefault(
                    (topology.nodes[row].gpu_model, place, layers.get(name, "")), len(groups)
                )
                if row not in devices:
                    devices[row] = {device.name: device for device in topology.find_devices(row)}
                found = devices[row].get(place.rpartition("/")[0])
                if found is not None and found.bytes_per_s > 0:
                    stated[port] = found.bytes_per_s
        return cls(key, group, stated)

    def estimate_speed(self, speed: Array) -> Array:
        """Return (port,) the expected speed in bytes/s, NaN if unknown.

        speed: (port,) the best observed speed of each port in bytes/s, NaN if unknown.
        """
        return np.fmax(self.stated, compute_group_p20(speed, self.group))


def compute_group_p20(speed: Array, group: NDArray[np.int32]) -> Array:
    """Return (n,) for each member the value that four fifths of its group reach.

    The value is NaN in groups of fewer than five. speed: (n,) bytes/s. group: (n,) number of the group, -1 for none.

    >>> compute_group_p20(np.array([4.0, 2.0, 4.0, 4.0, 4.0, 9.0]), np.array([0, 0, 0, 0, 0, 1]))
    array([ 4.,  4.,  4.,  4.,  4., nan])
    """
    use = (speed > 0) & (group >= 0)
    of, used_speed = group[use], speed[use]
    groups = int(group.max(initial=-1)) + 1
    ordered = used_speed[np.lexsort((used_speed, of))]
    count = np.bincount(of, minlength=groups)
    start = np.cumsum(count) - count
    mark = np.full(groups, np.nan)
    some = count >= LEAST_PEERS
    mark[some] = ordered[start[some] + (count[some] * SLOW_SHARE).astype(np.intp)]
    return np.where(group >= 0, mark[np.maximum(group, 0)] if groups else np.nan, np.nan)


def describe_port_place(entity: str, device: Device | None) -> str:
    """Describe in words where a port is. Returns "" if nothing is known.

    >>> describe_port_place("n1/mlx5_3/1", Device("mlx5_3", (3,), 3))
    'rail 3, GPU 3'
    """
    parts = []
    if device is not None and device.rail >= 0:
        parts.append(f"rail {device.rail}")
    if device is not None and device.gpus:
        parts.append(("GPU " if len(device.gpus) == 1 else "GPUs ") + " and ".join(map(str, device.gpus)))
    if not entity.endswith("/1"):
        parts.insert(0, f"port {entity.rpartition('/')[2]}")
    return ", ".join(parts)
