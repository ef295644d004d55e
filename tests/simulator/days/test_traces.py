import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fleetcast.simulator.days.traces import (
    HOUR_MS,
    WEEK_MS,
    choose_gang_shape,
    drop_oversized_jobs,
    generate_trace,
    load_trace,
    parse_time_ms,
    shift_start_ms,
)

NOW_MS = parse_time_ms("2026-08-07T12:00")
DATA = Path(os.environ.get("FLEETCAST_DATA", Path(__file__).parents[4] / "shared" / "data"))


def write_venus(folder: Path) -> None:
    path = folder / "jobs" / "venus"
    path.mkdir(parents=True)
    table = pd.DataFrame(
        {
            "job_id": ["7#0", "8#1", "9#2"],
            "submit_time": pd.to_datetime(["2020-05-12 20:00:00", "2020-05-12 19:00:00", "2020-05-12 19:10:00"]),
            "arrival_s": [3600.0, 0.0, 600.0],
            "service_sec": [10.0, 7200.0, 0.0],
            "gpu_count": [1, 8, 64],
            "slurm_job_id": [7, 8, 9],
        }
    )
    table.to_parquet(path / "venus_gpu_jobs.parquet")


def test_the_start_is_the_latest_same_weekday_and_hour_not_after_now():
    at = parse_time_ms("2020-05-12T19:30")
    start = shift_start_ms(at, NOW_MS)
    assert start <= NOW_MS < start + WEEK_MS
    assert (start - at) % WEEK_MS == 0


def test_a_gang_has_the_fewest_equal_members():
    assert choose_gang_shape(8, 8) == (1, 8)
    assert choose_gang_shape(16, 8) == (2, 8)
    assert choose_gang_shape(14, 8) == (2, 7)
    assert choose_gang_shape(3, 8) == (1, 3)


def test_the_trace_is_sorted_shifted_and_says_where_it_comes_from(tmp_path):
    write_venus(tmp_path)
    trace = load_trace(tmp_path, nodes=8, gpus_per_node=8, now_ms=NOW_MS, at="2020-05-12T19:30")
    assert trace.source == "venus"
    assert trace.job == ("8-1", "9-2", "7-0")
    assert (trace.submit_ms - trace.start_ms).tolist() == [-1_800_000, -1_200_000, 1_800_000]
    assert trace.run_s.tolist() == [7200.0, 1.0, 10.0]
    assert trace.class_[:2] == ("training", "training")
    assert "Venus" in trace.note


def test_jobs_wider_than_the_fleet_are_skipped_and_counted(tmp_path):
    write_venus(tmp_path)
    trace = load_trace(tmp_path, nodes=2, gpus_per_node=8, now_ms=NOW_MS)
    assert (len(trace), trace.skipped) == (2, 1)


def gpus_running(trace, time_ms):
    """GPUs that would run at a moment if no job ever waited."""
    alive = (trace.submit_ms <= time_ms) & (trace.submit_ms + trace.run_s * 1000 > time_ms)
    return int(trace.gpus[alive].sum())


def test_without_the_data_folder_the_generator_serves_and_says_so(tmp_path):
    missing = tmp_path / "nowhere"
    trace = load_trace(missing, nodes=133, gpus_per_node=8, now_ms=NOW_MS)
    assert trace.source == "generator"
    assert trace.note == f"FLEETCAST_DATA not found at {missing}: using the seeded generator"
    assert gpus_running(trace, trace.start_ms) > 133 * 8


def test_the_generator_repeats_itself_by_seed_and_differs_between_seeds():
    one, again, other = (generate_trace(256, start_ms=NOW_MS, seed=seed) for seed in (1, 1, 2))
    assert one.job == again.job
    assert np.array_equal(one.submit_ms, again.submit_ms)
    assert np.array_equal(one.gpus, again.gpus)
    assert len(one) != len(other) or not np.array_equal(one.submit_ms, other.submit_ms)


def test_the_generator_has_the_shape_of_the_trace():
    trace = generate_trace(1064, start_ms=NOW_MS, seed=0)
    minutes = np.median(trace.run_s) / 60
    assert 2 < minutes < 10
    assert np.quantile(trace.run_s, 0.95) > 5 * 3600
    by_hour = np.bincount((trace.submit_ms // HOUR_MS % 24).astype(int), minlength=24)
    assert by_hour[14:18].mean() > 3 * by_hour[4:8].mean()
    assert np.all(np.diff(trace.submit_ms) >= 0)
    assert 0.25 < np.mean(trace.gpus == 8) < 0.4


def test_a_tiny_fleet_gets_a_trace_it_can_hold():
    trace = drop_oversized_jobs(generate_trace(16, start_ms=NOW_MS, seed=3), nodes=2, gpus_per_node=8)
    assert int(trace.gpus.max()) <= 16
    assert gpus_running(trace, NOW_MS) > 16


def test_fitting_again_changes_nothing():
    trace = generate_trace(16, start_ms=NOW_MS, seed=3)
    wide = replace(trace, gpus=np.where(np.arange(len(trace)) == 0, 160, trace.gpus).astype(np.int32))
    once = drop_oversized_jobs(wide, nodes=2, gpus_per_node=8)
    assert once.skipped == 1
    assert drop_oversized_jobs(once, nodes=2, gpus_per_node=8) is once


@pytest.mark.skipif(not (DATA / "jobs" / "venus").is_dir(), reason="FLEETCAST_DATA has no jobs/venus")
def test_venus_passes_the_fleet_at_the_default_start():
    trace = load_trace(DATA, nodes=133, gpus_per_node=8, now_ms=NOW_MS)
    assert gpus_running(trace, trace.start_ms) > 1064


@pytest.mark.parametrize("seed", range(1, 21))
def test_a_rush_keeps_more_work_than_the_fleet_holds(seed: int) -> None:
    """At every minute, jobs that would run without any wait need more than all GPUs, so some wait."""
    capacity, start_ms, rush_h = 1064, 1_600_000_000_000, 5
    trace = generate_trace(capacity, start_ms=start_ms, seed=seed, rush_h=rush_h)
    end_ms = trace.submit_ms + (trace.run_s * 1000).astype(np.int64)
    for minute in range(rush_h * 60):
        now_ms = start_ms + minute * 60_000
        assert trace.gpus[(trace.submit_ms <= now_ms) & (end_ms > now_ms)].sum() > capacity, minute


@pytest.mark.parametrize("seed", range(1, 6))
def test_a_rush_keeps_more_work_than_the_fleet_holds_with_a_trace_too(seed: int, tmp_path: Path) -> None:
    """Venus alone fits its fleet almost always. All of its jobs stay, and the note counts the others."""
    write_venus(tmp_path)
    plain = load_trace(tmp_path, nodes=133, gpus_per_node=8, now_ms=NOW_MS, seed=seed)
    trace = load_trace(tmp_path, nodes=133, gpus_per_node=8, now_ms=NOW_MS, seed=seed, rush_h=5)
    assert set(plain) <= set(trace)
    assert bool(np.all(np.diff(trace.submit_ms) >= 0))
    assert f"{len(trace) - len(plain):,} generated jobs" in trace.note
    for minute in range(5 * 60):
        assert gpus_running(trace, trace.start_ms + minute * 60_000) > 1064, minute
