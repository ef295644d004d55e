"""Small panels and a model of them."""

import numpy as np

from fleetcast.models.demand.trees import DemandTrees, Settings
from fleetcast.models.forecast import Panel


def made_panel(days: int = 4, seed: int = 0) -> Panel:
    """A daily square wave of one pool, with noise."""
    rng = np.random.default_rng(seed)
    bins = np.arange(days * 144)
    values = 40.0 + 30 * ((bins // 72) % 2) + rng.normal(0, 1, (1, len(bins)))
    return Panel("running", ("a",), 600, 0, values, np.full(1, 100.0))


def made_trees() -> DemandTrees:
    panel = made_panel()
    return DemandTrees(0, Settings(trees=2, rows=300, leaf_rows=20, threads=1)).fit([panel], [panel.bins])
