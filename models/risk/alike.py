"""Numbering of the groups of comparable devices: those on one node with the same model or link layer."""

from collections.abc import Mapping, Sequence
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.peers import Groups


class ComparableDevices:
    """The numbered groups of comparable devices of one kind.

    The groups are built again only when devices, owners or traits have changed.
    """

    def __init__(self) -> None:
        self.groups = Groups(np.zeros(0, np.int32), 0)  # of devices; of -1 where no node owns it
        self.trait = np.zeros(0)  # (device,) a number that stands for its trait in every process, 0 unknown
        self._made_of: tuple[int, ...] = ()

    def refresh_groups(
        self, names: Sequence[str], node: NDArray[np.int32], traits: Mapping[str, str], changes: int
    ) -> None:
        """Assign numbers to the groups of devices that are on one node and have the same trait.

        names, node: (device,) names of the devices, and rows of the nodes that own them. traits: name → model or
        link layer. changes: a number that grows with each change of owners or traits. The groups stay as they are if
        this number has not grown.
        """
        key = (len(names), changes)
        if key == self._made_of:
            return
        numbers: dict[tuple[int, str], int] = {}
        found = [traits.get(name, "") for name in names]
        group = [
            numbers.setdefault((row, trait), len(numbers)) if row >= 0 else -1
            for row, trait in zip(node.tolist(), found, strict=True)
        ]
        self.groups = Groups(np.array(group, np.int32), len(numbers))
        self.trait = np.array([crc32(trait.encode()) if trait else 0 for trait in found], np.float64)
        self._made_of = key
