"""For data scientists: a demand forecaster of your own, judged offline before it serves.

    export PYTHONPATH=examples
    fleetcast evaluate demand --train split/train --test split/test --forecaster own_forecaster:LastWeek

`fleetcast backtest demand` and `fleetcast train demand` take it, too. It serves beside the others, where the gate finds
it better, with `[pipeline] forecasters = ["own_forecaster:LastWeek"]`.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.naive import forecast_by_errors, shift_bins
from fleetcast.models.forecast import Panel

WEEK_S = 7 * 86_400


class LastWeek:
    """The value at the same time of the last whole week that is known, and how far weeks differed."""

    name = "last_week"

    def forecast(self, panel: Panel, origins: NDArray[np.intp], steps: Sequence[int]) -> NDArray[np.float64]:
        week = WEEK_S // panel.bin_s

        def same_time(panel: Panel, filled: NDArray[np.float64], step: int) -> NDArray[np.float64]:
            """(series, bin) what bin b bets that bin b + step will hold; it may read nothing after b."""
            return shift_bins(filled, -(-step // week) * week - step)

        return forecast_by_errors(panel, origins, steps, same_time)
