"""The interface of forecasters: the panel of series that they receive, and the quantile levels that they return."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

QUANTILES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Panel:
    """Series of one target at regular times, which are forecast together.

    Bin b ends at first_ms + (b + 1) * bin_s * 1000. values: (series, bin), NaN if unknown. capacity:
    (series,), the ceiling in the same unit, NaN for none. covariates: name -> (series, bin), each known
    at the end of its bin: running, queued, arriving, started, ended, …
    """

    target: str
    names: tuple[str, ...]
    bin_s: int
    first_ms: int
    values: Array
    capacity: Array
    covariates: Mapping[str, Array] = field(default_factory=dict)

    @property
    def bins(self) -> int:
        return int(self.values.shape[1])

    def until(self, bins: int) -> "Panel":
        """Return a view of the first `bins` bins: the values that were known when the last of them ended."""
        known = {name: rows[:, :bins] for name, rows in self.covariates.items()}
        return replace(self, values=self.values[:, :bins], covariates=known)

    def end_ms(self, bin: int) -> int:
        """Return the time at which a bin ends, in Unix ms. A forecast from this bin may be issued at that time."""
        return self.first_ms + (bin + 1) * self.bin_s * 1000


class Forecaster(Protocol):
    """A method that forecasts the series of a panel.

    A forecaster keeps no state between calls except its fit.
    """

    name: str

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> Array:
        """Return (quantile, step, origin, series) the QUANTILES of the value at bin origin + step.

        They are NaN where the forecaster cannot forecast. The forecaster reads no bin after an origin. Quantiles do
        not decrease with their level. The gate clips and calibrates them.
        """
