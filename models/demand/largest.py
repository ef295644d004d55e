"""A wrapper that runs a costly forecaster only on the largest series of a panel.

It returns NaN for the other series.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.forecast import QUANTILES, Forecaster, Panel

Array = NDArray[np.float64]

SIZE_S = 7 * 86_400  # of which the mean is a series' size


class LargestSeriesForecaster:
    """A forecaster for the `most` largest series of each panel."""

    def __init__(self, forecaster: Forecaster, most: int) -> None:
        self.name = forecaster.name
        self._forecaster = forecaster
        self._most = most

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        rows = find_largest_rows(panel, self._most)
        if len(rows) == len(panel.names):
            return self._forecaster.forecast(panel, origins, steps)
        found = np.full((len(QUANTILES), len(steps), len(origins), len(panel.names)), np.nan)
        found[..., rows] = self._forecaster.forecast(select_panel_rows(panel, rows), origins, steps)
        return found


def find_largest_rows(panel: Panel, most: int) -> NDArray[np.intp]:
    """Return the rows of the `most` series with the largest sums over the last week, in order."""
    if len(panel.names) <= most:
        return np.arange(len(panel.names))
    size = np.nan_to_num(panel.values[:, -SIZE_S // panel.bin_s :]).sum(axis=1)
    return np.sort(np.argsort(-size, kind="stable")[:most])


def select_panel_rows(panel: Panel, rows: NDArray[np.intp]) -> Panel:
    """Return a panel that has only these rows of another panel."""
    names = tuple(panel.names[row] for row in rows.tolist())
    covariates = {name: table[rows] for name, table in panel.covariates.items()}
    return Panel(panel.target, names, panel.bin_s, panel.first_ms, panel.values[rows], panel.capacity[rows], covariates)
