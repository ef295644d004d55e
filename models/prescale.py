"""When to scale up a served model: so long before its request rate passes what now serves as a start takes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SURE = 0.9


def prescale(
    row: Mapping[str, Any], instances: int, peak_per_instance: float | None, cold: Array | None
) -> dict[str, Any]:
    """The lead for one row of `/demand` with the target request_rate.

    What now serves is what its instances were seen to serve at most. cold: seconds that starts took, None where none
    was measured. serves_per_s; passes_ms: when the p90 first passes it, null when it does not within the horizons;
    lead_s: the p90 of starts; scale_ms: `passes_ms` less the lead, which may be over.
    """
    lead_s = None if cold is None else round(float(np.quantile(cold, SURE)), 1)
    found: dict[str, Any] = {"instances": instances, "serves_per_s": None, "passes_ms": None, "lead_s": lead_s}
    found |= {"scale_ms": None, "reason": None}
    if not instances or not peak_per_instance:
        return found | {"reason": "no instance was seen to serve"}
    serves = instances * peak_per_instance
    found["serves_per_s"] = round(serves, 3)
    times = np.array([0.0, *row["horizons_s"]])
    rates = np.array([row["now"], *row["values"][row["quantiles"].index(SURE)]], np.float64)
    passed = np.flatnonzero(rates[1:] > serves)
    if not len(passed):
        return found | {"reason": "the p90 does not pass what now serves"}
    at = int(passed[0]) + 1
    rise = rates[at] - rates[at - 1]
    part = min(1.0, max(0.0, (serves - rates[at - 1]) / rise)) if rise > 0 else 0.0
    passes_ms = row["issued_ms"] + round(1000 * float(times[at - 1] + part * (times[at] - times[at - 1])))
    found["passes_ms"] = passes_ms
    if lead_s is None:
        return found | {"reason": "no cold start was measured"}
    return found | {"scale_ms": passes_ms - round(1000 * lead_s)}
