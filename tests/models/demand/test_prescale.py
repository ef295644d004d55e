"""When to scale up, on fans that anybody can read off."""

import msgspec
import numpy as np

from fleetcast.models.demand.prescale import compute_prescale
from fleetcast.models.demand.rows import DemandRow

ROW = DemandRow(
    queue="all",
    class_="all",
    group="m",
    target="request_rate",
    model="persistence",
    record=None,
    now=10.0,
    issued_ms=1_000_000,
    horizons_s=[60, 600],
    quantiles=[0.5, 0.9],
    values=[[10.0, 10.0], [10.0, 40.0]],
)


def test_the_lead_is_a_start_before_the_p90_passes_what_serves() -> None:
    found = compute_prescale(ROW, 2, 12.5, np.array([100.0, 100.0]))
    assert msgspec.structs.asdict(found) == {
        "instances": 2,
        "serves_per_s": 25.0,
        "passes_ms": 1_000_000 + 330_000,  # half of the way from 60 s to 600 s
        "lead_s": 100.0,
        "scale_ms": 1_000_000 + 230_000,
        "reason": None,
    }


def test_what_is_not_known_is_said() -> None:
    assert compute_prescale(ROW, 0, None, None).reason == "no instance was seen to serve"
    assert compute_prescale(ROW, 2, 50.0, None).reason == "the p90 does not pass what now serves"
    found = compute_prescale(ROW, 1, 5.0, None)
    assert (found.passes_ms, found.scale_ms, found.lead_s) == (1_000_000, None, None)
    assert found.reason == "no cold start was measured"
