"""One number of a demand forecast: what KEDA, an HPA or Ray is told."""

from bisect import bisect_left
from collections.abc import Mapping

from fleet.errors import RequestError, UnknownEntity
from models.demand.rows import DemandRow
from schedulers.adapter import NotKnown
from schedulers.weather import DemandKey


def value_of(demand: Mapping[DemandKey, DemandRow] | None, key: DemandKey, quantile: float, horizon_s: float) -> float:
    """The quantile of a series so many seconds ahead, in the unit of its target: GPUs, or requests/s.

    Between two horizons, and between now and the first one, it lies on the line between them. Raises UnknownEntity for
    a series that there is not, RequestError for a quantile or horizon that no forecast is of, NotKnown where there is
    no forecast now.
    """
    if demand is None:
        raise NotKnown("there is no forecast of demand now")
    row = demand.get(key)
    if row is None:
        raise UnknownEntity(f"no series of pool {key.pool!r}, class {key.class_!r}, group {key.group!r}, {key.target}")
    if quantile not in row.quantiles:
        known = ", ".join(map(str, row.quantiles))
        raise RequestError(f"quantile = {quantile:g}: must be one of {known}", "quantile")
    if not 0 <= horizon_s <= row.horizons_s[-1]:
        raise RequestError(f"horizon_s = {horizon_s:g}: must lie in 0..{row.horizons_s[-1]}", "horizon_s")
    times = [0, *row.horizons_s]
    values = [row.now, *row.values[row.quantiles.index(quantile)]]
    after = max(1, bisect_left(times, horizon_s))
    share = (horizon_s - times[after - 1]) / (times[after] - times[after - 1])
    low, high = (values[after], values[after]) if share == 1.0 else values[after - 1 : after + 1]
    if low is None or high is None:
        raise NotKnown(f"no forecast of {key.target} {horizon_s:g} s ahead yet")
    return low + share * (high - low)
