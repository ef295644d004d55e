"""Classical baselines of demand: ETS, MSTL and AutoReg of statsmodels.

statsmodels fits one series at a time, in seconds. So each series is fitted once a week on the four weeks
before, and every bin of the week is forecast by the fitted equations:

    AutoReg   on the bins as they are, with the lags of LAGS_S
    ETS       damped trend and season of a day, on hours. An hour may end with any bin, so there are as many series
              of hours as an hour has bins, with the same parameters
    MSTL      seasons of a day and a week, repeated. The rest is forecast by simple exponential smoothing

The value of an hour is a sample for a level, and the mean for arrivals. Within the first hour, the forecast lies
on the line from the last value to the hour's forecast. The quantiles are those of past errors, as for all naive
forecasters (`models/demand/naive.py`).
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.flows import FLOW_TARGETS
from fleetcast.models.demand.naive import DAY_S, ERRORS_DAYS, forecast_by_errors, forward_fill
from fleetcast.models.demand.theta import compute_rolling_mean
from fleetcast.models.forecast import Panel

Array = NDArray[np.float64]
Bins = NDArray[np.intp]

HOUR_S, WEEK_S = 3600, 7 * DAY_S
FIT_S, FEWEST_S = 4 * WEEK_S, 3 * DAY_S
LAGS_S = (600, 1200, 1800, 3600, 21_600, DAY_S)
ITERATIONS = 50
FAILURES = (ValueError, ArithmeticError, IndexError, np.linalg.LinAlgError, Warning)
SINGULAR = "The design matrix is rank-deficient"  # then statsmodels' weights are any that fit


@dataclass(frozen=True, slots=True)
class SeriesSpan:
    """A part of a series, from the first bin of the fit to the last bin that forecasts start from.

    values: (bin,), all known. fitted: the number of bins that the fit may read. steps: leads in bins.
    """

    values: Array
    fitted: int
    steps: tuple[int, ...]
    bin_s: int
    is_flow: bool

    @property
    def bins_per_hour(self) -> int:
        """The number of bins in an hour. It is 1 if a bin is longer than an hour."""
        return max(1, HOUR_S // self.bin_s)

    @property
    def hours_per_day(self) -> int:
        """The number of hours in a day. If a bin is longer than an hour, the number of bins in a day."""
        return max(1, DAY_S // (self.bins_per_hour * self.bin_s))

    def compute_hour_values(self) -> Array:
        """Return (bin,) the value of the hour that ends with each bin.

        For a level, it is the value of the bin itself. For arrivals, it is the mean of the hour.
        """
        return compute_rolling_mean(self.values[None], self.bins_per_hour)[0] if self.is_flow else self.values


Method = Callable[[SeriesSpan], Array]  # (step, bin) the forecast from each bin; those before `fitted` - 1 do not count


@dataclass(slots=True)
class RefittedForecaster:
    """A forecaster that fits a classical method again every week, counted from bin `first`.

    It has no forecasts before the first fit. If a fit fails, the forecasts of its week are NaN. fits:
    the number of fits. failed: reason → number of failed fits.
    """

    name: str
    method: Method
    first: int
    fits: int = 0
    failed: Counter[str] = field(default_factory=Counter)

    def forecast(self, panel: Panel, origins: Bins, steps: Sequence[int]) -> Array:
        filled = forward_fill(panel.values)
        points = np.full((len(steps), *filled.shape), np.nan)
        for begin, end in self._split_into_weeks(panel, int(origins.min(initial=panel.bins)) - max(steps)):
            for row, values in enumerate(filled[:, :end]):
                points[:, row, begin - 1 : end] = self._forecast_points(panel, values, begin, steps)
        at = {step: number for number, step in enumerate(steps)}
        return forecast_by_errors(panel, origins, steps, lambda panel, filled, step: points[at[step]])

    def _split_into_weeks(self, panel: Panel, first: int) -> Iterator[tuple[int, int]]:
        """Yield (begin, end) of the bins of each week.

        The weeks start at least two weeks before bin `first`, because the errors of these two weeks give the
        quantiles.
        """
        week = WEEK_S // panel.bin_s
        since = max(1, first - ERRORS_DAYS * DAY_S // panel.bin_s - week + 1)
        for begin in range(self.first - (self.first - since) // week * week, panel.bins + 1, week):
            yield begin, min(begin + week - 1, panel.bins)

    def _forecast_points(self, panel: Panel, values: Array, begin: int, steps: Sequence[int]) -> Array:
        """Return (step, bin) forecasts from bin `begin` - 1 on, fitted on the bins before `begin`."""
        known = int(np.isfinite(values).argmax()) if np.isfinite(values).any() else len(values)
        since = max(known, begin - FIT_S // panel.bin_s)
        if (begin - since) * panel.bin_s < FEWEST_S:
            return np.full((len(steps), len(values) - begin + 1), np.nan)
        from statsmodels.tools.sm_exceptions import ConvergenceWarning

        span = SeriesSpan(values[since:], begin - since, tuple(steps), panel.bin_s, panel.target in FLOW_TARGETS)
        self.fits += 1
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                for kind in (Warning, ConvergenceWarning):  # a fit that has not converged counts as it is
                    warnings.simplefilter("ignore", kind)
                warnings.filterwarnings("error", message=SINGULAR)
                found = self.method(span)[:, span.fitted - 1 :]
        except FAILURES as error:
            self.failed[f"{type(error).__name__}: {error}"] += 1
            return np.full((len(steps), len(values) - begin + 1), np.nan)
        if not np.isfinite(found).all():
            self.failed["a forecast is no number"] += 1
            return np.full_like(found, np.nan)
        return found


def forecast_by_autoreg(span: SeriesSpan) -> Array:
    """Return (step, bin) forecasts by an autoregression of a few lags, fitted by least squares."""
    from statsmodels.tsa.ar_model import AutoReg

    lags = sorted({max(1, lag_s // span.bin_s) for lag_s in LAGS_S})
    fit = AutoReg(span.values[: span.fitted], lags=lags, trend="c").fit()
    constant, *weights = fit.params
    return forecast_autoregression(span.values, float(constant), dict(zip(lags, weights, strict=True)), span.steps)


def forecast_autoregression(values: Array, constant: float, weights: dict[int, float], steps: Sequence[int]) -> Array:
    """Return (step, bin) forecasts of an autoregression from every bin.

    weights: lag → weight.
    """
    bins, longest = len(values), max(weights)
    ahead = np.full((longest + max(steps), bins), np.nan)  # row `longest` - 1 is the value at the bin itself
    for back in range(longest):
        ahead[longest - 1 - back, back:] = values[: bins - back]
    for step in range(max(steps)):
        at = longest + step
        ahead[at] = constant + sum(weight * ahead[at - lag] for lag, weight in weights.items())
    return ahead[[longest - 1 + step for step in steps]]


def forecast_by_ets(span: SeriesSpan) -> Array:
    """Return (step, bin) forecasts by exponential smoothing with additive error, trend and season.

    The trend is damped. The season is that of a day, if four days are known.
    """
    from statsmodels.tsa.exponential_smoothing.ets import ETSModel

    hours, fitted = span.compute_hour_values(), span.fitted
    season = (
        span.hours_per_day if fitted >= 4 * span.hours_per_day * span.bins_per_hour and span.hours_per_day > 1 else None
    )
    kind = {"error": "add", "trend": "add", "damped_trend": True, "seasonal": "add" if season else None}
    own = hours[:fitted][::-1][:: span.bins_per_hour][::-1]
    model = ETSModel(own, **kind, seasonal_periods=season, initialization_method="heuristic")
    fit = model.fit(disp=False, maxiter=ITERATIONS)
    start = {"initial_level": fit.initial_level, "initial_trend": fit.initial_trend}
    if season:
        start["initial_seasonal"] = fit.initial_seasonal
    leads = _list_lead_hours(span)
    found = np.full((len(leads), len(hours)), np.nan)
    for phase in range(span.bins_per_hour):
        part = hours[phase :: span.bins_per_hour]
        model = ETSModel(part, **kind, seasonal_periods=season, initialization_method="known", **start)
        states = np.asarray(model.smooth(fit.params).states)
        found[:, phase :: span.bins_per_hour] = np.stack(
            [_forecast_ets(states, fit.damping_trend, season, lead) for lead in leads]
        )
    return _interpolate_steps(span, hours, leads, found)


def _forecast_ets(states: Array, damping: float, season: int | None, lead: int) -> Array:
    """Return (hour,) point forecasts from the states after each hour.

    A forecast is the sum of level, trend and, if there is a season, the season's value at that time.
    """
    point = states[:, 0] + states[:, 1] * sum(damping**power for power in range(1, lead + 1))
    if season:
        back = -lead % season
        point = point + np.concatenate([np.full(back, np.nan), states[: len(states) - back, 2]])
    return np.asarray(point)


def forecast_by_mstl(span: SeriesSpan) -> Array:
    """Return (step, bin) forecasts that repeat the seasons of a day and a week, and smooth the rest.

    A season counts if more than two of its cycles are known.
    """
    from statsmodels.tsa.holtwinters import SimpleExpSmoothing
    from statsmodels.tsa.seasonal import MSTL

    hours, fitted = span.compute_hour_values(), span.fitted
    own = hours[:fitted][::-1][:: span.bins_per_hour][::-1]
    periods = [
        period for period in (span.hours_per_day, 7 * span.hours_per_day) if 2 * period < len(own) and period > 1
    ]
    seasons = np.asarray(MSTL(own, periods=periods).fit().seasonal).reshape(len(own), -1)
    level = SimpleExpSmoothing(own - seasons.sum(axis=1), initialization_method="estimated").fit().params
    leads = _list_lead_hours(span)
    columns = [_repeat_last_cycle(seasons[:, number], period, span, leads[-1]) for number, period in enumerate(periods)]
    shape = np.sum(columns, axis=0)  # (bin + hours ahead,)
    plain = hours - shape[: len(hours)]
    smooth = np.empty_like(plain)
    for phase in range(span.bins_per_hour):
        part = plain[phase :: span.bins_per_hour]
        model = SimpleExpSmoothing(part, initialization_method="known", initial_level=part[0])
        rest = model.fit(smoothing_level=level["smoothing_level"], optimized=False)
        smooth[phase :: span.bins_per_hour] = rest.level
    found = np.stack([smooth + shape[lead * span.bins_per_hour :][: len(hours)] for lead in leads])
    return _interpolate_steps(span, hours, leads, found)


def _repeat_last_cycle(season: Array, period: int, span: SeriesSpan, ahead: int) -> Array:
    """Return (bin + hours ahead,) the last cycle of an hourly season, repeated over all bins.

    Values between two full hours are interpolated linearly.
    """
    size = len(span.values) + ahead * span.bins_per_hour
    hours = (np.arange(size) - (span.fitted - 1)) / span.bins_per_hour  # since the last one that was fitted on
    cycle = np.append(season[-period:], season[-period])
    return np.asarray(np.interp((hours + period - 1) % period, np.arange(period + 1), cycle))


def _list_lead_hours(span: SeriesSpan) -> list[int]:
    """Return the leads in whole hours that are needed to interpolate the steps."""
    return sorted({max(1, -(-step // span.bins_per_hour)) for step in span.steps})


def _interpolate_steps(span: SeriesSpan, hours: Array, leads: Sequence[int], found: Array) -> Array:
    """Interpolate (lead, bin) forecasts at whole hours into (step, bin) forecasts.

    Values between two leads are interpolated linearly. Before the first lead, the line starts from the
    last known value.
    """
    known = found[:1] if span.is_flow else hours[None]
    table = np.concatenate([known, found])
    at = np.array([0, *leads], np.float64) * span.bins_per_hour
    points = []
    for step in span.steps:
        above = int(np.searchsorted(at, step))
        share = (step - at[above - 1]) / (at[above] - at[above - 1])
        points.append(table[above - 1] * (1 - share) + table[above] * share)
    return np.stack(points)


METHODS: dict[str, Method] = {"ets": forecast_by_ets, "mstl": forecast_by_mstl, "autoreg": forecast_by_autoreg}
