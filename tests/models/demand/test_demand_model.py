"""The demand model on histories whose answers are known."""

import numpy as np
import pytest

from fleetcast.features.job_records import JobRecord
from fleetcast.models.demand.demand_model import (
    RunningGpus,
    estimate_tolerated_wait,
    find_held_gpus,
    list_cold_starts,
    make_demand_model,
    summarise_bursts,
)

DAY = 1440
KEY = ("q", "all")


def record(**about: object) -> JobRecord:
    row = JobRecord(0, "q", "training", 8, 0, 0.0, False, None, None, None)
    return row._replace(**about)


def steady(level: float = 100.0) -> np.ndarray:
    return np.full(DAY, level)


def test_what_is_always_wanted_and_for_how_much_of_the_time_how_much() -> None:
    tens = np.repeat([10.0, 20.0, 30.0, 40.0], 100)
    (row,) = make_demand_model({KEY: RunningGpus(steady(), tens)}, [], {})
    assert row["window_s"] == 400 * 600
    assert row["floor_gpus"] == 10
    assert {band["share_of_time"]: band["gpus"] for band in row["bands"]} == {
        0.95: 10, 0.75: 20, 0.5: 30, 0.25: 40, 0.05: 40
    }  # fmt: skip
    for band in row["bands"]:
        assert (tens >= band["gpus"]).mean() >= band["share_of_time"]


def test_a_burst_shorter_than_the_cold_start_is_noise() -> None:
    minutes = steady()
    minutes[100:102] = 400  # two minutes
    minutes[300:320] = 250
    cold = np.array([170.0, 180.0, 500.0])
    assert summarise_bursts(minutes, cold) == {
        "ceiling_gpus": 250,
        "shortest_s": 1200,
        "noise_share": round(600 / 3600, 3),
    }
    assert summarise_bursts(minutes, None) == {"ceiling_gpus": 400, "shortest_s": None, "noise_share": None}
    assert summarise_bursts(minutes, np.array([60.0])) == {"ceiling_gpus": 400, "shortest_s": 120, "noise_share": 0}
    assert summarise_bursts(minutes, np.array([1e5])) == {"ceiling_gpus": 100, "shortest_s": None, "noise_share": 1}


def test_no_burst_and_no_history_are_said() -> None:
    assert summarise_bursts(steady(), None) == "no burst in the last day"
    unknown = np.full(DAY, np.nan)
    assert summarise_bursts(unknown, None) == "less than an hour of history"
    (row,) = make_demand_model({KEY: RunningGpus(unknown, unknown)}, [], {})
    nulls = ("floor_gpus", "bands", "burst", "mix", "residency", "duration_s", "tolerated_wait", "cold_start_s")
    assert all(row[name] is None and row["reasons"][name] for name in nulls)


def test_the_mix_is_of_gpu_time() -> None:
    tens = {"all": 100.0, "inference": 25.0, "training": 75.0}
    running = {("q", name): RunningGpus(steady(), np.full(50, level)) for name, level in tens.items()}
    rows = {row["class"]: row for row in make_demand_model(running, [], {("q", "all"): (0.9, 0.25)})}
    assert rows["all"]["mix"] == {"inference": 0.25, "training": 0.75}
    assert rows["inference"]["mix"] == {"inference": 0.25}
    assert rows["all"]["residency"] == {"loaded_share": 0.9, "active_share": 0.25}
    assert rows["training"]["residency"] is None


def test_runs_and_cold_starts_are_of_the_pool_and_class_and_lent_to_no_other() -> None:
    records = [record(run_s=100.0 * n, cold_s=60.0 * n) for n in range(1, 11)]
    minutes = steady()
    minutes[5:10] = 200
    running = {("q", name): RunningGpus(minutes, steady()) for name in ("all", "training", "batch")}
    rows = {row["class"]: row for row in make_demand_model(running, records, {})}
    assert rows["training"]["duration_s"] == {"p50": 550.0, "p90": 910.0, "p99": 991.0, "cv": 0.52}
    assert rows["training"]["cold_start_s"] == {"p50": 330.0, "p90": 546.0}
    assert rows["batch"]["duration_s"] is rows["batch"]["cold_start_s"] is None
    assert rows["all"]["burst"] == {"ceiling_gpus": 100, "shortest_s": None, "noise_share": 1}
    assert rows["all"]["reasons"]["burst.shortest_s"] == "all was noise"
    assert rows["batch"]["burst"] == {"ceiling_gpus": 200, "shortest_s": None, "noise_share": None}
    assert rows["batch"]["reasons"]["burst.shortest_s"] == "no cold start was measured"
    assert "whose start was observed" in rows["batch"]["reasons"]["cold_start_s"]
    assert ("q", "batch") not in list_cold_starts(records)
    assert ("q", "training") in list_cold_starts(records)


def test_an_outage_of_the_whole_fleet_is_no_demand() -> None:
    fleet = np.full(1000, 500.0)
    fleet[300:330] = 0.0  # 3 % of the time nothing ran
    fleet[330] = 8.0  # but a test
    part = np.where(fleet == 500, 60.0, 0.0)
    part[:200] = 0.0  # its own nights count
    keys = {("all", "all"): fleet, ("q", "all"): fleet, ("q", "batch"): part}
    rows = make_demand_model({key: RunningGpus(steady(), tens) for key, tens in keys.items()}, [], {})
    assert [(row["floor_gpus"], row["stood_still_s"]) for row in rows] == [(500, 18_600), (500, 18_600), (0, 18_600)]
    assert rows[0]["bands"][0] == {"share_of_time": 0.95, "gpus": 500}
    assert rows[0]["window_s"] == 600_000
    for row in rows:
        assert row["floor_gpus"] <= row["bands"][0]["gpus"]


def test_a_fleet_that_is_often_idle_has_no_floor() -> None:
    nights = np.where(np.arange(1000) % 144 < 36, 0.0, 100.0)
    (row,) = make_demand_model({("all", "all"): RunningGpus(steady(), nights)}, [], {})
    assert (row["floor_gpus"], row["stood_still_s"]) == (0, 0)


def test_the_tolerated_wait_is_what_requests_say_else_when_a_tenth_gave_up() -> None:
    started = [record(waited_s=10.0 * n, started_ms=60_000 * n) for n in range(100)]
    assert isinstance(estimate_tolerated_wait(started), str)
    said = [row._replace(tolerated_s=600.0) for row in started]
    assert estimate_tolerated_wait(said) == {"s": 600.0, "jobs": pytest.approx(10.0)}  # one starts a minute
    impatient = [record(waited_s=300.0, gave_up=True, started_ms=None) for _ in range(20)]
    found = estimate_tolerated_wait(started + impatient)
    assert found == {"s": 300.0, "jobs": pytest.approx(5.0)}
    patient = [record(waited_s=2.0, started_ms=60_000 * n) for n in range(1000)]
    late = [record(waited_s=1.0, gave_up=True, started_ms=None) for _ in range(20)]
    assert estimate_tolerated_wait(patient + late) == "fewer than a tenth gave up however long they waited"


def test_held_is_the_most_that_is_there_for_a_share_of_the_time() -> None:
    levels = np.random.default_rng(0).integers(0, 50, 1000).astype(float)
    for share in (0.05, 0.5, 0.99, 1.0):
        assert (levels >= find_held_gpus(levels, share)).mean() >= share
        assert (levels > find_held_gpus(levels, share)).mean() < share
