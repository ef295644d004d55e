"""A table of GPUs by the device names that other sources use.

Kernel logs name a GPU by its PCI address. Health checkers also use the UUID of its board.
"""

import re
from functools import lru_cache

MOST_PER_NODE = 1024
LONGEST_ADDRESS = 64
_PCI = re.compile(r"(?:PCI:)?([0-9a-fA-F]{4,8}):([0-9a-fA-F]{2}):([0-9a-fA-F]{2})(?:\.[0-7])?")


def normalise_device_name(stated: str) -> str:
    """Normalise a device name. A PCI address loses its function and capitals. Other names do not change.

    >>> [normalise_device_name(name) for name in ("00000000:9B:00.0", "PCI:0000:9b:00", "GPU-1a")]
    ['0000:9b:00', '0000:9b:00', 'GPU-1a']
    """
    return _normalise_address(stated) if len(stated) <= LONGEST_ADDRESS else stated


@lru_cache(65_536)
def _normalise_address(stated: str) -> str:
    found = _PCI.fullmatch(stated)
    if found is None:
        return stated
    domain, bus, slot = found.groups()
    return f"{int(domain, 16):04x}:{bus}:{slot}".lower()


class GpuDevices:
    """The table (node, device name) → GPU index, as exporters report it. The newest report wins."""

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, int]] = {}
        self.learnt = 0  # grows with every new word

    def record_device(self, node: str, stated: str, gpu: int) -> None:
        known = self._nodes.setdefault(node, {})
        name = normalise_device_name(stated)
        if known.get(name) != gpu and (name in known or len(known) < MOST_PER_NODE):
            known[name] = gpu
            self.learnt += 1

    def find_gpu(self, node: str, stated: str) -> int | None:
        """Return the index of a GPU, or None if no exporter has reported it."""
        return self._nodes.get(node, {}).get(normalise_device_name(stated))
