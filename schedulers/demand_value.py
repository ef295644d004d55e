"""The computation of one number from a demand forecast, for KEDA and an HPA.

The SDK computes it in the same way for Ray.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence

from fleetcast.fleet.errors import RequestError, UnknownEntity
from fleetcast.models.demand.rows import DemandRow
from fleetcast.schedulers.adapter import NotKnown
from fleetcast.schedulers.weather import DemandKey, Weather

OLDEST_S = 600.0  # of a forecast; one is made a minute


def find_fresh_row(weather: Weather, key: DemandKey) -> DemandRow:
    """Return the forecast of a series.

    Raises UnknownEntity for an unknown series, and NotKnown without a fresh forecast. If no pool has the
    name, the queue of that name is used, because earlier versions named queues in `pool`.
    """
    if weather.demand is None:
        raise NotKnown("there is no forecast of demand now")
    row = weather.demand.get(key)
    if row is None and key.queue == "all" and key.pool != "all":
        row = weather.demand.get(key._replace(queue=key.pool, pool="all"))
    whose = f"queue {key.queue!r}" if key.pool == "all" else f"pool {key.pool!r}"
    named = f"{whose}, class {key.class_!r}, group {key.group!r}, target {key.target!r}"
    if row is None:
        raise UnknownEntity(f"no forecast of {named}")
    age_s = _compute_age_s(row, weather.now_ms)
    if age_s > OLDEST_S:
        raise NotKnown(f"the forecast of {named} is {age_s:.0f} s old, at most {OLDEST_S:.0f} s are fresh")
    return row


def compute_demand_value(row: DemandRow, quantile: float, horizon_s: float, now_ms: int) -> float:
    """Return the quantile of demand `horizon_s` from now, in the unit of its target: GPUs, or requests/s.

    Interpolates linearly between two horizons or quantiles, and between now and the first horizon. The
    forecast's age is added to the horizon. Raises RequestError if there is no such forecast, and
    NotKnown if it has no number yet.
    """
    least, most = row.quantiles[0], row.quantiles[-1]
    if not least <= quantile <= most:
        raise RequestError(f"quantile = {quantile:g}: set one from {least:g} to {most:g}", "quantile")
    times = [0, *row.horizons_s]
    if not 0 <= horizon_s <= times[-1]:
        raise RequestError(f"horizon of {horizon_s:g} s: set one from 0 to {times[-1]:g}", "horizon_s")
    ahead_s = min(horizon_s + _compute_age_s(row, now_ms), times[-1])
    after = bisect_left(times, ahead_s)
    beside = range(max(0, after - 1), after + 1)
    values = [_interpolate(row.quantiles, _list_quantile_values(row, place), quantile) for place in beside]
    value = _interpolate([times[place] for place in beside], values, ahead_s)
    if not math.isfinite(value):
        raise NotKnown(f"no forecast of {row.target} {ahead_s:g} s ahead yet")
    return max(0.0, value)


def _compute_age_s(row: DemandRow, now_ms: int) -> float:
    return max(0.0, (now_ms - row.issued_ms) / 1000)


def _interpolate(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Return the value at `at`, interpolated linearly between the two nearest places.

    At a place itself, the result is exactly the value of that place.
    """
    after = bisect_left(places, at)
    if places[after] == at:
        return values[after]
    share = (at - places[after - 1]) / (places[after] - places[after - 1])
    return values[after - 1] + share * (values[after] - values[after - 1])


def _list_quantile_values(row: DemandRow, place: int) -> list[float]:
    """Return the value of each quantile at one place, NaN if unknown.

    Place 0 is now. Place k is the horizon with index k - 1.
    """
    if not place:
        return [row.now] * len(row.quantiles)
    return [math.nan if (value := values[place - 1]) is None else value for values in row.values]
