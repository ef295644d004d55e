"""What a fault is to the plan: something that is applied at every step and says whether it shows."""

from dataclasses import dataclass
from typing import Protocol

from simulator.effects import Effects, Load


class Shape(Protocol):
    """`age_s` counts from the fault's start and is negative while a precursor leads up to it."""

    def apply(self, effects: Effects, load: Load, node: int, unit: int, age_s: float, dt_s: float) -> bool:
        """Write into the cells of (node, unit); True when what runs there shows the fault now."""

    def end(self, effects: Effects, node: int, unit: int) -> None:
        """The fault is over or repaired."""


@dataclass(slots=True)
class Passing:
    """A shape that leaves nothing behind when it ends."""

    def end(self, effects: Effects, node: int, unit: int) -> None:
        return None


@dataclass(slots=True)
class NeedsReset:
    """A shape whose repair resets the GPU (unit -1: all of the node): volatile counters and the XID restart."""

    def end(self, effects: Effects, node: int, unit: int) -> None:
        effects.resets.append((node, unit))
