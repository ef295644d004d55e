"""Computation of when to scale up a served model, so that new instances are warm in time."""

import numpy as np
from numpy.typing import NDArray

from fleetcast.models.demand.rows import DemandRow, Prescale

Array = NDArray[np.float64]

SURE = 0.9


def compute_prescale(row: DemandRow, instances: int, peak_per_instance: float | None, cold: Array | None) -> Prescale:
    """Return when to scale up a served model, for its `/demand` row of request_rate.

    cold: (start,) seconds of measured cold starts, None without any. In the result, serves_per_s is the
    highest rate that these instances can serve, as observed. passes_ms: the time at which the p90 first exceeds
    that rate, None if it does not within the horizons. lead_s: the p90 of cold starts. scale_ms: `passes_ms`
    less `lead_s`, which may be in the past.
    """
    lead_s = None if cold is None else round(float(np.quantile(cold, SURE)), 1)
    found = Prescale(instances, lead_s=lead_s)
    if not instances or not peak_per_instance:
        found.reason = "no instance was seen to serve"
        return found
    serves = instances * peak_per_instance
    found.serves_per_s = round(serves, 3)
    times = np.array([0.0, *row.horizons_s])
    rates = np.array([row.now, *row.values[row.quantiles.index(SURE)]], np.float64)
    passed = np.flatnonzero(rates[1:] > serves)
    if not len(passed):
        found.reason = "the p90 does not pass what now serves"
        return found
    at = int(passed[0]) + 1
    rise = rates[at] - rates[at - 1]
    part = min(1.0, max(0.0, (serves - rates[at - 1]) / rise)) if rise > 0 else 0.0
    found.passes_ms = row.issued_ms + round(1000 * float(times[at - 1] + part * (times[at] - times[at - 1])))
    if lead_s is None:
        found.reason = "no cold start was measured"
    else:
        found.scale_ms = found.passes_ms - round(1000 * lead_s)
    return found
