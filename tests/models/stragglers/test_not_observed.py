"""An answer says which inputs are missing, and what therefore cannot be said."""

from collections.abc import Callable

import numpy as np

from fleetcast.fleet.events import Step
from tests.models.conftest import SmallFleet

Small = Callable[..., SmallFleet]


def steps(fleet: SmallFleet, durations: list[float], rank: int | None = None) -> None:
    """Steps of train-1, one after another."""
    for duration_s in durations:
        fleet.now_ms += int(duration_s * 1000)
        number = fleet.now_ms // 1000
        fleet.jobs.apply(
            Step(job="train-1", sequence=number, time_ms=fleet.now_ms, step=number, duration_s=duration_s, rank=rank)
        )


def slow_gang(fleet: SmallFleet) -> dict[str, object]:
    """A job whose steps take half as long again as before, and nobody knows why."""
    fleet.start("train-1", fleet.names)
    fleet.tick(2)
    steps(fleet, [2.0] * 20 + [3.0] * 6)
    return fleet.tick(1).stragglers["train-1"]


def test_a_slow_gang_that_nobody_can_be_blamed_for_says_what_is_not_observed(small_fleet: Small) -> None:
    fleet = small_fleet(ports=False)
    fleet.gpu["clock_event_reasons"][:] = np.nan
    body = slow_gang(fleet)
    missing = ["clock event reasons and power limits", "InfiniBand counters", "step times of each rank"]
    assert body["not_observed"] == missing
    assert str(body["sentence"]).endswith(
        "no member stands out; not observed: clock event reasons and power limits (why a clock is low), "
        "InfiniBand counters (which port is slow), step times of each rank (whose part takes longer)"
    )


def test_what_is_observed_is_not_listed_and_a_named_culprit_needs_no_excuse(small_fleet: Small) -> None:
    fleet = small_fleet()
    body = slow_gang(fleet)
    assert body["not_observed"] == ["step times of each rank"]
    fleet.throttle("n002", 3)
    steps(fleet, [3.0] * 4)
    named = fleet.tick(3).stragglers["train-1"]
    assert named["culprit"] == {"kind": "worker", "name": "n002/3", "share": 1.0}
    assert "not observed" not in str(named["sentence"])


def test_a_job_of_one_node_needs_no_port_and_one_without_telemetry_lacks_its_gpus(small_fleet: Small) -> None:
    fleet = small_fleet(ports=False)
    fleet.start("train-1", fleet.names[:1])
    fleet.start("far", ["elsewhere", "nowhere"])
    told = fleet.tick(2).stragglers
    assert told["train-1"]["not_observed"] == ["step times"]
    assert told["far"]["not_observed"] == ["GPU telemetry", "InfiniBand counters", "step times"]
