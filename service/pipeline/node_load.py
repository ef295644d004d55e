"""Forecasts of every node's load over the next minutes, for schedulers that use such forecasts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.node_load import GpuUse, compute_node_loads
from fleetcast.service.board.board import Section
from fleetcast.service.board.gpu_use import Occupant
from fleetcast.service.pipeline.capability import Capability
from fleetcast.service.pipeline.tick import Tick

SECTION = "node.load"  # (level, load, n) float32 of fleetcast.models.node_load


class NodeLoads(Capability):
    """The capability that forecasts each node's load. It has no state between ticks."""

    def make_sections(self, tick: Tick) -> Sequence[Section]:
        gpus = GpuUse.from_frame(tick.frames.gpu, tick.gpu_rows, compute_held_s(tick))
        return (Section(SECTION, compute_node_loads(gpus, tick.frames.node), tick.now_ms),)


def compute_held_s(tick: Tick) -> NDArray[np.float64]:
    """Return for how many seconds each GPU's holder has held it: (n, g) float64, NaN if the GPU is free.

    Work without a known job counts as infinitely old. A promised GPU counts as held from now on.
    """
    since_ms = np.array([row.placed_ms or row.started_ms for row in tick.events.running], np.float64)  # None: NaN
    ages_s = np.where(np.isnan(since_ms), np.inf, np.maximum(0.0, (tick.now_ms - since_ms) / 1000))
    held = np.append(ages_s, np.nan)[tick.occupancy.holder]  # -1, free, takes the last
    held = np.where(tick.gpu_use == Occupant.PROMISE, 0.0, held)
    return np.where(tick.unknown_use, np.inf, held)
