"""For data scientists: a demand forecaster of your own, judged offline before it serves.

    export PYTHONPATH=examples
    fleetcast evaluate demand --train split/train --test split/test --forecaster own_forecaster:LastWeek

`fleetcast backtest demand` and `fleetcast train demand` accept it, too. With `[pipeline] forecasters =
["own_forecaster:LastWeek"]` it runs next to the other forecasters. It serves wherever the gate finds it better.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.naive import forecast_by_errors, shift_bins
from fleetcast.models.forecast import Panel

WEEK_S = 7 * 86_400


class LastWeek:
    """A forecast that repeats the last known value of the same time of the week. Its past errors give the quantiles."""

    name = "last_week"

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> NDArray[np.float64]:
        week = WEEK_S // panel.bin_s

        def shift_to_same_time(panel: Panel, filled: NDArray[np.float64], step: int) -> NDArray[np.float64]:
            """Return (series, bin) the forecast of bin b + step, made at bin b. It may not read any bin after b."""
            return shift_bins(filled, -(-step // week) * week - step)

        return forecast_by_errors(panel, origins, steps, shift_to_same_time)
