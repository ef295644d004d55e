import numpy as np

from fleetcast.models.jobs.renewal import NextBeginning
from fleetcast.models.jobs.spikes import MINUTE_MS, Burst, JobLoad, Spike, predict_spikes

RACK = ("rack", "r1")


def rows(*loads: JobLoad, capacity: dict[tuple[str, str], float] | None = None) -> dict[tuple[str, str], Spike]:
    made = predict_spikes(loads, 0, capacity or {}, np.random.default_rng(1))
    return {(row.domain_kind, row.domain): row for row in made}


def test_loads_add_up_by_the_share_that_lies_in_a_domain() -> None:
    flat = {"power_w": np.full(5, 1000.0)}
    found = rows(
        JobLoad("a", {RACK: 0.5, ("rack", "r2"): 0.5}, flat), JobLoad("b", {RACK: 1.0}, flat), capacity={RACK: 2e3}
    )
    assert (found[RACK].p50, found[RACK].p90, found[RACK].jobs) == (1500.0, 1500.0, 2)
    assert (found[RACK].capacity, found["rack", "r2"].capacity) == (2000.0, None)


def test_independent_swings_even_out() -> None:
    swing = {"power_w": np.array([0.0, 1000.0])}
    one = rows(JobLoad("a", {RACK: 1.0}, swing))[RACK]
    many = rows(*(JobLoad(str(number), {RACK: 1.0}, swing) for number in range(50)))[RACK]
    assert one.p90 == 1000.0
    assert 26_000 < many.p90 < 33_000


def test_checkpoints_that_fall_together_are_a_spike_of_their_store() -> None:
    at = 7 * MINUTE_MS + 1000
    burst = Burst(NextBeginning(at, at, at, 5), 20.0, 1e9, "lustre")
    found = rows(*(JobLoad(str(number), {}, {}, burst) for number in range(3)))["storage", "lustre"]
    assert (found.p50, found.unit) == (3e9, "B/s")
    assert found.peak_ms == 7 * MINUTE_MS + MINUTE_MS // 2


def test_nothing_runs_and_nothing_spikes() -> None:
    assert rows() == {}
