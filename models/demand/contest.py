"""The contest between the forecasters of one panel. It evaluates them at past origins for their gate.

    refresh_gate(panel)            scores the bins that ended since the last call, and tests some origins
    make_served_forecasts(panel)   forecasts from the last bin, which may not be over yet

The first call receives a whole history. Its origins are tested as if forecasts had been issued
then, a limited number in each call. Meanwhile the gate chooses by the outcomes scored so far. A
forecaster forecasts nothing on the span that it was fitted on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.flows import cap_lone_spikes
from fleetcast.models.demand.gate import Gate, ServedForecasts
from fleetcast.models.demand.units import are_whole_numbers
from fleetcast.models.forecast import Forecaster, Panel

Array = NDArray[np.float64]

WARM_BINS = 144  # before the first origin: a day of ten minutes, two hours and a half of minutes
TESTS_A_CALL = 3_000  # origins times series: about two seconds


class Contest:
    """The contest between the forecasters of one target. Only one task may change it.

    `shadows` are forecasters that are scored like the others and never serve. The gate tests an origin every
    `origin_bins` bins. The number of a bin is its end time divided by the length of a bin.
    """

    def __init__(
        self,
        forecasters: Sequence[Forecaster],
        steps: Sequence[int],
        bin_s: int,
        origin_bins: int,
        shadows: Sequence[str] = (),
    ) -> None:
        self.steps = tuple(steps)
        self.bin_s = bin_s
        self._forecasters = tuple(forecasters)
        self._origin_bins = origin_bins
        self._shadows = tuple(shadows)
        self._gate = self._make_gate(())
        self._done = -1  # the last bin that matured

    def _make_gate(self, series: Sequence[str]) -> Gate:
        names = [forecaster.name for forecaster in self._forecasters]
        return Gate(names, self.steps, series, self.bin_s, shadows=self._shadows)

    def _compute_first_bin(self, panel: Panel) -> int:
        """Return the number of the bin in column 0."""
        return panel.end_ms(-1) // (self.bin_s * 1000)

    def _list_ended_bins(self, panel: Panel) -> NDArray[np.intp]:
        """Return (bin,) the numbers of the bins that have ended and have not matured."""
        first_bin = self._compute_first_bin(panel)
        known = np.flatnonzero(np.isfinite(panel.values).any(axis=0))
        begins = first_bin + (int(known[0]) if len(known) else panel.bins)
        start = max(self._done + 1, begins + WARM_BINS)
        return np.arange(start, first_bin + panel.bins - 1)  # the newest bin is not over

    def is_behind(self, panel: Panel) -> bool:
        """Return whether more than 2 * `origin_bins` ended bins still have to be tested.

        This happens after a start. In normal operation, fewer bins end between two calls.
        """
        return len(self._list_ended_bins(panel)) > 2 * self._origin_bins

    def refresh_gate(self, panel: Panel, tests: int | None = None) -> None:
        """Issue and score the forecasts of the bins that have ended since the last call.

        One call tests at most `tests` pairs of an origin and a series, but at least one origin. Later calls test
        the remaining pairs.
        """
        tests = TESTS_A_CALL if tests is None else tests
        first_bin, bins = self._compute_first_bin(panel), self._list_ended_bins(panel)
        self._adapt_gate(panel, self._done + 1 - first_bin)
        most = max(1, tests // max(1, len(panel.names))) * self._origin_bins
        bins = bins[:most]
        origins = bins[(bins + 1) % self._origin_bins == 0] - first_bin
        raw = self._make_raw_forecasts(cap_lone_spikes(panel), origins) if len(origins) else np.zeros(0)
        waiting = dict(zip((origins + first_bin).tolist(), range(len(origins)), strict=True))
        for bin in bins.tolist():
            self._gate.score_bin(bin, panel.values[:, bin - first_bin])
            if bin in waiting:
                self._gate.issue_forecast(bin, raw[:, :, :, waiting[bin]])
            self._done = bin

    def make_served_forecasts(self, panel: Panel, back: int = 0) -> ServedForecasts:
        """Return the forecasts that are served from the last bin, or from `back` bins before it."""
        origin = panel.bins - 1 - back
        self._adapt_gate(panel, origin + 1)
        return self._gate.make_served_forecast(
            self._make_raw_forecasts(cap_lone_spikes(panel), np.array([origin]))[:, :, :, 0]
        )

    def _make_raw_forecasts(self, panel: Panel, origins: NDArray[np.intp]) -> Array:
        """Return (forecaster, quantile, step, origin, series) the forecasts before calibration."""
        return np.stack([forecaster.forecast(panel, origins, self.steps) for forecaster in self._forecasters])

    def _adapt_gate(self, panel: Panel, seen: int) -> None:
        """Adapt the gate to the panel's series. Series that the gate already has keep their state.

        The first `seen` columns show which series have whole numbers only. A ceiling is raised to the highest value
        in these columns.
        """
        if self._gate.series != panel.names:
            known, self._gate = self._gate, self._make_gate(panel.names)
            if known.series:
                self._gate.load(*known.dump())
        values = cap_lone_spikes(panel).values[:, : max(0, seen)]
        self._gate.whole = np.asarray(are_whole_numbers(values).all(axis=1))
        highest = np.nan_to_num(values, nan=0.0).max(axis=1, initial=0.0)
        self._gate.ceiling = np.where(np.isfinite(panel.capacity), np.maximum(panel.capacity, highest), np.inf)

    def drop_record(self, name: str) -> None:
        """Drop the gate's record of a forecaster that switches to another version."""
        self._gate.reset_forecaster(name)

    def list_accuracy(self) -> list[dict[str, float | int | None]]:
        """Return the past accuracy of each series of the last panel, in the format of `Gate.list_accuracy`."""
        return self._gate.list_accuracy()

    def compute_mean_losses(self) -> dict[str, tuple[float, int]]:
        """Return forecaster -> (mean loss in units of persistence's, number of losses scored).

        The mean is over series and leads.
        """
        return self._gate.compute_mean_losses()

    def dump(self) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
        """Return copies of the state: a part that can be written as JSON, and arrays by name."""
        about, arrays = self._gate.dump()
        return {"done": self._done, "gate": about}, arrays

    def load(self, about: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> None:
        """Restore the state that `dump` returned, in a new contest.

        If the gate cannot use the dump, the contest tests the history again.
        """
        self._gate = self._make_gate(about["gate"]["series"])
        if self._gate.load(about["gate"], arrays):
            self._done = int(about["done"])
