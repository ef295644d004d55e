import time

import numpy as np
import pytest

from fleetcast.fleet.events import Finished, Started, Submitted
from fleetcast.fleet.job_table import JobTable
from fleetcast.fleet.topology import Level, NodeSpec, Topology
from fleetcast.simulator.days.backfill import FIRST_ESTIMATE_S, BackfillQueue, GpuPool, RunTimeSamples, choose_nodes
from fleetcast.simulator.days.replay import fast_forward_trace, make_opening_events
from fleetcast.simulator.days.traces import WEEK_MS, JobTrace, TraceJob, generate_trace

START_MS = 3 * WEEK_MS


def small_fleet(nodes: int = 4, rack_of: int = 2) -> Topology:
    return Topology.build(
        [NodeSpec(f"n{row}", gpus=8, domains={Level.RACK: f"r{row // rack_of}"}) for row in range(nodes)]
    )


def trace_of(*jobs: tuple[str, float, float, int]) -> JobTrace:
    """Jobs of (name, submitted s before the start, run_s, gpus)."""
    rows = sorted(jobs, key=lambda job: -job[1])
    return JobTrace(
        job=tuple(row[0] for row in rows),
        submit_ms=np.array([START_MS - row[1] * 1000 for row in rows], np.int64),
        run_s=np.array([row[2] for row in rows]),
        gpus=np.array([row[3] for row in rows], np.int32),
        user=("",) * len(rows),
        class_=("training",) * len(rows),
        start_ms=START_MS,
        source="test",
        note="",
    )


def test_a_job_that_ended_becomes_three_events_in_order():
    replay = fast_forward_trace(trace_of(("a", 100, 30, 16)), small_fleet())
    submitted, started, finished = replay.history
    assert isinstance(submitted, Submitted)
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert (submitted.gang, submitted.gpus_per_node) == (2, 8)
    assert [event.sequence for event in replay.history] == [0, 1, 2]
    assert finished.time_ms == started.time_ms + 30_000
    assert {rank.node for rank in started.ranks} == {"n0", "n1"}  # one rack holds it


def test_a_long_job_still_runs_with_its_remaining_time():
    replay = fast_forward_trace(trace_of(("a", 100, 130, 4)), small_fleet())
    (row,) = replay.ongoing
    assert row.remaining_s == pytest.approx(30.0)
    assert row.ranks[0].gpus == (0, 1, 2, 3)
    assert replay.running_gpus == 4


def test_the_queue_keeps_the_order_of_arrival():
    replay = fast_forward_trace(trace_of(("a", 100, 500, 32), ("b", 50, 10, 8), ("c", 40, 10, 8)), small_fleet())
    assert [job.job for job in replay.queue] == ["b", "c"]
    assert replay.queued_gpus == 16


def test_a_short_job_passes_the_head_only_if_it_leaves_the_heads_nodes_alone():
    # "a" holds three nodes for an estimated ten minutes, "head" then wants all four; "small" (an hour) is in the way
    pool = GpuPool(np.ones((4, 8), bool), np.zeros(4, np.int32))
    cluster = BackfillQueue(pool)
    for _ in range(5):
        cluster.run_times.add_run_time(24, 600.0)
        cluster.run_times.add_run_time(4, 3600.0)
    cluster.queue = [job("a", 24, 900), job("head", 32, 600), job("small", 4, 60)]
    assert [row.job.job for row in cluster.start_ready_jobs(0)] == ["a"]
    # many finished jobs of its size say that it lasts a minute: now it ends before the reservation
    for _ in range(60):
        cluster.run_times.add_run_time(4, 60.0)
    assert [row.job.job for row in cluster.start_ready_jobs(1)] == ["small"]
    assert [row.job for row in cluster.queue] == ["head"]


def job(name: str, gpus: int, run_s: float) -> TraceJob:
    return TraceJob(name, 0, run_s, gpus, "", "training")


def test_the_estimate_is_the_p90_of_finished_jobs_of_the_same_size():
    runs = RunTimeSamples()
    assert runs.estimate_p90_s(8) == FIRST_ESTIMATE_S
    for run_s in range(1, 12):
        runs.add_run_time(8, float(run_s))
    assert runs.estimate_p90_s(8) == 10.0
    assert runs.estimate_p90_s(1) == 10.0  # no job of one GPU has finished: all sizes


def test_members_prefer_the_tightest_rack_that_holds_them():
    rack = np.array([0, 0, 0, 1, 1], np.int32)
    assert choose_nodes(np.array([8, 8, 8, 8, 8]), rack, 2, 8) == [3, 4]
    assert choose_nodes(np.array([8, 8, 8, 8, 8]), rack, 4, 8) == [0, 1, 2, 3]
    assert choose_nodes(np.array([8, 3, 8, 8, 8]), rack, 1, 2) == [1]
    assert choose_nodes(np.array([8, 3, 8, 8, 8]), rack, 5, 8) is None


def test_no_gpu_is_held_twice_and_the_history_folds():
    trace = generate_trace(64, start_ms=START_MS, seed=5, days_before=10)
    replay = fast_forward_trace(trace, small_fleet(8), weeks=1)
    table = JobTable()
    assert all(table.apply(event) for event in replay.history)
    assert not table.list_running()
    held = [(rank.node, gpu) for row in replay.ongoing for rank in row.ranks for gpu in rank.gpus]
    assert len(held) == len(set(held)) == replay.running_gpus
    assert replay.queue


def test_four_weeks_of_a_thousand_gpus_pass_in_seconds():
    trace = generate_trace(1064, start_ms=START_MS, seed=0)
    topology = small_fleet(133, rack_of=19)
    began = time.process_time()
    replay = fast_forward_trace(trace, topology)
    assert time.process_time() - began < 15.0  # 1.8 s on a quiet core
    assert len(replay.history) > 30_000
    assert replay.running_gpus > 900


def test_opening_events_of_a_waiting_job_say_that_it_waits():
    submitted, queued = make_opening_events(job("a", 12, 60), 8)
    assert (submitted.sequence, queued.sequence) == (0, 1)
