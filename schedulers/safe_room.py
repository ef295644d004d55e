"""A search for the block of a fleet in which a gang would have the least risk."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fleetcast.schedulers.weather import Outlook


class SafeRoom(NamedTuple):
    """A block with room for a gang.

    `risk`: the probability that any of the nodes for the gang fails or slows down within 1 h.
    """

    block: str
    risk: float


class SafeRooms:
    """The blocks of nodes at one level of the topology, among which the safest for a gang is searched.

    Only nodes with free GPUs count. Unknown risk counts as zero. If the topology lacks `level`, the whole
    fleet is one block.
    """

    def __init__(self, nodes: Outlook, level: str) -> None:
        domains = nodes.domains.get(level)
        self.names = domains.names if domains else ()
        of = domains.of if domains else np.full(len(nodes.free), -1, np.int32)
        rows = np.flatnonzero(nodes.free > 0)
        p = np.nan_to_num(nodes.risk[0, rows], nan=0.0)
        order = np.lexsort((p, of[rows]))
        stays, free, blocks = np.log1p(-np.minimum(p[order], 1 - 1e-9)), nodes.free[rows][order], of[rows][order]
        edges = [*np.flatnonzero(np.diff(blocks, prepend=-2)).tolist(), len(blocks)]
        self._blocks = [
            (
                self._get_block_name(int(blocks[start])),
                np.cumsum(free[start:end]),
                -np.expm1(np.cumsum(stays[start:end])),
            )
            for start, end in pairwise(edges)
        ]
        self._found: dict[int, SafeRoom | None] = {}  # by GPUs

    def find_safest_block(self, gpus: int) -> SafeRoom | None:
        """Return the block in which `gpus` free GPUs have the least risk. Returns None if no block has enough GPUs."""
        if gpus not in self._found:
            rooms = [
                SafeRoom(name, float(risk[at]))
                for name, free, risk in self._blocks
                if gpus > 0 and (at := int(np.searchsorted(free, gpus))) < len(free)
            ]
            self._found[gpus] = min(rooms, key=lambda room: room.risk, default=None)
        return self._found[gpus]

    def _get_block_name(self, block: int) -> str:
        return self.names[block] if block >= 0 else "of no name"


def compute_block_risk(nodes: Outlook, names: tuple[str, ...]) -> float | None:
    """Return the probability that any of these nodes fails or slows down within 1 h. None if no risk is known."""
    rows = [nodes.rows[name] for name in names if name in nodes.rows]
    p = nodes.risk[0, rows]
    known = p[~np.isnan(p)]
    return float(-np.expm1(np.log1p(-np.minimum(known, 1 - 1e-9)).sum())) if len(known) else None
